"""`topoep explain`: the numbers in the story are those of the plan; a small plan is told as a person would."""

import re

import numpy as np
import pytest

from tests.cli_plan_test import error, run
from topoep_jax.plan.reference import PLANNERS

FIGURE_9 = np.zeros((4, 8), np.int32)
FIGURE_9[[0, 0, 0, 1, 1, 2, 3], [0, 1, 4, 2, 3, 5, 6]] = [3000, 3000, 8000, 3000, 3000, 10000, 10000]


@pytest.fixture
def figure_9(tmp_path):
    """The paper's example, a thousandfold: rank 0 sends 8,000 rows to expert 4 of the other domain."""
    np.save(tmp_path / "figure9.npy", FIGURE_9)
    trace = f"--trace={tmp_path / 'figure9.npy'}"
    return ("explain", trace, "--domains=2", "--hidden=64", "--ffn=64", "--slots=1", "--planner=topoep_paper")


def test_figure_9(capsys, figure_9):
    out = run(capsys, *figure_9)
    assert out.startswith(
        "figure9, sample 0, planner topoep_paper\n8 experts on 4 ranks in 2 domains, 1 slots per rank;"
        " 10,000 rows per rank, from figure9.npy\n2 copies; busiest rank 1.80 -> 1.00 x mean load, rows between domains"
        " 20.0% -> 0.0%, predicted layer time"
    )
    assert "Domain 0 (ranks 0-1) executes 12,000 rows without copies and 20,000 with them; 2 are made in it" in out
    assert "Domain 1 (ranks 2-3) executes 28,000 rows without copies and 20,000 with them; 0 are made in it" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"4 +2 \(domain 1\)", line)]
    # 4,000 rows of 128 bytes stay at home, both ways; without one copy rank 2 would run 4,000 rows more.
    tail = ["8,000", "4,000", "1.0", "1.80", "->", "1.00", "1.40", "traffic", "+", "load"]
    assert rows == [["4", "2", "(domain", "1)", rank, *tail] for rank in "01"]
    load = [line for line in out.splitlines() if re.match(r"d?\d? +\d  [#|]", line)]
    assert [re.findall(r"\d\.\d\d", line) for line in load] == [
        ["0.60", "1.00"],
        ["0.60", "1.00"],
        ["1.80", "1.00"],
        ["1.00", "1.00"],
    ]


def test_every_copy_is_told(capsys):
    out = run(capsys, "explain", "--model=deepseek-v2", "--tokens=1024", "--skew=-2", "--planner=topoep_paper")
    copies = int(re.search(r"(\d+) copies;", out)[1])
    assert copies > 10
    assert len(re.findall(r"(?:traffic|load|neither)$", out, re.M)) == copies
    assert sum(int(n) for n in re.findall(r"(\d+) are made in it", out)) == copies
    assert len(re.findall(r"[#|][# |]* \d\.\d\d  ", out)) == 16


def test_nothing_copied(capsys):
    out = run(capsys, "explain", "--model=qwen3-30b-a3b", "--tokens=64", "--planner=none", "--cap_factor=1.05")
    assert "nothing is copied" in out
    assert "aligned rows on a rank: NOT met" in out


def test_one_domain(capsys, figure_9):
    out = run(capsys, *figure_9, "--domains=1")
    assert "busiest NICs" not in out


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner(capsys, figure_9, planner):
    assert f"planner {planner}\n" in run(capsys, *figure_9, f"--planner={planner}")


def test_picture(capsys, figure_9, tmp_path):
    pytest.importorskip("matplotlib")
    for planner in ("topoep_paper", "none"):
        path = tmp_path / f"{planner}.png"
        assert f"drawn to {path}" in run(capsys, *figure_9, f"--planner={planner}", f"--png={path}")
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--planner=none,topoep_paper",), "--planner=none,topoep_paper is unknown: take one of"),
        (("--seed=1",), "--seed=1, but"),
        (("--seed=-1",), "--seed=-1"),
        (("--png=plan.pdf",), "--png=plan.pdf must end in .png"),
        (("--png=nowhere/plan.png",), "--png=nowhere/plan.png: there is no folder nowhere"),
        (("--skew=-1",), "belongs to synthetic demand"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags(capsys, figure_9, arguments, message):
    assert message in error(capsys, *figure_9, *arguments)


def test_one_plan_at_a_time(capsys):
    assert "one plan is explained at a time" in error(capsys, "explain", "--model=e640", "--skew=-1,-2")
