"""Every planner on every workload and skew, side by side: what README's table is made of.

    python -m tests.support.planner_table     # prints results/full/planners.json as Markdown

`tests/plan/table_test.py` computes and writes that file with `-m full`.
"""

import json

import numpy as np

from tests.support.cases import SKEWS, named
from tests.support.quality import FULL, RESULTS, drawn
from topoep_jax.plan.evaluate import evaluate
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.plan.run import time_planner

REPORT = "planners.json"
MEANS = (
    "imbalance",
    "inter_domain",
    "replica",
    "num_replicas",
    "against_c4",
    "worst_nic_mb",
    "objective_ms",
    "eq8_ms",
    "planner_ms",
)


def measured(name, seed, skew, planner):
    """Evaluation of one plan as a dict of plain numbers; `slots` is the most replicas on a rank."""
    omega, problem = drawn(name, seed)[skew], named(name).problem()
    answer = time_planner(omega, problem, planner)
    plan = evaluate(answer.draft, omega, problem)
    return {
        "imbalance": plan.imbalance,
        "inter_domain": plan.inter_domain,
        "replica": plan.replica,
        "num_replicas": plan.num_replicas,
        "against_c4": against_c4(plan.plan.slot_expert, omega, problem),
        "worst_nic_mb": plan.worst_nic_bytes / 1e6,
        "objective_ms": plan.objective_ps / 1e9,
        "eq8_ms": plan.eq8_ps / 1e9,
        "planner_ms": answer.milliseconds,
        "slots": plan.plan.slot_expert.shape[1],
    }


def against_c4(slot_expert, omega, problem):
    """Replicas outside their main's domain whose pull costs no less than the traffic of the domain's own rows."""
    domain = np.array(problem.topology.domain_of_rank)
    demand = np.zeros((problem.topology.num_domains, problem.num_experts), np.int64)
    np.add.at(demand, domain, omega)
    rank, slot = np.nonzero(slot_expert >= 0)
    expert = slot_expert[rank, slot]
    far = domain[problem.main_rank()[expert]] != domain[rank]
    saved = 2 * demand[domain[rank], expert] * problem.cost.token_bytes
    return int((far & (saved <= problem.cost.expert_bytes)).sum())


def compared(name, seeds, skews=SKEWS):
    """skew -> planner -> means over seeds; `slots` is the maximum."""
    table = {}
    for skew in skews:
        table[str(skew)] = rows = {}
        for planner in PLANNERS:
            runs = [measured(name, seed, skew, planner) for seed in seeds]
            rows[planner] = {key: round(float(np.mean([run[key] for run in runs])), 5) for key in MEANS}
            rows[planner]["slots"] = max(run["slots"] for run in runs)
    return table


def rivals_ahead(name, table):
    """(skew, planner, its ms, ours) wherever a planner within the same slots is not slower (faster, at skew 0)."""
    ahead = []
    for skew, rows in table.items():
        mine = rows["topoep"]["objective_ms"]
        for planner, row in rows.items():
            if planner == "topoep" or row["slots"] > named(name).num_slots:
                continue
            if row["objective_ms"] < mine or (float(skew) < 0 and row["objective_ms"] == mine):
                ahead.append((skew, planner, row["objective_ms"], mine))
    return ahead


def markdown(report):
    """One table per workload: predicted ms (max / mean load, inter-domain %) by planner and skew."""
    parts = []
    for name, table in report.items():
        head = [f"**{name}**, mean of {len(FULL[name])} seeds", *(f"skew {skew}" for skew in table)]
        lines = [head, ["---"] * len(head)]
        for planner in next(iter(table.values())):
            cells = [table[skew][planner] for skew in table]
            slots = max(cell["slots"] for cell in cells)
            label = planner + f" ({slots} slots)" * (slots > named(name).num_slots)
            lines.append(
                [label]
                + [f"{c['objective_ms']:.2f} ({c['imbalance']:.2f}, {100 * c['inter_domain']:.0f})" for c in cells]
            )
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(markdown(json.loads((RESULTS / REPORT).read_text())))
