"""The planner is written twice, in NumPy to be read and in C++ to be run: file by file, name by name, number by number.

Needs no compiler: it reads the texts.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import topoep_jax

ROOT = Path(topoep_jax.__file__).parent.parent
NUMPY, CPP = ROOT / "topoep_jax" / "plan", ROOT / "xla_ffi" / "plan"
PAIRS = [
    *("problem", "cost", "links", "pulls", "paper", "finish"),
    *(
        f"topoep/{stage}"
        for stage in (
            *("effort", "context", "state", "select", "fill_case", "fill", "apportion", "split", "spread", "greedy"),
            *("measure", "improve", "refine", "candidate", "search"),
        )
    ),
]
EACH = pytest.mark.parametrize("pair", PAIRS)

ONLY_NUMPY = {
    "problem": {"Draft", "none"},  # C++ works on slots from the start
    "cost": {"terms_ps", "moved_bytes", "picoseconds", "split_picoseconds"},  # of reports, and of the two words
    "links": {"busiest_direction", "everything", "moved_ps"},  # Links::BusiestPs() and TotalPs()
    "pulls": {"Copies", "schedule", "moved_bytes", "replicas", "price", "eq8", "check"},  # C++ lists no copies
    "paper": {"draft_and_moves"},
    "finish": {"worth_of", "aligned_rows", "is_bad", "fill_slots", "draft_of"},  # counted as the plan is made
    "topoep/effort": {"candidates", "served_experts"},  # C++ is told what to try
    "topoep/state": {"Taker"},
    "topoep/fill_case": {"Item"},
    "topoep/apportion": {"overlap"},
    "topoep/search": {"topoep"},  # Begin(), RunEntry() and Conclude() of solve.h
}
"""Public classes and functions without a counterpart."""
ONLY_FIELDS_OF_NUMPY = {
    "Context": {"members", "main_rank"},  # Domains, and a division
    "Effort": {"greedy_spread", "empty_spread"},
    "Problem": {"topology"},
}
ONLY_NUMBERS_OF_NUMPY = {"NOWHERE"}
ONLY_NUMBERS_OF_CPP = {"kNoCap", "kNotAPair", "kPhases"}


def module(pair: str):
    return importlib.import_module(f"topoep_jax.plan.{pair.replace('/', '.')}")


def header(pair: str) -> str:
    return (CPP / f"{pair}.h").read_text()


def camel(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.lower().split("_"))


def own_names(pair: str) -> list[str]:
    """Public classes and functions of a file."""
    tree = ast.parse((NUMPY / f"{pair}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name[0] != "_"]


def numbers_of_numpy(pair: str) -> dict[str, int]:
    """Public integers that a file writes down."""
    text = (NUMPY / f"{pair}.py").read_text()
    names = re.findall(r"^([A-Z][A-Z_]*) = ", text, re.M)
    values = {name: getattr(module(pair), name) for name in names}
    return {
        name: value for name, value in values.items() if isinstance(value, int) and name not in ONLY_NUMBERS_OF_NUMPY
    }


def numbers_of_cpp(text: str) -> dict[str, str]:
    """The expression of each constant that a header writes down at the top level."""
    return dict(re.findall(r"^inline constexpr int(?:32|64)_t (k\w+) = ([^;]+);", text, re.M))


def value_of(name: str, known: dict[str, str]) -> int:
    """The value of a constant of the headers."""
    text = re.sub(r"int64_t\{(\d+)\}", r"\1", known[name].replace("'", ""))
    text = re.sub(r"k[A-Z]\w*", lambda match: f"({value_of(match[0], known)})", text)
    assert re.fullmatch(r"[\d\s()*+<-]+", text), f"{name} = {text}: too much for this test"
    return eval(text)  # noqa: S307 - digits and signs only


@pytest.fixture(scope="module")
def every_number_of_cpp() -> dict[str, str]:
    return {k: v for path in CPP.rglob("*.h") for k, v in numbers_of_cpp(path.read_text()).items()}


def test_both_folders_hold_the_same_stages() -> None:
    stages = {pair.removeprefix("topoep/") for pair in PAIRS if "/" in pair}
    counts = {"depth"}  # the steps of the C++, on either side
    assert {path.stem for path in (NUMPY / "topoep").glob("*.py")} - counts == stages | {"__init__"}
    assert {path.stem for path in (CPP / "topoep").glob("*.h")} - counts == stages
    same = {path.stem for path in NUMPY.glob("*.py")} & {path.stem for path in CPP.glob("*.h")}
    assert same == {pair for pair in PAIRS if "/" not in pair}, "files of one name are partners"


@EACH
def test_first_lines_name_the_partner(pair: str) -> None:
    assert f"xla_ffi/plan/{pair}.h is the same in C++" in (NUMPY / f"{pair}.py").read_text().splitlines()[0]
    assert f"topoep_jax/plan/{pair}.py is the same" in header(pair).splitlines()[0]


@EACH
def test_every_name_has_its_counterpart(pair: str) -> None:
    text = header(pair)
    names = own_names(pair)
    missing = {name for name in names if not re.search(rf"\b(?:struct|class) {name}\b|\b{camel(name)}\(", text)}
    assert missing == ONLY_NUMPY.get(pair, set())


def own_fields(cls: ast.ClassDef) -> set[str]:
    """Public fields that a class declares or sets in its `__init__`."""
    fields = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            targets = [
                node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            ]
            fields |= {target.attr for target in targets}
    return fields


@EACH
def test_every_field_has_its_counterpart(pair: str) -> None:
    text = header(pair)
    for cls in ast.parse((NUMPY / f"{pair}.py").read_text()).body:
        if isinstance(cls, ast.ClassDef) and cls.name[0] != "_" and cls.name not in ONLY_NUMPY.get(pair, set()):
            fields = own_fields(cls)
            missing = {field for field in fields if not re.search(rf"\b{field}_?\b|\b{camel(field)}\b", text)}
            assert missing == ONLY_FIELDS_OF_NUMPY.get(cls.name, set()), cls.name


@EACH
def test_numbers_are_equal(pair: str, every_number_of_cpp: dict[str, str]) -> None:
    for name, value in numbers_of_numpy(pair).items():
        assert f"k{camel(name)}" in every_number_of_cpp, f"{name} of {pair}.py is written into the C++ without a name"
        assert value_of(f"k{camel(name)}", every_number_of_cpp) == value, name


@EACH
def test_numbers_of_headers_have_names_in_numpy(pair: str) -> None:
    known = {f"k{camel(name)}" for other in (*PAIRS, "hardware") for name in numbers_of_numpy(other)}
    assert set(numbers_of_cpp(header(pair))) <= known | ONLY_NUMBERS_OF_CPP
