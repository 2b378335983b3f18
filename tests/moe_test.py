"""The layer against the dense reference: outputs and all gradients, in few programs and many loads.

A `Program` is compiled once; routing, masks and loads are data, so every scenario below runs in it.
"""

import dataclasses
import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.dense import dense_layer
from topoep_jax import LayerConfig, Status, Topology, init_params, moe_layer, routing
from topoep_jax._arrays import empty_after
from topoep_jax.dispatch import Rails
from topoep_jax.dispatch import api as dispatch_api
from topoep_jax.dispatch import rows as rows_by_index
from topoep_jax.transfer import api as transfer_api

NODES = Topology.uniform(2, 4)
UNEVEN = Topology((0, 0, 0, 1, 1, 2, 2, 2))
GLM = {"scale": 1.5}
DEEPSEEK = {"num_groups": 8, "topk_group": 3, "scale": 16.0}


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program: the layer's static description, tokens per rank, and the dtype of rows and parameters.

    `garbage` puts NaN where `topoep_jax.experts.api` says that anything may be.
    """

    name: str
    config: LayerConfig
    num_tokens: int
    dtype: str = "float32"
    least_passes: int = 1
    garbage: bool = False

    @property
    def tolerance(self) -> float:
        return 2e-5 if self.dtype == "float32" else 2e-2


def layer(topology, num_experts, top_k, num_slots, **options):
    """The paper's planner fills slots whatever they cost, so that layers as small as these move replicas."""
    options = {"hidden": 16, "ffn": 8, "block_rows": 8, "planner": "topoep_paper"} | options
    return LayerConfig(topology=topology, num_experts=num_experts, top_k=top_k, num_slots=num_slots, **options)


PALLAS = {"gemm": "pallas", "ffn": 16, "block_rows": 16}  # the least that a matrix unit multiplies
RAGGED = {"gemm": "ragged_dot"}
LITTLE_CAP = {"cap_factor": 0.05, "block_rows": 4}

# Nine programs in which any two choices of chunks, product, residuals, overflow and dtype meet (a test counts), and
# some for routers, meshes and planners.
PROGRAMS = [
    Program("nodes", layer(NODES, 16, 3, 2, shared_ffn=12), 37),
    Program(
        "rows_passes_bf16",
        layer(NODES, 16, 3, 2, residuals="rows", chunks=2, **LITTLE_CAP),
        37,
        "bfloat16",
        least_passes=2,
        garbage=True,
    ),
    Program(
        "all_flag",
        layer(
            NODES,
            16,
            3,
            2,
            planner="topoep",
            residuals="all",
            overflow="flag",
            chunks=2,
            **LITTLE_CAP | {"cap_factor": 0.8},
        ),
        37,
        garbage=True,
    ),
    Program(
        "pallas_passes",
        layer(UNEVEN, 16, 3, 2, chunks=2, **PALLAS | {"cap_factor": 0.05}),
        128,
        least_passes=2,
        garbage=True,
    ),
    Program(
        "pallas_rows_flag_glm",
        layer(
            Topology((0, 0)), 8, 3, 1, router="glm4", router_options=GLM, residuals="rows", overflow="flag", **PALLAS
        ),
        11,
    ),
    Program("pallas_all_bf16", layer(NODES, 16, 3, 2, residuals="all", chunks=2, **PALLAS), 37, "bfloat16"),
    Program(
        "ragged_flag_bf16",
        layer(NODES, 16, 3, 2, overflow="flag", chunks=2, **RAGGED),
        37,
        "bfloat16",
        garbage=True,
    ),
    Program(
        "ragged_rows_glm",
        layer(Topology.uniform(8, 1), 8, 2, 1, router="glm4", router_options=GLM, residuals="rows", chunks=2, **RAGGED),
        37,
    ),
    Program(
        "ragged_all_passes",
        layer(UNEVEN, 16, 3, 2, residuals="all", **RAGGED | LITTLE_CAP),
        37,
        least_passes=2,
        garbage=True,
    ),
    Program("one_rank", layer(Topology((0,)), 4, 2, 0, shared_ffn=12), 1),
    Program("nodes_deepseek", layer(NODES, 32, 4, 4, router="deepseek_v2", router_options=DEEPSEEK, chunks=2), 24),
    Program("nodes_32", layer(Topology.uniform(4, 8), 64, 4, 2, ffn=4, chunks=2), 13),
    Program("one_main_none", layer(NODES, 8, 3, 4, planner="none", block_rows=4), 11, least_passes=2),
    Program("nodes_ultraep", layer(NODES, 16, 3, 2, planner="ultraep"), 37),
    Program("nodes_bf16", layer(NODES, 16, 3, 2, shared_ffn=12), 37, "bfloat16"),
]


