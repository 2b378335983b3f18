"""Experts whose matrices are apart: packed they compute the same, and unpacked they are as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from topoep_jax import MoE, pack_experts, unpack_experts

EXPERTS, HIDDEN, FFN = 4, 16, 8


def matrices():
    gate, up, down = jax.random.split(jax.random.key(0), 3)
    shape = (EXPERTS, HIDDEN, FFN)
    return (
        jax.random.normal(gate, shape),
        jax.random.normal(up, shape),
        jax.random.normal(down, (EXPERTS, FFN, HIDDEN)),
    )


def test_packing_is_undone_by_unpacking():
    w = pack_experts(*matrices())
    assert w.shape == (EXPERTS, 3 * HIDDEN * FFN)
    for again, own in zip(unpack_experts(w, HIDDEN), matrices(), strict=True):
        np.testing.assert_array_equal(again, own)
    np.testing.assert_array_equal(w[1], pack_experts(*(matrix[1] for matrix in matrices())))


def test_a_layer_of_packed_experts_is_that_of_the_matrices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    moe = MoE(HIDDEN, FFN, EXPERTS, EXPERTS, mesh=mesh, block_rows=8, rngs=nnx.Rngs(0))
    gate, up, down = matrices()
    moe.w[...] = jax.device_put(pack_experts(gate, up, down), moe.w[...].sharding)
    x = jax.random.normal(jax.random.key(1), (8, HIDDEN))
    y, _ = nnx.jit(lambda moe, x: moe(x))(moe, x)
    inner = jax.nn.silu(jnp.einsum("th,ehi->tei", x, gate)) * jnp.einsum("th,ehi->tei", x, up)
    weights = jax.nn.softmax(x @ moe.router[...])
    expected = jnp.einsum("tei,eih,te->th", inner, down, weights)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_bad_shapes_are_named():
    gate, up, down = matrices()
    with pytest.raises(ValueError, match=r"down \(4, 16, 8\) must be .*: matrices that x is multiplied"):
        pack_experts(gate, up, down.swapaxes(1, 2))
    with pytest.raises(ValueError, match=r"w has shape \(4, 10\), but \[\.\.\., 3 \* 16 \* I\] is needed"):
        unpack_experts(jnp.zeros((4, 10)), HIDDEN)
