"""The planning problems that are compared and timed, and the file in which plan_check reads them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from tests.support.cases import CASES, Case, named
from tests.support.generator import BAD_KINDS, GOOD_KINDS, small_demand
from topoep_jax import _native
from topoep_jax.plan import CostModel, Hardware, Plan
from topoep_jax.plan.api import solve
from topoep_jax.plan.problem import Problem
from topoep_jax.topology import Topology

PLANNERS = tuple(_native.PLANNER_IDS)
RANKS, EXPERTS = (8, 16, 32, 64, 128), (64, 128, 256, 512, 1024)
RANKS_OF_A_DOMAIN = 8


@dataclasses.dataclass(frozen=True)
class Question:
    """A problem with its demand [R, E]."""

    name: str
    problem: Problem
    planner: str
    omega: np.ndarray


def small_questions() -> Iterator[Question]:
    """Every small case of the list with every kind of demand, and every option of the problem on some."""
    for case in CASES:
        if "laws" not in case.tags:
            continue
        cap = case.tokens * case.top_k * 5 // 4
        problems = {planner: case.problem(effort="fast") for planner in PLANNERS}
        problems["topoep", "capped"] = case.problem(effort="fast", cap_rows=cap, block_rows=8)
        problems["topoep", "eq8"] = case.problem(effort="fast", objective="eq8")
        problems["topoep", "default"] = case.problem()
        for key, problem in problems.items():
            planner, option = (key, "") if isinstance(key, str) else key
            for kind in (*GOOD_KINDS, *BAD_KINDS):
                name = " ".join(filter(None, (case.name, planner, option, kind)))
                yield Question(name, problem, planner, small_demand(case, kind))
    for name in ("two_by_two", "uneven", "interleaved"):
        yield from _priced(named(name))


def _priced(case: Case) -> Iterator[Question]:
    """Every option of the cost, under both objectives."""
    ranks = case.topology.num_ranks
    options: dict[str, dict[str, object]] = {pulls: {"pulls": pulls} for pulls in ("relayed", "striped", "best")}
    options["tiles"] = {"tile_rows": 16, "instance_ps": 500}
    options["speeds"] = {"rank_speed": tuple(700 + 100 * (i % 5) for i in range(ranks))}
    for option, changes in options.items():
        for objective in ("bottleneck", "eq8"):
            problem = case.problem(effort="fast", objective=objective)
            problem = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, **changes))
            name = f"{case.name} {option} {objective}"
            for kind in ("skewed", "own_skew"):
                yield Question(f"{name} {kind}", problem, "topoep", small_demand(case, kind))


def large_questions() -> Iterator[Question]:
    """The published models of the list, at fast effort with every planner and at default effort."""
    for case in CASES:
        if "tables" not in case.tags:
            continue
        for kind in ("skewed", "own_skew"):
            omega = small_demand(case, kind)
            for planner in PLANNERS:
                yield Question(f"{case.name} {planner} {kind}", case.problem(effort="fast"), planner, omega)
        yield Question(f"{case.name} topoep default skewed", case.problem(), "topoep", small_demand(case, "skewed"))


def timed_questions(most_ranks: int) -> Iterator[Question]:
    """Sizes by ranks and experts at fast effort, the paper's plan beside; default effort on some."""
    cost = CostModel.from_model(2048, 768, Hardware.h800())
    for ranks in RANKS:
        for experts in EXPERTS:
            if ranks > most_ranks or experts < ranks:
                continue
            topology = Topology.uniform(ranks // RANKS_OF_A_DOMAIN, RANKS_OF_A_DOMAIN)
            rng = np.random.default_rng(0)
            p = np.exp(rng.normal(0, 1, experts))
            omega = rng.multinomial(4096 * 8, p / p.sum(), size=ranks).astype(np.int32)
            fast = Problem(topology, cost, experts, 2, None, 128, "bottleneck", "fast")
            yield Question(f"EP{ranks} E{experts} topoep fast", fast, "topoep", omega)
            yield Question(f"EP{ranks} E{experts} topoep_paper", fast, "topoep_paper", omega)
            if experts == 4 * ranks:
                full = dataclasses.replace(fast, effort="default")
                yield Question(f"EP{ranks} E{experts} topoep default", full, "topoep", omega)


@functools.cache
def solver(problem: Problem, planner: str, implementation: str):  # noqa: ANN201
    """A compiled function of demand; compiled once for each problem."""
    return jax.jit(functools.partial(solve, problem=problem, planner=planner, implementation=implementation))


def right_answer(question: Question) -> Plan:
    """The plan of the C++ planner on the CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return solver(question.problem, question.planner, "cpu")(question.omega)


def write(questions: Sequence[Question], path: Path) -> None:
    """Writes problems and right answers for plan_check: arrays of int64, each behind its length."""
    with path.open("wb") as file:
        for question in questions:
            for array in _arrays(question):
                flat = np.asarray(array, np.int64).ravel()
                file.write(np.concatenate([[flat.size], flat]).astype(np.int64).tobytes())


def _arrays(question: Question) -> list[object]:
    attributes = _native.attributes(question.problem, question.planner)
    named = [array for name, values in attributes.items() for array in (list(name.encode()), values)]
    return [len(attributes), *named, question.omega, *right_answer(question)]
