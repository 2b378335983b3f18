"""The MoE layer's GPU program with the kernels that nvcc built, compiled ahead of time: its calls, and their order."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.aot import Compiler, Program
from topoep_jax import transport
from topoep_jax.config import LayerConfig
from topoep_jax.moe import init_params, moe_layer
from topoep_jax.topology import Topology

HOSTS, GPUS, TOKENS = 2, 4, 256
CONFIG = LayerConfig(
    hidden=128,
    ffn=64,
    num_experts=32,
    top_k=4,
    topology=Topology.uniform(HOSTS, GPUS),
    block_rows=32,
    transport="device",
    pulls="best",
)


@pytest.fixture
def mesh(aot: Compiler) -> Iterator[jax.sharding.Mesh]:
    mesh = aot.mesh(HOSTS, GPUS)
    transport.init(mesh, "ep", configs=CONFIG, compile_only=True)
    yield mesh
    transport.shutdown("ep")


def program(aot: Compiler, mesh: jax.sharding.Mesh, *, backward: bool) -> Program:
    def loss(params: dict, x: jax.Array) -> jax.Array:
        def on_rank(params: dict, x: jax.Array) -> jax.Array:
            return moe_layer(params, x, axis_name="ep", config=CONFIG)[0]

        specs = ({"w": P("ep"), "router": P()}, P("ep"))
        y = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False)(params, x)
        return jnp.square(y.astype(jnp.float32)).sum()

    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), CONFIG, jnp.bfloat16))
    spec = {"w": P("ep"), "router": P()}
    params = {name: aot.struct(value.shape, value.dtype, mesh, spec[name]) for name, value in shapes.items()}
    x = aot.struct((HOSTS * GPUS * TOKENS, CONFIG.hidden), jnp.bfloat16, mesh, P("ep"))
    return aot.compile(jax.grad(loss, (0, 1)) if backward else loss, params, x)


def place(entry: list, target: str) -> list[int]:
    return [i for i, instruction in enumerate(entry) if instruction.target == target]


def test_forward_plans_then_pulls(aot: Compiler, mesh: jax.sharding.Mesh) -> None:
    entry = program(aot, mesh, backward=False).entry()
    [plan], [pull] = place(entry, "topoep_plan"), place(entry, "topoep_pull")
    assert plan < pull
    assert not place(entry, "topoep_push")


def test_backward_pulls_again_and_pushes_once(aot: Compiler, mesh: jax.sharding.Mesh) -> None:
    entry = program(aot, mesh, backward=True).entry()
    [plan], pulls, [push] = place(entry, "topoep_plan"), place(entry, "topoep_pull"), place(entry, "topoep_push")
    assert len(pulls) == 2
    assert plan < pulls[0] < pulls[1] < push
