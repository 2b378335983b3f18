"""Our planner against the paper's, the empty plan, proven optima and its cap: the figures that the project promises.

The default tier takes two seeds of three workloads, and every small case that was solved to the optimum. `-m full`
takes all seeds and the wide workloads, and writes results/full/plan_quality.json.
"""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest

from tests.plan.backends_test import random_problem
from tests.support.cases import SKEWS, named
from tests.support.generator import GOOD_KINDS, small_demand
from tests.support.make_milp_suite import FAMILIES, SUITE
from tests.support.quality import FULL, QUICK, cells, mean_over_seeds, record, result, solver
from topoep_jax.plan import Status, picoseconds
from topoep_jax.plan.api import solve

REPORT = "plan_quality.json"
EFFORTS = ("fast", "default")
SAMPLES = [pytest.param(QUICK, id="quick"), pytest.param(FULL, id="all", marks=pytest.mark.full)]

MAX_LOAD = {
    ("qwen3_30b", -4): 1.07,
    ("glm45_air", -4): 1.025,
    ("deepseek_v2", -4): 1.03,
    ("e640", -4): 1.08,
    ("qwen3_30b", -2): 1.12,
    ("e640", -2): 1.07,
}
"""(workload, skew) -> the highest mean over seeds of max / mean load."""
INTER_DOMAIN = {"qwen3_30b": 0.025, "glm45_air": 0.017, "e640": 0.035}
"""The highest share of rows that cross domains at skew -4, mean over seeds."""
INTER_DOMAIN_EQ8 = {"deepseek_v2": 0.021}
"""The same under the paper's objective: the default one prefers to cross and balance here."""
MAX_RATIO = {"default": 0.81, "fast": 0.83}
"""Predicted time over that of the paper's plan, mean over workloads with R <= 32, skews -0.5..-4 and seeds."""
MAX_RATIO_QUICK = {"default": 0.84, "fast": 0.86}
"""The same without e640, where the gain is above the mean."""
MAX_RATIO_R128 = 0.52
MILP_MEAN, MILP_WORST = 1.12, 1.41
"""Predicted time over the optimum of the small cases."""


def ours(name, seed, skew, effort="default", **options):
    return result(name, seed, skew, "topoep", effort=effort, **options)


def ratio_to_paper(name, seed, skew, effort="default"):
    return ours(name, seed, skew, effort).ps / result(name, seed, skew, "topoep_paper").ps


QUICK_SLACK = 1.03
"""The limits hold for means over all seeds; the two of the default tier lie up to 2.5 % above them."""


def over(limits, values, sample=FULL):
    """What exceeds its limit: key -> (value, limit)."""
    slack = 1 if sample is FULL else QUICK_SLACK
    return {key: (values[key], limit) for key, limit in limits.items() if key in values and values[key] > slack * limit}


@pytest.mark.parametrize("sample", SAMPLES)
def test_load_and_traffic(sample):
    table = {}
    for name in sample:
        case = {
            "imbalance": lambda seed, skew, name=name: ours(name, seed, skew).score.imbalance,
            "inter_domain": lambda seed, skew, name=name: ours(name, seed, skew).score.inter_domain,
            "objective_ms": lambda seed, skew, name=name: ours(name, seed, skew).ps / 1e9,
            "paper_objective_ms": lambda seed, skew, name=name: result(name, seed, skew, "topoep_paper").ps / 1e9,
            "none_objective_ms": lambda seed, skew, name=name: result(name, seed, skew, "none").ps / 1e9,
            "ratio_to_paper": lambda seed, skew, name=name: ratio_to_paper(name, seed, skew),
        }
        table[name] = {key: mean_over_seeds(sample, name, measure) for key, measure in case.items()}
    if sample is FULL:
        record(REPORT, "default_effort", {name: by_skew(rows) for name, rows in table.items()})
    load = {(name, skew): table[name]["imbalance"][skew] for name in table for skew in SKEWS}
    inter = {name: table[name]["inter_domain"][-4] for name in table}
    assert not over(MAX_LOAD, load, sample)
    assert not over(INTER_DOMAIN, inter, sample)


