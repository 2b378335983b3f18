"""tools/gpu_check.sh without a GPU: its runner tells passes, failures and skips apart, and a planted fault fails it."""

import importlib
import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tools.gpu_check
from tools.gpu_check import __main__ as command
from tools.gpu_check import sanitizers, transfers
from tools.gpu_check.runner import (
    FAILED,
    NEEDS_GPU,
    PASSED,
    ROOT,
    SKIPPED,
    Check,
    Condition,
    Setting,
    run_checks,
)

# The interpreter of the tests: another one's JAX may not know the flags that they set for XLA.
SCRIPT = ["env", f"PYTHON={sys.executable}", ROOT / "tools/gpu_check.sh"]


def run(folder: Path, *names: str, limit_s: int = 60, budget_s: float = 60) -> dict[str, tuple[str, str]]:
    checks = [Check(name, f"tests.support.small_checks:{name}", limit_s) for name in names]
    results = run_checks(checks, Setting(folder, True, ""), time.monotonic() + budget_s, lambda result: None)
    return {result.name: (result.status, result.reason) for result in results}


def test_a_check_passes_fails_or_is_skipped_with_the_reason(tmp_path):
    results = run(tmp_path, "passes", "fails", "is_left_out", "is_left_out_in_vain", "dies")
    assert results["passes"] == (PASSED, "")
    assert results["fails"] == (FAILED, "status 1: RuntimeError: as it should")
    assert results["is_left_out"] == (SKIPPED, "nothing to see")
    said = "RuntimeError: skips itself for a reason that is not so: this is no dry run"
    assert results["is_left_out_in_vain"] == (FAILED, f"status 1: {said}")
    assert results["dies"][0] == FAILED


def test_a_dry_run_leaves_out_what_is_only_on_a_gpu(tmp_path):
    """The memory of a GPU, ranks on one, and its kernels while they run; a CPU makes all other checks."""
    checks = [check for check in command.CHECKS if check.needs_gpu]
    assert {check.name for check in checks} == {"copies", "transfers", "memcheck", "racecheck", "synccheck"}
    results = run_checks(checks, Setting(tmp_path, True, ""), time.monotonic() + 60, lambda result: None)
    assert {(result.status, result.reason) for result in results} == {(SKIPPED, NEEDS_GPU)}


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_every_reason_to_skip_is_true_where_it_is_given_alone(tmp_path, monkeypatch):
    modules = [
        importlib.import_module(f"tools.gpu_check.{m.name}") for m in pkgutil.iter_modules(tools.gpu_check.__path__)
    ]
    reasons = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, Condition)
    }
    assert list(reasons.values()) == [sanitizers.NO_SANITIZER, transfers.NO_RANKS], "test a new one below"
    setting = Setting(tmp_path, False, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert sanitizers.NO_SANITIZER.holds(setting)
    program(tmp_path / "compute-sanitizer", "")
    assert not sanitizers.NO_SANITIZER.holds(setting)
    program(tmp_path / "ranks_on_one_gpu", """echo '{"ok": false, "reason": "no NCCL"}'""")
    assert transfers.NO_RANKS.holds(setting)
    program(tmp_path / "ranks_on_one_gpu", """echo '{"ok": true}'""")
    assert not transfers.NO_RANKS.holds(setting)


def test_a_check_that_hangs_fails_unless_the_budget_ended(tmp_path):
    assert run(tmp_path, "hangs", limit_s=1)["hangs"] == (FAILED, "did not end in 1 s")
    results = run(tmp_path, "hangs", "passes", budget_s=1.5)
    assert results["hangs"][0] == SKIPPED and "the budget ended" in results["hangs"][1]
    assert results["passes"] == (SKIPPED, "the budget had ended")


def test_every_check_exists():
    assert len({check.name for check in command.CHECKS}) == len(command.CHECKS)
    for check in command.CHECKS:
        module, function = check.entry.split(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(setting: Setting)" in text


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    done = subprocess.run([*SCRIPT, "--folder", tmp_path], capture_output=True, text=True)
    if "no GPU here" not in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2


# CI makes a whole dry run, and plants faults of other checks.
@pytest.mark.full  # CI runs the command itself
@pytest.mark.parametrize(("plant", "products"), [("", []), ("programs", []), ("", ["gemms"])])
def test_a_dry_run_passes_and_a_planted_fault_fails_it(tmp_path, plant, products):
    arguments = ["--dry-run", "--folder", tmp_path, "--only", "extension", "programs", *products]
    done = subprocess.run(
        [*SCRIPT, *arguments, *(["--plant", plant] if plant else [])],
        capture_output=True,
        text=True,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert report["label"] == "dry-run"
    assert statuses == {"extension": PASSED, "programs": FAILED} if plant else set(statuses.values()) == {PASSED}
    assert done.returncode == (1 if plant else 0), done.stdout + done.stderr
