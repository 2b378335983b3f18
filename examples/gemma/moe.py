"""A Gemma-like decoder in Flax nnx, trained on bytes of text over eight emulated devices.

    .venv/bin/python -m examples.gemma.dense    # with an MLP in every block
    .venv/bin/python -m examples.gemma.moe      # with experts of topoep_jax in its place
    diff examples/gemma/dense.py examples/gemma/moe.py

The diff is all that a model has to change.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.gemma.layers import Attention, RMSNorm
from examples.text import VOCAB, batches
from topoep_jax import MoE, Topology, collect_metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Shapes of the model."""

    num_layers: int
    vocab: int = VOCAB
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0
    ffn: int = 256


class Block(nnx.Module):
    """Attention and MLP, each between a norm before and a norm after, added to the residual stream x [B, T, D]."""

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.pre_attention_norm, self.post_attention_norm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, *heads, config.rope_theta, rngs=rngs)
        self.pre_mlp_norm, self.post_mlp_norm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        ranks = {"mesh": mesh, "axis": "data", "topology": Topology.uniform(2, mesh.size // 2)}  # none on a cluster
        self.mlp = MoE(config.hidden, config.ffn // 4, num_experts=32, top_k=4, block_rows=16, **ranks, rngs=rngs)
        self.residual = NamedSharding(mesh, P("data"))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x)))
        y, metrics = self.mlp(self.pre_mlp_norm(x))
        self.metrics = nnx.Intermediate(metrics)  # Where passes > 1, rows overflowed and took another pass.
        x = x + self.post_mlp_norm(y)
        return jax.lax.with_sharding_constraint(x, self.residual)


class Gemma(nnx.Module):
    """Tokens [B, T] to logits [B, T, vocab]; the embedding is read on the way in and on the way out."""

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab, config.hidden)))
        self.blocks = nnx.List([Block(config, mesh, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.embedding[...]
        x = table[tokens] * table.shape[1] ** 0.5
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x) @ table.T


@partial(nnx.jit, static_argnums=(0, 1))
def create(config: Config, mesh: Mesh) -> tuple[Gemma, nnx.Optimizer]:
    """Model and optimizer, every array made where its annotation says, and on all devices where it has none.

    Made outside of a program, the optimizer's counters would be on one device: the training step would be compiled a
    second time for where its first run leaves them, and a checkpoint of them would fit no other set of devices.
    """
    model = Gemma(config, mesh, nnx.Rngs(0))
    made = model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    state = nnx.state(made)
    nnx.update(made, jax.lax.with_sharding_constraint(state, nnx.get_named_sharding(state, mesh)))
    return made


def loss_fn(model: Gemma, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Gemma, optimizer: nnx.Optimizer, tokens: jax.Array) -> dict[str, Any]:
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return {"loss": loss, "moe": collect_metrics(nnx.pop(model, nnx.Intermediate))}


def main(num_layers: int = 2, steps: int = 60) -> list[float]:
    """Trains, and returns the loss of every step."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    model, optimizer = create(Config(num_layers=num_layers), mesh)
    losses = []
    for step, batch in zip(range(1, steps + 1), batches(8, 128), strict=False):
        tokens = jax.device_put(batch, NamedSharding(mesh, P("data")))
        metrics = train_step(model, optimizer, tokens)
        losses.append(float(metrics["loss"]))
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}: loss {losses[-1]:.3f}, {metrics['moe'].summary()}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # With eight accelerators leave these two lines out.
    jax.config.update("jax_num_cpu_devices", 8)
    main()
