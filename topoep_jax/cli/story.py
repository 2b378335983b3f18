"""What `topoep explain` tells of one plan, in text and in a picture."""

import dataclasses

import numpy as np

from topoep_jax.cli.copies import Copy, copies_of
from topoep_jax.cli.output import decimals_for, milliseconds, plural
from topoep_jax.cli.study import Sample, Study
from topoep_jax.plan.cost import terms_ps
from topoep_jax.plan.evaluate import Evaluation, evaluate, nic_bytes
from topoep_jax.plan.problem import Problem, none
from topoep_jax.plan.reference import SCORED_ONLY
from topoep_jax.plan.run import time_planner


@dataclasses.dataclass(frozen=True)
class Story:
    """Everything that text and picture tell.

    Attributes:
      title: model, skew and planner.
      remarks: what to know before reading on, a line each.
      setting: sizes, in words.
      problem: the question.
      before: the plan without copies.
      after: the plan.
      copies: of each domain.
    """

    title: str
    remarks: list[str]
    setting: str
    problem: Problem
    before: Evaluation
    after: Evaluation
    copies: dict[int, list[Copy]]

    @property
    def mean_load(self) -> float:
        """Rows per rank."""
        return max(float(self.after.rank_load.mean()), 1.0)

    def terms(self) -> dict[str, tuple[int, int]]:
        """Picoseconds before and after, by cause."""
        before, after = (terms_ps(p.plan, self.problem) for p in (self.before, self.after))
        return {cause: (before[cause], after[cause]) for cause in before}

    def ms(self, ps: int, sign: str = "") -> str:
        """Milliseconds, all with the decimals that the plan's whole time needs."""
        whole = self.terms().values()
        return f"{ps / 1e9:{sign}.{decimals_for(sum(after for _, after in whole) / 1e9, 3)}f}"

    def nic_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [2, R], sent and received between domains, before and after."""
        before, after = (nic_bytes(p.plan, self.problem) for p in (self.before, self.after))
        return before, after

    def summary(self) -> str:
        """The result in one line."""
        before, after = (sum(ps) / 1e9 for ps in zip(*self.terms().values(), strict=True))
        imbalance = f"busiest rank {self.before.imbalance:.2f} -> {self.after.imbalance:.2f} x mean load"
        crossing = f"rows between domains {self.before.inter_domain:.1%} -> {self.after.inter_domain:.1%}"
        time = f"predicted layer time {milliseconds(before)} -> {milliseconds(after)} ms"
        slower = " (slower than no copies)" * (after > before)
        return f"{plural(self.after.num_replicas, 'copy', 'copies')}; {imbalance}, {crossing}, {time}{slower}"


def tell(study: Study, sample: Sample, planner: str) -> Story:
    """Asks a planner, and scores its plan and the empty one."""
    omega, problem = sample.omega, sample.problem
    before = evaluate(none(omega, problem), omega, problem)
    draft = time_planner(omega, problem, planner).draft
    after = evaluate(draft, omega, problem)
    remarks = [f"no layer can run what {planner} makes: {SCORED_ONLY[planner]}"] if planner in SCORED_ONLY else []
    if not draft.holds[problem.main_rank(), range(problem.num_experts)].all():
        remarks.append("experts that left their main rank are told as copies")
    if planner == "none":
        remarks.append("planner none copies nothing: no copy was looked for")
    elif after.num_replicas == 0:
        remarks.append("nothing is copied: no copy was found that pays")
    if study.samples_of_trace is None:
        sampled = f"skew {sample.skew:g}, seed {sample.seed}"
    else:
        sampled = study.samples_of_trace[sample.seed]
    return Story(
        title=f"{study.name}, {sampled}, planner {planner}",
        remarks=remarks,
        setting=study.describe(),
        problem=problem,
        before=before,
        after=after,
        copies=copies_of(after, before, omega, problem),
    )
