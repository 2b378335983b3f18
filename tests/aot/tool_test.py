"""`python -m topoep_jax.aot`: flags, one layer compiled and reported in every form, a program of the user's."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.support.aot import Compiler
from topoep_jax.aot import TARGETS, LayerProgram, Report, compile_layer, struct, timeline, worst_case
from topoep_jax.aot import command as command_line
from topoep_jax.cli import execute
from topoep_jax.config import LayerConfig
from topoep_jax.moe import noting_layers
from topoep_jax.plan import Hardware
from topoep_jax.topology import Topology
from train.aot import step as train_step

TOKENS = 256
CONFIG = LayerConfig(128, 128, 16, 4, Topology.uniform(2, 4), block_rows=32, chunks=2, overflow="flag")
SMALL = [
    "--topology=1x2x4",
    "--hidden=128",
    "--ffn=128",
    "--num_experts=16",
    "--top_k=4",
    "--block_rows=32",
    f"--tokens={TOKENS}",
]


@pytest.fixture(scope="module")
def layer(aot: Compiler) -> LayerProgram:
    return compile_layer(CONFIG, aot.mesh(2, 4), TOKENS)


def run(*arguments: str) -> int:
    return execute("aot", "", lambda: command_line, list(arguments))


@pytest.fixture
def compiled_before(layer: LayerProgram, monkeypatch: pytest.MonkeyPatch) -> list[LayerConfig]:
    """The command finds one layer compiled, whatever it asks for; what it asked for is returned."""
    asked: list[LayerConfig] = []

    def compile_layer(config: LayerConfig, *_: object, **__: object) -> LayerProgram:
        asked.append(config)
        return layer

    monkeypatch.setattr(command_line, "compile_layer", compile_layer)
    return asked


def test_json_has_the_keys_that_scripts_rely_on(
    compiled_before: list[LayerConfig], layer: LayerProgram, capsys: pytest.CaptureFixture
) -> None:
    assert run(*SMALL, "--json", "--compare") == 0
    found = json.loads(capsys.readouterr().out)
    needed = {
        "temp_bytes",
        "argument_bytes",
        "output_bytes",
        "flops_ratio",
        "collectives",
        "custom_calls",
        "host_reads",
        "kernels",
        "forecast_ms",
        "bound_ms",
        "losses",
    }
    assert found.keys() >= needed
    assert all(c.keys() >= {"kind", "phase", "bytes", "overlapped"} for c in found["collectives"])
    pull = next(c for c in found["collectives"] if c["phase"] == "pull")
    assert (pull["kind"], pull["bytes"], pull["overlapped"]) == ("ragged-all-to-all", 2 * CONFIG.expert_size * 2, True)
    assert found["custom_calls"]["topoep_plan"] == 1
    assert found["layer_bytes"] == found["temp_bytes"] + found["output_bytes"] - layer.param_grad_bytes
    assert found["worst_case_ratio"] == 1
    assert compiled_before == [dataclasses.replace(CONFIG, hardware=Hardware.h800()), worst_case(compiled_before[0])]


def test_text_says_what_a_run_needs(compiled_before: list[LayerConfig], capsys: pytest.CaptureFixture) -> None:
    assert run(*SMALL, "--timeline", "--gpu=h100") == 0
    text = capsys.readouterr().out
    for part in (
        "compiled for 8 NVIDIA H100s",
        "temporaries",
        "together",
        "of the 81,920 MiB",
        "largest losses at skew -4",
        "largest buffers",
        "host reads: ",
    ):
        assert part in text
    for phase in ("dispatch_1", "combine_2", "home_1", "push"):
        assert phase in text
    assert "with an empty plan all of these launches stay" in text
    assert compiled_before[0].hardware == Hardware.h100()


def test_a_measurement_takes_the_place_of_constants(
    compiled_before: list[LayerConfig], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    rates, links = tmp_path / "rates.json", tmp_path / "hardware.json"
    rates.write_text('{"plan_us": 4000}')
    found = {
        "version": 1,
        "inter_fs_per_byte": 20_000,
        "intra_fs_per_byte": None,
        "gflops": 100_000,
        "rank_speed": None,
    }
    links.write_text(json.dumps({**found, "num_devices": 2, "num_domains": 2}))

    def waits(*flags: str) -> dict[str, float]:
        assert run(*SMALL, "--json", *flags) == 0
        return json.loads(capsys.readouterr().out)["waits_us"]["0"]

    now, slower = waits(), waits(f"--rates={rates}")
    assert slower["plan"] - now["plan"] == pytest.approx(3600)
    waits(f"--hardware={links}", "--intra_gbps=800")
    assert compiled_before[-1].hardware == Hardware(20_000, 10_000, 100_000)
    assert run(*SMALL, "--intra_gbps=800") == 2
    assert "--intra_gbps=800 completes a measurement, which --hardware names" in capsys.readouterr().err


def test_worst_case_rows_hold_any_routing() -> None:
    other = worst_case(CONFIG)
    assignments = TOKENS * CONFIG.top_k
    # Every token of 8 ranks may choose both experts of one rank.
    assert sum(other.window_rows(assignments)) == 8 * TOKENS * 2 + 2 * 32
    assert (other.num_slots, other.chunks, other.planner) == (0, 1, "none")


def test_predictions_follow_the_rates_of_links(layer: LayerProgram) -> None:
    target = TARGETS["h100"]
    slow = dataclasses.replace(target, hardware=Hardware(200_000, 50_000, 400_000))
    report, slower = (Report.of(layer.program, gpu, 2, layer) for gpu in (target, slow))
    by_phase = {c.phase: c for c in report.collectives}
    for phase in ("dispatch_1", "dispatch_2", "pull", "home_2"):
        wires = [found.forecast.prices.wire(by_phase[phase]) for found in (report, slower)]
        assert wires[1] > 5 * wires[0] > 0, phase
        longer = slower.collective_us(by_phase[phase]) - report.collective_us(by_phase[phase])
        assert longer == pytest.approx((wires[1] - wires[0]) / 1e6)
    assert report.gemm_us(by_phase["combine_1"]) > 0
    assert report.collective_us(by_phase["dispatch_1"]) == report.collective_us(by_phase["again_1"])
    assert timeline(report.forecast).count("topoep_gmm") == 10


@pytest.mark.parametrize("gpu", TARGETS)
def test_every_target_compiles_a_program_of_the_user(aot: Compiler, capsys: pytest.CaptureFixture, gpu: str) -> None:
    assert run("--topology=1x1x2", f"--gpu={gpu}", f"--program={__name__}:doubled", "--program_args=64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops_ratio"] is None
    assert len({*found["forecast_ms"].values()}) == 1  # no layer, so no plan
    assert [(c["kind"], c["bytes"]) for c in found["collectives"]] == [("all-gather", 64 * 4)]


def doubled(mesh: Mesh, size: str) -> tuple:
    def on_rank(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(2 * x, "ep", tiled=True)

    function = jax.shard_map(
        on_rank, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec(), check_vma=False
    )
    return function, (struct((int(size),), jnp.float32, mesh, PartitionSpec("ep")),)


def test_the_trainer_offers_its_step(aot: Compiler) -> None:
    step, args = train_step(aot.mesh(1, 2), "--batch_size=4", "--seq_len=64", "--shape=num_layers=1", "--chunks=2")
    with jax.numpy_dtype_promotion("standard"), noting_layers() as layers:  # optax mixes dtypes
        text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert {(config.num_ranks, tokens) for config, tokens in layers} == {(2, 2 * 64)}
    assert "ragged_all_to_all" in text
    assert "topoep_gmm" in text
    with pytest.raises(ValueError, match="--batch_size=3 is not a multiple of --ep=2"):
        train_step(aot.mesh(1, 2), "--batch_size=3")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "give --model, or --hidden, --ffn, --num_experts, --top_k"),
        (["--model=gpt"], "--model=gpt is unknown: take one of qwen3-30b-a3b"),
        (["--model=glm-4.5-air", "--topology=4x8"], "--topology=4x8 must be slices x nodes x GPUs per node"),
        (["--program=tests.aot.tool_test:none"], "module tests.aot.tool_test has no none"),
        (["--program=a:b", "--compare"], "--compare says what layer to compile"),
    ],
)
def test_mistakes_are_told_in_a_line(
    aot: Compiler, capsys: pytest.CaptureFixture, flags: list[str], reason: str
) -> None:
    assert run(*flags) == 2
    assert reason in capsys.readouterr().err


def test_without_the_cuda_library_stand_ins_do(aot: Compiler) -> None:
    script = """
import jax
jax.config.update("jax_platforms", "cpu")
from topoep_jax import _cuda
def missing():
    raise ImportError("no nvcc")
_cuda.load = missing
from functools import partial
import jax.numpy as jnp
from topoep_jax import CostModel, Hardware, Topology, solve_plan
from topoep_jax.aot import TARGETS, compile_program, prepare, struct
assert prepare() == "no nvcc"
mesh = TARGETS["h200"].mesh(1, 2)
solve = partial(solve_plan, topology=Topology.uniform(1, 2), cost=CostModel.from_model(64, 64, Hardware.h100()), num_slots=1)
program = compile_program(solve, struct((2, 4), jnp.int32, mesh))
assert [i.target for i in program.module.instructions() if i.target] == ["topoep_plan"]
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", script], check=True)
