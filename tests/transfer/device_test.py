"""The device transport's calls, as a CUDA program holds them: operands, attributes, aliases and order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from topoep_jax import MoE, Topology, transport
from topoep_jax._compat import vary_like
from topoep_jax.plan.problem import CostModel
from topoep_jax.transfer import device_pull, device_push
from topoep_jax.transport import Group, LayerSizes, group_sizes

COST = CostModel(1000, 1, 0, inter_fs_per_byte=20_000, intra_fs_per_byte=5_000, pulls="striped")
TOPOLOGY = Topology((0, 0, 1, 1))
GROUP = Group("ep", 7, "device", TOPOLOGY, group_sizes([LayerSizes(2, 3, 96, "striped")], TOPOLOGY))


def transfers(mains, slot_expert):
    """A pull and what a backward pass does: pull again, then push."""
    first = vary_like(jnp.zeros(1, jnp.int32), mains)
    slots, turn = device_pull(mains, slot_expert, first, GROUP, COST)
    again, turn = device_pull(mains, slot_expert, turn, GROUP, COST)
    grads = (slots + again).astype(jnp.float32)
    sums, turn, _ = device_push(grads, mains.astype(jnp.float32), slot_expert, turn, mains, GROUP)
    return sums, turn


def lowered(check_vma: bool) -> str:
    mesh = AbstractMesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    program = jax.shard_map(
        transfers, mesh=mesh, in_specs=(P("ep"), P()), out_specs=(P("ep"), P("ep")), check_vma=check_vma
    )
    shapes = jax.ShapeDtypeStruct((8, 24), jnp.bfloat16), jax.ShapeDtypeStruct((4, 3), jnp.int32)
    return jax.jit(program).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str, target: str) -> list[str]:
    return [line for line in text.splitlines() if f"@{target}(" in line]


@pytest.mark.parametrize("check_vma", [False, True])
def test_calls_of_a_cuda_program(check_vma):
    text = lowered(check_vma)
    pulls, pushes = calls(text, "topoep_pull"), calls(text, "topoep_push")
    assert (len(pulls), len(pushes)) == (2, 1)
    for call in pulls:
        for attribute in ("group = 7", "pulls = 2", "expert_bytes = 1000", "inter_fs_per_byte = 20000"):
            assert attribute in call
        assert "domain_of_rank = dense<[0, 0, 1, 1]> : tensor<4xi32>" in call
        assert "has_side_effect = true" not in call  # jax.checkpoint refuses it on jax 0.10
        assert "output_tuple_indices = [1], operand_index = 2" in call
        assert "(tensor<2x24xbf16>, tensor<4x3xi32>, tensor<1xi32>) -> (tensor<3x24xbf16>, tensor<1xi32>)" in call
    assert "group = 7" in pushes[0]
    assert "output_tuple_indices = [0], operand_index = 1" in pushes[0]
    assert "output_tuple_indices = [1], operand_index = 3" in pushes[0]
    assert "output_tuple_indices = [2], operand_index = 4" in pushes[0]
    assert "domain_of_rank = dense<[0, 0, 1, 1]> : tensor<4xi32>" in pushes[0]
    # Each call takes the turn of the one before.
    operands, results = [], []
    for call in (*pulls, *pushes):
        result, arguments = re.search(r"(%\w+):[23] = .*?@topoep_\w+\(([^)]*)\)", call).groups()
        operands.append(arguments.split(", ")[3 if "topoep_push" in call else 2])
        results.append(f"{result}#1")
    assert operands[1:] == results[:-1]


MAINS = jnp.zeros((2, 8), jnp.float32)
PLAN = jnp.full((4, 3), -1, jnp.int32)
TURN = jnp.zeros(1, jnp.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: device_pull(MAINS, PLAN[:2], TURN, GROUP, COST), r"must be \[Em, D\] and \[R, N\] with R=4"),
        (lambda: device_pull(MAINS, PLAN[:, :0], TURN, GROUP, COST), "at least one slot"),
        (
            lambda: device_pull(jnp.zeros((2, 40), jnp.float32), PLAN, TURN, GROUP, COST),
            r"192 bytes for mains, .* float32\[2, 40\], 3 slots and pulls='striped' needs 320: .* with dtype=float32",
        ),
        (
            lambda: device_pull(MAINS, PLAN, TURN[0], GROUP, COST),
            r"expected int32 \(1,\)",
        ),
        (
            lambda: device_pull(MAINS, PLAN.astype(jnp.float32), TURN, GROUP, COST),
            "slot_expert is float32, expected the int32 array of a plan",
        ),
        (lambda: device_push(MAINS, MAINS, PLAN.astype(jnp.int16), TURN, MAINS, GROUP), "slot_expert is int16"),
        (lambda: device_push(MAINS, MAINS, PLAN, TURN, MAINS, GROUP), r"slot_grads have shape \(2, 8\)"),
        (
            lambda: device_push(jnp.zeros((3, 8), jnp.bfloat16), MAINS, PLAN, TURN, MAINS, GROUP),
            "added in float32, not in bfloat16",
        ),
        (
            lambda: device_pull(MAINS, PLAN, TURN, Group("ep", 0, "xla", GROUP.topology, None, ("no NCCL",)), COST),
            r"has no kernels \(no NCCL\): use transfer.pull",
        ),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_module_takes_the_group_that_is_there_now():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))
    layer = MoE(8, 4, 8, 2, mesh=mesh, topology=TOPOLOGY, transport="device", rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def number_in_the_program() -> str:
        # A new function, for JAX keeps what it has traced.
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])
        text = program.trace(state, jnp.zeros((16, 8))).lower(lowering_platforms=("cuda",)).as_text()
        [call] = calls(text, "topoep_pull")
        return re.search(r"group = (\d+)", call)[1]

    numbers = []
    for _ in range(2):
        group = transport.init(mesh, "ep", configs=layer.config, compile_only=True)
        numbers.append((str(group.ident), number_in_the_program()))
        transport.shutdown("ep")
    assert numbers[0][0] == numbers[0][1] != numbers[1][0] == numbers[1][1]
    with pytest.raises(ValueError, match=r"no transport .* call topoep_jax.transport.init\(mesh, 'ep', "):
        number_in_the_program()
