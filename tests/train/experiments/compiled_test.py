"""Figures of compiled programs, what they say where nothing compiles, and a layer whose planner is on the host."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from topoep_jax.config import LayerConfig
from topoep_jax.moe import init_params, moe_layer
from topoep_jax.shapes import SHAPES
from topoep_jax.topology import Topology
from train.experiments import fig04_host_trip, fig_d_memory, gpu_trip, plans, trip_picture, trip_training
from train.experiments.record import Record, mean_of, pick
from train.experiments.settings import MODELS, Settings

LAYER = LayerConfig(
    64, 32, 16, 2, Topology.uniform(2, 2), planner="topoep_paper", block_rows=16, cap_factor=2.0, overflow="flag"
)


def measured():
    """What needs minutes to measure."""
    records = [
        Record("4", "m", "p", {"way": way}, trip_picture.PLAN, 100.0, "us", "measured") for way in trip_picture._PLANS
    ]
    for way in trip_training.IMPLEMENTATIONS:
        records.append(Record("4", "m", "p", {"way": way}, trip_training.STEP, 100.0, "ms", "measured"))
    return [*records, Record("4", "m", "p", {"steps": 30}, trip_training.DIFFER, 0, "", "measured")]


# Not jitted, shard_map compiles each operation by itself: a minute, whatever the planner.
@pytest.mark.parametrize("jit", [jax.jit, pytest.param(lambda f: f, id="eager", marks=pytest.mark.full)])
def test_a_layer_is_the_same_with_its_planner_on_the_host(jit) -> None:
    mesh = Mesh(np.array(jax.devices()[: LAYER.num_ranks]), ("ep",))
    params = init_params(jax.random.key(0), LAYER)
    x = jax.random.normal(jax.random.key(1), (LAYER.num_ranks * 32, LAYER.hidden))
    layout = {"w": PartitionSpec("ep"), "router": PartitionSpec()}

    def run(implementation, jit=jax.jit):
        config = dataclasses.replace(LAYER, planner_implementation=implementation)
        layer = functools.partial(moe_layer, axis_name="ep", config=config)
        out = PartitionSpec("ep"), PartitionSpec()
        return jit(jax.shard_map(layer, mesh=mesh, in_specs=(layout, out[0]), out_specs=out, check_vma=False))(
            params, x
        )

    inside, callback = run(None), run("reference", jit)
    assert int(inside[1].slots_used) > 0
    if jit is jax.jit:
        jax.tree.map(np.testing.assert_array_equal, inside, callback)
    else:  # Sums in another order.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), inside, callback)


def test_a_callback_is_written_as_jax_lowers_it() -> None:
    shapes = (jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((3, 4), jnp.int32))
    rows = jnp.zeros((5,), jnp.int32)

    def call(write):
        text = jax.jit(lambda rows: write(lambda rows: None, shapes, rows)).lower(rows).as_text()
        (line,) = re.findall(r"stablehlo.custom_call (@.*)", text)
        # A layer's program is one of each rank, which knows no shardings.
        return re.sub(r", sdy.sharding = #[^}]*", "", line)

    target = gpu_trip.CALLBACK.replace("gpu", "cpu")
    assert call(functools.partial(gpu_trip.as_call, target=target)) == call(jax.pure_callback)


def test_each_way_to_plan_is_the_program_that_it_says() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    demand = jax.ShapeDtypeStruct((shape.topology.num_ranks, shape.num_experts), jnp.int32)
    found = fig04_host_trip.programs(plans.problem(shape))
    texts = {way: program.lower(demand).as_text() for way, program in found.items()}
    callback = gpu_trip.CALLBACK.replace("gpu", "cpu")
    assert set(texts) == {"inside", "callback"}
    assert callback in texts["callback"] and "topoep_plan" not in texts["callback"]
    assert callback not in texts["inside"] and "topoep_plan" in texts["inside"]


def test_each_way_to_train_is_the_planner_that_it_says() -> None:
    found = {way: config.planner_implementation for way, config in trip_training.configs(trip_training.RUN).items()}
    assert found == {"inside": "cpu", "callback": "reference"}


def test_where_nothing_compiles_the_figures_say_so(monkeypatch) -> None:
    monkeypatch.setattr(gpu_trip, "missing", lambda: "no compiler: install one\nand more")
    (record,) = gpu_trip.run("4", "qwen3-30b-a3b", "topoep_paper")
    assert record.value == 0 and record.setting["because"] == "no compiler: install one"
    figure = trip_picture.draw([record, *measured()])
    assert any("no compiler" in text.get_text() for text in figure.axes[0].texts)
    sources = {record.setting["from"] for record in fig_d_memory.run(Settings(full=True))}
    assert sources == {"docs/layer.md"}


def test_memory_is_compiled_anew_in_the_full_set_alone(monkeypatch) -> None:
    monkeypatch.setattr(gpu_trip, "missing", lambda: "")
    monkeypatch.setattr(fig_d_memory, "compiled", lambda model: (1.0, 2.0))
    assert {r.setting["from"] for r in fig_d_memory.run(Settings())} == {"docs/layer.md"}
    records = fig_d_memory.run(Settings(full=True))
    assert [r.value for r in records] == [1.0, 2.0] * len(MODELS)
    fig_d_memory.draw(records)


def test_the_host_is_in_one_of_two_gpu_programs(aot) -> None:
    del aot  # It skips where the packages are missing.
    records = list(gpu_trip.run("4", "qwen3-30b-a3b", "topoep_paper"))
    found = {
        way: {r.metric: r.value for r in pick(records, way=way) if r.metric != gpu_trip.ROW}
        for way in gpu_trip.IMPLEMENTATIONS
    }
    nothing = ("host callbacks", gpu_trip.TO_HOST, gpu_trip.FROM_HOST, "host reads for the plan")
    assert [found["inside"][name] for name in nothing] == [0, 0, 0, 0]
    assert [found["callback"][name] for name in nothing] == [1, 1, 5, 1]
    assert not any("waits" in metric for metric in found["callback"])  # No text of a program says how often.
    assert {record.setting["from"] for record in records} == {f"compiled here, jax {jax.__version__}"}
    # The demand int32 [R, E].
    assert found["callback"][f"bytes of {gpu_trip.TO_HOST}"] == 4 * 32 * 128
    assert [found[way]["planners inside a CUDA graph"] for way in found] == [1, 0]
    assert found["inside"]["host reads for other things"] == found["callback"]["host reads for other things"]
    figure = trip_picture.draw([*records, *measured()])
    assert mean_of(records, way="inside", what="plan") == 1 and figure.axes[0].texts


@pytest.mark.full
def test_training_does_not_depend_on_where_plans_are_made(tmp_path) -> None:
    settings = Settings(folder=tmp_path)
    records = fig04_host_trip.run(settings)
    assert mean_of(records, metric=trip_training.DIFFER) == 0
    trip_picture.draw(records)
