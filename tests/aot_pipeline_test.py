"""The overlapped layer as GPUs would run it: which collective runs under which GEMM, memory, and no read by the host.

Compiled ahead of time for H200 nodes at the dimensions of three models; nothing runs. That barriers order a program is
no promise of XLA's, so the order is what this file asserts. `make test-cuda` compiles one layer of Qwen3; the other
models, layers in a scan and the comparison with worst-case rows are marked full.
"""

import functools

import pytest

from tests.aot import Compiler
from topoep_jax import transport
from topoep_jax.aot import LayerProgram, collectives, compile_layer, host_reads, worst_case
from topoep_jax.aot.forecast import SKEWS, plan_load
from topoep_jax.config import LayerConfig
from topoep_jax.shapes import SHAPES

MIB = 2**20
LARGE = 4 * MIB
"""Rows, parameters and gradients are larger, and so need a GEMM to hide under. The gradient of a router is not."""
EXEMPT = {"dispatch_1", "combine_2", "grad_1"}
"""Nothing is there yet, or left, that could run under these."""
FORWARD = ["weights", "dispatch_1", "pull", "dispatch_2", "combine_1", "combine_2"]
BACKWARD = ["grad_1", "again_1", "repull", "again_2", "grad_2", "home_1", "home_2", "weight_grads", "push"]
MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2")
FULL = pytest.mark.full
BOUND_MIB = {"qwen3-30b-a3b": 960, "glm-4.5-air": 1800}
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
def compiled(model: str, layers: int = 1) -> LayerProgram:
    return compile_for(config_of(model), layers)


def compile_for(config: LayerConfig, layers: int = 1) -> LayerProgram:
    topology = config.topology
    mesh = Compiler.mesh(topology.num_domains, topology.num_ranks // topology.num_domains)
    return compile_layer(config, mesh, TOKENS, layers=layers)


@pytest.fixture(
    params=[
        pytest.param((model, layers), id=f"{model}-{layers}", marks=[] if (model, layers) == (MODELS[0], 1) else FULL)
        for model in MODELS
        for layers in (1, 3)
    ]
)
def layer(request: pytest.FixtureRequest, aot: Compiler) -> LayerProgram:
    return compiled(*request.param)


def test_every_large_collective_runs_under_a_gemm(layer: LayerProgram) -> None:
    exchanges = [c for c in collectives(layer.program) if c.kind == "ragged-all-to-all"]
    assert [c.phase for c in exchanges] == FORWARD + BACKWARD
    exposed = {c.phase for c in collectives(layer.program) if c.num_bytes >= LARGE and not c.overlapped}
    assert exposed <= EXEMPT
    # A slice of the replica gradients is small by choice, yet together they are large.
    assert {c.phase: c.overlapped for c in exchanges}["push"]
    assert {c.times for c in exchanges if c.phase != "push"} == {layer.layers}


def test_nothing_stops_for_the_host(layer: LayerProgram) -> None:
    reads = host_reads(layer.program)
    if not transport.xla_options().missing:
        assert not reads
    else:
        assert all("without the device's kernel" in read.reason for read in reads), reads
        assert len(reads) == len(FORWARD + BACKWARD)


def test_a_layer_fits(layer: LayerProgram) -> None:
    model = next(name for name in MODELS if SHAPES[name].hidden == layer.config.hidden)
    mib = layer.layer_bytes / MIB
    print(f"{model}, {layer.layers} layers: {mib:.0f} MiB")
    if layer.layers == 1:
        assert mib <= BOUND_MIB.get(model, float("inf"))
    else:
        one = compiled(model)
        kept = TOKENS * layer.config.hidden * 2  # x of each layer; its weights, experts and plan are small
        assert layer.layer_bytes - one.layer_bytes <= layer.layers * kept * 1.05


def test_no_buffer_grows_with_all_experts(layer: LayerProgram) -> None:
    """One f32 sum of the mains' gradients is all there is of that size, beside parameters and their gradients."""
    config = layer.config
    mains = config.num_mains * config.expert_size
    sized = [b for b in layer.program.buffers if b.role != "parameter" and b.num_bytes >= 2 * mains]
    assert max(buffer.num_bytes for buffer in sized) < config.num_experts * config.expert_size // 4
    sums = {b.place for b in sized if b.shape.startswith(f"f32[{config.num_mains},{config.expert_size}]")}
    assert len(sums) == 1
    staged = [b for b in layer.program.buffers if b.shape.startswith(f"f32[{config.num_ranks * config.num_slots},")]
    assert max(buffer.num_bytes for buffer in staged) <= config.staging_bytes


@FULL
@pytest.mark.parametrize("model", MODELS)
def test_worst_case_rows_need_nine_times_the_memory(aot: Compiler, model: str) -> None:
    other = compile_for(worst_case(config_of(model)))
    ratio = other.layer_bytes / compiled(model).layer_bytes
    print(f"{model}: worst-case rows {other.layer_bytes / MIB:.0f} MiB, {ratio:.1f} x")
    assert ratio >= 9


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("skew", SKEWS)
def test_few_rows_are_computed_that_are_not_there(model: str, skew: float) -> None:
    assert plan_load(config_of(model), TOKENS, skew).flops_ratio <= 1.03
