"""`topoep trace`: its numbers are those of the paper's definitions, written out here; its picture has three panels."""

import collections
import itertools
import json
import math
import re

import numpy as np
import pytest

from tests.cli.plan_test import error, run
from topoep_jax import Topology, TraceWriter, open_trace
from topoep_jax.cli import draw_skew
from topoep_jax.traces import skew_of

LAYERS, EXPERTS, RANKS, TOP = (1, 2, 4), 16, 4, 4


@pytest.fixture(scope="module")
def routing():
    """int64 [microbatches, layers, R, T, K]: hot experts that move, some padding; layer 2 never routes in step 1."""
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(6, 3, 1, 1, EXPERTS)) + 2 * rng.normal(size=(1, 3, 1, 1, EXPERTS))
    chosen = np.argsort(-(rng.normal(size=(6, 3, RANKS, 12, EXPERTS)) + bias), axis=-1)[..., :2]
    chosen[:, :, 1, :5] = -1
    chosen[1, 1] = -1
    return chosen


@pytest.fixture(scope="module")
def path(routing, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "routing.npz"
    domains = Topology.uniform(2, 2)
    with TraceWriter(
        path, num_experts=EXPERTS, num_ranks=RANKS, layers=LAYERS, model="tiny", topology=domains, hidden=64, ffn=32
    ) as writer:
        for microbatch in routing:
            writer.append(microbatch)
    return path


def mean(values):
    known = [value for value in values if value is not None]
    return pytest.approx(sum(known) / len(known)) if known else None


def told(microbatches):
    """The figures of one layer from its experts [microbatches, R, T, K], by the definitions and without NumPy."""
    loads = [collections.Counter(e for e in microbatch.ravel().tolist() if e >= 0) for microbatch in microbatches]
    full = [load for load in loads if load]
    ratio = [max(load.values()) / (load.total() / EXPERTS) for load in full]
    hot = [set(sorted(range(EXPERTS), key=lambda e: (-load[e], e))[:TOP]) if load else None for load in loads]
    turnover = [len(a - b) / TOP for a, b in itertools.pairwise(hot) if a is not None and b is not None]
    ranks = [[sum(load[e] for e in range(4 * r, 4 * r + 4)) for r in range(RANKS)] for load in full]
    shares = [[n / load.total() for n in load.values()] for load in full]
    total = sum(loads, collections.Counter())
    return {
        "imbalance": mean(ratio),
        "imbalance_least": pytest.approx(min(ratio)),
        "imbalance_most": pytest.approx(max(ratio)),
        "imbalance_of_all": pytest.approx(max(total.values()) / (total.total() / EXPERTS)),
        "busiest": mean([sum(n for _, n in load.most_common(TOP)) / load.total() for load in full]),
        "effective_experts": mean([math.exp(-sum(p * math.log(p) for p in share)) for share in shares]),
        "turnover": mean(turnover),
        "drift": pytest.approx(len(hot[0] - hot[-1]) / TOP),
        "rank_imbalance": mean([max(load) / (sum(load) / RANKS) for load in ranks]),
    }


def test_figures_are_those_of_the_definitions(capsys, routing, path):
    found = json.loads(run(capsys, "trace", f"--trace={path}", "--json", f"--top={TOP}"))
    assert found["layers"] == [{"layer": layer, **told(routing[:, index])} for index, layer in enumerate(LAYERS)]
    for key, value in found["mean"].items():
        assert value == mean([layer[key] for layer in found["layers"]])
    del found["layers"], found["mean"]
    assert found == {
        "trace": "routing.npz",
        "model": "tiny",
        "num_experts": 16,
        "num_ranks": 4,
        "domain_of_rank": [0, 0, 1, 1],
        "microbatches": 6,
        "steps": 6,
        "cut_off": False,
        "top": 4,
    }


def test_text(capsys, path):
    out = run(capsys, "trace", f"--trace={path}")
    found = json.loads(run(capsys, "trace", f"--trace={path}", "--json"))
    assert out.startswith(
        "routing.npz: tiny, 3 layers, 16 experts on 4 ranks in 2 domains, 6 microbatches of 81 assignments\n"
    )
    assert f"the busiest expert has {found['mean']['imbalance']:.2f} x the mean load; the 8 busiest take" in out
    assert f"{found['mean']['turnover']:.0%} of the 8 busiest change from one recorded step to the next" in out
    assert "50% by chance" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["4"])]
    for row, layer in zip(rows, found["layers"], strict=True):
        imbalance = [f"{layer[key]:.2f}" for key in ("imbalance", "imbalance_least", "imbalance_most")]
        assert row[:4] == [str(layer["layer"]), *imbalance]
        assert row[7] == f"{layer['rank_imbalance']:.2f}"
    assert len(out.splitlines()) < 40


