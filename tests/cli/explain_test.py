"""`topoep explain`: the numbers in the story are those of the plan; a small plan is told as a person would."""

import dataclasses
import re

import numpy as np
import pytest

from tests.cli.plan_test import error, run
from tests.support.cases import named
from tests.support.generator import small_demand
from topoep_jax.cli.copies import Copy, copies_of
from topoep_jax.plan.cost import OBJECTIVES
from topoep_jax.plan.evaluate import evaluate
from topoep_jax.plan.problem import none
from topoep_jax.plan.reference import PLANNERS

FIGURE_9 = np.zeros((4, 8), np.int32)
FIGURE_9[[0, 0, 0, 1, 1, 2, 3], [0, 1, 4, 2, 3, 5, 6]] = [3000, 3000, 8000, 3000, 3000, 10000, 10000]

COPY = Copy(0, 0, 1, demand=1, rows=1, saved_bytes=0, crosses=False, owner_load=(1.0, 1.0), grown_ps={})


@pytest.fixture
def figure_9(tmp_path):
    """The paper's example, a thousandfold: rank 0 sends 8,000 rows to expert 4 of the other domain."""
    np.save(tmp_path / "figure9.npy", FIGURE_9)
    trace = f"--trace={tmp_path / 'figure9.npy'}"
    return ("explain", trace, "--domains=2", "--hidden=64", "--ffn=64", "--num_slots=1", "--planner=topoep_paper")


def test_figure_9(capsys, figure_9):
    out = run(capsys, *figure_9)
    assert out.startswith(
        "figure9.npy, sample 0, planner topoep_paper\n8 experts on 4 ranks in 2 domains, 1 slot per rank;"
        " 10,000 rows per rank, from figure9.npy\n2 copies; busiest rank 1.80 -> 1.00 x mean load, rows between domains"
        " 20.0% -> 0.0%, predicted layer time"
    )
    assert "Domain 0 (ranks 0-1) executes 12,000 rows without copies and 20,000 with them; 2 copies come into it" in out
    assert "Domain 1 (ranks 2-3) executes 28,000 rows without copies and 20,000 with them; 0 copies come into it" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"4 +2 \(domain 1\)", line)]
    # 4,000 rows of 128 bytes stay at home, both ways. Without one copy rank 2 runs 4,000 rows more (18 x 64 x 64 flop
    # each, at 400 TFLOP/s), and they cross both ways at 50 GB/s, in place of one pull of two (24,576 bytes).
    # All come from rank 0, so that rank 1 needs them no longer through NVLink at 200 GB/s.
    without_ps = 4000 * 184 + (4000 * 256 - 24576) * 20
    for row, ps in zip(rows, (without_ps, without_ps - 4000 * 256 * 5), strict=True):
        assert row[5:11] == ["8,000", "4,000", "1.0", "1.80", "->", "1.00"]
        assert row[11:] == [f"{ps / 1e9:+.5f}", "rows", "between", "domains"]
    assert [row[:5] for row in rows] == [["4", "2", "(domain", "1)", rank] for rank in "01"]
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
    assert (
        len(re.findall(r"[+-]?\d\S*  +(?:expert compute|(?:rows|pulls) .*|no effect|better without)$", out, re.M))
        == copies
    )
    assert sum(int(n) for n in re.findall(r"(\d+) cop(?:y comes|ies come) into it", out)) == copies
    assert len(re.findall(r"[#|][# |]* \d\.\d\d  ", out)) == 16


def test_nothing_copied(capsys):
    out = run(capsys, "explain", "--model=qwen3-30b-a3b", "--tokens=64", "--planner=none", "--cap_factor=1.05")
    assert "planner none copies nothing: no copy was looked for" in out
    assert "domain wants" not in out
    assert "aligned rows on a rank: NOT met" in out


@pytest.mark.parametrize("pulls", ["direct", "relayed", "striped", "best"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_time_without_a_copy(objective, pulls):
    case = named("two_by_two")
    problem = case.problem(objective=objective)
    problem = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, pulls=pulls))
    omega = small_demand(case, "skewed").astype(np.int64)
    before, draft = none(omega, problem), PLANNERS["topoep_paper"](omega, problem)
    plan = evaluate(draft, omega, problem)
    copies = [c for group in copies_of(plan, evaluate(before, omega, problem), omega, problem).values() for c in group]
    assert len(copies) == plan.num_replicas > 0
    for copy in copies:
        rest = dataclasses.replace(draft, holds=draft.holds.copy(), quota=draft.quota.copy())
        rest.holds[copy.holder, copy.expert] = False
        rest.quota[copy.expert, copy.owner] += rest.quota[copy.expert, copy.holder]
        rest.quota[copy.expert, copy.holder] = 0
        without = evaluate(rest, omega, problem)
        expected = {"bottleneck": without.objective_ps - plan.objective_ps, "eq8": without.eq8_ps - plan.eq8_ps}
        assert copy.without_ps == expected[objective]


def test_a_reason_is_what_grows_most():
    def reason(**grown_ps):
        return dataclasses.replace(COPY, grown_ps=grown_ps).reason

    assert reason(compute=2, rows=3, pulls=-4) == "rows"
    assert reason(compute=2, rows=3, pulls=-5) == "no effect"
    assert reason(compute=2, rows=3, pulls=-6) == "better without"


def test_slower_than_no_copies(capsys):
    out = run(capsys, "explain", "--model=qwen3-30b-a3b", "--tokens=64", "--skew=0", "--planner=echo")
    assert "ms (slower than no copies)\n" in out
    assert "better without" in out


def test_what_no_layer_can_run(capsys, figure_9):
    told = "no layer can run what"
    eplb, moonep = (run(capsys, *figure_9, f"--planner={planner}") for planner in ("eplb", "moonep"))
    assert f"{told} eplb makes: it moves experts" in eplb
    assert "experts that left their main rank are told as copies" in eplb
    assert f"{told} moonep makes: it takes up to E/R slots" in moonep
    assert told not in run(capsys, *figure_9)


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
