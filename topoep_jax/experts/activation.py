"""SwiGLU of rows times their router weights, whose gradient so is a by-product of the backward pass."""

import jax
import jax.numpy as jnp


def swiglu(gate_up: jax.Array, weight: jax.Array) -> jax.Array:
    """weight * silu(gate) * up in f32. gate_up [n, 2 I], weight f32 [n]; returns [n, I] in the dtype of `gate_up`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up * weight[:, None]).astype(gate_up.dtype)


def swiglu_grad(gate_up: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of `swiglu` towards gate_up [n, 2 I] (in its dtype) and weight (f32 [n]), from grad [n, I]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    gate_sigmoid = jax.nn.sigmoid(gate)
    silu = gate * gate_sigmoid
    grad = grad.astype(jnp.float32)
    weight_grad = (grad * silu * up).sum(1)
    grad = grad * weight[:, None]
    gate_grad = grad * up * (gate_sigmoid + silu * (1 - gate_sigmoid))
    return jnp.concatenate([gate_grad, grad * silu], axis=1).astype(gate_up.dtype), weight_grad