def test_many_layers_fit_a_screen(capsys, tmp_path):
    with TraceWriter(tmp_path / "deep.npz", num_experts=8, num_ranks=2) as writer:
        # Layer l sends 8 + l of 128 assignments to expert 0, the others in turns to the rest.
        writer.append([np.where(np.arange(128) < 8 + layer, 0, 1 + np.arange(128) % 7)[:, None] for layer in range(60)])
    out = run(capsys, "trace", f"--trace={tmp_path / 'deep.npz'}")
    assert len(out.splitlines()) < 40
    shown = [int(line.split()[0]) for line in out.splitlines() if line.endswith("#")]
    assert shown == list(range(40, 60))
    assert "40 layers less skewed not shown" in out
    assert "one step does not tell" in out


@pytest.mark.parametrize("shape", [(4, 8), (5, 4, 8), (5, 3, 4, 8)])
def test_arrays_of_users(capsys, tmp_path, shape):
    omega = np.random.default_rng(0).integers(0, 50, shape)
    np.save(tmp_path / "mine.npy", omega)
    picture = [f"--png={tmp_path / 'a.png'}"] if len(shape) == 2 else []
    found = json.loads(run(capsys, "trace", f"--trace={tmp_path / 'mine.npy'}", "--json", *picture))
    samples = omega.reshape(-1, shape[-3] if len(shape) == 4 else 1, 4, 8)
    load = samples.sum(axis=2)
    assert [layer["layer"] for layer in found["layers"]] == list(range(samples.shape[1]))
    np.testing.assert_allclose(
        [layer["imbalance"] for layer in found["layers"]], (load.max(axis=2) / load.mean(axis=2)).mean(axis=0)
    )
    assert (found["layers"][0]["turnover"] is None) == (len(samples) == 1)


def test_turnover_is_from_step_to_step(capsys, tmp_path):
    """Two groups that always use other experts: between them nothing moved, and from step 0 to 5 all did."""
    groups = np.repeat([0, 2], 8).reshape(1, 16, 1)
    with TraceWriter(tmp_path / "t.npz", num_experts=8, num_ranks=2, num_groups=2) as writer:
        for step, first in ((0, 0), (1, 0), (5, 4)):
            writer.append(groups + first, step=step)
            writer.append(groups + first, step=step)
    command = ("trace", f"--trace={tmp_path / 't.npz'}", "--top=2")
    found = json.loads(run(capsys, *command, "--json"))
    assert (found["microbatches"], found["steps"]) == (12, 3)
    assert (found["mean"]["turnover"], found["mean"]["drift"]) == (0.5, 1)
    assert "50% of the 2 busiest change from one recorded step to the next, 100% from" in run(capsys, *command)
    with open_trace(tmp_path / "t.npz") as trace:
        skew = skew_of(trace, top=2)
    assert (skew.steps, skew.turnover.tolist()) == ((0, 1, 5), [[0], [1]])
    pytest.importorskip("matplotlib")
    (line,) = draw_skew.figure_of(skew, "title").axes[-1].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 5], [0, 100])


