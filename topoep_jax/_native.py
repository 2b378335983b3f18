"""Loads the C++ extension, registers its XLA FFI targets once, and wraps each in a typed Python function."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._native_ids import OBJECTIVE_IDS, PLANNER_IDS, PULL_IDS
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.topoep.effort import EFFORTS, candidates
from topoep_jax.plan.types import Plan

try:
    from topoep_jax import _xla_ffi
except ImportError as error:
    raise ImportError(
        f"the native extension topoep_jax._xla_ffi does not load ({error}): in a checkout build it with `make setup`,"
        " else install the package again"
    ) from error

window_sizes = _xla_ffi.group_sizes
"""Bytes of every window and workspace of a group that serves one layer."""

_EFFORT_ATTRIBUTES = (
    "thrifty",
    "eager",
    "fill_moves",
    "paper",
    "refine_changes",
    "refine_starts",
    "refine_waves",
)
"""What the planner reads of an effort besides the candidates that its other fields make."""

for _name, _handler in _xla_ffi.registrations().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")


# A program also where it is called eagerly: the working memory stays inside it, which vmap would stack else.
@functools.partial(jax.jit, static_argnames=("problem", "planner", "num_threads"), inline=True)
def plan(omega: jax.Array, problem: Problem, planner: str, *, num_threads: int = 1) -> Plan:
    """The C++ planner on demand `omega` (int32 [R, E]).

    The same call serves every platform: on a GPU it runs where `_cuda.load()` has registered the handler, in working
    memory that the program holds ready for it (elsewhere nobody touches that memory).

    `api.solve_plan` checks the arguments and explains them. `num_threads` lanes share each candidate of planner
    `topoep`, whose plan does not depend on them.

    Raises:
      jax.errors.JaxRuntimeError: when it runs, if shapes or attributes contradict each other.
    """
    asked = attributes(problem, planner, num_threads=num_threads)
    num_ranks = problem.topology.num_ranks
    # In the order of Plan's fields.
    shapes = [
        (num_ranks, problem.num_slots),
        (num_ranks, num_ranks, problem.mains_per_rank + problem.num_slots),
        (num_ranks,),
        (2,),
        (),
    ]
    results = [
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        jax.ShapeDtypeStruct((_xla_ffi.plan_workspace(asked),), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("topoep_plan", results, vmap_method="sequential")
    *outputs, _ = call(omega, **asked)
    return Plan(*outputs)


def attributes(problem: Problem, planner: str, *, num_threads: int = 1) -> dict[str, np.ndarray]:
    """What the C++ planner is told besides the demand, by name: int64 lists, of one element where it is a number.

    xla_ffi/plan/owned_problem.cc reads them, for calls of the planner and for programs that solve the same problem.
    """
    cost, effort = problem.cost, EFFORTS[problem.effort]
    searched = candidates(problem.topology, problem.num_slots, effort) if planner == "topoep" else ()
    values: dict[str, Any] = {
        "domain_of_rank": problem.topology.domain_of_rank,
        "num_experts": problem.num_experts,
        "num_slots": problem.num_slots,
        "cap_rows": -1 if problem.cap_rows is None else problem.cap_rows,
        "block_rows": problem.block_rows,
        "planner": PLANNER_IDS[planner],
        "objective": OBJECTIVE_IDS[problem.objective],
        "num_threads": num_threads,
        **vars(cost),
        "rank_speed": cost.rank_speed or (),
        "pulls": PULL_IDS[cost.pulls],
        "candidates": [dataclasses.astuple(candidate) for candidate in searched],
        **{name: getattr(effort, name) for name in _EFFORT_ATTRIBUTES},
    }
    return {name: np.array(value, np.int64).ravel() for name, value in values.items()}
