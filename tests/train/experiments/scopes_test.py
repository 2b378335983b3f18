"""Figure 15's measured part: a profile's operations find the phases of the layer, and the layer's scopes are known."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import Mesh, PartitionSpec

from topoep_jax import moe
from topoep_jax.config import LayerConfig
from topoep_jax.topology import Topology
from train.experiments import emulated, fig15_breakdown, process, scopes
from train.experiments.record import mean_of
from train.experiments.scopes import MEAN, OTHER, SLOWEST, WAITING, Event, Place
from train.experiments.settings import Settings

KNOWN = {scope for own in scopes.SCOPES.values() for scope in own}
KERNELS = {"pack", "accumulate"}
"""Scopes that Pallas makes of a kernel's name: only programs for GPUs have them."""

PROGRAM = """HloModule jit_step, is_scheduled=true

%fill (p: f32[]) -> f32[4] {
  ROOT %b = f32[4]{0} broadcast(%p), dimensions={}
}

%turn (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %of_the_loop = f32[4]{0} negate(%state)
  %own = f32[4]{0} add(%of_the_loop, %of_the_loop), metadata={op_name="jit(step)/transpose(jvp())/topoep_push/while/body/topoep_wgrad/add"}
  ROOT %next = (s32[], f32[4]{0}) tuple(%state, %own)
}

%more (state: (s32[], f32[4])) -> pred[] {
  %state = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] compare(%state, %state), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %zeros = f32[4]{0} fusion(%x), kind=kLoop, calls=%fill
  %gathered = f32[8]{0} all-gather(%x), dimensions={0}, metadata={op_name="jit(step)/jvp()/topoep_dispatch_2/all_gather"}
  %logits = f32[4]{0} dot(%x, %x), metadata={op_name="jit(step)/transpose(jvp(topoep_route))/dot_general"}
  %carried = (s32[], f32[4]{0}) tuple(%zeros, %logits)
  %loop = (s32[], f32[4]{0}) while(%carried), condition=%more, body=%turn, metadata={op_name="jit(step)/transpose(jvp())/topoep_push/while"}
  ROOT %rest = f32[4]{0} copy(%loop)
}
"""  # noqa: E501


def test_operations_find_their_phase_in_the_program() -> None:
    found = scopes.places(PROGRAM)
    assert found["gathered"] == Place("dispatch", "forward", True)
    assert found["logits"] == Place("routing", "backward", False)
    assert found["own"] == Place("experts", "backward", False)  # The innermost scope counts,
    assert found["of_the_loop"] == Place("push", "backward", False)  # none is that of the loop,
    assert found["zeros"] == Place("push", "backward", False)  # and a fill is its first reader's,
    assert found["rest"] == Place(OTHER, "forward", False)  # if somebody reads it.
    assert "loop" not in found  # Its operations are there themselves.


def test_unknown_scopes_are_refused() -> None:
    with pytest.raises(ValueError, match="topoep_new"):
        scopes.places(PROGRAM.replace("topoep_wgrad", "topoep_new"))


PLACES = {
    "dot": Place("experts", "forward", False),
    "copy": Place(OTHER, "forward", False),
    "all-gather": Place("combine", "backward", True),
}


def step(run, *times):
    """Events of (rank, operation, milliseconds), one after the other."""
    return [Event(run, rank, operation, number, 1e6 * ms) for number, (rank, operation, ms) in enumerate(times)]


def test_who_waits_in_a_collective_does_not_work() -> None:
    together = [(0, "all-gather", 5), (1, "all-gather", 1), (0, "all-gather", 2), (1, "all-gather", 6)]
    (times,) = scopes.breakdown(step(7, (0, "dot", 2), (1, "dot", 6), (1, "copy", 4), *together), PLACES)
    found = {kind: [1e-6 * ns for ns in ranks] for kind, ranks in times.items()}
    assert found == {
        ("experts", "forward"): [2, 6],
        (OTHER, "forward"): [0, 4],
        ("combine", "backward"): [3, 3],
        (WAITING, "backward"): [4, 4],
    }
    assert scopes.attributed([times]) == pytest.approx(100 * 14 / 18)


def test_ranks_are_summarized_over_their_quickest_steps() -> None:
    events = [e for run, ms in enumerate((2, 3, 40)) for e in step(run, (0, "dot", ms), (1, "dot", 5))]
    (found,) = scopes.summarize(scopes.breakdown(events, PLACES)).values()
    assert found == pytest.approx({MEAN: 3.5, SLOWEST: 5})


def test_half_a_profile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"all-gather ran .*incomplete"):
        scopes.breakdown(step(0, (0, "all-gather", 5), (1, "all-gather", 1), (1, "all-gather", 1)), PLACES)


