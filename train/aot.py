"""The training step as a program of `python -m topoep_jax.aot`: what a run needs, before there are GPUs.

python -m topoep_jax.aot --topology=1x4x8 --program=train.aot:step --program_args="--model=qwen3-30b-a3b --batch_size=32
--seq_len=4096 --block_rows=128 --chunks=2 --remat=full"
python -m topoep_jax.aot --topology=1x2x8 --program=train.aot:stage --program_args="backward 0/2
--model=deepseek-v2-paper --batch_size=16
--seq_len=4096 --block_rows=128 --chunks=2 --remat=full"
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from train.config import TrainConfig, define
from train.mesh import arrange, over_ranks
from train.part import overflow_of
from train.stages import Stage
from train.step import build


def step(mesh: Mesh, *arguments: str) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """The step of `train.pretrain` with these flags, and its arguments as shapes.

    Args:
      mesh: devices; --ep follows from their number and --dp.
      *arguments: flags of `train.pretrain`.

    Raises:
      ValueError: settings out of range, or a batch that the mesh does not divide.
    """
    config = parse(mesh, *arguments)
    mesh = arrange(mesh.devices, config)
    program = build(config, mesh)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        program.abstract,
        program.shardings,
    )
    shape = (config.microbatches, config.batch_size // config.microbatches, config.seq_len + 1)
    return program.step, (state, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over_ranks(mesh, lead=1)))


def stage(mesh: Mesh, program: str, place: str, *arguments: str) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """One program of a pipeline stage, and its arguments as shapes.

    Args:
      mesh: devices of the stage.
      program: forward, backward or update, see `train.stages`.
      place: the stage and their number, as in 0/2.
      *arguments: flags of `train.pretrain`.

    Raises:
      ValueError: as for `step`; a stage or program that is not there.
    """
    index, _, count = place.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"{place!r} is no stage: write 0/2 for the first of two")
    made = stage_of(mesh, int(index), int(count), *arguments)
    every = made.arguments()
    if program not in every:
        raise ValueError(f"stage {place} has no program {program!r}: take one of {', '.join(every)}")
    return getattr(made, program), every[program]


def stage_of(mesh: Mesh, index: int, count: int, *arguments: str) -> Stage:
    """Stage `index` of `count` on the devices of `mesh`, with flags of `train.pretrain`."""
    config = parse(mesh, *arguments)
    mesh = arrange(mesh.devices, config)
    return Stage(config, mesh, index, count, overflow=overflow_of(config, mesh))


def parse(mesh: Mesh, *arguments: str) -> TrainConfig:
    """The settings of these flags on all devices of `mesh`. Raises ValueError where one is out of range."""
    values = define()
    values(["train.aot", *arguments])
    given: dict[str, Any] = {name: values[name].value for name in values if values[name].present}
    return TrainConfig(**{**given, "ep": mesh.size // (given.get("dp") or 1)})
