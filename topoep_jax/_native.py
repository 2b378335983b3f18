"""Loads the C++ extension, registers its XLA FFI targets once, and wraps each in a typed Python function."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._native_ids import OBJECTIVE_IDS, PLANNER_IDS, PULL_IDS
from topoep_jax.plan.cost import CostModel
from topoep_jax.plan.topoep.effort import EFFORTS, Candidate, candidates
from topoep_jax.plan.types import Plan
from topoep_jax.topology import Topology

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
@functools.partial(
    jax.jit,
    static_argnames=(
        "domain_of_rank",
        "cost",
        "num_slots",
        "cap_rows",
        "block_rows",
        "planner",
        "objective",
        "effort",
        "num_threads",
    ),
    inline=True,
)
def plan(
    omega: jax.Array,
    *,
    domain_of_rank: tuple[int, ...],
    cost: CostModel,
    num_slots: int,
    cap_rows: int | None,
    block_rows: int,
    planner: str,
    objective: str,
    effort: str = "default",
    expert_idx: jax.Array | None = None,
    num_threads: int = 1,
) -> Plan:
    """The C++ planner on demand `omega` (int32 [R, E]) and, exactly where `cost.dedup`, its tokens (int32 [R, T, K]).

    The same call serves every platform: on a GPU it runs where `_cuda.load()` has registered the handler, in working
    memory that the program holds ready for it (elsewhere nobody touches that memory).

    `api.solve_plan` checks the arguments and explains them. `num_threads` lanes share each candidate of planner
    `topoep`, whose plan does not depend on them.

    Raises:
      jax.errors.JaxRuntimeError: when it runs, if shapes or attributes contradict each other.
    """
    num_ranks, num_experts = omega.shape
    instances = num_experts // num_ranks + num_slots
    search = _search(planner, effort, domain_of_rank, num_slots)
    workspace = _xla_ffi.plan_workspace(
        domain_of_rank,
        num_experts,
        num_slots,
        PLANNER_IDS[planner],
        len(search["candidates"]) // _CANDIDATE_FIELDS,
        len(search["thrifty"]),
        len(search["eager"]),
        search["paper"],
        cost.rank_speed is not None,
        cost.dedup,
        0 if expert_idx is None else expert_idx.shape[2],
    )
    # In the order of Plan's fields.
    shapes = [(num_ranks, num_slots), (num_ranks, num_ranks, instances), (num_ranks,), (2,), ()]
    results = [
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("topoep_plan", results, vmap_method="sequential")
    *outputs, _ = call(
        omega,
        # No zeros in place of what nothing reads: on a stream of its own XLA cannot compile a constant.
        omega[..., None] if expert_idx is None else expert_idx,
        domain_of_rank=np.array(domain_of_rank, np.int32),
        num_slots=num_slots,
        planner=PLANNER_IDS[planner],
        objective=OBJECTIVE_IDS[objective],
        cap_rows=-1 if cap_rows is None else cap_rows,
        block_rows=block_rows,
        expert_bytes=cost.expert_bytes,
        token_bytes=cost.token_bytes,
        row_ps=cost.row_ps,
        inter_fs_per_byte=cost.inter_fs_per_byte,
        intra_fs_per_byte=cost.intra_fs_per_byte,
        instance_ps=cost.instance_ps,
        tile_rows=cost.tile_rows,
        rank_speed=np.array(cost.rank_speed or (), np.int32),
        dedup=cost.dedup,
        pulls=PULL_IDS[cost.pulls],
        num_threads=num_threads,
        **search,
    )
    return Plan(*outputs)


def _search(planner: str, effort: str, domain_of_rank: tuple[int, ...], num_slots: int) -> dict[str, Any]:
    """The attributes that tell planner `topoep` what to try; the others try nothing."""
    if planner != "topoep":
        arrays = {"candidates": np.zeros(0, np.int64), "thrifty": np.zeros(0, np.int32), "eager": np.zeros(0, np.int32)}
        return arrays | {"fill_moves": 0, "paper": False, "refine_changes": 0, "refine_starts": 0, "refine_waves": 0}
    step = EFFORTS[effort]
    fields = [dataclasses.astuple(candidate) for candidate in candidates(Topology(domain_of_rank), num_slots, step)]
    return {
        "candidates": np.array(fields, np.int64).ravel(),
        "thrifty": np.array(step.thrifty, np.int32),
        "eager": np.array(step.eager, np.int32),
        "fill_moves": step.fill_moves,
        "paper": step.paper,
        "refine_changes": step.refine_changes,
        "refine_starts": step.refine_starts,
        "refine_waves": step.refine_waves,
    }
