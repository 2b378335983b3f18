"""The training step as a program of `python -m topoep_jax.aot`: what a run needs, before there are GPUs.

python -m topoep_jax.aot --topology=1x4x8 --program=train.aot:step --program_args="--model=qwen3_30b_a3b --batch_size=32
--seq_len=4096 --block_rows=128 --chunks=2 --remat"
"""

from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.config import TrainConfig, define_flags
from train.step import AXIS, build


def step(mesh: Mesh, *arguments: str) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """The step of `train.pretrain` with these flags, and its arguments as shapes.

    Args:
      mesh: whose axis is "ep"; --ep follows from it.
      *arguments: flags of `train.pretrain`.

    Raises:
      ValueError: settings out of range, or a batch that the mesh does not divide.
    """
    values = flags.FlagValues()
    define_flags(values)
    values(["train.aot", *arguments])
    given: dict[str, Any] = {name: values[name].value for name in values if values[name].present}
    config = TrainConfig(**{**given, "ep": mesh.size})
    program = build(config, mesh)
    state = jax.tree.map(
        lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place),
        program.abstract,
        program.shardings,
    )
    tokens = jax.ShapeDtypeStruct(
        (config.batch_size, config.seq_len + 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(AXIS))
    )
    return program.step, (state, tokens)
