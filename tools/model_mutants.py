"""Makes one deliberate error in the models after the other, and shows that the parity tests notice: make mutants.

    python tools/model_mutants.py                 every mutant; writes results/full/model_mutants.json
    python tools/model_mutants.py --only TEXT     those whose names hold TEXT; the other rows of the JSON stay
    python tools/model_mutants.py --mutant NAME   the tests with this error; its status is theirs

The errors are those of tools/model_mutants.txt; no file changes, since they are made while a module is imported. The
tests are those of tests/models/parity_test.py, on the variants that a mutant names. Exits with an error where one of
these variants passes them all, or fails by an exception alone: an error that does not run says nothing of a test of
numbers.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TABLE = ROOT / "tools/model_mutants.txt"
RESULTS = ROOT / "results/full/model_mutants.json"
TESTS = ("test_logits", "test_experts", "test_loss", "test_gradients")
FAILED = 1


class Mutant(NamedTuple):
    """One error: in `file`, the lines `old`, which stand there once, become `new`."""

    name: str
    file: str
    variants: tuple[str, ...]
    old: str
    new: str

    def source(self) -> str:
        """The file with the error in it."""
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: {self.file} holds these lines {text.count(self.old)} times:\n{self.old}")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """The table."""
    mutants = []
    for block in re.split(r"^= ", TABLE.read_text(), flags=re.MULTILINE)[1:]:
        head, *lines = block.splitlines()
        name, file, variants = head.split(" | ")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line.startswith(sign)) for sign in "-+")
        mutants.append(Mutant(name, file, tuple(variants.split()), old, new))
    return mutants


class Mutation(importlib.machinery.SourceFileLoader):
    """Finds and loads the module with the error, neither from a cache nor into one."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.file.removesuffix(".py").replace("/", "."), str(ROOT / mutant.file))
        self.source = mutant.source()

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Finds the module, for `sys.meta_path`."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """The code of the wrong source."""
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Failures:
    """Plugin of pytest that notes which test failed, and by what."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, str]] = []

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo) -> None:
        """Called in fixtures as well."""
        self.noted.append((node.name, call.excinfo.typename))


def run_with(mutant: Mutant) -> int:
    """Status of the tests with the error; the last line it prints is what failed, as JSON."""
    sys.meta_path.insert(0, Mutation(mutant))
    failures = Failures()
    status = run_tests(mutant.variants, failures)
    print(json.dumps(failures.noted))
    return status


def run_tests(variants: tuple[str, ...], *plugins: object) -> int:
    """Status of the tests on these variants."""
    names = [f"tests/models/parity_test.py::{test}[{variant}]" for variant in variants for test in TESTS]
    return int(
        pytest.main(["-q", "-p", "no:cacheprovider", "--tb=line", "-m", "full or not full", *names], plugins=plugins)
    )


def describe(mutant: Mutant) -> dict:
    """Which tests notice it; the row of the JSON."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "--mutant", mutant.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    text = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    if done.returncode not in (0, FAILED):
        raise SystemExit(f"{mutant.name} ended with status {done.returncode}:\n{text}")
    failed = json.loads(done.stdout.splitlines()[-1])
    if any(error != "AssertionError" for _, error in failed):
        raise SystemExit(f"{mutant.name} fails otherwise than by its numbers:\n{text}")
    noticed = [test for test, _ in failed]
    return {"mutant": mutant.name, "noticed_by": noticed, "seconds": round(time.monotonic() - begin, 1)}


def read_rows() -> list[dict]:
    """The rows of the JSON, none where it is not there."""
    return json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else []


def is_killed(mutant: Mutant, row: dict) -> bool:
    """Whether a test on each of its variants notices it."""
    return all(any(f"[{variant}]" in test for test in row["noticed_by"]) for variant in mutant.variants)


def main() -> None:
    """Runs what the command line asks for."""
    mutants = read_mutants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutant", choices=[mutant.name for mutant in mutants])
    parser.add_argument("--only", default="", metavar="TEXT")
    arguments = parser.parse_args()
    if arguments.mutant:
        raise SystemExit(run_with(next(mutant for mutant in mutants if mutant.name == arguments.mutant)))
    chosen = [mutant for mutant in mutants if arguments.only in mutant.name]
    for mutant in chosen:
        mutant.source()
    if run_tests(tuple(dict.fromkeys(name for mutant in chosen for name in mutant.variants))):
        raise SystemExit("the tests fail without any error")
    rows = {row["mutant"]: row for row in read_rows()}
    survivors = []
    for mutant in chosen:
        rows[mutant.name] = row = describe(mutant)
        survivors += [] if is_killed(mutant, row) else [mutant.name]
        print(f"{mutant.name:44} {', '.join(row['noticed_by']) or 'SURVIVED'}", flush=True)
        in_order = [rows[mutant.name] for mutant in mutants if mutant.name in rows]
        RESULTS.write_text(json.dumps({"mutants": in_order}, indent=2) + "\n")
    if survivors:
        raise SystemExit(f"not every variant notices: {'; '.join(survivors)}")


if __name__ == "__main__":
    main()
