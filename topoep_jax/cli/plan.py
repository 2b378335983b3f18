"""`topoep plan`: planners side by side, as a table of means over seeds or as one JSON record per seed and planner."""

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from topoep_jax.cli import study as studies
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import milliseconds, table
from topoep_jax.cli.study import Sample, Study
from topoep_jax.plan.evaluate import Evaluation, evaluate
from topoep_jax.plan.problem import Draft, none
from topoep_jax.plan.run import time_planner
from topoep_jax.plan.topoep import dependent_steps
from topoep_jax.plan.types import Status

_SMALL = 16  # Experts up to which the exact optimum takes seconds.
_MILP_SECONDS = 60.0
_NOTES = """
layer ms  predicted time of one layer (bottleneck objective): compute of forward and backward, traffic of the forward
          pass (rows at dispatch and combine, each pull once); the backward pass's traffic counts as hidden
/ none    layer ms against those without replicas
Eq. 8 ms  the paper's objective, which adds the traffic of all ranks
worst NIC most bytes between domains that one rank sends or receives in a forward pass
plan ms   measured on one CPU: C++ where the planner has it, otherwise NumPy
"""
_NOTE_ON_STEPS = "steps     dependent steps of the planner on a GPU, at most\n"


@dataclasses.dataclass(frozen=True)
class Result:
    """One planner on one sample."""

    sample: Sample
    planner: str
    plan: Evaluation
    none_objective_ps: int
    milliseconds: float
    dependent_steps: int | None
    quota_bound_ps: int | None

    def record(self, model: str) -> dict[str, Any]:
        """What `--json` prints."""
        plan = self.plan
        return {
            "model": model,
            "skew": self.sample.skew,
            "seed": self.sample.seed,
            "planner": self.planner,
            "imbalance": plan.imbalance,
            "inter_domain": plan.inter_domain,
            "replica": plan.replica,
            "num_replicas": plan.num_replicas,
            "objective_ms": plan.objective_ps / 1e9,
            "eq8_ms": plan.eq8_ps / 1e9,
            "none_objective_ms": self.none_objective_ps / 1e9,
            "planner_ms": self.milliseconds,
            "dependent_steps": self.dependent_steps,
            "status": int(plan.status),
        }


def define() -> Flags:
    """Flags of the command."""
    values = studies.define()
    studies.add_demand(values, "none", "topoep_paper", "topoep", seeds=1)
    values.add("json", bool, "print a list of records, one per seed and planner", False)
    values.add("bounds", bool, "also print lower bounds: best quotas by LP, small layers' optimum by MILP", False)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    study = studies.from_flags(values)
    skews, planners = studies.skews(values.skew), studies.planners(values.planner)
    seeds = range(values.seeds or study.num_samples or 1)
    if study.num_samples is not None and len(seeds) > study.num_samples:
        raise ValueError(f"--seeds={len(seeds)}, but {values.trace} has {study.num_samples} samples")
    by_skew: dict[float | None, list[Result]] = {}
    optima: dict[float | None, list[int]] = {}
    for sample in study.samples(skews, seeds):
        results = [_result(sample, planner, bounds=values.bounds) for planner in _with_progress(sample, planners)]
        by_skew.setdefault(sample.skew, []).extend(results)
        if values.bounds and study.layer.num_experts <= _SMALL:
            optima.setdefault(sample.skew, []).append(_optimum_ps(sample))
    if values.json:
        records = [result.record(study.name) for results in by_skew.values() for result in results]
        yield json.dumps(records, indent=1) + "\n"
        if values.bounds:  # Records have fixed keys.
            sys.stderr.write("".join(_report(study, s, r, optima.get(s)) for s, r in by_skew.items()))
        return
    for skew, results in by_skew.items():
        yield _report(study, skew, results, optima.get(skew)) + "\n"
    yield _NOTES.lstrip()
    if any(result.dependent_steps is not None for results in by_skew.values() for result in results):
        yield _NOTE_ON_STEPS


def _with_progress(sample: Sample, planners: Sequence[str]) -> Iterator[str]:
    """The planners; says on a terminal which one is at work."""
    for planner in planners:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rskew {sample.skew}, seed {sample.seed}: {planner:<20}\r")
        yield planner
    if sys.stderr.isatty():
        sys.stderr.write(f"{'':<60}\r")


