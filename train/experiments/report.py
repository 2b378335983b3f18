"""The static report: one page without scripts or network, and the pictures beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context

from topoep_jax.cli.output import plural
from topoep_jax.simulate.fit import CANNOT_EXPLAIN
from train.experiments import page, style
from train.experiments.checks import Outcome
from train.experiments.figure import Figure
from train.experiments.figures import CANNOT, DRAWINGS, FIGURES
from train.experiments.record import Record
from train.experiments.settings import Settings
from train.experiments.tables import compared, everything

_KINDS = (
    ("measured", "found by running it here: a property of plans on forced routing, or a time on this machine's CPU"),
    ("simulated", "<b>modelled</b>, never measured: times, bytes or steps that a model or a formula gives"),
    ("compiled", "read off a program that was compiled ahead of time for GPUs and did not run"),
    ("paper", "printed in arXiv 2609.35481. C: unambiguous; I: one reading survives; A: whose it is is a guess"),
)


def draw(out: Path, figure: Figure, records: Sequence[Record]) -> None:
    """Writes the picture of a figure."""
    with rc_context(style.RC):
        figure.draw(records).savefig(out / "figures" / f"{figure.name}.png", dpi=100)


def write(out: Path, settings: Settings, found: Mapping[str, Sequence[Record]], outcomes: Sequence[Outcome]) -> Path:
    """Writes `index.html` of the figures that were drawn; returns its path."""
    parts = [
        page.heading(1, "The paper's experiments, side by side"),
        page.paragraph(
            "TopoEP (arXiv 2609.35481) on 32 H800, and what this library gives in the same settings. "
            + ("The full set. " if settings.full else "The quick set: fewer draws than <code>--full</code>. ")
            + f"Forced routing, {plural(len(settings.draws), 'draw')} of each of the paper's models,"
            f" {plural(len(settings.few_draws), 'draw')} of wide layers. In tables, ± is the standard deviation over"
            " draws; numbers that were made from several have none."
        ),
        page.table(["kind", "a number of this kind was"], [list(kind) for kind in _KINDS]),
        page.heading(2, "Contents"),
        _contents(found),
        page.heading(2, "Acceptance"),
        _acceptance(outcomes),
        *(_section(number, found[number]) for number in FIGURES if number in found),
        page.heading(2, "What cannot be reproduced here", "cannot"),
        page.listing([page.prose(text) for text in CANNOT]),
        page.heading(2, "What the model of the paper's cluster cannot explain", "limits"),
        page.listing([page.prose(text) for text in CANNOT_EXPLAIN]),
    ]
    path = out / "index.html"
    path.write_text(page.document("The paper's experiments", parts))
    return path


def _contents(found: Mapping[str, Sequence[Record]]) -> str:
    """Every figure of the paper by its number, ours beyond it, and where each is."""
    rows: dict[str, list[str]] = {}
    for number, figure in FIGURES.items():
        here = page.link(f"#{figure.name}", figure.label) if number in found else figure.label
        kinds = ", ".join(sorted({record.kind for record in found.get(number, ())} - {"paper"}))
        rows[number] = [here, page.escape(figure.title), kinds if number in found else "not run this time"]
    for number, what in DRAWINGS.items():
        rows[number] = [number if number.startswith("T") else f"Figure {number}", page.prose(what), "no numbers"]
    ordered = sorted(rows, key=_order)
    return page.table(["", "what", "kind of its numbers"], [rows[number] for number in ordered])


def _order(number: str) -> tuple[int, int, str]:
    digits = "".join(letter for letter in number if letter.isdecimal())
    kind = 0 if number[0].isdecimal() else 1 if number.startswith("Table") else 2
    return kind, int(digits or 0), number


def _acceptance(outcomes: Sequence[Outcome]) -> str:
    rows = [
        [
            f"<b>{outcome.verdict}</b>",
            page.escape(outcome.title),
            str(outcome.points),
            page.listing([page.prose(failure) for failure in outcome.failures]) if outcome.failures else "",
        ]
        for outcome in outcomes
    ]
    return page.table(["", "what must hold", "points", "points that do not, and why"], rows)


def _section(number: str, records: Sequence[Record]) -> str:
    figure = FIGURES[number]
    notes = [f"<b>What differs.</b> {page.prose(figure.differs)}", f"<b>Needs</b> {page.prose(figure.needs)}."]
    if figure.modelled:
        notes.append(
            "<b>Modelled.</b> Differences under 3 % mean nothing, 3 to 7 % only where all constants agree in sign; see "
            + page.link("#limits", "what the model cannot explain")
            + "."
        )
    return "\n".join(
        [
            page.heading(2, f"{figure.label}: {figure.title}", figure.name),
            page.picture(f"figures/{figure.name}.png", f"{figure.label}: {figure.title}"),
            *(page.paragraph(note) for note in notes),
            compared(records),
            page.details("All numbers of this figure", everything(records)),
        ]
    )
