"""The MoE layer's GPU program with the kernels that nvcc built, compiled ahead of time: its calls, and their order."""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.aot import Compiler, entry
from topoep_jax import transport
from topoep_jax.aot import Program
from topoep_jax.aot.hlo import Instruction
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


def program(aot: Compiler, mesh: jax.sharding.Mesh, *, backward: bool, layers: int = 1, remat: bool = False) -> Program:
    def on_rank(params: dict, x: jax.Array) -> jax.Array:
        return moe_layer(params, x, axis_name="ep", config=CONFIG)[0]

    specs = ({"w": P("ep"), "router": P()}, P("ep"))
    layer = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False)
    layer = jax.checkpoint(layer) if remat else layer

    def loss(params: list[dict], x: jax.Array) -> jax.Array:
        for own in params:
            x = x + layer(own, x)
        return jnp.square(x.astype(jnp.float32)).sum()

    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), CONFIG, jnp.bfloat16))
    spec = {"w": P("ep"), "router": P()}
    params = [{name: aot.struct(value.shape, value.dtype, mesh, spec[name]) for name, value in shapes.items()}] * layers
    x = aot.struct((HOSTS * GPUS * TOKENS, CONFIG.hidden), jnp.bfloat16, mesh, P("ep"))
    return aot.compile(jax.grad(loss, (0, 1)) if backward else loss, params, x)


def place(instructions: list[Instruction], target: str) -> list[int]:
    return [i for i, instruction in enumerate(instructions) if instruction.target == target]


def transfers_in_order(instructions: list[Instruction]) -> list[str]:
    """Targets of the pulls and pushes, each of which depends by data on the one before; fails if one does not.

    What XLA's scheduler makes of the program then cannot differ between ranks where it matters.
    """
    needs: dict[str, set[str]] = {}  # transfers that an instruction depends on, in any number of steps
    order = []
    for instruction in instructions:
        operands = re.findall(r"%([\w.-]+)", instruction.text.partition(" = ")[2])
        before = set().union(*(needs.get(name, set()) | ({name} & set(order)) for name in operands))
        needs[instruction.name] = before
        if instruction.target in ("topoep_pull", "topoep_push"):
            assert before == set(order), f"{instruction.name} does not wait for {set(order) - before}"
            order.append(instruction.name)
    targets = {instruction.name: instruction.target for instruction in instructions}
    return [targets[name] for name in order]


def test_forward_plans_on_a_stream_of_its_own_then_pulls(aot: Compiler, mesh: jax.sharding.Mesh) -> None:
    made = program(aot, mesh, backward=False)
    forward = entry(made)
    [planning] = [name for name, body in made.module.computations.items() if place(body, "topoep_plan")]
    assert planning != made.module.entry, "the planner is in the program's own stream"
    [start] = [instruction.name for instruction in forward if planning in instruction.text]
    planned = next(i for i, instruction in enumerate(forward) if re.search(rf"-done\(.*%{start}\)", instruction.text))
    [pull] = place(forward, "topoep_pull")
    assert planned < pull
    assert not place(forward, "topoep_push")


@pytest.mark.parametrize("remat", [False, True])
def test_all_transfers_of_two_layers_follow_each_other_by_data(
    aot: Compiler, mesh: jax.sharding.Mesh, remat: bool
) -> None:
    made = transfers_in_order(entry(program(aot, mesh, backward=True, layers=2, remat=remat)))
    backward = ["topoep_pull", "topoep_push", "topoep_push"]  # gradients of down, then of gate and up
    assert made == ["topoep_pull"] * 2 + backward * 2