def test_a_file_that_was_cut_off_says_so(capsys, path, tmp_path):
    whole = path.read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    out = run(capsys, "trace", f"--trace={tmp_path / 'cut.npz'}")
    assert "the file was cut off: these are the microbatches that are whole" in out


def test_padding_has_no_skew(capsys, tmp_path):
    idx = np.full((3, 2, 2, 4, 1), -1)
    np.savez(tmp_path / "none.npz", expert_idx=idx)
    idx[:, 1] = 0
    np.savez(tmp_path / "half.npz", expert_idx=idx)
    none, half = (("trace", f"--trace={tmp_path / name}.npz", "--num_experts=4") for name in ("none", "half"))
    assert "nothing was routed: every token of the trace is padding" in error(capsys, *none)
    found = json.loads(run(capsys, *half, "--json", f"--png={tmp_path / 'half.png'}"))
    assert {value for key, value in found["layers"][0].items() if key != "layer"} == {None}
    assert found["mean"]["imbalance"] == found["layers"][1]["imbalance"] == 4
    assert re.search(r"^0 ( +-){7}$", run(capsys, *half), re.MULTILINE)


def test_one_expert(capsys, tmp_path):
    np.save(tmp_path / "one.npy", np.ones((3, 1, 1), int))
    found = json.loads(run(capsys, "trace", f"--trace={tmp_path / 'one.npy'}", "--json"))
    assert found["layers"][0]["imbalance"] == found["layers"][0]["effective_experts"] == 1


