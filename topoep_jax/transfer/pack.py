"""The experts that other ranks pull, apart from those that nobody does."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from topoep_jax import _pallas
from topoep_jax._compat import platform_dependent, result_like


def pack(mains: jax.Array, pulled: jax.Array) -> jax.Array:
    """What a pull sends: on GPUs a copy of the experts that are pulled, and of no others; elsewhere `mains` itself.

    XLA's device-initiated exchange sends from memory of its own, where parameters do not lie. Left to XLA, all of them
    are copied there, once for both passes: the copy would stay until the backward pass, of every layer.

    Args:
      mains: [Em, D].
      pulled: bool [Em].

    Returns:
      [Em, D]; rows of experts that are not pulled hold anything.
    """
    if not _pallas.pays(mains.shape[1]):
        return mains
    return platform_dependent(mains, pulled.astype(jnp.int32), cuda=copy_pulled, default=lambda mains, _: mains)


def copy_pulled(mains: jax.Array, pulled: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `pack`, with pulled int32 [Em]: each program has some columns of one expert."""
    num_mains, size = mains.shape
    columns = _pallas.columns(size)
    parts = size // columns

    def kernel(mains: Any, pulled: Any, out: Any) -> None:
        main, here = pl.program_id(0) // parts, pl.ds(pl.program_id(0) % parts * columns, columns)

        @pl.when(pulled[main] > 0)
        def copy() -> None:
            out[main, here] = mains[main, here]

    return _pallas.call(
        kernel,
        (mains, pulled),
        result_like(mains, mains.shape),
        name="topoep_pack",
        programs=num_mains * parts,
        interpret=interpret,
    )