def by_skew(rows):
    return {str(skew): {key: round(values[skew], 5) for key, values in rows.items()} for skew in SKEWS}


@pytest.mark.parametrize("sample", SAMPLES)
def test_traffic_under_the_papers_objective(sample):
    inter = {
        name: np.mean([ours(name, seed, -4, objective="eq8").score.inter_domain for seed in sample[name]])
        for name in INTER_DOMAIN_EQ8
    }
    if sample is FULL:
        record(REPORT, "inter_domain_under_eq8_at_skew_-4", inter)
    assert not over(INTER_DOMAIN_EQ8, inter, sample)


@pytest.mark.parametrize("sample", SAMPLES)
def test_faster_than_the_paper(sample):
    small = [cell for cell in cells(sample) if named(cell[0]).topology.num_ranks <= 32]
    skewed = [cell for cell in small if cell[2] < 0]
    means = {effort: float(np.mean([ratio_to_paper(*cell, effort) for cell in skewed])) for effort in EFFORTS}
    worst = {effort: max(ratio_to_paper(*cell, effort) for cell in cells(sample)) for effort in EFFORTS}
    if sample is FULL:
        wide = [ratio_to_paper(*cell) for cell in cells(sample) if cell[0] == "r128" and cell[2] < 0]
        r128 = float(np.mean(wide))
        record(REPORT, "ratio_to_paper", {"R<=32": means, "r128": r128, "worst_single_case": worst})
        assert r128 <= MAX_RATIO_R128
    assert not over(MAX_RATIO if sample is FULL else MAX_RATIO_QUICK, means)
    assert max(worst.values()) <= 1


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("effort", EFFORTS)
def test_never_slower_than_the_empty_plan(sample, effort):
    for cell in cells(sample):
        plan, empty = ours(*cell, effort), result(*cell, "none")
        assert plan.ps < empty.ps or (plan.ps == empty.ps and Status.EMPTY in plan.status), cell


@pytest.mark.parametrize("effort", EFFORTS)
def test_near_the_optimum_of_small_cases(effort):
    suite = json.loads(SUITE.read_text())
    ratios = []
    for entry in suite:
        case, _ = FAMILIES[entry["family"]]
        plan = solver(case, "topoep", effort=effort)(np.array(entry["omega"], np.int32))
        ratios.append(int(picoseconds(plan.predicted_ps)) / entry["bottleneck"]["optimum_ps"])
    print(f"{effort}: over the optimum {distribution(ratios)}")
    if effort == "default":
        assert np.mean(ratios) <= MILP_MEAN
        assert max(ratios) <= MILP_WORST


@pytest.mark.full
def test_report_of_small_cases():
    suite = json.loads(SUITE.read_text())
    report = {}
    for objective in ("bottleneck", "eq8"):
        for planner, options in (
            ("none", {}),
            ("topoep_paper", {}),
            *(("topoep", {"effort": effort}) for effort in (*EFFORTS, "full")),
        ):
            ratios = []
            for entry in suite:
                solve = solver(FAMILIES[entry["family"]][0], planner, objective=objective, **options)
                plan = solve(np.array(entry["omega"], np.int32))
                ratios.append(int(picoseconds(plan.predicted_ps)) / entry[objective]["optimum_ps"])
            report[f"{objective} {planner} {options.get('effort', '')}".strip()] = distribution(ratios)
    record(REPORT, "over_the_optimum_of_small_cases", report)


def distribution(ratios):
    quantiles = {"mean": np.mean(ratios), "median": np.median(ratios), "p90": np.percentile(ratios, 90)}
    return {key: round(float(value), 4) for key, value in (quantiles | {"max": max(ratios)}).items()}


def unaligned_cap(case):
    """5 % above the mean load, to the row."""
    return {"cap_rows": ceil_div(105 * case.tokens * case.top_k, 100), "block_rows": 1}


def aligned_cap(case):
    """The static receive buffer of a rank, as in the glossary, at cap_factor 1.05."""
    instances = case.num_experts // case.topology.num_ranks + case.num_slots
    blocks = ceil_div(unaligned_cap(case)["cap_rows"], 128) + instances
    return {"cap_rows": blocks * 128, "block_rows": 128}


