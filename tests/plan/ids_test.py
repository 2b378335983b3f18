"""Python and C++ call a thing by the same number; the headers are parsed, so that this needs no extension."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from topoep_jax._native_ids import OBJECTIVE_IDS, PLANNER_IDS, PULL_IDS
from topoep_jax.plan.topoep import Candidate, Kind
from topoep_jax.plan.types import Status

HEADERS = Path(__file__).resolve().parent.parent.parent / "xla_ffi/plan"


def snake_case(name: str) -> str:
    """`topoep_paper` for `TopoepPaper`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def enum_of(header: str, name: str) -> dict[str, int]:
    """Each name of an enum and its number."""
    text = (HEADERS / header).read_text()
    body = re.search(rf"enum (?:class )?{name} : \w+ {{(.*?)}};", text, re.DOTALL)
    assert body, f"{header} has no enum {name}"
    return {snake_case(key): int(value) for key, value in re.findall(r"k(\w+) = (\d+)", body[1])}


@pytest.mark.parametrize(
    ("header", "name", "ids"),
    [
        ("problem.h", "Planner", PLANNER_IDS),
        ("problem.h", "Objective", OBJECTIVE_IDS),
        ("problem.h", "Pulls", PULL_IDS),
        ("problem.h", "Status", Status.__members__),
        ("topoep/effort.h", "Kind", Kind.__members__),
    ],
)
def test_an_enum_has_the_same_numbers_in_both_languages(header: str, name: str, ids: Mapping[str, int]):
    assert enum_of(header, name) == {key.lower(): int(value) for key, value in ids.items()}


def test_a_candidate_has_the_same_fields_in_the_same_order_in_both_languages():
    body = re.search(r"struct Candidate {(.*?)};", (HEADERS / "topoep/effort.h").read_text(), re.DOTALL)
    assert body
    assert re.findall(r"int64_t (\w+);", body[1]) == [field.name for field in dataclasses.fields(Candidate)]
