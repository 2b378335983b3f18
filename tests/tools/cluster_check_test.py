"""tools/cluster_check.sh on emulated devices: two processes, lax collectives, and a planted fault that they find."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tools.cluster_check import __main__ as command
from tools.cluster_check.transfers import random_placement
from tools.gpu_check.runner import FAILED, PASSED, ROOT


def test_every_check_exists():
    for check in command.CHECKS:
        module, function = check.entry.split(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(setting: Setting)" in text


def test_placements_are_legal():
    for seed in range(20):
        plan = random_placement(np.random.default_rng(seed), 8, 4, 3)
        for rank, experts in enumerate(plan.tolist()):
            held = [expert for expert in experts if expert >= 0]
            assert experts == sorted(set(held)) + [-1] * (3 - len(held))
            assert all(expert // 4 != rank and expert < 32 for expert in held)


# CI makes a whole dry run.
@pytest.mark.full  # CI runs the command itself
@pytest.mark.parametrize("plant", ["", "exact"])
def test_two_processes_compare_transfers(tmp_path, plant):
    arguments = ["--dry-run", "--folder", tmp_path, "--only", "exact", *(["--plant", plant] if plant else [])]
    done = subprocess.run([sys.executable, "-m", "tools.cluster_check", *arguments], cwd=ROOT, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["label"] == "dry-run"
    [check] = report["checks"]
    assert check["status"] == (FAILED if plant else PASSED), check
    assert done.returncode == (1 if plant else 0)
    if not plant:
        assert check["details"] == {"kind": "xla", "modes": ["direct"], "plans": 12}


def test_nodes_need_a_coordinator():
    command_line = [sys.executable, "-m", "tools.cluster_check", "--nodes", "4"]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--coordinator" in done.stderr