def test_the_picture(capsys, path, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    out = run(capsys, "trace", f"--trace={path}", f"--png={tmp_path / 'a.png'}")
    assert out.endswith(f"drawn to {tmp_path / 'a.png'}\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with open_trace(path) as trace:
        skew = skew_of(trace)
    figure = draw_skew.figure_of(skew, "title")
    share, imbalance, turnover = (axes for axes in figure.axes if axes.get_label() != "<colorbar>")
    np.testing.assert_array_equal(share.images[0].get_array(), skew.share)
    assert [label.get_text() for label in share.get_yticklabels()] == ["1", "2", "4"]
    (line,) = (line for line in imbalance.lines if line.get_label() == "mean of microbatches")
    np.testing.assert_array_equal(line.get_xdata(), LAYERS)
    np.testing.assert_allclose(line.get_ydata(), skew.imbalance.mean(axis=0))
    (line,) = turnover.lines
    np.testing.assert_allclose(line.get_ydata(), 100 * skew.turnover.mean(axis=1))
    for axes in figure.axes:
        assert axes.get_ylabel()
    assert matplotlib.get_backend() is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--trace is missing: write --trace=routing.npz"),
        (("--trace=none.npz",), "--trace=none.npz: there is no such file"),
        (("--trace={path}", "--top=16"), "top=16 must lie in 1..15"),
        (("--trace={path}", "--top=0"), "--top=0"),
        (("--trace={path}", "--num_experts=8"), "has 16 experts, but 8 were asked for"),
        (("--trace={path}", "--png=a.pdf"), "--png=a.pdf must end in .png"),
        (("--trace={path}", "--png=no/where.png"), "there is no folder no"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags(capsys, path, arguments, message):
    assert message in error(capsys, "trace", *(argument.format(path=path) for argument in arguments))


@pytest.mark.parametrize("command", ["plan", "explain", "simulate"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--hidden=65", "--hidden=65, but {path} has hidden=64"),
        ("--ffn=33", "--ffn=33, but {path} has ffn=32"),
        ("--domains=3", "--domains=3 does not divide the 4 ranks of {path}"),
        ("--model=e640", "{path} has 16 experts, but 640 were asked for"),
        ("--num_experts=8", "{path} has 16 experts, but 8 were asked for"),
    ],
)
def test_flags_may_not_contradict_the_file(capsys, path, command, flag, message):
    assert message.format(path=path) in error(capsys, command, f"--trace={path}", flag)


def test_the_same_routing_on_other_nodes(capsys, path):
    assert "on 4 ranks in 4 domains" in run(capsys, "plan", f"--trace={path}", "--planner=none", "--domains=4")


def test_top_k_may_not_contradict_the_file(capsys, path, tmp_path):
    assert f"--top_k=3, but {path} has top_k=2" in error(capsys, "simulate", f"--trace={path}", "--top_k=3")
    sizes = {"num_experts": 128, "num_ranks": 2, "topology": Topology.uniform(1, 2)}
    for name, more, tokens, message in (
        ("k", {}, [(1, 4, 2)], "--model=qwen3-30b-a3b with top_k=8, but {path} has top_k=2"),
        ("ks", {}, [(1, 4, 2), (1, 4, 3)], "--model=qwen3-30b-a3b with top_k=8, but {path} has top_k=2, 3"),
        ("hidden", {"hidden": 4}, [(1, 4, 8)], "--model=qwen3-30b-a3b with hidden=2048, but {path} has hidden=4"),
        (
            "domains",
            {"num_ranks": 32, "topology": Topology.uniform(1, 32)},
            [(1, 32, 8)],
            "--model=qwen3-30b-a3b puts the 32 ranks in domains",
        ),
        ("name", {"model": "glm-4.5-air"}, [(1, 4, 8)], "--model=qwen3-30b-a3b, but {path} has model=glm-4.5-air"),
    ):
        file = tmp_path / f"{name}.npz"
        with TraceWriter(file, **{**sizes, **more}) as writer:
            for shape in tokens:
                writer.append(np.zeros(shape, int))
        for command in ("plan", "explain", "simulate"):
            found = error(capsys, command, f"--trace={file}", "--model=qwen3-30b-a3b")
            assert message.format(path=file) in found
    assert "of several top_k=2, 3: simulate" in error(capsys, "simulate", f"--trace={tmp_path / 'ks.npz'}")


def test_simulate_needs_nothing_but_the_file(capsys, routing, path, tmp_path):
    command = ("simulate", f"--trace={path}", "--planner=none", "--json", "--plan_us=0")
    (record,) = json.loads(run(capsys, *command))
    told_again = ("--top_k=2", "--hidden=64", "--ffn=32", "--domains=2", "--layers=3")
    assert [record] == json.loads(run(capsys, *command, *told_again))
    assert record["layers"] == 3
    rows = (routing >= 0).sum() / (6 * 3)
    assert record["tokens_per_second"] == pytest.approx(1e3 * rows / 2 / record["step_ms"])
    np.savez(tmp_path / "mine.npz", expert_idx=routing)
    mine = (
        f"--trace={tmp_path / 'mine.npz'}",
        "--num_experts=16",
        "--hidden=64",
        "--ffn=32",
        "--domains=2",
        "--layers=3",
    )
    (other,) = json.loads(run(capsys, "simulate", *mine, *command[2:]))
    assert other == {**record, "model": "mine.npz"}


def test_plan_and_explain_need_nothing_but_the_file(capsys, routing, path):
    command = (f"--trace={path}", "--planner=none")
    records = json.loads(run(capsys, "plan", *command, "--json"))
    assert [record["seed"] for record in records] == list(range(18))
    assert records[0]["model"] == "tiny"
    loads = np.stack([np.bincount(m[m >= 0] // 4, minlength=RANKS) for m in routing.reshape(18, -1)])
    np.testing.assert_allclose(
        [record["imbalance"] for record in records],
        np.where(loads.sum(axis=1) > 0, loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9), 1),
    )
    out = run(capsys, "explain", *command, "--seed=5")
    assert out.startswith("tiny, sample 5 (step 1, layer 4), planner none\n16 experts on 4 ranks in 2 domains")