def _result(sample: Sample, planner: str, *, bounds: bool) -> Result:
    omega, problem = sample.omega, sample.problem
    answer = time_planner(omega, problem, planner)
    plan = evaluate(answer.draft, omega, problem)
    return Result(
        sample=sample,
        planner=planner,
        plan=plan,
        none_objective_ps=evaluate(none(omega, problem), omega, problem).objective_ps,
        milliseconds=answer.milliseconds,
        dependent_steps=dependent_steps(problem) if planner == "topoep" else None,
        quota_bound_ps=_quota_bound_ps(sample, plan, answer.draft) if bounds else None,
    )


def _quota_bound_ps(sample: Sample, plan: Evaluation, draft: Draft) -> int | None:
    """The least time that any quotas reach with the plan's replicas; None where mains were moved."""
    from topoep_jax.plan.bounds import lp_quota_bound

    problem = dataclasses.replace(sample.problem, num_slots=plan.plan.slot_expert.shape[1])
    if not draft.holds[problem.main_rank(), range(problem.num_experts)].all():
        return None
    return lp_quota_bound(np.asarray(plan.plan.slot_expert), sample.omega, problem)["bound_ps"]


def _optimum_ps(sample: Sample) -> int:
    from topoep_jax.plan.bounds import milp_optimum

    return milp_optimum(sample.omega, sample.problem, time_limit=_MILP_SECONDS)["bound_ps"]


def _report(study: Study, skew: float | None, results: list[Result], optima: list[int] | None) -> str:
    """Title and table of one skew: a line per planner, means over seeds."""
    by_planner: dict[str, list[Result]] = {}
    for result in results:
        by_planner.setdefault(result.planner, []).append(result)
    columns = [column for column in COLUMNS if any(column.get(r) is not None for r in results) or not column.optional]
    if study.capped:
        columns.append(Column("cap met", lambda r: Status.CAP_MET in r.plan.status, "{:.0%}".format))
    rows = [
        [planner, *(column.cell([column.get(r) for r in group]) for column in columns)]
        for planner, group in by_planner.items()
    ]
    seeds = len(next(iter(by_planner.values())))
    of_what = "samples" if skew is None else "seeds"
    title = study.name + ("" if skew is None else f", skew {skew:g}") + f", mean of {seeds} {of_what}" * (seeds > 1)
    text = f"{title}\n{study.describe()}\n\n" + table(["planner", *(c.title for c in columns)], rows)
    if any(result.quota_bound_ps is not None for result in results):
        text += f"\nquota bound: the least {study.objective} time of any split of rows over the plan's replicas\n"
    if optima:
        optimum = milliseconds(statistics.mean(optima) / 1e9, 3)
        text += f"\nno legal plan is faster than {optimum} ms ({study.objective}, MILP)\n"
    return text


@dataclasses.dataclass(frozen=True)
class Column:
    """A number of a result, averaged over seeds.

    Attributes:
      title: heading.
      get: the number, None where it is unknown.
      form: how its mean is printed.
      optional: whether the column is left out when nothing is known.
    """

    title: str
    get: Callable[[Result], float | None]
    form: Callable[[float], str]
    optional: bool = False

    def cell(self, values: Sequence[float | None]) -> str:
        """Text of the mean."""
        known = [value for value in values if value is not None]
        return self.form(statistics.mean(known)) if len(known) == len(values) else "-"


COLUMNS = (
    Column("imbalance", lambda r: r.plan.imbalance, "{:.2f}".format),
    Column("inter-domain %", lambda r: 100 * r.plan.inter_domain, "{:.1f}".format),
    Column("replica %", lambda r: 100 * r.plan.replica, "{:.1f}".format),
    Column("replicas", lambda r: r.plan.num_replicas, "{:.1f}".format),
    Column("worst NIC MB", lambda r: r.plan.worst_nic_bytes / 1e6, "{:.1f}".format),
    Column("layer ms", lambda r: r.plan.objective_ps / 1e9, milliseconds),
    Column("/ none", lambda r: r.plan.objective_ps / max(r.none_objective_ps, 1), "{:.3f}".format),
    Column("Eq. 8 ms", lambda r: r.plan.eq8_ps / 1e9, lambda ms: milliseconds(ms, 1)),
    Column("plan ms", lambda r: r.milliseconds, "{:.2f}".format),
    Column("steps", lambda r: r.dependent_steps, "{:.0f}".format, optional=True),
    Column(
        "quota bound ms",
        lambda r: None if r.quota_bound_ps is None else r.quota_bound_ps / 1e9,
        milliseconds,
        optional=True,
    ),
)
