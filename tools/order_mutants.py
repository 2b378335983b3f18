"""Leaves out one stage of the pipeline after the other, and shows that the tests of GPU programs notice: make mutants.

    python tools/order_mutants.py                 every stage; writes results/full/order_mutants.json
    python tools/order_mutants.py --stage NAME    the tests without this stage; its status is theirs

A stage is a call of `topoep_jax.pipeline.order.stage`; without it, its operands go through unchanged. The tests are
those of tests/aot/pipeline_test.py for one layer of Qwen3-30B-A3B, by both exchanges: which collective runs under which
product, and how much memory the layer takes. Exits with an error where a stage is left out and they pass: then it
should not be there.
"""

import argparse
import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PASSES = ("forward", "backward")
RESULTS = ROOT / "results/full/order_mutants.json"
TESTS = ("test_every_large_collective_runs_under_a_gemm", "test_a_layer_fits")
LAYERS = ("qwen3-30b-a3b-1-direct", "qwen3-30b-a3b-1-auto")
FAILED = 1


def find_stages() -> list[str]:
    """Finds the stages as pass.name, in the order of the sources."""
    stages = []
    for source in PASSES:
        for node in ast.walk(ast.parse((ROOT / f"topoep_jax/pipeline/{source}.py").read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "stage":
                stages.append((PASSES.index(source), node.lineno, f"{source}.{ast.literal_eval(node.args[0])}"))
    return [name for *_, name in sorted(stages)]


class Without:
    """Plugin of pytest that leaves out one stage, once the tests' own settings are made."""

    def __init__(self, stage: str) -> None:
        self.source, _, self.name = stage.partition(".")

    def pytest_collection_finish(self) -> None:
        """Where the pipeline may be imported: what the tests set before is read once."""
        from topoep_jax.pipeline import backward, forward, order

        module = {"forward": forward, "backward": backward}[self.source]
        module.stage = lambda name, *values: values if name == self.name else order.stage(name, *values)


def run_without(stage: str) -> int:
    """Status of the tests on programs that lack one stage."""
    names = [f"tests/aot/pipeline_test.py::{test}[{layer}]" for test in TESTS for layer in LAYERS]
    options = ["-q", "--require-cuda", "-m", "", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *names], plugins=[Without(stage)]))


def describe(stage: str) -> dict[str, object]:
    """Which tests notice that a stage is gone; the row of the JSON."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, __file__, "--stage", stage], capture_output=True, text=True, cwd=ROOT)
    noticed = [test for test in TESTS if f"FAILED tests/aot/pipeline_test.py::{test}" in done.stdout]
    if done.returncode != (FAILED if noticed else 0):
        raise SystemExit(f"{stage} ended with status {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {"stage": stage, "noticed_by": noticed, "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=find_stages())
    arguments = parser.parse_args()
    if arguments.stage:
        raise SystemExit(run_without(arguments.stage))
    import jax

    rows = []
    for stage in find_stages():
        rows.append(describe(stage))
        print(f"{stage:24} {', '.join(rows[-1]['noticed_by']) or 'SURVIVED'}", flush=True)
    RESULTS.write_text(json.dumps({"jax": jax.__version__, "stages": rows}, indent=2) + "\n")
    survivors = [row["stage"] for row in rows if not row["noticed_by"]]
    if survivors:
        raise SystemExit(f"nothing notices that these are gone: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
