"""`topoep plan`: what it prints is what planners do, and every bad flag gets one line."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.cases import named
from tests.support.cli_runs import error, records, run
from tests.support.generator import biased_demand, score
from topoep_jax import cli
from topoep_jax.plan import Status, reference
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.plan.topoep import dependent_steps

KEYS = [
    *("model", "skew", "seed", "planner"),
    *("imbalance", "inter_domain", "replica", "num_replicas", "objective_ms", "eq8_ms", "none_objective_ms"),
    *("planner_ms", "dependent_steps", "status"),
]
QWEN = ("plan", "--model=qwen3-30b-a3b")


def small_trace(tmp_path):
    """4 ranks x 8 experts, two samples; experts 0 and 5 are hot."""
    omega = np.random.default_rng(0).integers(0, 50, (2, 4, 8))
    omega[:, :, [0, 5]] += 4000
    np.save(tmp_path / "small.npy", omega)
    return omega, ("plan", f"--trace={tmp_path / 'small.npy'}", "--domains=2", "--hidden=64", "--ffn=32")


def test_records(capsys):
    found = records(capsys, *QWEN, "--skew=-4,-1", "--seeds=2", "--planner=none,topoep_paper", "--tokens=256")
    assert all(list(record) == KEYS for record in found)
    labels = [(r["skew"], r["seed"], r["planner"]) for r in found]
    assert labels == [(k, s, p) for k in (-4, -1) for s in (0, 1) for p in ("none", "topoep_paper")]
    for record in found:
        assert record["model"] == "qwen3-30b-a3b"
        assert record["planner_ms"] > 0
        if record["planner"] == "none":
            assert record["objective_ms"] == record["none_objective_ms"]
            assert record["status"] == Status.CAP_MET | Status.EMPTY


def test_records_are_those_of_the_tests_own_scoring(capsys):
    (record,) = records(capsys, *QWEN, "--skew=-2", "--planner=topoep_paper")
    case = named("qwen3_30b")
    plan = reference.solve(biased_demand(case, (-2,), 0)[-2], case.problem(), "topoep_paper")
    scored = score(case, plan)
    expected = {
        "imbalance": scored.imbalance,
        "inter_domain": scored.inter_domain,
        "replica": scored.replica,
        "num_replicas": int((plan.slot_expert >= 0).sum()),
        "objective_ms": scored.bottleneck_ps / 1e9,
        "eq8_ms": scored.eq8_ps / 1e9,
        "status": int(plan.status),
    }
    assert {key: record[key] for key in expected} == expected


def test_the_objective_in_the_records_is_always_the_bottleneck(capsys):
    both = [
        records(capsys, *QWEN, "--tokens=256", "--planner=topoep_paper", f"--objective={objective}")[0]
        for objective in ("bottleneck", "eq8")
    ]
    assert both[0]["objective_ms"] == both[1]["objective_ms"]


def test_table(capsys):
    out = run(capsys, *QWEN, "--skew=-4,0", "--seeds=2", "--planner=none,topoep_paper", "--tokens=256")
    assert "qwen3-30b-a3b, skew -4, mean of 2 seeds\n128 experts on 32 ranks in 4 domains, 2 slots per rank" in out
    header = next(line for line in out.splitlines() if line.startswith("planner"))
    columns = "planner imbalance inter-domain % replica % replicas worst NIC MB layer ms / none Eq. 8 ms plan ms"
    assert " ".join(header.split()) == columns
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["none"], ["topoep_paper"])]
    assert [row[0] for row in rows] == ["none", "topoep_paper"] * 2
    assert rows[0][7] == "1.000"
    found = records(capsys, *QWEN, "--skew=-4", "--seeds=2", "--planner=topoep_paper", "--tokens=256")
    assert rows[1][1] == f"{np.mean([r['imbalance'] for r in found]):.2f}"
    assert "compute of forward and backward, traffic of the forward\n" in out


def test_steps_are_told_where_they_are_known(capsys):
    command = (*QWEN, "--planner=none,topoep", "--tokens=64")
    expected = dependent_steps(named("qwen3_30b").problem(effort="fast"))
    assert expected is not None
    found = records(capsys, *command, "--effort=fast")
    assert [record["dependent_steps"] for record in found] == [None, expected]
    assert "\nsteps " in run(capsys, *command, "--effort=fast")
    assert "steps" not in run(capsys, *QWEN, "--planner=none", "--tokens=64")


def test_all_planners_on_a_small_trace(capsys, tmp_path):
    _, command = small_trace(tmp_path)
    found = records(capsys, *command, "--planner=all")
    assert [r["planner"] for r in found] == list(PLANNERS) * 2
    assert {(r["model"], r["skew"]) for r in found} == {("small.npy", None)}
    assert sorted({r["seed"] for r in found}) == [0, 1]


def test_a_trace_is_its_demand(capsys, tmp_path):
    case = named("glm45_air")
    omega = biased_demand(case, (-2,), 0)[-2]
    np.savez(tmp_path / "t.npz", omega=omega)
    timeless = [
        {k: v for k, v in record.items() if k not in ("planner_ms", "skew")}
        for arguments in (("--skew=-2",), (f"--trace={tmp_path / 't.npz'}",))
        for record in records(capsys, "plan", "--model=glm-4.5-air", "--planner=topoep_paper", *arguments)
    ]
    assert timeless[0] == timeless[1]


def test_the_first_samples_of_a_trace(capsys, tmp_path):
    _, command = small_trace(tmp_path)
    assert {r["seed"] for r in records(capsys, *command, "--seeds=1")} == {0}
    assert "mean of 2 samples" in run(capsys, *command)


def test_the_models_own_router(capsys):
    def plans(model, router):
        arguments = ("plan", f"--model={model}", "--planner=none", "--tokens=128", "--skew=-1", f"--router={router}")
        (record,) = records(capsys, *arguments)
        return {key: value for key, value in record.items() if key != "planner_ms"}

    assert plans("qwen3-30b-a3b", "model") == plans("qwen3-30b-a3b", "topk")  # softmax keeps the order
    assert plans("deepseek-v2", "model") != plans("deepseek-v2", "topk")  # experts come in groups


def test_short_times_keep_three_digits(capsys, tmp_path):
    _, command = small_trace(tmp_path)
    (record,) = records(capsys, *command, "--planner=none", "--seeds=1")
    out = run(capsys, *command, "--planner=none", "--seeds=1")
    (row,) = (line.split() for line in out.splitlines() if line.startswith("none "))
    assert record["objective_ms"] < 0.1
    assert float(row[6]) == float(f"{record['objective_ms']:.3g}")
    assert out.startswith("small.npy\n")


def test_cap(capsys):
    command = (*QWEN, "--skew=-4", "--planner=none", "--tokens=1024")
    assert [r["status"] & Status.CAP_MET for r in records(capsys, *command, "--cap_factor=1.05")] == [0]
    assert [r["status"] & Status.CAP_MET for r in records(capsys, *command, "--cap_factor=6")] == [1]
    assert "cap met" in run(capsys, *command, "--cap_factor=1.05")


def test_slots(capsys):
    command = (*QWEN, "--planner=topoep_paper", "--tokens=256")
    assert records(capsys, *command, "--num_slots=0")[0]["num_replicas"] == 0
    assert records(capsys, *command, "--num_slots=1")[0]["num_replicas"] <= 32


def test_pulls_are_priced(capsys):
    direct, best = (
        records(capsys, *QWEN, "--planner=topoep_paper", "--tokens=512", f"--pulls={pulls}")[0]["objective_ms"]
        for pulls in ("direct", "best")
    )
    assert best < direct


def test_bounds(capsys, tmp_path):
    pytest.importorskip("scipy")
    _, command = small_trace(tmp_path)
    out = run(capsys, *command, "--bounds", "--seeds=1", "--num_slots=1", "--planner=none,topoep_paper")
    assert "quota bound ms" in out
    optimum = float(out.split("no legal plan is faster than ")[1].split()[0])
    (record,) = records(capsys, *command, "--seeds=1", "--num_slots=1", "--planner=topoep_paper")
    assert 0 < optimum <= record["objective_ms"] + 5e-4
    assert cli.main([*command, "--bounds", "--seeds=1", "--num_slots=1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert list(json.loads(out)[0]) == KEYS
    assert "quota bound ms" in err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help(capsys, command):
    assert run(capsys, command, "--help").startswith(f"usage: topoep {command}")


def test_usage(capsys):
    assert all(command in run(capsys, "--help") for command in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "'fly' is no command: take one of plan, explain, trace"),
        (("plan",), "--model or --trace is missing"),
        (("plan", "--model=gpt"), "--model=gpt is unknown: take one of qwen3-30b-a3b, glm-4.5-air"),
        ((*QWEN, "--planner=best"), "--planner=best is unknown: take one of none, topoep_paper"),
        ((*QWEN, "--skew=hot"), "--skew has 'hot': write numbers"),
        ((*QWEN, "--skew=nan"), "--skew has 'nan'"),
        ((*QWEN, "--skew=1e9"), "--skew has '1e9'"),
        ((*QWEN, "--skew="), "--skew is empty"),
        ((*QWEN, "--planner="), "--planner is empty"),
        ((*QWEN, "--seeds=0"), "--seeds=0"),
        ((*QWEN, "--seeds=two"), "--seeds=two"),
        ((*QWEN, "--tokens=0"), "--tokens=0"),
        ((*QWEN, "--tokens=100000000"), "--tokens=100000000 makes 2^31 rows or more"),
        ((*QWEN, "--num_slots=-1"), "--num_slots=-1"),
        ((*QWEN, "--num_slots=125"), "num_slots=125 must be within 0..124"),
        ((*QWEN, "--cap_factor=-1"), "cap_factor=-1.0 must be a finite positive number"),
        ((*QWEN, "--block_rows=0"), "--block_rows=0"),
        ((*QWEN, "--objective=fun"), "--objective=fun"),
        ((*QWEN, "--effort=none"), "--effort=none"),
        ((*QWEN, "--router=glm4"), "--router=glm4"),
        ((*QWEN, "--pulls=pushed"), "--pulls=pushed"),
        ((*QWEN, "--hardware=abacus"), "--hardware=abacus is neither a file nor one of h800, h100"),
        ((*QWEN, "--inter_gbps=400"), "--inter_gbps=400 completes a measurement"),
        ((*QWEN, "--domains=2"), "--domains=2 needs a --trace"),
        ((*QWEN, "--colour=red"), "Unknown command line flag 'colour'"),
        ((*QWEN, "surplus"), "'surplus' is no flag"),
        (("plan", "--trace=none.npy"), "--trace=none.npy: there is no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags(capsys, arguments, message):
    assert message in error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--domains=3",), "--domains=3 does not divide the 4 ranks"),
        (("--skew=-1",), "belongs to synthetic demand, not to a --trace"),
        (("--tokens=1",), "belongs to synthetic demand, not to a --trace"),
        (("--seeds=3",), "--seeds=3, but"),
        (("--num_experts=9",), "has 8 experts, but 9 were asked for"),
        (("--hidden=100000000000",), "check the units"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags_of_a_trace(capsys, tmp_path, arguments, message):
    _, command = small_trace(tmp_path)
    assert message in error(capsys, *command, *arguments)


def test_a_trace_needs_a_topology_and_sizes(capsys, tmp_path):
    _, (name, trace, *_) = small_trace(tmp_path)
    assert "--domains is missing" in error(capsys, name, trace)
    assert "--hidden and --ffn" in error(capsys, name, trace, "--domains=2")
    np.save(tmp_path / "seven.npy", np.ones((3, 7), int))
    command = ("plan", f"--trace={tmp_path / 'seven.npy'}", "--domains=1", "--hidden=8", "--ffn=8")
    assert "7 experts on 3 ranks: their number must be a multiple of 3" in error(capsys, *command)


def test_as_a_program():
    command = [sys.executable, "-m", "topoep_jax.cli"]
    arguments = [*QWEN, "--tokens=64", "--planner=none", "--json", "--skew", "-1"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    assert list(json.loads(result.stdout)[0]) == KEYS
    assert subprocess.run([*command, "plan"], capture_output=True, check=False).returncode == 2
