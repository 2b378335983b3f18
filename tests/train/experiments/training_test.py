"""Experiments that train: runs that are kept, gone on with or begun anew, and what is made of their files."""

import json

import numpy as np
import pytest

from topoep_jax import TraceWriter
from topoep_jax.topology import Topology
from train.experiments import fig02_skew, fig14_loss, training
from train.experiments.record import mean_of, pick
from train.experiments.settings import Settings


@pytest.fixture
def runs(monkeypatch):
    """What would be run: (folder, flags); each leaves the files of a finished run."""
    asked = []

    def run(folder, flags):
        asked.append(flags)
        steps = int(next(flag for flag in flags if flag.startswith("--steps=")).partition("=")[2])
        (folder / "checkpoints" / str(steps)).mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"loss": 1.0}\n' * steps)
        (folder / "summary.json").write_text("{}")

    monkeypatch.setattr(training, "_run", run)
    training._trained.cache_clear()
    yield asked
    training._trained.cache_clear()


def asked_again(settings, planner="none", corpus="code"):
    training._trained.cache_clear()  # As in another process.
    return training.trained(settings, planner, corpus, settings.steps)


def test_a_finished_run_is_kept_only_if_asked(tmp_path, runs) -> None:
    settings = Settings(folder=tmp_path)
    folder = training.trained(settings, "none", "code", settings.steps)
    assert training.trained(settings, "none", "code", settings.steps) == folder
    assert len(runs) == 1  # Two figures share it.
    asked_again(Settings(folder=tmp_path, resume=True))
    assert len(runs) == 1
    asked_again(settings)
    assert len(runs) == 2 and not any("--resume" in flags for flags in runs)


def test_an_interrupted_run_goes_on(tmp_path, runs) -> None:
    resumed = Settings(folder=tmp_path, resume=True)
    folder = training.trained(resumed, "none", "code", resumed.steps)
    (folder / "summary.json").unlink()
    asked_again(resumed)
    assert "--resume" in runs[1]
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / "500").rmdir()
    asked_again(resumed)
    assert "--resume" not in runs[2]


def test_other_flags_begin_anew(tmp_path, runs) -> None:
    resumed = Settings(folder=tmp_path, resume=True)
    folder = training.trained(resumed, "none", "code", resumed.steps)
    folder.with_suffix(".flags").write_text("--of=another")
    asked_again(resumed)
    assert len(runs) == 2 and "--resume" not in runs[1]


def test_a_run_of_another_length_begins_anew(tmp_path, runs) -> None:
    training.trained(Settings(folder=tmp_path), "none", "code", 500)
    asked_again(Settings(full=True, folder=tmp_path, resume=True))
    assert "--steps=10000" in runs[1] and "--resume" not in runs[1]


def test_a_run_that_ended_early_goes_on(tmp_path, runs) -> None:
    resumed = Settings(folder=tmp_path, resume=True)
    log = training.trained(resumed, "none", "code", resumed.steps) / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:300]))
    asked_again(resumed)
    assert "--resume" in runs[1]


def test_prose_is_text_of_the_python_at_hand(tmp_path, runs) -> None:
    training.trained(Settings(folder=tmp_path), "none", "prose", 500)
    (data,) = (flag for flag in runs[0] if flag.startswith("--data="))
    with open(data.partition("=")[2]) as text:
        assert len(text.read()) > 100_000


def test_a_run_that_fails_says_how(tmp_path) -> None:
    with pytest.raises(ValueError, match="num_layers"):
        training._run(tmp_path / "run", ["--num_layers=1"])


def test_losses_are_compared_step_by_step(tmp_path, monkeypatch) -> None:
    settings = Settings()
    runs = {("none", 4): (1.0, 1.0), ("topoep", 4): (1.001, 0.999), ("none", 2): (1.0, 1.002)}
    for (planner, ranks), factors in runs.items():
        losses = np.linspace(4, 2, settings.steps)
        losses[[3, 7]] *= factors
        folder = tmp_path / f"{planner}_{ranks}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
    monkeypatch.setattr(
        fig14_loss, "trained", lambda settings, planner, corpus, steps, ranks=4: tmp_path / f"{planner}_{ranks}"
    )
    records = fig14_loss.run(settings)
    found = {
        kind: mean_of(records, kind="measured", planner="topoep", metric=f"{kind} relative difference of the loss")
        for kind in ("mean", "max", "signed mean")
    }
    assert found["signed mean"] == pytest.approx(0, abs=1e-9)  # One step above, one as far below.
    assert found["max"] == pytest.approx(0.1) and found["mean"] == pytest.approx(0.2 / settings.steps, rel=1e-3)
    most = f"max {fig14_loss._DIFFERENCE}"
    assert mean_of(records, planner=fig14_loss.CONTROL, metric=most) == pytest.approx(0.2)
    fig14_loss.draw(records)


def test_skew_of_a_trace_is_drawn(tmp_path, monkeypatch) -> None:
    layers, ranks, experts = 2, 2, 16
    for number, corpus in enumerate(training.CORPORA):
        (tmp_path / corpus).mkdir()
        rng = np.random.default_rng(number)
        with TraceWriter(
            tmp_path / corpus / "routing.npz",
            num_experts=experts,
            num_ranks=ranks,
            num_groups=1,
            layers=range(layers),
            topology=Topology.uniform(2, 1),
            model="made",
            hidden=8,
            ffn=8,
        ) as writer:
            for step in (10, 20):
                writer.append(rng.integers(0, experts, (layers, ranks, 32, 2)), step=step)
    monkeypatch.setattr(fig02_skew, "trained", lambda settings, planner, corpus, steps: tmp_path / corpus)
    records = fig02_skew.run(Settings())
    for corpus in training.CORPORA:
        shares = [r.value for r in pick(records, corpus=corpus, metric="share of the assignments")]
        assert len(shares) == layers * experts and sum(shares) == pytest.approx(100 * layers)
        assert mean_of(records, corpus=corpus, metric="busiest expert / mean, all layers") > 1
    fig02_skew.draw(records)
