"""One number of an experiment, where it comes from, and the JSON that holds all of them."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from topoep_jax.simulate.published import Value

Kind = Literal["measured", "simulated", "compiled", "paper"]
"""measured: by running it here; simulated: by a model of time, bytes or steps; compiled: read off a compiled program;
paper: printed there."""
TIME_UNITS = ("us", "ms", "s", "tokens/s", "% of the time")


@dataclasses.dataclass(frozen=True)
class Record:
    """One number.

    Attributes:
      figure: its number in the paper, or a letter beyond it.
      model: key of `SHAPES`, or what else was run.
      planner: this library's name, "" where there is none.
      setting: whatever else was chosen, by name.
      metric: what was found.
      value: how much.
      unit: of the value; "" for a ratio.
      kind: where it comes from.
      seed: of the draw; None where there is none, or where the value is over several.
      mark: of a value of the paper (`simulate.published`): C, I or A.
    """

    figure: str
    model: str
    planner: str
    setting: Mapping[str, str | float]
    metric: str
    value: float
    unit: str
    kind: Kind
    seed: int | None = None
    mark: str = ""

    @property
    def timed(self) -> bool:
        """Whether a clock was read: such values differ from run to run, all others do not."""
        return self.kind == "measured" and self.unit in TIME_UNITS

    def key(self) -> tuple[Any, ...]:
        """Everything but the value, in an order that does not depend on who made the record first."""
        setting = tuple(sorted((name, str(value)) for name, value in self.setting.items()))
        seed = -1 if self.seed is None else self.seed
        return (self.figure, self.model, self.planner, setting, self.metric, self.unit, self.kind, seed)


def of_paper(
    figure: str,
    values: Mapping[str, Value],
    *,
    model: str,
    metric: str,
    unit: str = "",
    factor: float = 1.0,
    **setting: str | float,
) -> list[Record]:
    """Records of printed values, by planner; `factor` turns the printed unit into ours."""
    return [
        Record(figure, model, planner, setting, metric, factor * value.number, unit, "paper", mark=value.mark)
        for planner, value in values.items()
    ]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Records that differ in their seeds alone.

    Attributes:
      first: one of them.
      values: of all, by ascending seed.
      paper: the printed value that belongs to them.
    """

    first: Record
    values: Sequence[float]
    paper: Record | None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds, of a sample; None of one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def summarize(records: Iterable[Record]) -> list[Summary]:
    """Everything that is not the paper's, seeds put together, in the order of first appearance."""
    ours: list[Record] = []
    printed: list[Record] = []
    for record in records:
        (printed if record.kind == "paper" else ours).append(record)
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in ours:
        groups.setdefault(record.key()[:-1], []).append(record)
    found = []
    for group in groups.values():
        group.sort(key=lambda record: record.key())
        found.append(Summary(group[0], [record.value for record in group], _printed_for(group[0], printed)))
    return found


def _printed_for(record: Record, printed: Iterable[Record]) -> Record | None:
    """The paper's value with the same names, whose settings are among the record's."""
    for paper in printed:
        same = all(getattr(paper, name) == getattr(record, name) for name in ("figure", "model", "planner", "metric"))
        if same and paper.setting.items() <= record.setting.items():
            return paper
    return None


def pick(records: Iterable[Record], **wanted: Any) -> Iterator[Record]:
    """Records with these fields; names that are no field are looked up in the setting."""
    for record in records:
        own = {**record.setting, **{field.name: getattr(record, field.name) for field in dataclasses.fields(Record)}}
        if all(own.get(name) == value for name, value in wanted.items()):
            yield record


def mean_of(records: Iterable[Record], **wanted: Any) -> float:
    """The mean over those that `pick` finds.

    Raises:
      ValueError: there are none.
    """
    values = [record.value for record in pick(records, **wanted)]
    if not values:
        raise ValueError(f"no record has {wanted}: run the figure again")
    return statistics.mean(values)


def to_json(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Sorted, so that equal records are equal files."""
    return [dataclasses.asdict(record) for record in sorted(records, key=lambda record: record.key())]


def from_json(text: str) -> list[Record]:
    """The inverse of `to_json` and `json.dumps`."""
    return [Record(**fields) for fields in json.loads(text)]
