"""Predicted time of a plan: integers in, picoseconds out; xla_ffi/plan/cost.h is the same in C++.

It is the time of one MoE layer on one microbatch. Rates are femtoseconds per byte, times are picoseconds, everything is
a 64-bit integer, and each term is rounded once: `ps = floor(total_bytes * fs_per_byte / 1000)`. Planners, laws, reports
and native code all use this arithmetic, so that a plan has one cost, bit for bit, everywhere.
"""

from typing import Any

import numpy as np

from topoep_jax.plan import pulls
from topoep_jax.plan.hardware import NOMINAL_SPEED
from topoep_jax.plan.links import Reduce, busiest_direction, everything, link_ps
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.plan.types import Plan

OBJECTIVES: dict[str, Reduce] = {"bottleneck": busiest_direction, "eq8": everything}
"""How each objective counts the traffic of a class of link, in or out, rows and pulls: (b) by the busiest rank, or (a),
Eq. 8 of the paper, of all ranks together. Pulls repeated in the backward pass and gradient pushes count as hidden."""


def predict_ps(plan: Plan, problem: Problem) -> int:
    """Picoseconds of a plan by `problem.objective`: the slowest rank's compute, then traffic by class of link."""
    return sum(terms_ps(plan, problem).values())


def terms_ps(plan: Plan, problem: Problem) -> dict[str, int]:
    """The terms of `predict_ps` by cause, each rounded once."""
    topology, cost = problem.topology, problem.cost
    cost.check_ranks(topology.num_ranks)
    reduce = OBJECTIVES[problem.objective]
    rows, copies = moved_bytes(plan, problem)
    inter = topology.crosses_domains()
    intra = ~inter & ~np.eye(topology.num_ranks, dtype=bool)  # what stays on a rank costs nothing
    instance_rows = np.asarray(plan.quota).sum(axis=0, dtype=np.int64)
    terms = {"expert compute": int(rank_compute_ps(instance_rows, cost).max())}
    for what, moved in (("rows", 2 * rows), ("pulls", copies)):
        terms[f"{what} between domains"] = link_ps(reduce(moved * inter), cost.inter_fs_per_byte)
        terms[f"{what} inside a domain"] = link_ps(reduce(moved * intra), cost.intra_fs_per_byte)
    return terms


def moved_bytes(plan: Plan, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R, R] twice: bytes of rows from source to executing rank at dispatch, and of pulled parameters."""
    topology, cost = problem.topology, problem.cost
    copies = pulls.schedule(np.asarray(plan.slot_expert), problem.mains_per_rank, topology, cost)
    rows = np.asarray(plan.quota).sum(axis=2, dtype=np.int64)
    return cost.token_bytes * rows, pulls.moved_bytes(copies, topology, cost)


def rank_compute_ps(rows: np.ndarray, cost: CostModel) -> np.ndarray:
    """Picoseconds that each rank computes, int64 [R]; `rows` is int [R, J], the rows of each of its instances."""
    rows = rows.astype(np.int64)
    padded = -(-rows // cost.tile_rows) * cost.tile_rows if cost.tile_rows else rows
    ps = np.maximum(cost.instance_ps * (rows > 0).sum(axis=1), cost.row_ps * padded.sum(axis=1))
    if cost.rank_speed is None:
        return ps
    speed = np.array(cost.rank_speed)
    # floor(ps * 1000 / speed) without leaving 64 bits.
    return ps // speed * NOMINAL_SPEED + ps % speed * NOMINAL_SPEED // speed


def picoseconds(predicted_ps: Any) -> np.ndarray:
    """Joins the high and low words of `Plan.predicted_ps` (int32 [..., 2]) into int64 [...]."""
    words = np.asarray(predicted_ps).astype(np.int64)
    return (words[..., 0] << 32) | (words[..., 1] & 0xFFFFFFFF)


def split_picoseconds(ps: int) -> np.ndarray:
    """int32 [2], the high and low word of a 64-bit number; the inverse of `picoseconds`."""
    return np.array([ps >> 32, ps & 0xFFFFFFFF], np.uint64).astype(np.uint32).view(np.int32)