# Tokens that cross to a domain once, wherever there are several of one size.
HOPS = [
    dataclasses.replace(
        program, name=f"{program.name}_{exchange}", config=dataclasses.replace(program.config, exchange=exchange)
    )
    for program in [
        *PROGRAMS,
        Program("interleaved", layer(Topology((0, 1, 2, 3, 3, 2, 1, 0)), 16, 3, 2, chunks=2), 37),
    ]
    for exchange in ("two_hop", "auto")
    if Rails.of(program.config.topology) is not None
]

RARE = {"pallas_all_bf16", "ragged_flag_bf16", "ragged_all_passes", "nodes_32", "nodes_ultraep", "nodes_bf16"}
RARE |= {p.name for p in HOPS} - {"nodes_two_hop", "rows_passes_bf16_two_hop", "interleaved_auto"}
"""Of these, which take as long as the others and find the least."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What the tokens ask for. `skew` spreads the popularity of experts, `hot` sends every token to expert 0 first."""

    name: str
    skew: float = 0.0
    hot: bool = False
    dead_expert: bool = False
    padding: float = 0.0
    empty_ranks: tuple[int, ...] = ()
    seed: int = 0


SCENARIOS = [
    Scenario("uniform"),
    Scenario("skewed", skew=1.5, dead_expert=True, seed=1),
    Scenario("very_skewed", skew=3.0, padding=0.3, seed=2),
    Scenario("one_hot_expert", hot=True, seed=3),
    Scenario("empty_first_rank", skew=3.0, empty_ranks=(0,), padding=0.1, seed=4),
    Scenario("only_last_rank", skew=1.0, empty_ranks=tuple(range(31)), seed=5),
    Scenario("no_token", padding=1.0, seed=6),
]


def make_inputs(program, scenario):
    """Global parameters, tokens [R * T, H], mask [R * T] and a target that makes the loss depend on every output."""
    config, rng = program.config, np.random.default_rng(scenario.seed)
    num_tokens = config.num_ranks * program.num_tokens
    params = init_params(jax.random.key(scenario.seed), config, jnp.dtype(program.dtype))
    x = rng.normal(size=(num_tokens, config.hidden)).astype(np.float32)
    router = np.array(params["router"])
    # Two input features are constant, so that their router rows act as biases.
    x[:, 0], router[0] = 1.0, rng.normal(size=config.num_experts) * scenario.skew
    if scenario.hot:
        router[0, 0] = 4.0  # much more would saturate the softmax and leave no gradient to compare
    if scenario.dead_expert:
        router[0, -1] = -30.0
    params["router"] = jnp.asarray(router)
    if "correction_bias" in params:
        bias = rng.normal(size=config.num_experts) * 0.1
        bias[0] += 5.0 * scenario.hot
        params["correction_bias"] = jnp.asarray(bias, jnp.float32)
    mask = rng.random(num_tokens) >= scenario.padding
    empty = [r for r in scenario.empty_ranks if r < config.num_ranks - 1 or not scenario.name.startswith("only")]
    mask.reshape(config.num_ranks, -1)[empty] = False
    target = rng.normal(size=x.shape).astype(np.float32)
    return params, jnp.asarray(x, program.dtype), jnp.asarray(mask), jnp.asarray(target)


