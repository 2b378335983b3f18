"""Every planner's C++ equals its NumPy reference bit for bit, and both obey the laws, on random demand.

The 10,000 matrices are grouped by problem, since sizes and rates are compiled in. A fixed sample, one matrix of most
problems, runs by default; `-m full` runs all and writes results/full/plan_backends.json.
"""

import functools
import json
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case, named
from tests.generator import BAD_KINDS, GOOD_KINDS, small_demand
from topoep_jax import _native
from topoep_jax.plan import CostModel, Plan, Status, laws, reference
from topoep_jax.plan.api import solve
from topoep_jax.plan.cost import OBJECTIVES
from topoep_jax.plan.problem import Problem
from topoep_jax.topology import Topology

KINDS = (*GOOD_KINDS, *GOOD_KINDS, *BAD_KINDS)
FAMILIES = {"R<=8": (98, 100), "R=32": (6, 30), "R=128": (4, 5)}
"""(problems, matrices of each): 10,000 in all."""
SAMPLED = {"R<=8": 98, "R=32": 6, "R=128": 1}
"""Problems of the default tier: the reference of planner `topoep` takes its time on many ranks."""
AT_DEFAULT_EFFORT = {"R<=8": range(0, 98, 33), "R=32": range(5, 6), "R=128": range(3, 4)}
"""Problems where planners that search do so at default effort; elsewhere fast."""
RESULTS = Path(__file__).parent.parent / "results" / "full" / "plan_backends.json"


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
    rng = np.random.default_rng([list(FAMILIES).index(family), index])
    num_ranks, mains = {"R<=8": (1 + index % 8, int(rng.integers(1, 5))), "R=32": (32, 4), "R=128": (128, 5)}[family]
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


def solve_native(problem: Problem, planner: str):
    return jax.jit(functools.partial(solve, problem=problem, planner=planner, implementation="cpu"))


def solve_with_threads(problem: Problem, omega: np.ndarray, planner: str, num_threads: int) -> Plan:
    """The same bodies on a team of host threads."""
    return _native.plan(jnp.asarray(omega), problem, planner, num_threads=num_threads)


def compare(family: str, index: int, matrices: range) -> Counter:
    """Checks the given matrices of one problem; counts what was seen."""
    case, problem = random_problem(family, index)
    native = {planner: solve_native(problem, planner) for planner in _native.PLANNER_IDS}
    seen = Counter()
    for matrix in matrices:
        kind = KINDS[(index + matrix) % len(KINDS)]
        omega = small_demand(case, kind, seed=1000 * index + matrix)
        status = {}
        for planner, run in native.items():
            expected = reference.solve(omega, problem, planner)
            status[planner] = Status(int(expected.status))
            laws.check_plan(run(omega), omega, problem, planner, again=expected)
            if (index + matrix) % 5 == 0:
                threads = 2 + (index + matrix) // 5 % 7
                laws.determinism(solve_with_threads(problem, omega, planner, threads), expected)
        seen[kind] += 1
        seen["with replicas"] += Status.EMPTY not in status["topoep"]
        seen["over the cap"] += not status["topoep"] & (Status.CAP_MET | Status.BAD_INPUT)
        seen["dearer than no replicas"] += Status.OVER_EMPTY_COST in status["topoep_paper"]
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_sample_of_random_demand(family):
    """One matrix of each problem, another kind each time: 105 of the 10,000."""
    seen = sum((compare(family, index, range(index % 7, index % 7 + 1)) for index in range(SAMPLED[family])), Counter())
    if family == "R<=8":
        assert set(KINDS) <= set(seen)
        assert min(seen["with replicas"], seen["over the cap"], seen["dearer than no replicas"]) >= 10


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_one_to_eight_threads_give_the_plan_of_numpy(name):
    case = named(name)
    problem = case.problem(effort="fast", cap_rows=case.tokens * case.top_k * 21 // 20)
    omega = small_demand(case, "skewed")
    for planner in _native.PLANNER_IDS:
        expected = reference.solve(omega, problem, planner)
        for threads in range(1, 9):
            laws.determinism(solve_with_threads(problem, omega, planner, threads), expected)


@pytest.mark.full
def test_ten_thousand_random_matrices():
    started, report = time.time(), {}
    for family, (problems, matrices) in FAMILIES.items():
        seen = sum((compare(family, index, range(matrices)) for index in range(problems)), Counter())
        report[family] = {"problems": problems, "matrices": problems * matrices, "seen": dict(sorted(seen.items()))}
    total = sum(entry["matrices"] for entry in report.values())
    assert total == 10_000
    report |= {
        "matrices": total,
        "planners": sorted(_native.PLANNER_IDS),
        "bit_identical": True,
        "laws_hold": True,
        "seconds": round(time.time() - started),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
