"""What must hold of the records, as code: each check passes, or says which points fail and why."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from train.experiments.record import Record, Summary, pick, summarize
from train.experiments.settings import SLOTS

DEVIATIONS = 2.0
"""How far from the paper's value a mean may lie, in standard deviations over the draws."""
CAUSES = {
    (
        "10",
        "imbalance",
    ): "the number of tokens, which the paper does not print: with 4096 a rank some 20 experts of other"
    " nodes are worth a pull and fill the slots up to two of a rank, so that the load falls late, but to 1.0; its"
    " equal values from two slots on need at most 16 of them, as with 256 to 1024 tokens (10c), and the height of its"
    " values needs a rare draw: 8.39 without replicas, where 3 draws of ours have 5.4 +- 1.4",
    ("13b", "imbalance"): "the paper's value is one mean over 5, 5 and 4 layers, each of one draw of the bias: without"
    " replicas it has 4.09 / 3.24 / 4.56, and 10 draws of ours 5.3 +- 1.3 / 3.7 +- 0.4 / 5.0 +- 0.8",
    (
        "16",
        "inter-node share",
    ): "what crosses are rows of experts not worth a pull, which depend on the tokens: in 5 draws 2.5 / 3.0 /"
    " 4.6 % with 2048 a rank, 1.3 / 1.3 / 2.1 with 4096 as here, 0.9 / 0.7 / 1.1 with 8192; the paper, which does not"
    " print its number, has 0.91 / 1.1 / 1.88",
    ("16", "replica-served share"): "it rises with the load of the hottest experts, whose mean over 10 draws of ours is"
    " above the paper's (13b); a line through those 10 draws puts 81.7 / 66.5 / 70.2 % where the paper's load is, and"
    " the paper has 79.8 / 63.8 / 68.3",
}
"""(figure, metric) -> why our values may differ from the paper's."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
      title: what must hold.
      points: how many were looked at; 0 where the figures that it needs were not run.
      failures: each point that does not hold, in words, with its cause.
    """

    title: str
    points: int
    failures: Sequence[str]

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        if not self.points:
            return "not run"
        return "fails" if self.failures else "holds"


def check(records: Sequence[Record]) -> list[Outcome]:
    """All checks, also those that have nothing to look at."""
    return [
        _outcome(f"topoep_paper within {DEVIATIONS:g} standard deviations of the paper", _near_paper(records)),
        _outcome(
            "no planner of equal slots beats topoep in both imbalance and inter-domain share", _undominated(records)
        ),
        _outcome("topoep has the lowest predicted time at every skew <= -0.5", _fastest(records)),
        _outcome(
            "topoep is never predicted to be slower than none (Figure A, in which planning takes no time)",
            _never_loses(records),
        ),
        _outcome(
            "nor is it in models that charge for planning: of the paper's cluster, which has other terms too that it"
            " does not know (Figure 12), and of this library's layer at nominal rates (Figure B)",
            _gains_in_models(records),
        ),
    ]


