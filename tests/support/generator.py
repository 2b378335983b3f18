"""Demand to plan for, and a second opinion on plans: synthetic routing, random matrices, and scoring by definition.

Scoring shares no code with `topoep_jax.plan.cost`: it follows the assignments one instance at a time.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from tests.support.cases import Case
from topoep_jax.plan.types import Plan
from topoep_jax.synthetic import biased_demand as biased_demand

MAX_ROWS = 2**31 - 1


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Notes at what fails inside which of a test's many questions it was."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def small_demand(case: Case, kind: str, seed: int = 0) -> np.ndarray:
    """int32 [R, E] of a named kind, about `case.tokens * case.top_k` rows per rank where the kind allows it."""
    rng = np.random.default_rng(seed)
    shape = (case.topology.num_ranks, case.num_experts)
    rows = case.tokens * case.top_k
    omega = np.zeros(shape, np.int64)
    match kind:
        case "zeros":
            pass
        case "uniform":
            omega = rng.multinomial(rows, np.full(shape[1], 1 / shape[1]), size=shape[0])
        case "skewed":
            omega = rng.multinomial(rows, _softmax(rng.normal(0, 2, shape[1])), size=shape[0])
        case "own_skew":  # every source likes other experts
            omega = np.stack([rng.multinomial(rows, _softmax(rng.normal(0, 2, shape[1]))) for _ in range(shape[0])])
        case "hot_column":
            omega[:, rng.integers(shape[1])] = rows
        case "hot_entry":
            omega[rng.integers(shape[0]), rng.integers(shape[1])] = rows
        case "sparse":
            omega = rng.integers(0, rows, shape) * (rng.random(shape) < 0.2)
        case "idle_sources":
            omega = rng.multinomial(rows, _softmax(rng.normal(0, 1, shape[1])), size=shape[0])
            omega[rng.random(shape[0]) < 0.5] = 0
        case "ties":
            omega[:] = rng.integers(1, 4) * rng.integers(0, 3, shape[1])
        case "near_limit":
            omega = _with_total(rng, shape, MAX_ROWS - int(rng.integers(0, 3)))
        case "one_near_limit":
            omega[rng.integers(shape[0]), rng.integers(shape[1])] = MAX_ROWS
        case "negative":
            omega = rng.integers(0, 9, shape)
            omega[rng.integers(shape[0]), rng.integers(shape[1])] = -1
        case "too_much":
            omega = _with_total(rng, shape, MAX_ROWS + 1)
        case _:
            raise ValueError(kind)
    return omega.astype(np.int32)


GOOD_KINDS = (
    "zeros",
    "uniform",
    "skewed",
    "own_skew",
    "hot_column",
    "hot_entry",
    "sparse",
    "idle_sources",
    "ties",
    "near_limit",
    "one_near_limit",
)
BAD_KINDS = ("negative", "too_much")


@dataclasses.dataclass(frozen=True)
class Score:
    """What the evidence tables report of a plan."""

    imbalance: float
    inter_domain: float
    replica: float
    bottleneck_ps: int
    eq8_ps: int


def score(case: Case, plan: Plan) -> Score:
    """Scores a plan from the definitions of its objectives, in plain integers."""
    cost, domain = case.cost, case.topology.domain_of_rank
    num_ranks = len(domain)
    mains = case.num_experts // num_ranks
    slot_expert, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota).astype(np.int64)
    rates = {"inter": cost.inter_fs_per_byte, "intra": cost.intra_fs_per_byte}
    sent = {(what, link): [0] * num_ranks for what in ("rows", "pulls") for link in rates}
    received = {key: [0] * num_ranks for key in sent}

    def move(what, source, target, count):
        if source != target:
            link = "intra" if domain[source] == domain[target] else "inter"
            sent[what, link][source] += count
            received[what, link][target] += count

    for source in range(num_ranks):
        for target in range(num_ranks):
            move("rows", source, target, int(quota[source, target].sum()))
    for rank, experts in enumerate(slot_expert.tolist()):
        for expert in experts:
            if expert >= 0:
                move("pulls", expert // mains, rank, 1)

    def link_time(what, link, count):
        size = 2 * cost.token_bytes if what == "rows" else cost.expert_bytes
        return size * count * rates[link] // 1000

    load = quota.sum(axis=(0, 2))
    compute = cost.row_ps * int(load.max())
    total = max(int(load.sum()), 1)
    return Score(
        imbalance=int(load.max()) * num_ranks / total,
        inter_domain=sum(sent["rows", "inter"]) / total,
        replica=int(quota[:, :, mains:].sum()) / total,
        bottleneck_ps=compute + sum(link_time(*key, max(max(sent[key]), max(received[key]))) for key in sent),
        eq8_ps=compute + sum(link_time(*key, sum(sent[key])) for key in sent),
    )


def _softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def _with_total(rng: np.random.Generator, shape: tuple[int, int], total: int) -> np.ndarray:
    return rng.multinomial(total, _softmax(rng.normal(0, 2, shape[0] * shape[1]))).reshape(shape)
