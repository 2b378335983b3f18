"""JAX's strictness flags, alone and together: a layer is traced, compiled and differentiated under any of them."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from topoep_jax import LayerConfig, Topology, init_params, moe_layer

# What makes JAX refuse more, of 0.10.2 and of 0.12. Left out: `jax_error_checking_behavior_*`, with which JAX itself
# traces no shard_map at all, and `jax_disable_jit`, with which it runs none on several devices.
STRICT = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_explicit_x64_dtypes": "error",
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_check_static_indices": True,
    "jax_legacy_prng_key": "error",
    "jax_debug_key_reuse": True,
    "jax_disallow_mesh_context_manager": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_transfer_guard": "disallow",
}
RELAXED = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
PAIRS = list(itertools.combinations(STRICT, 2))
ONCE_FAILED = [("jax_enable_x64", "jax_numpy_dtype_promotion")]


@contextlib.contextmanager
def flags(values):
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def arguments():
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    config = LayerConfig(
        hidden=16,
        ffn=8,
        num_experts=4,
        top_k=2,
        topology=Topology.uniform(1, 2),
        num_slots=1,
        block_rows=4,
        planner="topoep_paper",
        overflow="flag",
    )
    params = init_params(jax.random.key(0), config)
    specs = {name: P("ep") if name == "w" else P() for name in params}
    x, mask = jax.random.normal(jax.random.key(1), (8, 16)), np.arange(8) % 4 != 3
    values = (params, x, mask), (specs, P("ep"), P("ep"))
    return config, mesh, specs, jax.tree.map(lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec)), *values)


def lowered(arguments, *, backward):
    """The layer, forward alone or forward and backward, as a program that is not compiled yet."""
    config, mesh, specs, inputs = arguments

    def on_rank(params, x, mask):
        y, metrics = moe_layer(params, x, axis_name="ep", config=config, mask=mask)
        return y, metrics

    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=(P("ep"), P()), check_vma=False
    )

    def loss(params, x, mask):
        y, metrics = mapped(params, x, mask)
        return (y**2).sum(), (y, metrics)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if backward else mapped).lower(*inputs)


def run(program, arguments):
    return jax.device_get(program.compile()(*arguments[-1]))


@pytest.mark.parametrize("pair", ONCE_FAILED, ids=" ".join)
def test_a_layer_is_traced_under_pairs_that_once_failed(pair, arguments):
    with flags(RELAXED | {name: STRICT[name] for name in pair}):
        lowered(arguments, backward=True)


def test_all_flags_together_change_no_value(arguments):
    with flags(RELAXED):
        want = run(lowered(arguments, backward=False), arguments)
    with flags(STRICT):
        got = run(lowered(arguments, backward=False), arguments)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parameters_are_drawn_under_all_flags():
    config = LayerConfig(
        16, 8, 4, 2, Topology.uniform(1, 2), shared_ffn=8, router="glm4", router_options={"scale": 1.5}
    )
    draw = jax.jit(lambda key: init_params(key, config))
    key = jax.random.key(0)
    with flags(STRICT):
        got = draw(key)
    assert {value.dtype.name for value in got.values()} == {"float32"}


@pytest.fixture(scope="module")
def run_once_compiled(arguments):
    """Traces the program, compiles it where none like it was, to the letter, and runs it under the flags of now."""
    made = {}

    def run():
        program = lowered(arguments, backward=True)
        text = program.as_text()
        if text not in made:
            made[text] = program.compile()
        return jax.device_get(made[text](*arguments[-1]))

    return run


@pytest.fixture(scope="module")
def relaxed(run_once_compiled):
    """What the program gives under none of the flags."""
    with flags(RELAXED):
        return run_once_compiled()


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_no_two_flags_change_a_value(pair, run_once_compiled, relaxed):
    with flags(RELAXED | {name: STRICT[name] for name in pair}):
        got = run_once_compiled()
    jax.tree.map(np.testing.assert_array_equal, got, relaxed)