def run_on_mesh(config, params, x, mask, *, check_vma=False, **options):
    """(y, metrics, the experts that the layer chose)."""
    mesh = Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
    specs = {name: P("ep") if name == "w" else P() for name in params}

    def on_rank(params, x, mask):
        y, metrics = moe_layer(params, x, axis_name="ep", config=config, mask=mask, **options)
        valid_x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
        logits = valid_x.astype(jnp.float32) @ params["router"]
        bias = {"correction_bias": params["correction_bias"]} if config.router == "glm4" else {}
        chosen = routing.get_router(config.router)(logits, config.top_k, **bias, **dict(config.router_options))
        metrics = jax.tree.map(lambda v: v[None], metrics)
        return y, metrics, routing.apply_mask(chosen, mask).expert_idx

    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=P("ep"), check_vma=check_vma
    )
    return mapped(params, x, mask)


def with_gradients(function, *, garbage=False):
    """Compiles (params, x, mask or choices, target) -> ((loss, aux), gradients of params and x)."""

    def loss(params, x, extra, target):
        y, *aux = function(params, x, extra)
        return (y.astype(jnp.float32) * target).sum(), (y, *aux)

    differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def traced(*args):
        with pytest.MonkeyPatch.context() as patch:
            if garbage:
                for module in (dispatch_api, transfer_api):
                    patch.setattr(module, "empty_after", lambda *x: jnp.full_like(empty_after(*x), jnp.nan))
                # What no index asks for.
                anything = lambda index, values: jnp.where(index[:, None], jnp.nan, values).astype(values.dtype)  # noqa: E731
                pick, add = rows_by_index._pick, rows_by_index._add
                patch.setattr(rows_by_index, "_pick", lambda rows, i: anything(i < 0, pick(rows, i)))
                unread = rows_by_index.UNREAD
                patch.setattr(rows_by_index, "_add", lambda rows, i: anything(i[:, 0] == unread, add(rows, i)))
            return differentiated(*args)

    return jax.jit(traced)


@cache
def compiled(program):
    config = program.config
    return (
        with_gradients(partial(run_on_mesh, config), garbage=program.garbage),
        with_gradients(lambda params, x, chosen: (dense_layer(params, x, config, chosen),)),
    )


def error(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.isfinite(got).all()
    scale = np.abs(want).max()
    return np.abs(got - want).max() / scale if scale > 0 else np.abs(got).max()


def by_matrix(config, params, x):
    """Gradients under the name of what they belong to, each expert matrix on its own scale."""
    size = config.hidden * config.ffn
    gate, up = jnp.split(params["w"][:, : 2 * size].reshape(config.num_experts, config.hidden, -1), 2, axis=-1)
    rest = {name: value for name, value in params.items() if name != "w"}
    return {"x": x, "gate": gate, "up": up, "down": params["w"][:, 2 * size :], **rest}


def assert_equals_dense(program, run, dense, scenario):
    """Runs both on one scenario, compares everything that is differentiable, and returns the layer's metrics.

    A result that the layer flags as incomplete is not compared.
    """
    params, x, mask, target = make_inputs(program, scenario)
    (_, (y, metrics, chosen)), grads = run(params, x, mask, target)
    first = jax.tree.map(lambda v: np.asarray(v)[0], metrics)
    if program.config.overflow == "flag" and first.passes > 1:
        return first
    valid_x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
    (_, (y_dense,)), grads_dense = dense(params, valid_x, chosen, target)
    assert error(y, y_dense) <= program.tolerance
    got, want = (by_matrix(program.config, *g) for g in (grads, grads_dense))
    assert want.keys() == got.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert error(got[name], want[name]) <= program.tolerance, f"gradient of {name}"
    same_everywhere = jax.tree.map(lambda v: bool((np.asarray(v) == np.asarray(v)[:1]).all()), metrics)
    assert all(same_everywhere), same_everywhere
    demand = np.bincount(np.asarray(chosen)[np.asarray(chosen) >= 0], minlength=program.config.num_experts)
    np.testing.assert_array_equal(metrics.expert_load[0], demand)
    return first


# Pairs of all choices are there without this one.
@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=pytest.mark.full) if p.name in RARE else p for p in PROGRAMS + HOPS],
    ids=lambda p: p.name,
)
def test_output_and_gradients_equal_the_dense_layer(program):
    run, dense = compiled(program)
    passes, replicas = [], []
    for scenario in SCENARIOS:
        metrics = assert_equals_dense(program, run, dense, scenario)
        passes.append(int(metrics.passes))
        replicas.append(float(metrics.replica))
        assert metrics.dropped_rows == 0
        assert metrics.passes_run == (metrics.passes if program.config.overflow == "loop" else 1)
        assert metrics.num_experts == program.config.num_experts
        assert not metrics.status & Status.BAD_INPUT
        assert (metrics.overflow_rows > 0) == (metrics.passes > 1)
        if metrics.status & Status.CAP_MET:
            assert metrics.passes == 1
    assert max(passes) >= program.least_passes
    assert min(passes) == 1 or program.least_passes > 1, "no scenario is compared"
    if program.config.num_slots and program.config.planner != "none":
        assert max(replicas) > 0.0, "no scenario of this program moves a replica"


