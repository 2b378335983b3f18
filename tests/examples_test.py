"""The examples train, tell what the planner did, and are as short as README says."""

import difflib
import pathlib

import jax
import numpy as np
import pytest

from examples import linen_decoder
from examples.gemma import dense, moe

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def standard_promotion():
    """Neither Flax's own layers nor optax are written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def assert_learns(losses: list[float]) -> None:
    thirds = [np.mean(third) for third in np.array_split(losses, 3)]
    assert np.isfinite(losses).all()
    assert thirds[0] > thirds[1] > thirds[2]
    assert thirds[2] < losses[0] - 1.5


def test_ten_lines_turn_an_mlp_into_experts():
    before, after = (pathlib.Path(module.__file__).read_text().splitlines() for module in (dense, moe))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    changes = [line for line in lines if not line.startswith("@@")]
    assert sum(line.startswith("+") for line in changes) <= 10
    assert sum(line.startswith("-") for line in changes) <= 10
    readme = (ROOT / "README.md").read_text()
    assert not [line for line in changes if line not in readme], "README shows another diff"


def test_gemma_learns_without_and_with_experts(capsys):
    assert_learns(dense.main(num_layers=1, steps=21))
    assert "replicas" not in capsys.readouterr().out
    assert_learns(moe.main(num_layers=1, steps=21))
    assert capsys.readouterr().out.count(" replicas, 1 pass") == 3


def test_linen_learns_and_runs_again_what_overflows(capsys, monkeypatch):
    passes = []
    make_step = linen_decoder.make_step

    def watched(decoder):
        step = make_step(decoder)

        def run(state, tokens):
            state, loss, metrics = step(state, tokens)
            passes.append((decoder.experts["overflow"], int(metrics.passes.max())))
            return state, loss, metrics

        return run

    monkeypatch.setattr(linen_decoder, "make_step", watched)
    assert_learns(linen_decoder.main(num_layers=1, steps=21))
    again = [run for run in passes if run[0] == "loop"]
    assert again == [("loop", 2)] * len(again)
    assert len(again) == passes.count(("flag", 2)) > 0
    assert f"{len(again)} of 21 steps overflowed and ran again" in capsys.readouterr().out
