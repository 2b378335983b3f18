"""The overlapped layer as GPUs would run it: which collective runs under which GEMM, memory, and no read by the host.

Compiled ahead of time for H200 nodes at the dimensions of three models; nothing runs. That barriers order a program is
no promise of XLA's, so the order is what this file asserts. `make test-cuda` compiles one layer of Qwen3; the other
models, layers in a scan and the comparison with worst-case rows are marked full.
"""

import functools
import math
import re

import pytest

from tests.support.aot import Compiler
from topoep_jax import transport
from topoep_jax.aot import LayerProgram, collectives, compile_layer, host_reads, worst_case
from topoep_jax.aot.dump import Buffer
from topoep_jax.aot.forecast import SKEWS, planned_work
from topoep_jax.config import LayerConfig
from topoep_jax.shapes import SHAPES

MIB = 2**20
LARGE = 4 * MIB
"""Rows, parameters and gradients are larger, and so need a GEMM to hide under. The gradient of a router is not."""
EXEMPT = {"dispatch_1", "combine_2", "grad_1"}
"""Nothing is there yet, or left, that could run under these."""
FORWARDED = {"dispatch_2_forward", "grad_2_forward", "again_2_forward"}
"""The products lie under launch 1 before these, which has more bytes, and all of them where a plan is direct."""
LAST_HOME = {"combine_2_gather", "combine_rails", "home_2_gather", "home_1", "home_rails"}
"""The way home by gateways: only the longest of the backward pass, of own rows, finds a product."""
FORWARD = ["weights", "dispatch_1", "pull", "dispatch_2", "combine_1", "combine_2"]
BACKWARD = ["grad_1", "again_1", "repull", "grad_2", "again_2", "home_1", "home_2", "weight_grads"]
LOOPS = ["push", "push"]
MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2")
FULL = pytest.mark.full
BOUND_MIB = {
    ("qwen3-30b-a3b", "direct"): 700,
    ("glm-4.5-air", "direct"): 1500,
    ("deepseek-v2", "direct"): 1450,
    ("qwen3-30b-a3b", "auto"): 860,
    ("glm-4.5-air", "auto"): 1560,
    ("deepseek-v2", "auto"): 1520,
}
TOKENS = 4096


def config_of(model: str, **changes) -> LayerConfig:
    shape = SHAPES[model]
    return LayerConfig(
        shape.hidden,
        shape.ffn,
        shape.num_experts,
        shape.top_k,
        shape.topology,
        router=shape.router,
        router_options=shape.router_options,
        chunks=2,
        overflow="flag",
        **changes,
    )


@functools.cache
def compiled(model: str, layers: int = 1, exchange: str = "direct") -> LayerProgram:
    return compile_for(config_of(model, exchange=exchange), layers)


