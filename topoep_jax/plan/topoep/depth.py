"""How many steps of a planner must follow one another on a device, however many threads it has."""

import numpy as np

from topoep_jax.plan.paper import draft_and_moves
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.topoep.candidate import LEVEL_ROUNDS
from topoep_jax.plan.topoep.effort import BY_INTERVALS, EFFORTS, Candidate, candidates

# Barriers and reductions of the stages in xla_ffi/plan/topoep/; tests/plan/depth_test.py counts them there.
_PREPARE = 1
_SELECT = 2
_FILL = 3  # and one for each slot of the largest domain and each move
_SPLIT = 3
_SPREAD = 18
_MEASURE = 3
_ROUND = 3
_KEEP = 1
_CONCLUDE = 3
_PAPER = 11  # and two for each move of its second stage
_PAPER_MOVE = 2


def dependent_steps(problem: Problem) -> int | None:
    """Bounds the steps of planner `topoep` for any demand, with one team of threads for each candidate.

    A step is one barrier of a team, one reduction or scan over it, or the boundary of a kernel. The path is what all
    candidates share, the longest candidate (which keeps its plans), the choice, and the final order of the plan chosen.
    The paper's plan, where it competes beside them, is not counted: its moves follow one another for as long as the
    demand makes them, two steps each.

    Args:
      problem: the question; `problem.effort` says how hard is searched.

    Returns:
      The bound; None where the number of steps depends on the demand or the prediction has steps of its own: efforts
      that spread greedily or refine, and pulls that are not direct.
    """
    effort = EFFORTS[problem.effort]
    if effort.greedy_spread or effort.refine_changes or _prediction_has_steps(problem):
        return None
    tried = candidates(problem.topology, problem.num_slots, effort)
    build = max(_build_steps(candidate, problem, effort.fill_moves) for candidate in tried)
    rounds = len(effort.thrifty) + len(effort.eager) + (LEVEL_ROUNDS if problem.cap_rows is not None else 0)
    improve = _MEASURE + _ROUND * rounds
    phases = 3 if problem.cap_rows is not None else 2
    return _PREPARE + build + improve + phases * _KEEP + _CONCLUDE


def dependent_steps_of_paper(omega: np.ndarray, problem: Problem) -> int | None:
    """Counts the same steps of planner `topoep_paper` for one demand, since nothing else bounds its moves.

    Domains move side by side, so that the one with the most moves counts.

    Args:
      omega: int [R, E].
      problem: the question.

    Returns:
      The count; None where the prediction has steps of its own.
    """
    if _prediction_has_steps(problem):
        return None
    _, moves = draft_and_moves(np.asarray(omega, np.int64), problem)
    return _PREPARE + _PAPER + _PAPER_MOVE * moves + _CONCLUDE


def _prediction_has_steps(problem: Problem) -> bool:
    return problem.cost.pulls != "direct"


def _build_steps(candidate: Candidate, problem: Problem, fill_moves: int) -> int:
    steps = 0
    if candidate.sixteenths:
        topology = problem.topology
        largest = max(len(topology.ranks_of_domain(domain)) for domain in range(topology.num_domains))
        steps += _SELECT + _FILL + largest * problem.num_slots + fill_moves + _SPLIT
    if candidate.spread >= 0 and candidate.price == BY_INTERVALS:
        steps += _SPREAD
    return steps