def ceil_div(a, b):
    return -(-a // b)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("cap", [unaligned_cap, aligned_cap])
def test_cap_is_met(sample, cap):
    met = {name: [] for name in sample}
    for name, seed, skew in cells(sample):
        met[name].append(Status.CAP_MET in ours(name, seed, skew, **cap(named(name))).status)
    counts = {name: f"{sum(values)} of {len(values)}" for name, values in met.items()}
    if sample is FULL:
        inter = {
            name: mean_over_seeds(
                sample,
                name,
                lambda seed, skew, name=name: ours(name, seed, skew, **cap(named(name))).score.inter_domain,
            )
            for name in sample
        }
        record(REPORT, cap.__name__, {"met": counts, "inter_domain": inter})
    missed = {name: len(values) - sum(values) for name, values in met.items()}
    if cap is unaligned_cap and missed.pop("r128", 0) > 1:
        pytest.fail(f"r128: {counts['r128']}")
    assert not any(missed.values()), counts


def check_random_small_cases(index, matrices):
    """Plans many matrices of one random problem in one call; the statuses must be true, the empty plan never better.

    One problem in twenty is searched at default effort, which refines small plans for 50 ms each.
    """
    effort = "default" if index % 20 == 0 else "fast"
    case, problem = random_problem("R<=8", index)
    kinds = [GOOD_KINDS[(index + i) % len(GOOD_KINDS)] for i in range(matrices)]
    omega = np.stack([small_demand(case, kind, seed=100_000 * index + i) for i, kind in enumerate(kinds)])

    problem = dataclasses.replace(problem, effort=effort)

    def both(matrix):
        return [solve(matrix, problem, planner) for planner in ("topoep", "none")]

    plan, empty = jax.device_get(jax.jit(lambda matrices: jax.lax.map(both, matrices))(omega))
    ours_ps, empty_ps = picoseconds(plan.predicted_ps), picoseconds(empty.predicted_ps)
    rows = plan.quota.sum(axis=1, dtype=np.int64)
    aligned = (-(-rows // problem.block_rows) * problem.block_rows).sum(axis=2).max(axis=1)
    met = np.full(matrices, True) if problem.cap_rows is None else aligned <= problem.cap_rows
    is_empty = (plan.slot_expert < 0).all(axis=(1, 2))
    empty_meets = (empty.status & Status.CAP_MET) != 0
    worse = np.flatnonzero(empty_meets & (ours_ps > empty_ps))
    assert worse.size == 0, f"problem {index}: slower than the empty plan on matrices {worse}, kinds {kinds}"
    np.testing.assert_array_equal(plan.status, Status.CAP_MET * met + Status.EMPTY * is_empty)
    np.testing.assert_array_equal(plan.quota.sum(axis=(2, 3)), omega.sum(axis=2))
    lost = np.flatnonzero(empty_meets & ~met)
    assert lost.size == 0, f"problem {index}: misses a cap that the empty plan meets on matrices {lost}"
    return {
        "matrices": matrices,
        "at default effort": matrices * (effort == "default"),
        "empty": int(is_empty.sum()),
        "faster than empty": int((ours_ps < empty_ps).sum()),
        "cap asked": 0 if problem.cap_rows is None else matrices,
        "cap met": 0 if problem.cap_rows is None else int(met.sum()),
        "cap met where the empty plan misses it": int((met & ~empty_meets).sum()),
    }


def summed(reports):
    reports = list(reports)
    return {key: sum(report[key] for report in reports) for key in reports[0]}


def test_sample_of_random_small_cases():
    seen = summed(check_random_small_cases(index, 50) for index in range(24))
    assert min(seen.values()) > 0, seen


@pytest.mark.full
def test_hundred_thousand_random_small_cases():
    started = time.time()
    seen = summed(check_random_small_cases(index, 250) for index in range(400))
    assert seen["matrices"] == 100_000
    record(REPORT, "random_small_cases", seen | {"seconds": round(time.time() - started)})
