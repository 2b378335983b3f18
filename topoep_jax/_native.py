"""Loads the C++ extension, registers its XLA FFI targets once, and wraps each in a typed Python function."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._native_ids import OBJECTIVE_IDS, PLANNER_IDS, PULL_IDS
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.topoep.effort import EFFORTS, Candidate, candidates
from topoep_jax.plan.types import Plan

try:
    from topoep_jax import _xla_ffi
except ImportError as error:
    raise ImportError(
        f"the native extension topoep_jax._xla_ffi does not load ({error}): in a checkout build it with `make setup`,"
        " else install the package again"
    ) from error

TARGETS = {"topoep_plan": "cpu", "topoep_host_pull": "cpu", "topoep_host_push": "cpu"}
"""Platform of each FFI target of the extension."""

window_sizes = _xla_ffi.group_sizes
"""Bytes of every window and workspace of a group that serves one layer."""

_CANDIDATE_FIELDS = len(dataclasses.fields(Candidate))

for _name, _handler in _xla_ffi.registrations().items():
    jax.ffi.register_ffi_target(_name, _handler, platform=TARGETS[_name])


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
    topology, cost = problem.topology, problem.cost
    num_ranks = topology.num_ranks
    search = _search(planner, problem)
    workspace = _xla_ffi.plan_workspace(
        topology.domain_of_rank,
        problem.num_experts,
        problem.num_slots,
        PLANNER_IDS[planner],
        len(search["candidates"]) // _CANDIDATE_FIELDS,
        len(search["thrifty"]),
        len(search["eager"]),
        search["paper"],
        cost.rank_speed is not None,
    )
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
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("topoep_plan", results, vmap_method="sequential")
    *outputs, _ = call(
        omega,
        domain_of_rank=np.array(topology.domain_of_rank, np.int32),
        num_slots=problem.num_slots,
        planner=PLANNER_IDS[planner],
        objective=OBJECTIVE_IDS[problem.objective],
        cap_rows=-1 if problem.cap_rows is None else problem.cap_rows,
        block_rows=problem.block_rows,
        expert_bytes=cost.expert_bytes,
        token_bytes=cost.token_bytes,
        row_ps=cost.row_ps,
        inter_fs_per_byte=cost.inter_fs_per_byte,
        intra_fs_per_byte=cost.intra_fs_per_byte,
        instance_ps=cost.instance_ps,
        tile_rows=cost.tile_rows,
        rank_speed=np.array(cost.rank_speed or (), np.int32),
        pulls=PULL_IDS[cost.pulls],
        num_threads=num_threads,
        **search,
    )
    return Plan(*outputs)


def _search(planner: str, problem: Problem) -> dict[str, Any]:
    """The attributes that tell planner `topoep` what to try; the others try nothing."""
    if planner != "topoep":
        arrays = {"candidates": np.zeros(0, np.int64), "thrifty": np.zeros(0, np.int32), "eager": np.zeros(0, np.int32)}
        return arrays | {"fill_moves": 0, "paper": False, "refine_changes": 0, "refine_starts": 0, "refine_waves": 0}
    step = EFFORTS[problem.effort]
    tried = candidates(problem.topology, problem.num_slots, step)
    return {
        "candidates": np.array([dataclasses.astuple(candidate) for candidate in tried], np.int64).ravel(),
        "thrifty": np.array(step.thrifty, np.int32),
        "eager": np.array(step.eager, np.int32),
        "fill_moves": step.fill_moves,
        "paper": step.paper,
        "refine_changes": step.refine_changes,
        "refine_starts": step.refine_starts,
        "refine_waves": step.refine_waves,
    }
