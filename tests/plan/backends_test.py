"""Every planner's C++ gives one plan on one thread and on several, which is its NumPy reference's, and obeys the laws.

On random demand. The matrices are grouped by problem, since sizes and rates are compiled in. By default 1 % of the
10,000 matrices are planned, all of them in NumPy too; `-m full` plans all, 1,001 with R <= 32 and 100 above in NumPy
too, and writes results/full/plan_backends.json with a hash of all plans.
"""

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cases import CASES, Case
from tests.support.generator import BAD_KINDS, GOOD_KINDS, small_demand
from tests.support.quality import RESULTS, record
from topoep_jax import _native
from topoep_jax.plan import CostModel, Plan, Status, laws, reference
from topoep_jax.plan.cost import OBJECTIVES
from topoep_jax.plan.problem import Problem
from topoep_jax.topology import Topology

KINDS = (*GOOD_KINDS, *GOOD_KINDS, *BAD_KINDS)
FAMILIES = {"R<=8": (98, 100), "R=32": (6, 30), "R=128": (4, 5)}
"""(problems, matrices of each): 10,000 in all."""
WIDER = {"R=64": (12, 7)}
"""More of them, for NumPy on many ranks."""
SAMPLED = {"R<=8": range(0, 98, 7), "R=32": range(2), "R=128": range(1)}
"""Problems of the default tier."""
SAMPLED_MATRICES = {"R<=8": 7, "R=32": 3, "R=128": 1}
AT_DEFAULT_EFFORT = {"R<=8": range(0, 98, 33), "R=32": range(5, 6), "R=128": range(3, 4), "R=64": ()}
"""Problems where planners that search do so at default effort; elsewhere fast."""
PLANNERS = ("none", "topoep_paper", "topoep")
REPORT = "plan_backends.json"