def text(outcomes: Iterable[Outcome]) -> str:
    """Lines for a terminal."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{outcome.verdict}: {outcome.title} ({outcome.points} points)\n")
        lines += [f"    {failure}\n" for failure in outcome.failures]
    return "".join(lines)


def _outcome(title: str, findings: Iterable[str | None]) -> Outcome:
    """The outcome of findings that are None where a point holds."""
    found = list(findings)
    return Outcome(title, len(found), [finding for finding in found if finding])


def _near_paper(records: Sequence[Record]) -> Iterator[str | None]:
    for summary in summarize(records):
        first, deviation = summary.first, summary.deviation
        if first.planner != "topoep_paper" or first.figure not in ("10", "13b", "16") or summary.paper is None:
            continue
        if deviation is None:  # One draw that was chosen has no spread.
            continue
        away = abs(summary.mean - summary.paper.value)
        # The paper prints so many digits; a spread below their half is none.
        if away <= DEVIATIONS * max(deviation, 0.005):
            yield None
        else:
            spread = f"{away / max(deviation, 1e-9):.1f} standard deviations"
            unit = f" {first.unit}" if first.unit else ""
            yield (
                f"figure {first.figure}, {place(first)}: {first.metric} {summary.mean:.3g} +- {deviation:.2g}{unit},"
                f" the paper {summary.paper.value:.3g} ({spread}): {CAUSES[first.figure, first.metric]}"
            )


def _undominated(records: Sequence[Record]) -> Iterator[str | None]:
    within = _within_slots(records)
    imbalance = {_id(s): s.mean for s in summarize(pick(records, figure="13b", metric="imbalance"))}
    inter = {_id(s): s.mean for s in summarize(pick(records, figure="16", metric="inter-node share"))}
    for model, planner in imbalance:
        mine, other = (model, "topoep"), (model, planner)
        if planner == "topoep" or not within.get(other) or mine not in inter or other not in inter:
            continue
        both = imbalance[other] < imbalance[mine] and inter[other] < inter[mine]
        yield (
            f"{model}: {planner} has {imbalance[other]:.3f} and {inter[other]:.1f} %, topoep {imbalance[mine]:.3f} and"
            f" {inter[mine]:.1f} %"
            if both
            else None
        )


def _within_slots(records: Sequence[Record]) -> dict[tuple[str, str], bool]:
    """Whether a planner keeps to the slots that all are given, by model and planner."""
    used = summarize(pick(records, figure="13b", metric="slots used"))
    return {_id(s): max(s.values) <= SLOTS for s in used}


def _id(summary: Summary) -> tuple[str, str]:
    return summary.first.model, summary.first.planner


def _fastest(records: Sequence[Record]) -> Iterator[str | None]:
    for mine, others in _predicted(records):
        if float(mine.first.setting["skew"]) > -0.5:
            continue
        ahead = [s for s in others if s.mean <= mine.mean]
        yield _against(mine, ahead) if ahead else None


def _never_loses(records: Sequence[Record]) -> Iterator[str | None]:
    for mine, others in _predicted(records):
        # Draw by draw: a mean could hide one that loses.
        plain = next(s for s in others if s.first.planner == "none")
        lost = [b - a for a, b in zip(plain.values, mine.values, strict=True) if b > a]
        yield f"{place(mine.first)}: {len(lost)} draws are slower, by up to {max(lost):.3g} ms" if lost else None


def _gains_in_models(records: Sequence[Record]) -> Iterator[str | None]:
    gains = pick(records, planner="topoep", metric="gain", kind="simulated")
    for summary in summarize(record for record in gains if record.figure in ("12", "B")):
        worst, draws = min(summary.values), len(summary.values)
        among = f", the worst of {draws} draws" if draws > 1 else ""
        where = f"figure {summary.first.figure}, {place(summary.first)}"
        yield f"{where}: {worst:.1f} %{among}" if worst < 0 else None


def _predicted(records: Sequence[Record]) -> Iterator[tuple[Summary, list[Summary]]]:
    """Predicted times of topoep, and of all planners of equal slots in the same setting."""
    found = summarize(pick(records, metric="predicted layer time", slots=float(SLOTS)))
    for mine in found:
        if mine.first.planner == "topoep":
            same = [s for s in found if s is not mine and _place(s) == _place(mine)]
            yield mine, same


def _place(summary: Summary) -> tuple[str, str, tuple]:
    first = summary.first
    return first.figure, first.model, tuple(sorted((k, str(v)) for k, v in first.setting.items()))


def _against(mine: Summary, ahead: Sequence[Summary]) -> str:
    names = ", ".join(f"{s.first.planner} {s.mean:.4g}" for s in ahead)
    return f"{place(mine.first)}: topoep {mine.mean:.4g} ms, but {names} ms"


def place(record: Record) -> str:
    """Model and setting, in words."""
    return ", ".join(
        [
            record.model,
            *(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in record.setting.items()
            ),
        ]
    )
