"""The cost model: every optional term by hand, against definitions written again, and up to the edge of 64 bits."""

import itertools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.plans import random_priced_plan
from topoep_jax import _native
from topoep_jax.plan import CostModel, Hardware, picoseconds
from topoep_jax.plan.cost import OBJECTIVES, predict_ps, rank_compute_ps
from topoep_jax.plan.problem import MAX_INSTANCES, MAX_ROWS, PULLS, Problem
from topoep_jax.plan.pulls import moved_bytes, schedule
from topoep_jax.plan.types import unpriced
from topoep_jax.topology import Topology

# Vector A of the planner's vectors: e2 copied to rank 0, e0 to rank 1; loads 10, 10, 10, 10.
TWO_BY_TWO = Topology((0, 0, 1, 1))
SLOTS = np.array([[2], [0], [-1], [-1]])
QUOTA = np.zeros((4, 4, 2), np.int32)
for _at, _rows in {(0, 0, 0): 2, (0, 0, 1): 8, (0, 1, 1): 4, (1, 1, 0): 6, (2, 3, 0): 10, (3, 2, 0): 10}.items():
    QUOTA[_at] = _rows
COST = {"expert_bytes": 24, "token_bytes": 4, "row_ps": 100, "inter_fs_per_byte": 20_000, "intra_fs_per_byte": 5_000}
TRAFFIC_PS = 8 * 10 * 5 + 24 * 20 + 24 * 5


@pytest.mark.parametrize(
    ("terms", "compute_ps"),
    [
        ({}, 1000),
        ({"instance_ps": 400}, 1000),  # two instances take 800, ten rows take longer
        ({"instance_ps": 700}, 1400),  # ranks 0 and 1 have two active instances each
        ({"instance_ps": 1200}, 2400),
        ({"tile_rows": 1}, 1000),
        ({"tile_rows": 4}, 1200),  # 2 + 8 rows are 4 + 8, 6 + 4 are 8 + 4, 10 are 12
        ({"tile_rows": 5}, 1500),  # 2 + 8 rows are 5 + 10
        ({"rank_speed": (1000, 1000, 1000, 1000)}, 1000),
        ({"rank_speed": (1000, 800, 1000, 2000)}, 1250),
        ({"rank_speed": (1000, 1000, 1000, 700)}, 1428),  # 1428.57
        ({"instance_ps": 700, "tile_rows": 5, "rank_speed": (1000, 800, 1000, 1000)}, 1875),  # 15 rows on rank 1
    ],
)
def test_compute_by_hand(terms, compute_ps):
    cost = CostModel(**COST, **terms)
    assert predicted("bottleneck", cost) == compute_ps + TRAFFIC_PS
    assert predicted("eq8", cost) == compute_ps + TRAFFIC_PS + 8 * 14 * 5


def predicted(objective: str, cost: CostModel) -> int:
    return predict_ps(unpriced(SLOTS, QUOTA), Problem(TWO_BY_TWO, cost, 4, 1, None, 1, objective))


