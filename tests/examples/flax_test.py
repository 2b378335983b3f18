"""The examples train, tell what the planner did, and are as short as README says."""

import difflib
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples import linen_decoder
from examples.gemma import dense, moe
from examples.text import batches

ROOT = pathlib.Path(__file__).parent.parent.parent


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


def compiled(caplog, name: str) -> int:
    """How many programs of a function were compiled since the last time."""
    count = sum(f"Compiling jit({name})" in record.getMessage() for record in caplog.records)
    caplog.clear()
    return count


@pytest.mark.parametrize("example", [pytest.param(dense, marks=pytest.mark.full), moe], ids=["dense", "moe"])
def test_gemma_learns(example, capsys, caplog):
    with jax.log_compiles():
        assert_learns(example.main(num_layers=1, steps=21))
        assert compiled(caplog, "train_step") == 1
    assert capsys.readouterr().out.count(" replicas, 1 pass") == (3 if example is moe else 0)


@pytest.mark.parametrize("example", [dense, pytest.param(moe, marks=pytest.mark.full)], ids=["dense", "moe"])
def test_a_checkpoint_of_gemma_and_its_optimizer_goes_on_with_fewer_devices(example, tmp_path):
    config, tokens = example.Config(num_layers=1), next(batches(8, 64))  # of another length, to be compiled apart

    def step(mesh, made):
        return example.train_step(*made, jax.device_put(tokens, NamedSharding(mesh, P("data"))))["loss"]

    whole, part = (Mesh(np.array(jax.devices()[:count]), ("data",)) for count in (8, 4))
    made = example.create(config, whole)
    step(whole, made)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(made)))
        checkpointer.wait_until_finished()
        again = example.create(config, part)
        state = nnx.state(again)
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(again, state)
    np.testing.assert_allclose(step(part, again), step(whole, made), rtol=1e-5)
    assert again[1].step[...] == 2


def test_linen_learns_and_runs_again_what_overflows(capsys, caplog, monkeypatch):
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
    with jax.log_compiles():
        assert_learns(linen_decoder.main(num_layers=1, steps=21))
    assert compiled(caplog, "train_step") == 2, "one program for each policy"
    again = [run for run in passes if run[0] == "loop"]
    assert again == [("loop", 2)] * len(again)
    assert len(again) == passes.count(("flag", 2)) > 0
    assert f"{len(again)} of 21 steps overflowed and ran again" in capsys.readouterr().out
