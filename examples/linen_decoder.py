"""A linen decoder with `topoep_jax.linen.MoE`, on a mesh of two axes, that runs again what did not fit.

    .venv/bin/python -m examples.linen_decoder

Batches are sharded over both axes; each of the two groups along "data" holds all experts, spread over "expert", and
plans on its own. The layer's receive buffers are of fixed size. With overflow="flag" a step reads nothing back to find
out whether all rows fitted: it runs to its end and keeps the old state if they did not. Then the same batch runs once
more, through a second program with overflow="loop", which takes as many passes as needed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.text import VOCAB, batches
from topoep_jax import MoEMetrics, Topology, collect_metrics
from topoep_jax.linen import MoE

Step = Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array, MoEMetrics]]

HIDDEN, NUM_HEADS, LENGTH = 64, 4, 128
CAP_FACTOR = 0.8  # Below the default of 1.05, so that this short run has steps that overflow.


class Block(nn.Module):
    """Attention and experts, each behind a norm and added to the residual stream."""

    experts: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        causal = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(NUM_HEADS, use_bias=False)(nn.RMSNorm()(x), mask=causal)
        y, metrics = MoE(HIDDEN, ffn=32, num_experts=16, top_k=4, **self.experts)(nn.RMSNorm()(x))
        return x + y, metrics


class Decoder(nn.Module):
    """Tokens [batch, time] to logits [batch, time, VOCAB], and the metrics of every layer."""

    num_layers: int
    experts: dict[str, Any]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        embed = nn.Embed(VOCAB, HIDDEN)
        x = embed(tokens) + nn.Embed(LENGTH, HIDDEN)(jnp.arange(tokens.shape[1]))[None]
        layers = []
        for _ in range(self.num_layers):
            x, metrics = Block(self.experts)(x)
            layers.append(metrics)
        return embed.attend(nn.RMSNorm()(x)), collect_metrics(layers)


def create(decoder: Decoder, mesh: Mesh) -> TrainState:
    """The first state, every array made where its annotation says: experts over their axis, all else everywhere."""

    def init() -> TrainState:
        params = decoder.init(jax.random.key(0), jnp.zeros((8, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=decoder.apply, params=params, tx=optax.adamw(3e-3))

    return jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), mesh))()


def make_step(decoder: Decoder) -> Step:
    """A jitted training step: (state, tokens) to (state, loss, metrics)."""

    @jax.jit
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array, MoEMetrics]:
        def loss_fn(params: Any) -> tuple[jax.Array, MoEMetrics]:
            logits, metrics = decoder.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updated = state.apply_gradients(grads=grads)
        if decoder.experts["overflow"] == "flag":
            fits = jnp.all(metrics.passes == 1)
            updated = jax.tree.map(lambda new, old: jnp.where(fits, new, old), updated, state)
        return updated, loss, metrics

    return train_step


def main(num_layers: int = 2, steps: int = 40) -> list[float]:
    """Trains, and returns the loss of every step."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"))
    experts = {"mesh": mesh, "axis": "expert", "data_axes": ("data",), "topology": Topology.uniform(2, 2)}
    experts |= {"block_rows": 16, "cap_factor": CAP_FACTOR}
    decoder, exact = (Decoder(num_layers, {**experts, "overflow": policy}) for policy in ("flag", "loop"))
    state = create(decoder, mesh)
    train_step, exact_step = make_step(decoder), make_step(exact)  # The second is compiled when it is first called.
    losses, again = [], 0
    for step, batch in zip(range(1, steps + 1), batches(8, LENGTH), strict=False):
        tokens = jax.device_put(batch, NamedSharding(mesh, P(("data", "expert"))))
        state, loss, metrics = train_step(state, tokens)
        if (metrics.passes > 1).any():
            state, loss, metrics = exact_step(state, tokens)
            again += 1
        losses.append(float(loss))
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}: loss {losses[-1]:.3f}, {metrics.summary()}")
    print(f"{again} of {steps} steps overflowed and ran again")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # With eight accelerators leave these two lines out.
    jax.config.update("jax_num_cpu_devices", 8)
    main()
