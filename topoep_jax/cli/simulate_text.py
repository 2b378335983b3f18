"""What `topoep simulate` says: one screen, or records."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from topoep_jax.cli.output import milliseconds, plural, table
from topoep_jax.cli.study import Study
from topoep_jax.plan.evaluate import Evaluation
from topoep_jax.plan.types import Status
from topoep_jax.simulate import Outcome, Setting
from topoep_jax.simulate.compare import HELD_OUT
from topoep_jax.simulate.verdict import MEANINGLESS, NEEDS_AGREEMENT, gain_percent

_MS = 1e9
_PARTS = (0.5, 0.25)
_MUCH = 0.2
"""Of a layer without balancing."""
NOTES = f"""Everything above is modelled: nothing of it was measured.
layer ms    one MoE layer and microbatch, forward and backward
gain %      throughput of the step against none; low and high: the least and the most as the constants vary
imbalance   rows of the busiest rank over the mean
busiest link  the NIC or NVLink port that carries longest, in ms of a layer
busiest rank  the one that computes and communicates longest
busy/alone  ms of a layer on the busiest rank; alone: of these, while it computes nothing
Under {MEANINGLESS:g} % a difference means nothing; under {NEEDS_AGREEMENT:g} % all constants must agree in its sign.
Of large gains, take less than the low end: at skew -4 these rules give topoep_paper +340 % of Qwen3-30B-A3B's layers on
an h800 and +201 % of GLM-4.5-Air's, where the phases that the paper prints make +113 and +79 %: without replicas its
exchanges are faster than the wire of its busiest rank (--fit).
"""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Planners compared on one demand.

    Attributes:
      study: the layer and its demand.
      setting: constants.
      skew: of synthetic demand.
      tokens: per rank and microbatch.
      outcomes: planner by planner, "none" first.
      plans: of each planner, sample by sample.
    """

    study: Study
    setting: Setting
    skew: float | None
    tokens: float
    outcomes: Sequence[Outcome]
    plans: Mapping[str, Sequence[Evaluation]]

    @property
    def title(self) -> str:
        """What was simulated."""
        return self.study.name + ("" if self.skew is None else f", skew {self.skew:g}")

    def may_quote(self, outcome: Outcome) -> bool:
        """Whether there is a gain to tell."""
        return self.setting.quotable and outcome.planner != "none"

    def records(self) -> list[dict[str, Any]]:
        """The records for JSON, one for each planner."""
        return [self._record(outcome) for outcome in self.outcomes]

    def _record(self, outcome: Outcome) -> dict[str, Any]:
        plans, verdict = self.plans[outcome.planner], outcome.verdict
        link, rank, link_ms = outcome.steps.each[0].busiest_link()
        nic_bytes, nvlink_bytes = outcome.steps.each[0].busiest_bytes()
        quotable = self.may_quote(outcome)
        return {
            "kind": "simulated",
            "model": self.study.name,
            "skew": self.skew,
            "constants": self.setting.title,
            "planner": outcome.planner,
            "samples": len(plans),
            "layers": outcome.steps.each[0].step.layers,
            "microbatches": outcome.steps.each[0].step.microbatches,
            "outside_ms": outcome.steps.each[0].step.outside_ms,
            "layer_ms": outcome.layer_ms,
            "step_ms": outcome.step_ms,
            "tokens_per_second": outcome.tokens_per_second(self.tokens),
            "gain_percent": verdict.gain if quotable else None,
            "gain_percent_low": verdict.low if quotable else None,
            "gain_percent_high": verdict.high if quotable else None,
            "gain_percent_by_constants": dict(outcome.gains) if quotable else None,
            "answer": verdict.answer if quotable else None,
            "imbalance": statistics.mean(plan.imbalance for plan in plans),
            "inter_domain": statistics.mean(plan.inter_domain for plan in plans),
            "replica": statistics.mean(plan.replica for plan in plans),
            "cap_met": statistics.mean(Status.CAP_MET in plan.status for plan in plans),
            "busiest_rank": outcome.steps.each[0].timeline.busiest_rank(),
            "exchange": self.study.layer.exchange,
            "nic_bytes": nic_bytes,
            "nvlink_bytes": nvlink_bytes,
            "busiest_link": {"class": link, "rank": rank, "layer_ms": link_ms},
            "layer_phases_ms": {
                phase: {"busy": share.busy_ps / _MS, "alone": share.exposed_ps / _MS}
                for phase, share in outcome.layer_shares().items()
            },
        }


