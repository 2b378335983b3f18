"""`topoep simulate`: one screen that answers, with its uncertainty, and never without the word modelled."""

import dataclasses
import json

import numpy as np
import pytest

from tests.support.cli_runs import error, records, run
from topoep_jax import Topology, TraceWriter
from topoep_jax.cli import fit
from topoep_jax.shapes import SHAPES
from topoep_jax.simulate.fit import SKEWS
from topoep_jax.simulate.published import LAYERS, PLANNERS
from topoep_jax.synthetic import biased_demand

QWEN = ("simulate", "--model=qwen3-30b-a3b", "--seeds=1", "--planner=topoep_paper")
SMALL = (*QWEN, "--tokens=256", "--layers=1")


def test_one_screen(capsys):
    out = run(capsys, *QWEN, "--tokens=256")
    lines = out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 160
    assert lines[0] == "qwen3-30b-a3b, skew -4, 1 seed"
    assert "MODELLED: this library's layer at the rates of h800" in out
    assert "Everything above is modelled: nothing of it was measured." in out
    assert "step: 5 MoE layers, 1 microbatch of 256 tokens per rank, and nothing else" in out
    (verdict,) = (line for line in lines if line.startswith("  topoep_paper: "))
    assert "as the constants vary" in verdict
    assert "of a step that is MoE layers alone" in out
    assert "    least with: " in out and "; most with: " in out
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] in (["none"], ["topoep_paper"])}
    layer = next(line.split() for line in lines if line.startswith("layer "))
    assert [layer[1], layer[2]] == [rows[planner][1] for planner in ("none", "topoep_paper")]


def test_records(capsys):
    command = (*SMALL, "--skew=-4,0", "--layers=2", "--microbatches=2", "--dense_ms=4", "--optimizer_ms=1")
    found = records(capsys, *command)
    assert found == records(capsys, *command)
    assert [(r["skew"], r["planner"]) for r in found] == [(s, p) for s in (-4, 0) for p in ("none", "topoep_paper")]
    for record in found:
        assert record["kind"] == "simulated"
        assert record["outside_ms"] == 9
        assert record["step_ms"] == pytest.approx(9 + 4 * record["layer_ms"])
        assert record["tokens_per_second"] == pytest.approx(1e3 * 32 * 256 * 2 / record["step_ms"])
        if record["planner"] != "none":
            assert record["gain_percent_low"] <= record["gain_percent"] <= record["gain_percent_high"]
        alone = sum(phase["alone"] for phase in record["layer_phases_ms"].values())
        assert alone == pytest.approx(record["layer_ms"])
    assert [record["answer"] for record in found[::2]] == [None, None]
    assert all(record["answer"] for record in found[1::2])
    assert found[1]["imbalance"] < found[0]["imbalance"]


def test_the_papers_cluster(capsys):
    command = ("simulate", "--hardware=h800_fitted", "--seeds=1", "--planner=topoep_paper", "--model=glm-4.5-air")
    plain, paper = records(capsys, *command)
    assert plain["outside_ms"] == pytest.approx(414, abs=1)
    assert plain["tokens_per_second"] == pytest.approx(88.3e3, rel=0.08)
    assert paper["tokens_per_second"] == pytest.approx(106.7e3, rel=0.05)
    assert set(paper["gain_percent_by_constants"]) == {"calibration A", "calibration C"}
    assert "calibration R" in paper["constants"]


def test_gains_of_the_held_out_model_are_not_told(capsys):
    command = ("simulate", "--hardware=h800_fitted", "--seeds=1", "--planner=topoep_paper", "--model=deepseek-v2")
    out = run(capsys, *command, "--tokens=64", "--dense_ms=400")
    assert "topoep_paper: no answer" in out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("topoep_paper "))
    assert row[4:7] == ["-"] * 3
    assert {record["gain_percent"] for record in records(capsys, *command, "--tokens=64", "--dense_ms=400")} == {None}


def trace_of(tmp_path, *samples):
    np.savez(tmp_path / "t.npz", omega=np.stack(samples))
    return f"--trace={tmp_path / 't.npz'}"


def test_a_trace_is_its_demand(capsys, tmp_path):
    shape = dataclasses.replace(SHAPES["qwen3-30b-a3b"], tokens=256)
    omega = biased_demand(shape, [-2.0], 0)[-2.0]
    of_trace = records(capsys, *QWEN, "--layers=1", trace_of(tmp_path, omega))
    of_model = records(capsys, *SMALL, "--skew=-2")
    assert [{**record, "skew": None} for record in of_model] == of_trace