def compile_for(config: LayerConfig, layers: int = 1) -> LayerProgram:
    topology = config.topology
    mesh = Compiler.mesh(topology.num_domains, topology.num_ranks // topology.num_domains)
    return compile_layer(config, mesh, TOKENS, layers=layers)


@pytest.fixture(
    params=[
        pytest.param(
            (model, layers, exchange),
            id=f"{model}-{layers}-{exchange}",
            marks=[] if (model, layers) == (MODELS[0], 1) else FULL,
        )
        for model in MODELS
        for layers in (1, 3)
        for exchange in ("direct", "auto")
    ]
)
def layer(request: pytest.FixtureRequest, aot: Compiler) -> LayerProgram:
    asked_for = request.config.getoption("--require-cuda") or request.node.get_closest_marker("full")
    if not asked_for:
        pytest.skip("takes a minute to compile: make test-cuda")
    return compiled(*request.param)


def test_every_large_collective_runs_under_a_gemm(layer: LayerProgram) -> None:
    exchanges = [c for c in collectives(layer.program) if c.kind == "ragged-all-to-all"]
    assert [c.phase for c in exchanges] == phases(layer)
    exposed = {c.phase for c in collectives(layer.program) if c.num_bytes >= LARGE and not c.overlapped}
    assert exposed <= EXEMPT | (FORWARDED | LAST_HOME if layer.config.exchange == "auto" else set())
    # A strip of the replica gradients is small by choice, yet together they are large.
    assert all(c.overlapped for c in exchanges if c.phase == "push")
    assert {c.times for c in exchanges if c.phase != "push"} == {layer.layers}


def phases(layer: LayerProgram) -> list[str]:
    """Exchanges of rows and replicas, in the order of the program."""
    if layer.config.exchange == "direct":
        return FORWARD + BACKWARD + LOOPS
    ways: dict[str, list[str]] = {name: [name, f"{name}_forward"] for name in ("dispatch_2", "grad_2", "again_2")}
    ways["combine_2"] = ["combine_2_gather", "combine_2", "combine_rails"]
    ways["home_1"], ways["home_2"] = [], ["home_2_gather", "home_1", "home_2"]
    ways["weight_grads"] = ["weight_grads", "home_rails"]
    both = [way for name in FORWARD + BACKWARD for way in ways.get(name, [name])]
    return both + LOOPS


def test_nothing_stops_for_the_host(layer: LayerProgram) -> None:
    reads = host_reads(layer.program)
    if not transport.xla_options().missing:
        assert not reads
    else:
        assert all("without the device's kernel" in read.reason for read in reads), reads
        assert len(reads) == len(phases(layer))


def test_profiles_name_the_phase_of_every_kernel(layer: LayerProgram) -> None:
    calls = [i for i in layer.program.module.instructions() if i.kernel or (i.target or "").startswith("topoep")]
    assert {"topoep_plan", "topoep_gmm", "topoep_wgrad"} <= {call.kernel or call.target for call in calls}
    assert not [call.name for call in calls if "/topoep_" not in call.op_name]


def test_a_layer_fits(layer: LayerProgram) -> None:
    model = next(name for name in MODELS if SHAPES[name].hidden == layer.config.hidden)
    mib = layer.layer_bytes / MIB
    print(f"{model}, {layer.config.exchange}, {layer.layers} layers: {mib:.0f} MiB")
    if layer.layers == 1:
        assert mib <= BOUND_MIB[model, layer.config.exchange]
    else:
        one = compiled(model, exchange=layer.config.exchange)
        assert layer.layer_bytes - one.layer_bytes <= kept_bytes(layer)


def kept_bytes(layer: LayerProgram) -> int:
    """What layers in a scan keep for the backward pass: x of each, and logits and probabilities of its router in f32.

    The weights, experts, plan and tables of the exchange are small. The scan itself has the x that it hands on, takes
    the parameters of one layer out of the stack, and holds their gradients until it puts them there.
    """
    config = layer.config
    x = TOKENS * config.hidden * 2
    router = 2 * TOKENS * config.num_experts * 4
    slices = 2 * 2 * config.num_mains * config.expert_size
    return int(1.01 * (layer.layers * (x + router) + x + slices))


def test_no_buffer_grows_with_all_experts(layer: LayerProgram) -> None:
    """Beside parameters and their gradients there is only what a rank sends while it is pulled; f32 sums are strips."""
    config = layer.config
    mains = [config.num_mains, config.expert_size]
    made = [(b, shape_of(b, layer.layers)) for b in layer.program.buffers if b.role != "parameter"]
    by_expert = [
        (buffer, dims)
        for buffer, dims in made
        if dims[:1] in ([config.num_experts], mains[:1]) and 2 * math.prod(dims) >= math.prod(mains)
    ]
    assert all(dims == mains and buffer.shape.startswith("bf16") for buffer, dims in by_expert), by_expert
    if layer.layers == 1:
        assert len({buffer.place for buffer, _ in by_expert}) <= 2
    staged = [b for b, dims in made if dims[:1] == [config.num_ranks * config.num_slots] and b.shape.startswith("f32")]
    assert 0 < max(buffer.num_bytes for buffer in staged) <= config.staging_bytes


def shape_of(buffer: Buffer, layers: int) -> list[int]:
    """Dimensions of an array without those of a stack of layers or a layer cut out of it; none of a tuple."""
    match = re.match(r"\w+\[([\d,]+)\]", buffer.shape)
    dims = [int(size) for size in match[1].split(",")] if match else []
    return dims[1:] if layers > 1 and len(dims) == 3 and dims[0] in (1, layers) else dims


@FULL
@pytest.mark.parametrize("model", MODELS)
def test_worst_case_rows_need_many_times_the_memory(aot: Compiler, model: str) -> None:
    other = compile_for(worst_case(config_of(model)))
    ratio = other.layer_bytes / compiled(model).layer_bytes
    print(f"{model}: worst-case rows {other.layer_bytes / MIB:.0f} MiB, {ratio:.1f} x")
    assert ratio >= 8


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("skew", SKEWS)
def test_few_rows_are_computed_that_are_not_there(model: str, skew: float) -> None:
    assert planned_work(config_of(model), TOKENS, skew).flops_ratio <= 1.04