def test_a_profile_is_read(tmp_path) -> None:
    names = ["dot", "end: dot", "hlo_module", "run_id", "device_ordinal", "jit_step", "jit_other"]
    values = "metadata_id: 3 ref_value: {}", "metadata_id: 4 int64_value: 9", "metadata_id: 5 int64_value: 1"
    stats = " ".join(f"stats {{{{ {value} }}}}" for value in values)
    event = f"events {{{{ metadata_id: {{}} offset_ps: 2000 duration_ps: 5000 {stats} }}}}"
    lines = "".join(event.format(name, module) for name, module in ((1, 6), (2, 6), (1, 7)))
    metadata = "".join(
        f'{kind} {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for kind in ("event_metadata", "stat_metadata")
        for key, name in enumerate(names, 1)
    )
    profile = ProfileData.text_proto_to_serialized_xspace(f'planes {{ name: "CPU" lines {{ {lines} }} {metadata} }}')
    with pytest.raises(ValueError, match="xplane"):
        scopes.read(tmp_path, "jit_step", PLACES)
    (tmp_path / "host.xplane.pb").write_bytes(profile)
    assert scopes.read(tmp_path, "jit_step", PLACES) == [Event(9, 1, "dot", 2.0, 5.0)]
    with pytest.raises(ValueError, match="jit_third"):
        scopes.read(tmp_path, "jit_third", PLACES)


TINY = dataclasses.replace(
    emulated.LAYER, hidden=16, ffn=16, num_experts=8, topology=Topology.uniform(2, 2), block_rows=8, planner="topoep"
)


@pytest.mark.full
def test_every_phase_is_found_in_a_profile() -> None:
    found = emulated.profile(TINY, tokens=64, steps=2)
    milliseconds = {(phase, way): ms for phase, way, over, ms in found["times"] if over == SLOWEST}
    # XLA for CPUs may make one pull of that of both passes.
    forward = {(phase, "forward") for phase in scopes.SCOPES if phase != "push"}
    backward = {(phase, "backward") for phase in ("routing", "dispatch", "experts", "combine", "push")}
    assert forward | backward <= milliseconds.keys()
    assert all(milliseconds[kind] > 0 for kind in forward | backward)
    assert found["attributed"] > 80


def lowered(config: LayerConfig) -> str:
    """The program of a layer, forward and backward, before XLA; its locations hold the scopes."""
    mesh = Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
    params = jax.eval_shape(lambda: moe.init_params(jax.random.key(0), config))
    sharded = {name: PartitionSpec("ep") if name == "w" else PartitionSpec() for name in params}
    layer = jax.shard_map(
        functools.partial(moe.moe_layer, axis_name="ep", config=config),
        mesh=mesh,
        in_specs=(sharded, PartitionSpec("ep")),
        out_specs=(PartitionSpec("ep"), PartitionSpec()),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((64 * config.num_ranks, config.hidden), np.float32)

    def loss(params, x):
        y, metrics = layer(params, x)
        return y.sum(), (y, metrics)

    return jax.jit(jax.grad(loss, has_aux=True)).lower(params, x).as_text(debug_info=True)


def test_the_layer_has_the_scopes_of_the_phases_and_no_others() -> None:
    text = lowered(dataclasses.replace(TINY, chunks=2, overflow="loop", shared_ffn=16))
    found = set(re.findall(r"[\"/(]topoep_(\w+)", text)) - {"jax"}  # Paths of files are there as well.
    assert found == KNOWN - KERNELS


def test_users_find_the_scopes_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "layer.md").read_text()
    listed = text.partition("\n## Profiles")[2].partition("\n## ")[0]
    assert set(re.findall(r"`topoep_(\w+)`", listed)) - {"phase"} == KNOWN


def test_a_profile_becomes_records_and_a_picture(tmp_path, monkeypatch) -> None:
    made = {"attributed": 90.0, "times": [("experts", "forward", MEAN, 2.0), ("experts", "forward", SLOWEST, 3.0)]}

    def run(module, out, steps, *, log):
        assert module == "train.experiments.emulated" and steps == "5"
        log.parent.mkdir(parents=True)
        Path(out).write_text(json.dumps(dict.fromkeys(emulated.PLANNERS, made)))

    monkeypatch.setattr(process, "run", run)
    records = emulated.measured(Settings(folder=tmp_path))
    # Clocks differ from run to run, so none of them may be among what is equal in two runs.
    assert all(record.kind == "measured" and record.timed for record in records)
    assert mean_of(records, planner="topoep", metric="experts forward", over=SLOWEST) == 3.0
    fig15_breakdown.draw(records).savefig(tmp_path / "picture.png")