def test_a_trace_of_a_published_model_is_one_by_any_of_its_names(capsys, tmp_path):
    idx = np.arange(4 * 64 * 8).reshape(1, 4 * 64, 8) % 128
    sizes = {"num_experts": 128, "num_ranks": 4, "topology": Topology.uniform(2, 2)}
    command = ("simulate", "--hardware=h800_fitted", "--planner=topoep_paper")
    for name in ("qwen3-30b-a3b", "Qwen3-30B-A3B", "qwen3-30b-a3b-paper"):
        with TraceWriter(tmp_path / f"{name}.npz", **sizes, model=name, hidden=2048, ffn=768) as writer:
            writer.append(idx)
        out = run(capsys, *command, f"--trace={tmp_path / name}.npz")
        assert out.startswith("qwen3-30b-a3b, ")
        other = error(capsys, *command, f"--trace={tmp_path / name}.npz", "--model=glm-4.5-air")
        assert f"--model=glm-4.5-air, but {tmp_path / name}.npz has model={name}" in other
    # One of this name with other sizes is no longer it.
    with TraceWriter(tmp_path / "own.npz", **sizes, model="qwen3-30b-a3b", hidden=1024, ffn=768) as writer:
        writer.append(idx)
    assert "the rest of it is unknown" in error(capsys, *command, f"--trace={tmp_path / 'own.npz'}")


def test_every_sample_of_a_trace_counts(capsys, tmp_path):
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 50, (4, 8)) + 3000 * (np.arange(8) == hot) for hot in (0, 5)]
    sizes = ("--domains=2", "--hidden=256", "--ffn=128", "--top_k=2", "--layers=1")
    command = ("simulate", trace_of(tmp_path, *samples), *sizes, "--planner=topoep_paper")
    both = records(capsys, *command)
    assert both[0]["samples"] == 2
    first = records(capsys, *command, "--seeds=1")
    (tmp_path / "second").mkdir()
    second = records(capsys, "simulate", trace_of(tmp_path / "second", samples[1]), *sizes, "--planner=topoep_paper")
    for mean, one, other in zip(both, first, second, strict=True):
        assert mean["layer_ms"] == pytest.approx((one["layer_ms"] + other["layer_ms"]) / 2)
    assert "--top_k, or a --model that has it, is missing" in error(
        capsys, "simulate", trace_of(tmp_path, *samples), *sizes[:3]
    )


def test_a_trace_without_rows_has_no_step(capsys, tmp_path):
    command = ("simulate", "--domains=2", "--hidden=256", "--ffn=128", "--top_k=2")
    empty, full = np.zeros((4, 8), np.int64), np.full((4, 8), 30)
    message = error(capsys, *command, trace_of(tmp_path, empty, empty))
    assert f"--trace={tmp_path / 't.npz'}: 2 samples without a single row" in message
    both = trace_of(tmp_path, empty, full)
    assert "1 sample without a single row" in error(capsys, *command, both, "--seeds=1")
    assert records(capsys, *command, both)


@pytest.mark.parametrize("hardware", ["h800", "h800_fitted"])
def test_without_slots_equal_plans_take_equal_time(capsys, hardware):
    command = (*QWEN, "--tokens=256", "--num_slots=0", f"--hardware={hardware}", "--dense_ms=0")
    plain, other = records(capsys, *command)
    assert (plain["planner"], other["planner"]) == ("none", "topoep_paper")
    assert other["layer_phases_ms"] == plain["layer_phases_ms"]
    assert other["gain_percent"] == other["gain_percent_low"] == other["gain_percent_high"] == 0
    assert other["answer"] == "no difference"


def test_other_layers(capsys):
    usual = records(capsys, *SMALL)[1]["layer_ms"]
    for changed in ("--chunks=1", "--residuals=all", "--launch_us=50", "--plan_us=0", "--hardware=h100"):
        assert records(capsys, *SMALL, changed)[1]["layer_ms"] != usual, changed
    relayed = records(capsys, *SMALL, "--planner=none", "--pulls=relayed")
    assert [record["planner"] for record in relayed] == ["none"]


def test_a_measured_machine(capsys, tmp_path):
    """The rates of h800 as `topoep measure` writes them; then with one rank at half speed, which holds up all."""
    measured = {"version": 1, "inter_fs_per_byte": 20_000, "intra_fs_per_byte": 5_000, "gflops": 400_000}
    layer_ms = []
    for name, speeds in (("even", None), ("uneven", [500] + [1000] * 31)):
        path = tmp_path / f"{name}.json"
        sizes = {"num_devices": 32, "num_domains": 4, "note": "not the rates of any cluster"}
        # Some editors put a byte order mark in front.
        path.write_text(json.dumps(measured | sizes | {"rank_speed": speeds}), encoding="utf-8-sig")
        found = records(capsys, *SMALL, f"--hardware={path}", "--skew=0", "--planner=none")
        layer_ms.append(found[0]["layer_ms"])
        assert f"{path} (not the rates of any cluster)" in found[0]["constants"]
    assert layer_ms[0] == records(capsys, *SMALL, "--skew=0", "--planner=none")[0]["layer_ms"]
    assert layer_ms[1] > layer_ms[0]


