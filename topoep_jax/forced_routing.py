"""Forced routing: logits with a known imbalance that no model has to be trained into, for tests and measurements.

The semantics are those of Megatron-LM (`--moe-router-force-load-balancing`, `--moe-router-force-biased`), made
stateless: every draw is a function of (seed, layer, step, rank).
"""

import dataclasses
import functools
import numbers
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._compat import vary_like
from topoep_jax._integers import is_integer

_PRNG = "threefry2x32"  # named, so that draws do not depend on the process-wide default generator
_NOISE, _BIAS = 0, 1  # independent random streams of one seed
_MAX_SKEW = 1e6  # far beyond any use, and safely within f32


@dataclasses.dataclass(frozen=True)
class Forced:
    """Forced routing: a known, model-independent imbalance for tests and measurements (as Megatron-LM defines it).

    Attributes:
      skew: |skew| is the standard deviation of one bias per expert, shared by all ranks. Negative: drawn once per layer
        and fixed for the whole run. 0: no bias, statistically uniform routing. Positive: drawn anew at every step.
      seed: in 0..2^31-1; equal seeds give equal logits.

    Raises:
      ValueError: a skew or seed out of range.
      TypeError: a skew or seed that is not a number.
    """

    skew: float
    seed: int = 0

    def __post_init__(self) -> None:
        real = isinstance(self.skew, numbers.Real) and not isinstance(self.skew, bool)
        if not real or not is_integer(self.seed):
            raise TypeError(f"skew={self.skew!r} must be a real number and seed={self.seed!r} an integer")
        if not abs(self.skew) <= _MAX_SKEW:
            raise ValueError(
                f"skew={self.skew} must be finite and within +-{_MAX_SKEW}: |skew| is a standard deviation, as in"
                " Forced(skew=-2.0)"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} must lie in 0..2^31-1, so that it means the same with and without x64")


def forced_logits(
    forced: Forced, logits: jax.Array, *, layer: jax.Array | int, step: jax.Array | int, rank: jax.Array | int
) -> jax.Array:
    """Replaces the logits by N(0, 1) draws plus the shared bias of `forced`; gradients pass straight to `logits`.

    The draws depend on (seed, layer, step, rank), the bias on (seed, layer) or, for a positive skew, on (seed, layer,
    step): there is no state to save. Works under jit, scan, vmap, shard_map and pmap, with the same bits in each.

    Args:
      forced: skew and seed.
      logits: float [T, E]; only shape, dtype and gradient matter.
      layer: int [], non-negative, may be traced, as `step` and `rank`.
      step: int [], must change with every call that shall draw anew (also between accumulated microbatches).
      rank: int [], position on the expert-parallel axis.

    Returns:
      As `logits` in shape and dtype.
    """
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits of shape {logits.shape} and dtype {logits.dtype} must be float [tokens, experts]")
    seed = jax.random.key(int(forced.seed), impl=_PRNG)
    drawn = _normal(_fold(seed, _NOISE, layer, step, rank), logits.shape)
    if forced.skew != 0:
        bias_key = _fold(seed, _BIAS, layer, step if forced.skew > 0 else 0)
        drawn = drawn + _normal(bias_key, (1, logits.shape[1]), abs(float(forced.skew)))
    drawn = vary_like(drawn.astype(logits.dtype), logits)
    # The draws vary over ranks even where the logits do not; a gradient must have the type of what it is for.
    return _straight_through(vary_like(logits, drawn), drawn)


@jax.custom_vjp
def _straight_through(logits: jax.Array, forced: jax.Array) -> jax.Array:
    """Forward `forced`, bit for bit; backward the identity on `logits`."""
    del logits
    return forced


def _straight_through_fwd(logits: jax.Array, forced: jax.Array) -> tuple[jax.Array, None]:
    return _straight_through(logits, forced), None


def _straight_through_bwd(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(gradient)


_straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


@functools.cache
def _normal_quantiles() -> np.ndarray:
    """f64 [2^16]: the middles of as many equally likely slices of N(0, 1), symmetric around 0."""
    inverse = statistics.NormalDist().inv_cdf
    upper = np.array([inverse((i + 0.5) / 2**16) for i in range(2**15, 2**16)])
    return np.concatenate([-upper[::-1], upper])


def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float = 1.0) -> jax.Array:
    """f32 draws from N(0, deviation^2), looked up rather than computed.

    The polynomials of `jax.random.normal` round differently from program to program, which flips close selections: then
    one process, eight and a resumed run would not see the same demand.
    """
    table = jnp.asarray((_normal_quantiles() * deviation).astype(np.float32))
    slices = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
    return table.at[slices].get(mode="promise_in_bounds")


def _fold(key: jax.Array, *numbers_: jax.Array | int) -> jax.Array:
    for number in numbers_:
        key = jax.random.fold_in(key, number)
    return key
