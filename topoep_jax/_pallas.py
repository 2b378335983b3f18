"""How the library calls its Pallas kernels, all of which read and write whole arrays where they lie."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from topoep_jax import _compat

_MOST_COLUMNS, _LEAST_COLUMNS = 4096, 16


def columns(width: int) -> int:
    """Columns that a program copies at once of rows of this width, a power of two."""
    return math.gcd(width, _MOST_COLUMNS)


def pays(width: int) -> bool:
    """Whether these are so many that a kernel is worth it."""
    return columns(width) >= _LEAST_COLUMNS


def call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    results: Any,
    *,
    name: str,
    programs: int,
    num_warps: int = 4,
    num_stages: int = 1,
    aliases: Mapping[int, int] = MappingProxyType({}),
    interpret: bool = False,
) -> Any:
    """Runs a kernel on a grid of `programs` programs, through Triton on GPUs.

    Args:
      kernel: takes a reference to each operand, then to each result.
      operands: arrays.
      results: a `_compat.result_like`, or several.
      name: shows in profiles and in the compiled program.
      programs: number of programs.
      num_warps: warps of a program.
      num_stages: depth of the pipeline of loads in its loops.
      aliases: operands whose memory a result takes over.
      interpret: run it as ordinary operations, on any platform.
    """
    _compat.silence_triton()
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=[whole] * len(operands),
        out_specs=jax.tree.map(lambda _: whole, results),
        out_shape=results,
        input_output_aliases=aliases,
        interpret=interpret,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )(*operands)