def predicted_by_definition(plan, objective: str) -> int:
    """Every term again, in plain integers."""
    cost, domain = plan.cost, plan.topology.domain_of_rank
    ranks = range(len(domain))
    compute = 0
    for rank in ranks:
        rows = [int(n) for n in plan.quota[:, rank].sum(axis=0)]
        padded = sum(-(-n // cost.tile_rows) * cost.tile_rows if cost.tile_rows else n for n in rows)
        ps = max(cost.instance_ps * sum(n > 0 for n in rows), cost.row_ps * padded)
        compute = max(compute, ps if cost.rank_speed is None else ps * 1000 // cost.rank_speed[rank])
    rows = {(s, r): int(plan.quota[s, r].sum()) for s in ranks for r in ranks}
    copies = schedule(plan.slot_expert, plan.mains_per_rank, plan.topology, cost)
    pulled = moved_bytes(copies, plan.topology, cost)
    total = compute
    for moved in ({pair: 2 * cost.token_bytes * n for pair, n in rows.items()}, dict(np.ndenumerate(pulled))):
        for rate, near in ((cost.inter_fs_per_byte, False), (cost.intra_fs_per_byte, True)):
            sent, received = Counter(), Counter()
            for (a, b), size in moved.items():
                if a != b and (domain[a] == domain[b]) == near:
                    sent[a] += int(size)
                    received[b] += int(size)
            counts = [*sent.values(), *received.values(), 0]
            total += (sum(sent.values()) if objective == "eq8" else max(counts)) * rate // 1000
    return total


def every_combination(rng, num_ranks):
    """All 8 combinations of the terms, pulls aside, and each mode of pulls in turn."""
    terms = itertools.product(
        (0, int(rng.integers(1, 3000))),
        (0, int(rng.integers(1, 9))),
        (None, tuple(rng.integers(1, 3000, num_ranks).tolist())),
    )
    names = ("instance_ps", "tile_rows", "rank_speed")
    for values, mode in itertools.product(terms, PULLS):
        yield dict(zip(names, values, strict=True), pulls=mode)


def test_every_combination_of_terms_by_definition():
    rng = np.random.default_rng(0)
    for _ in range(30):
        plan = random_priced_plan(rng)
        for terms in every_combination(rng, plan.topology.num_ranks):
            priced = plan.with_cost(**terms)
            for name in OBJECTIVES:
                found = predict_ps(unpriced(plan.slot_expert, plan.quota), priced.problem(name))
                assert found == predicted_by_definition(priced, name), (terms, name)


def test_every_combination_of_terms_in_both_languages():
    """The C++ planner's own price of its plan is Python's, on random demand."""
    rng = np.random.default_rng(2)
    for _ in range(2):
        plan = random_priced_plan(rng)
        for terms, objective in itertools.product(every_combination(rng, plan.topology.num_ranks), OBJECTIVES):
            problem = plan.with_cost(**terms).problem(objective)
            answer = _native.plan(jnp.array(plan.omega, jnp.int32), problem, "topoep_paper")
            assert picoseconds(answer.predicted_ps) == predict_ps(answer, problem), (terms, objective)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_ps": -1}, "instance_ps=-1 must be an integer of at least 0"),
        ({"tile_rows": -128}, "tile_rows=-128"),
        ({"tile_rows": 1.5}, "tile_rows=1.5"),
        ({"inter_fs_per_byte": -1}, "inter_fs_per_byte=-1"),
        ({"rank_speed": ()}, "rank_speed=.* must hold one integer per rank"),
        ({"rank_speed": 800}, "rank_speed=800"),
        ({"rank_speed": (1000, 0)}, r"rank_speed\[1\]=0 must be an integer in 1"),
        ({"rank_speed": (1000, -5)}, r"rank_speed\[1\]=-5"),
        ({"rank_speed": (0.8, 1)}, r"rank_speed\[0\]=0.8 .* permille"),
        ({"pulls": "multicast"}, r"pulls='multicast' is unknown: choose one of \['direct', 'relayed', 'striped'"),
        ({"row_ps": 0, "tile_rows": 2**31}, "tile_rows=2147483648 is above 2147483647"),
        ({"row_ps": 2**26, "tile_rows": 2**24}, "row_ps=67108864 is above .* tiles have 16777216 rows"),
        ({"row_ps": 2**30, "rank_speed": (1,)}, "row_ps=1073741824 is above .* slowest rank runs at 1 permille"),
        ({"instance_ps": 2**46}, "instance_ps=70368744177664 is above"),
        ({"expert_bytes": 7 * 10**9, "pulls": "striped"}, "expert_bytes=7000000000 is above"),
    ],
)
def test_bad_terms_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**(COST | change))


def test_speeds_of_other_ranks_are_refused():
    cost = CostModel(**COST, rank_speed=[1000, 900])
    with pytest.raises(ValueError, match="rank_speed has 2 entries, but the topology has 4 ranks"):
        predicted("eq8", cost)


@pytest.mark.parametrize("link", ["inter_fs_per_byte", "intra_fs_per_byte", "gflops"])
@pytest.mark.parametrize("rate", [0, -1, 0.5])
def test_bandwidths_are_positive(link, rate):
    rates = {"inter_fs_per_byte": 1, "intra_fs_per_byte": 1, "gflops": 1} | {link: rate}
    with pytest.raises(ValueError, match=f"{link}={rate} must be an integer of at least 1"):
        Hardware(**rates)


def test_speeds_come_from_the_hardware_and_stay_hashable():
    hardware = Hardware(20_000, 5_000, 400_000, rank_speed=np.array([1000, 800]))
    cost = CostModel.from_model(64, 32, hardware, instance_ps=5, tile_rows=8, pulls="best")
    assert cost.rank_speed == (1000, 800)
    assert (cost.instance_ps, cost.tile_rows, cost.pulls) == (5, 8, "best")
    assert hash(cost) == hash(CostModel(12288, 128, 92, 20_000, 5_000, 5, 8, (1000, 800), "best"))


@pytest.mark.parametrize("slowest", [1, 333, 999, 1000, 5000])
@pytest.mark.parametrize("tile_rows", [0, 128, 2**20])
def test_the_largest_allowed_compute_fits_64_bits(slowest, tile_rows):
    """At the limits that the constructor allows, the most rows and instances give the exact quotient."""
    terms = COST | {"tile_rows": tile_rows, "rank_speed": (slowest,)}
    limits = {}
    for name in ("row_ps", "instance_ps"):
        with pytest.raises(ValueError, match="is above") as failure:
            CostModel(**(terms | {name: 2**63}))
        limits[name] = int(str(failure.value).split("is above ")[1].split(",")[0])
    cost = CostModel(**(terms | limits))
    rows = np.zeros((1, MAX_INSTANCES), np.int64)
    rows[0, :] = 1
    rows[0, 0] = MAX_ROWS - MAX_INSTANCES + 1
    padded = sum(-(-int(n) // tile_rows) * tile_rows if tile_rows else int(n) for n in rows[0])
    exact = max(cost.row_ps * padded, cost.instance_ps * MAX_INSTANCES) * 1000 // slowest
    assert exact < 2**62
    assert rank_compute_ps(rows, cost).tolist() == [exact]