def random_topology(rng: np.random.Generator, num_ranks: int) -> Topology:
    """Even neighbours half of the time, else any assignment of ranks to domains."""
    if rng.random() < 0.5:
        divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
        num_domains = int(rng.choice(divisors))
        return Topology.uniform(num_domains, num_ranks // num_domains)
    domains = rng.integers(0, rng.integers(1, num_ranks + 1), num_ranks).tolist()
    renumber = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    return Topology(tuple(renumber[domain] for domain in domains))


def random_problem(family: str, index: int) -> tuple[Case, Problem]:
    """Sizes from the family's range; pulls that pay for some experts and not for others."""
    rng = np.random.default_rng([list(FAMILIES | WIDER).index(family), index])
    sizes = {"R<=8": (1 + index % 8, int(rng.integers(1, 5))), "R=32": (32, 4), "R=128": (128, 5), "R=64": (64, 3)}
    num_ranks, mains = sizes[family]
    topology = random_topology(rng, num_ranks) if num_ranks < 128 else Topology.uniform(16, 8)
    num_experts = num_ranks * mains
    num_slots = int(rng.integers(0, min(4, num_experts - mains) + 1)) if num_ranks < 128 else 2
    rows = 64 * mains
    rows_to_pay = int(rng.integers(1, 2 + 4 * rows // num_experts * num_ranks // topology.num_domains))
    token_bytes = int(rng.integers(1, 10))
    cost = CostModel(
        expert_bytes=2 * token_bytes * rows_to_pay + int(rng.integers(0, 2)),
        token_bytes=token_bytes,
        row_ps=int(rng.integers(0, 100)),
        inter_fs_per_byte=int(rng.integers(0, 30_000)),
        intra_fs_per_byte=int(rng.integers(0, 6_000)),
    )
    cap_rows = None if rng.random() < 0.3 else int(rows * rng.uniform(0.5, 4))
    block_rows = int(rng.choice([1, 8, 128]))
    objective = str(rng.choice(sorted(OBJECTIVES)))
    effort = "default" if index in AT_DEFAULT_EFFORT[family] else "fast"
    problem = Problem(topology, cost, num_experts, num_slots, cap_rows, block_rows, objective, effort)
    return Case(family, topology, num_experts, 1, 1, 1, num_slots, rows), problem


def with_options(problem: Problem, index: int) -> Problem:
    """The problem with the options of the cost by turns."""
    rng = np.random.default_rng(index)
    num_ranks = problem.topology.num_ranks
    options = [
        {"pulls": "relayed"},
        {"pulls": "striped"},
        {"pulls": "best"},
        {"instance_ps": int(rng.integers(1, 3000))},
        {"tile_rows": int(rng.integers(1, 17))},
        {"rank_speed": tuple(rng.integers(500, 1500, num_ranks).tolist())},
        {
            "pulls": "striped",
            "instance_ps": 500,
            "tile_rows": 8,
            "rank_speed": tuple(rng.integers(500, 1500, num_ranks).tolist()),
        },
    ]
    return dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, **options[index % 7]))


def solve(omega: np.ndarray, problem: Problem, planner: str, num_threads: int = 1) -> Plan:
    """In C++, on a team of host threads."""
    return Plan(*map(np.asarray, _native.plan(jnp.asarray(omega), problem, planner, num_threads=num_threads)))


class Comparison:
    """Counts what was seen, and hashes all plans that were compared."""

    def __init__(self) -> None:
        self.started = time.time()
        self.matrices = 0
        self.seen = Counter()
        self.hash = hashlib.sha256()

    def ask(self, case: Case, problem: Problem, index: int, matrices: Sequence[int], in_numpy: Sequence[int]) -> None:
        """Plans some matrices of a problem on one thread and on several; and some of these in NumPy."""
        kinds = {matrix: KINDS[(index + matrix) % len(KINDS)] for matrix in matrices}
        omegas = {matrix: small_demand(case, kind, seed=1000 * index + matrix) for matrix, kind in kinds.items()}
        self.matrices += len(matrices)
        self.seen.update(kinds.values())
        self.seen["in NumPy"] += len(in_numpy)
        for planner in PLANNERS:
            for matrix, omega in omegas.items():
                plan = solve(omega, problem, planner)
                again = solve(omega, problem, planner, num_threads=2 + index % 7)
                laws.check_plan(plan, omega, problem, planner, again=again)
                if matrix in in_numpy:
                    laws.determinism(plan, reference.solve(omega, problem, planner))
                for field in plan:
                    self.hash.update(field.tobytes())
                status = Status(int(plan.status))
                if planner == "topoep":
                    self.seen["with replicas"] += Status.EMPTY not in status
                    self.seen["over the cap"] += not status & (Status.CAP_MET | Status.BAD_INPUT)
                elif planner == "topoep_paper":
                    self.seen["dearer than no replicas"] += Status.OVER_EMPTY_COST in status

    def record(self, section: str) -> None:
        """Writes what was seen into the report; nothing was unequal, and no law was broken."""
        found = {
            "matrices": self.matrices,
            "planners": PLANNERS,
            "seen": dict(sorted(self.seen.items())),
            "sha256": self.hash.hexdigest(),
            "seconds": round(time.time() - self.started),
            "jax": jax.__version__,
            "numpy": np.__version__,
        }
        record(REPORT, section, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_sample_of_random_demand(family):
    """A few matrices of some problems, in NumPy too: 105 of the 10,000, every number of ranks and kind of demand."""
    comparison = Comparison()
    for index in SAMPLED[family]:
        first = index % 24 if family == "R<=8" else 0
        matrices = range(first, first + SAMPLED_MATRICES[family])
        comparison.ask(*random_problem(family, index), index, matrices, in_numpy=matrices)
    if family == "R<=8":
        assert set(KINDS) <= set(comparison.seen)
        for what in ("with replicas", "over the cap", "dearer than no replicas"):
            assert comparison.seen[what] >= 10


def test_sample_at_default_effort_where_slots_are_refined():
    case, problem = random_problem("R<=8", 33)
    assert problem.effort == "default"
    Comparison().ask(case, problem, 33, range(6), in_numpy=range(6))


@pytest.mark.parametrize("index", range(14, 21))
def test_sample_of_the_options_of_the_cost(index):
    case, problem = random_problem("R<=8", index)
    Comparison().ask(case, with_options(problem, index), index, range(8), in_numpy=range(2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_to_eight_threads_give_the_same_plan(case):
    """Over the cases: each asks one thread and two other numbers, since each number is a program of its own."""
    problem = case.problem(effort="fast", cap_rows=case.tokens * case.top_k * 21 // 20)
    omega = small_demand(case, "skewed")
    at = CASES.index(case)
    for planner in PLANNERS:
        expected = solve(omega, problem, planner)
        for threads in (2 + at % 7, 2 + (at + 3) % 7):
            laws.determinism(solve(omega, problem, planner, threads), expected)


def in_numpy(family: str, index: int, matrices: int) -> range:
    """The matrices of a problem that the full tier also plans in NumPy: 1,001 with R <= 32, and 100 above."""
    if family in ("R=32", "R=128") and index in AT_DEFAULT_EFFORT[family]:
        return range(1)
    step = {"R<=8": 10, "R=32": 8}.get(family, 1)
    return range(index % step, matrices, step)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES | WIDER)
def test_ten_thousand_random_matrices(family):
    """Families can run side by side; the hash of the 10,000 is of what all of them recorded last."""
    problems, matrices = (FAMILIES | WIDER)[family]
    comparison = Comparison()
    for index in range(problems):
        question = random_problem(family, index)
        comparison.ask(*question, index, range(matrices), in_numpy(family, index, matrices))
    comparison.record(family)
    report = json.loads((RESULTS / REPORT).read_text())
    if set(FAMILIES) <= set(report):
        assert sum(report[family]["matrices"] for family in FAMILIES) == 10_000
        digests = [bytes.fromhex(report[family]["sha256"]) for family in FAMILIES]
        record(REPORT, "sha256 of the 10,000", hashlib.sha256(b"".join(digests)).hexdigest())


@pytest.mark.full
def test_random_matrices_with_the_options_of_the_cost():
    comparison = Comparison()
    for index in range(98):
        case, problem = random_problem("R<=8", index)
        comparison.ask(case, with_options(problem, index), index, range(10), in_numpy=range(2))
    comparison.record("R<=8, options of the cost")