def test_a_preset_is_no_file_of_its_name(capsys, tmp_path, monkeypatch):
    (tmp_path / "h800").write_text("no measurement")
    monkeypatch.chdir(tmp_path)
    assert "at the rates of h800; " in run(capsys, *SMALL, "--hardware=h800")


def test_a_toy_is_not_taken_for_a_model(capsys):
    warning = "the assumed time of planning is"
    assert warning in run(capsys, *SMALL, "--tokens=8") and warning not in run(capsys, *SMALL, "--tokens=4096")


def test_perfetto(capsys, tmp_path):
    path = tmp_path / "step.json"
    out = run(capsys, *SMALL, f"--perfetto={path}")
    assert out.endswith(f"written to {path}\n")
    trace = json.loads(path.read_text())
    assert trace["otherData"]["title"] == "qwen3-30b-a3b, skew -4, planner topoep_paper; " + next(
        line.removeprefix("MODELLED: ") for line in out.splitlines() if line.startswith("MODELLED: ")
    )
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(32))


def test_fit(capsys, monkeypatch):
    """The demand is that of few tokens: what is printed of it is no fit, but all of it is printed."""

    def few(model, seeds):
        rng = np.random.default_rng(0)
        ranks, experts = {"qwen3-30b-a3b": (32, 128), "glm-4.5-air": (16, 128), "deepseek-v2": (16, 160)}[model]
        return {skew: [rng.integers(0, 50, (ranks, experts)) for _ in seeds] for skew in SKEWS}

    monkeypatch.setattr(fit, "forced_demand", few)
    out = run(capsys, "simulate", "--fit", "--seeds=1")
    assert "MODELLED, not measured" in out
    for text in (
        "qwen3-30b-a3b      none             calibration     13a    -4  329.7     C     331.0     +0.4",
        "held out",
    ):
        assert text in out
    assert "what the model cannot explain\n- Megatron's exchanges" in out
    assert max(map(len, out.splitlines())) <= 120
    points = json.loads(run(capsys, "simulate", "--fit", "--seeds=1", "--json"))
    throughput = [point for point in points if point["metric"] == "throughput"]
    assert len(throughput) == 3 * 21 + 3 * 6
    assert {point["planner"] for point in throughput} == set(PLANNERS)
    assert {point["model"] for point in throughput} == set(LAYERS)
    assert {point["role"] for point in points} == {"base", "calibration", "held out"}
    assert {point["calibration"] for point in points} == {"R", "A", "C"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "--model or --trace is missing"),
        ((*QWEN, "--planner=best"), "--planner=best is unknown"),
        ((*QWEN, "--hardware=h900"), "--hardware=h900 is neither a file nor one of"),
        ((*QWEN, "--chunks=3"), "chunks=3 must be 1 or 2"),
        ((*QWEN, "--layers=1000000000"), "layers=1000000000 times microbatches=1 is more than 1024"),
        ((*QWEN, "--microbatches=1000000000"), "times microbatches=1000000000 is more than 1024"),
        ((*QWEN, "--top_k=3"), "--top_k=3 needs a --trace"),
        ((*QWEN, "--plan_us=10000000"), "plan_us=10000000 must be within"),
        ((*QWEN, "--dense_ms=nan"), "dense_ms=nan must be within"),
        ((*QWEN, "--perfetto=step.txt"), "must end in .json"),
        ((*QWEN, "--perfetto=step.json", "--skew=-4,0"), "--perfetto writes one step"),
        ((*QWEN, "--hardware=h800_fitted", "--chunks=1"), "--chunks=1 is of this library's layer"),
        ((*QWEN, "--hardware=h800_fitted", "--tokens=64"), "for --tokens=4096 alone"),
        (("simulate", "--model=e640", "--hardware=h800_fitted"), "the paper has no step of e640"),
        ((*SMALL, "--hardware=h800_fitted", "--inter_gbps=400"), "--inter_gbps=400 is of this library's layer, not of"),
        (("simulate", "--fit", "--perfetto=a.json", "--model=zzz"), "--model, --perfetto does nothing with --fit"),
        (("simulate", "--fit", "--skew=-4"), "--skew does nothing with --fit"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags(capsys, arguments, message):
    assert message in error(capsys, *arguments)