def test_each_form_of_product_meets_garbage():
    assert {program.config.gemm for program in PROGRAMS if program.garbage} == {"auto", "pallas", "ragged_dot"}


def test_any_two_choices_meet_in_a_program():
    def choices(program):
        config = program.config
        overflow = "passes" if program.least_passes > 1 else config.overflow
        return {
            "chunks": config.chunks,
            "gemm": config.gemm,
            "residuals": config.residuals,
            "overflow": overflow,
            "dtype": program.dtype,
        }

    made = [choices(program) for program in PROGRAMS]
    assert len(PROGRAMS) <= 20
    for one, other in itertools.combinations(made[0], 2):
        wanted = set(itertools.product({c[one] for c in made}, {c[other] for c in made}))
        assert {(c[one], c[other]) for c in made} == wanted


# With two chunks it is one of the programs above; with one the trainer's tests compare the same.
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_flag_then_loop_equals_loop_bit_by_bit(chunks):
    """What flag does not flag is what loop gives; what it flags is run again with loop by whoever called."""
    [flagging] = (program for program in PROGRAMS if program.name == "all_flag")
    flagging = dataclasses.replace(flagging, config=dataclasses.replace(flagging.config, chunks=chunks))
    looping = dataclasses.replace(flagging, config=dataclasses.replace(flagging.config, overflow="loop"))
    flags = []
    for scenario in SCENARIOS:
        inputs = make_inputs(looping, scenario)
        (_, (y, metrics, _)), grads = compiled(flagging)[0](*inputs)
        flags.append(bool(metrics.passes[0] > 1))
        (_, (want, want_metrics, _)), want_grads = compiled(looping)[0](*inputs)
        assert (metrics.passes_run == 1).all()
        jax.tree.map(np.testing.assert_array_equal, metrics, want_metrics._replace(passes_run=metrics.passes_run))
        if not flags[-1]:
            jax.tree.map(np.testing.assert_array_equal, (y, grads), (want, want_grads))
        else:
            assert (np.asarray(y) != np.asarray(want)).any()
    assert set(flags) == {False, True}


def test_gradients_of_the_router_see_every_rank():
    """A mutation check of the oracle itself: another expert's parameters must not pass."""
    program = PROGRAMS[0]
    run, dense = compiled(program)
    params, x, mask, target = make_inputs(program, SCENARIOS[1])
    (_, (y, _, chosen)), _ = run(params, x, mask, target)
    (_, (wrong,)), _ = dense(params, x, jnp.roll(chosen, 1, axis=0), target)
    assert error(y, wrong) > 100 * program.tolerance


def test_what_is_not_differentiable_or_too_narrow_is_refused():
    program = PROGRAMS[0]
    params, x, mask, target = make_inputs(program, SCENARIOS[0])

    def loss(x):
        return (run_on_mesh(program.config, params, x, mask)[0] * target).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))).trace(x)
    with pytest.raises(ValueError, match="a float dtype of 16 bits or more"):
        jax.jit(loss).trace(x.astype(jnp.float8_e4m3fn))
