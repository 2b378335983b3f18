"""SwiGLU of rows times their router weights, whose gradient so is a by-product of the backward pass."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from topoep_jax import _pallas
from topoep_jax._compat import result_like

_MOST_ROWS, _MOST_COLUMNS = 16, 256


@jax.named_scope("topoep_swiglu")
def swiglu(gate_up: jax.Array, weight: jax.Array) -> jax.Array:
    """weight * silu(gate) * up in f32. gate_up [n, 2 I], weight f32 [n]; returns [n, I] in the dtype of `gate_up`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up * weight[:, None]).astype(gate_up.dtype)


def backward(gate_up: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `experts.swiglu_backward`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    gate_grad, up_grad, inner, weight_grad = _differentiate(gate, up, weight, grad.astype(jnp.float32))
    dtype = gate_up.dtype
    return jnp.concatenate([gate_grad, up_grad], axis=1).astype(dtype), inner.astype(dtype), weight_grad


def backward_by_kernel(
    gate_up: jax.Array, weight: jax.Array, grad: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`backward` in one kernel and in place: XLA would keep f32 arrays of all rows, and both versions of each array."""
    num_rows, ffn = grad.shape
    rows, columns = math.gcd(num_rows, _MOST_ROWS), math.gcd(ffn, _MOST_COLUMNS)

    def kernel(_: Any, weight: Any, __: Any, gate_up: Any, inner: Any, weight_grad: Any) -> None:
        here = pl.ds(pl.program_id(0) * rows, rows)
        scale = weight[here]

        def step(k: jax.Array, total: jax.Array) -> jax.Array:
            left, right = pl.ds(k * columns, columns), pl.ds(ffn + k * columns, columns)
            gate, up = gate_up[here, left].astype(jnp.float32), gate_up[here, right].astype(jnp.float32)
            grad = inner[here, left].astype(jnp.float32)
            gate_grad, up_grad, value, part = _differentiate(gate, up, scale, grad)
            gate_up[here, left] = gate_grad.astype(gate_up.dtype)
            gate_up[here, right] = up_grad.astype(gate_up.dtype)
            inner[here, left] = value.astype(inner.dtype)
            return total + part

        weight_grad[here] = lax.fori_loop(0, ffn // columns, step, jnp.zeros((rows,), jnp.float32))

    return _pallas.call(
        kernel,
        (gate_up, weight, grad),
        (result_like(gate_up, gate_up.shape), result_like(grad, grad.shape), result_like(weight, weight.shape)),
        name="topoep_swiglu_backward",
        programs=num_rows // rows,
        aliases={0: 0, 2: 1},
        interpret=interpret,
    )


def _differentiate(
    gate: jax.Array, up: jax.Array, weight: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """All f32: gradients of gate and up, the activation itself, and the gradient of the weight."""
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    plain = silu * up
    weight_grad = (grad * plain).sum(1)
    grad = grad * weight[:, None]
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu, plain * weight[:, None], weight_grad