def screen(answer: Answer) -> str:
    """One comparison."""
    step = answer.outcomes[0].steps.each[0].step
    samples = len(answer.plans["none"])
    of_what = "sample" if answer.skew is None else "seed"
    outside = f"{step.outside_ms:,.1f} ms outside of them" if step.outside_ms else "and nothing else"
    lines = [
        f"{answer.title}, {plural(samples, of_what)}",
        answer.study.describe(),
        f"MODELLED: {answer.setting.title}",
        f"step: {plural(step.layers, 'MoE layer')}, {plural(step.microbatches, 'microbatch', 'microbatches')} of"
        f" {answer.tokens:,.0f} tokens per rank, {outside}",
        "",
        _planners(answer),
        _verdicts(answer),
        _phases(answer.outcomes),
    ]
    return "\n".join(lines) + "\n"


def _planners(answer: Answer) -> str:
    rows = []
    for outcome in answer.outcomes:
        plans, verdict = answer.plans[outcome.planner], outcome.verdict
        link, rank, link_ms = outcome.steps.each[0].busiest_link()
        gains = [f"{percent:+.1f}" for percent in (verdict.gain, verdict.low, verdict.high)]
        rows.append(
            [
                outcome.planner,
                milliseconds(outcome.layer_ms),
                milliseconds(outcome.step_ms, 1),
                f"{outcome.tokens_per_second(answer.tokens):,.0f}",
                *(gains if answer.may_quote(outcome) else ["-"] * 3),
                f"{statistics.mean(plan.imbalance for plan in plans):.2f}",
                f"{100 * statistics.mean(plan.inter_domain for plan in plans):.1f}",
                f"{statistics.mean(Status.CAP_MET in plan.status for plan in plans):.0%}",
                f"{outcome.steps.each[0].timeline.busiest_rank()}",
                f"{link} {rank}: {milliseconds(link_ms)}" if link_ms else "-",
            ]
        )
    header = ["planner", "layer ms", "step ms", "tokens/s", "gain %", "low", "high", "imbalance", "inter %", "cap met"]
    return table([*header, "busiest rank", "busiest link"], rows)


def _verdicts(answer: Answer) -> str:
    lines = ["Does balancing pay here? (modelled, step throughput)"]
    plain = answer.outcomes[0]
    for outcome in answer.outcomes[1:]:
        if not answer.setting.quotable:
            lines.append(f"  {outcome.planner}: no answer; of {HELD_OUT}, the fit misses the paper's own gain by far")
            continue
        lines.append(f"  {outcome.planner}: {outcome.verdict}")
        low, high = (pick(outcome.gains, key=lambda name: outcome.gains[name]) for pick in (min, max))
        lines.append(f"    least with: {low}; most with: {high}")
        lines += _too_small(outcome, plain)
        if not plain.steps.each[0].step.outside_ms:
            parts = ", ".join(
                f"{gain_percent(1, 1 - part + part * outcome.step_ms / max(plain.step_ms, 1e-9)):+.1f} % if they are"
                f" {part:.0%} of it"
                for part in _PARTS
            )
            lines.append(f"    of a step that is MoE layers alone; {parts}: give --dense_ms")
    return "\n".join(lines) + "\n"


def _too_small(outcome: Outcome, plain: Outcome) -> list[str]:
    """A warning where the answer is about an assumption, not about the model."""
    plan = outcome.layer_shares().get("plan")
    if plan is None or plan.exposed_ps < _MUCH * plain.layer_ms * _MS:
        return []
    return [
        f"    the assumed time of planning is {plan.exposed_ps / _MS / plain.layer_ms:.0%} of the layer without it: so"
        " few tokens, or such small experts, say nothing about a real model's"
    ]


def _phases(outcomes: Sequence[Outcome]) -> str:
    shares = [outcome.layer_shares() for outcome in outcomes]
    order = ["demand", "plan", "dispatch", "pull", "experts forward", "combine", "experts backward", "push"]
    named = dict.fromkeys(phase for own in shares for phase in own)
    phases = [*(phase for phase in order if phase in named), *(phase for phase in named if phase not in order)]

    def cells(phase: str) -> list[str]:
        return [
            cell
            for own in shares
            for cell in ([f"{ps / _MS:.2f}" for ps in own[phase]] if phase in own else ["-", "-"])
        ]

    rows = [[phase, *cells(phase)] for phase in phases]
    total = [cell for outcome in outcomes for cell in ("", f"{outcome.layer_ms:.2f}")]
    header = [part for outcome in outcomes for part in (f"{outcome.planner}: busy", "alone")]
    return table(["phase", *header], [*rows, ["layer", *total]])
