"""Runs one planner on one question and takes the time: the native planner where there is one, else NumPy."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax.plan.api import solve
from topoep_jax.plan.finish import draft_of
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.plan.types import Plan

T = TypeVar("T")

_REPEATS = 5
_PATIENCE_S = 0.2  # What takes longer is timed once.


@dataclasses.dataclass(frozen=True)
class Timed:
    """A draft and the median time it took."""

    draft: Draft
    milliseconds: float


def time_planner(omega: np.ndarray, problem: Problem, planner: str) -> Timed:
    """The draft of `planner` for omega (int64 [R, E]); on one machine, the same draft every time."""
    if planner not in _native_planners():
        return Timed(*_median(lambda: PLANNERS[planner](omega, problem)))
    with jax.default_device(jax.devices("cpu")[0]):
        demand = jnp.asarray(omega, jnp.int32)
        run = _compiled(problem, planner)
        jax.block_until_ready(run(demand))
        plan, milliseconds = _median(lambda: jax.block_until_ready(run(demand)))
    return Timed(draft_of(plan, problem), milliseconds)


def run_planner(omega: np.ndarray, problem: Problem, planner: str) -> Draft:
    """The same draft, not timed."""
    if planner not in _native_planners():
        return PLANNERS[planner](omega, problem)
    with jax.default_device(jax.devices("cpu")[0]):
        return draft_of(_compiled(problem, planner)(jnp.asarray(omega, jnp.int32)), problem)


@functools.cache
def _native_planners() -> frozenset[str]:
    """Planners that the C++ extension has; none where it does not load."""
    try:
        from topoep_jax import _native
    except ImportError:
        return frozenset()
    return frozenset(_native.PLANNER_IDS)


@functools.lru_cache(maxsize=64)
def _compiled(problem: Problem, planner: str) -> Callable[[jax.Array], Plan]:
    return jax.jit(functools.partial(solve, problem=problem, planner=planner, implementation="cpu"))


def _median(call: Callable[[], T]) -> tuple[T, float]:
    """The result of `call` and its median time in milliseconds."""
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _PATIENCE_S:
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return result, 1e3 * statistics.median(times)
