"""Builds every candidate, improves it, and chooses; xla_ffi/plan/topoep/search.h is the same in C++."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from topoep_jax.plan.finish import Worth, draft_of, worth_of
from topoep_jax.plan.paper import paper_plan
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.plan.topoep.candidate import run_candidate
from topoep_jax.plan.topoep.context import Context
from topoep_jax.plan.topoep.effort import EFFORTS, Effort, candidates
from topoep_jax.plan.topoep.refine import can_refine, refine
from topoep_jax.plan.topoep.state import State

TOLERANCE = 128
"""A plan that is slower than the best by one part in so many may win by its traffic."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A plan that competes.

    Attributes:
      state: the plan.
      worth: what it costs, and its aligned rows.
      inter_rows: rows that leave their domain.
    """

    state: State
    worth: Worth
    inter_rows: int

    @classmethod
    def of(cls, context: Context, state: State) -> "Entry":
        """Scores a plan."""
        inter_rows = int(state.quota.sum(axis=2)[context.problem.topology.crosses_domains()].sum())
        return cls(state, worth_of(state.plan(), context.problem), inter_rows)


def topoep(omega: np.ndarray, problem: Problem) -> Draft:
    """Builds many cheap candidates, scores each exactly, and takes the best; never worse than the empty plan.

    What is minimised is the predicted time of `cost.predict_ps`. With W = expert_bytes, S = token_bytes, rows[s, r] the
    rows that rank r executes for source rank s, and bytes[s, r] of parameters that s sends r for its replicas, it is

        max_r compute[r] + sum over c of floor(fs[c] 2 S busiest_c(rows) / 1000) + floor(fs[c] busiest_c(bytes) / 1000)

    where c is inter or intra, fs[c] the femtoseconds per byte of such a link, and busiest_c(x) the most that one rank
    sends or receives of x between domains, or inside one: max_r max(sum_s x[s, r], sum_t x[r, t]). (Eq. 8 of the paper
    has all sums instead: sum_{s, r} x[s, r].) A rank computes for compute[r] = row_ps x its rows, or as `CostModel`
    says where instances cost time, rows are padded or ranks differ in speed. Pulls that are direct send
    bytes[s, r] = W x the replicas on r of the experts whose main is on s.

    The stages are those of docs/planners.md: `candidates` says what is tried, `run_candidate` builds and improves each,
    `choose` takes one of all their plans, in this order, and the paper's, and `refine_best` changes it slot by slot
    where there are few. Ties go to the lower index everywhere.

    Args:
      omega: int64 [R, E], demand.
      problem: the question; `problem.effort` is a key of `EFFORTS`.

    Example:
      The paper's Figure 9. Rank 0 has 8 rows for expert 4 of the other domain: with a copy on rank 0 they stay at home,
      and a copy on rank 1 takes half of them. All ranks then compute for 10 rows, 4 rows go to a neighbour and none to
      the other domain, and rank 2 sends its expert there twice: 2000 + 160 + 640 ps.

      >>> from topoep_jax.plan.finish import finish
      >>> from topoep_jax.plan.problem import CostModel
      >>> from topoep_jax.topology import Topology
      >>> omega = np.zeros((4, 8), np.int64)
      >>> omega[[0, 0, 0, 1, 1, 2, 3], [0, 1, 4, 2, 3, 5, 6]] = [3, 3, 8, 3, 3, 10, 10]
      >>> cost = CostModel(expert_bytes=16, token_bytes=4, row_ps=200, inter_fs_per_byte=20000, intra_fs_per_byte=5000)
      >>> problem = Problem(Topology((0, 0, 1, 1)), cost, 8, 2, None, 1, "bottleneck", "fast")
      >>> draft = topoep(omega, problem)
      >>> np.argwhere(draft.holds[:, 4]).ravel().tolist(), draft.quota[4].sum(axis=1).tolist()
      ([0, 1, 2], [4, 4, 0, 0])
      >>> worth_of(finish(draft, omega, problem), problem).cost
      2800
    """
    effort = EFFORTS[problem.effort]
    context = Context(omega, problem)
    tried = candidates(problem.topology, problem.num_slots, effort)
    entries = [Entry.of(context, state) for candidate in tried for state in run_candidate(context, effort, candidate)]
    if effort.paper:
        entries.append(Entry.of(context, State.of(context, paper_plan(omega, problem))))
    best = choose(problem, entries, paper=effort.paper)
    if can_refine(context, effort):
        return draft_of(refine_best(context, effort, entries, best).plan(), problem)
    return draft_of(best.state.plan(), problem)


def choose(problem: Problem, entries: list[Entry], *, paper: bool) -> Entry:
    """The entry to take: of the cheap ones that meet the cap the one that sends the fewest rows to other domains.

    Cheap is what costs at most c + floor(c / 128), where c is the least cost, and neither more than the empty plan nor
    more than the paper's, if these meet the cap. Among equals the lower cost wins, then the earlier entry; but where
    the empty plan costs c, it is taken. If none meets the cap, the fewest aligned rows win, then the lower cost.

    Args:
      problem: for its cap.
      entries: the empty plan's first.
      paper: whether the last one is the paper's.
    """
    eligible = [entry for entry in entries if entry.worth.meets_cap(problem)]
    if not eligible:
        return min(entries, key=lambda entry: (entry.worth.aligned, entry.worth.cost))
    least = min(entry.worth.cost for entry in eligible)
    limit = least + least // TOLERANCE
    for rival in entries[:1] + entries[-1:] * paper:
        if rival.worth.meets_cap(problem):
            limit = min(limit, rival.worth.cost)
    if entries[0].worth.meets_cap(problem) and entries[0].worth.cost == least:
        return entries[0]
    cheap = [entry for entry in eligible if entry.worth.cost <= limit]
    return min(cheap, key=lambda entry: (entry.inter_rows, entry.worth.cost))


def refine_best(context: Context, effort: Effort, entries: Sequence[Entry], chosen: Entry) -> State:
    """The best of the chosen entry and the cheapest ones, all refined; where no entry meets the cap, the chosen one.

    Of entries of equal cost only the first is tried.
    """
    best, worth = refine(context, effort, chosen.state)
    first: dict[int, Entry] = {}
    for entry in entries:
        if entry.worth.meets_cap(context.problem):
            first.setdefault(entry.worth.cost, entry)
    for cost in sorted(first)[: effort.refine_starts]:
        state, new = refine(context, effort, first[cost].state)
        if new.cost < worth.cost:
            best, worth = state, new
    return best
