"""Parameters in bfloat16 are masters, rounded, whatever comes between; and a run starts from given weights."""

import dataclasses
import functools
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint
from tests.train_runs import metrics_of, restored, settings
from train import pretrain
from train.config import TrainConfig
from train.optimizer import wide
from train.step import Program, build


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True, scope="module")
def each_step_is_compiled_once():
    @functools.cache
    def build_once(config: TrainConfig) -> Program:
        program = build(config)
        return dataclasses.replace(program, step=jax.jit(program.step, donate_argnums=0))

    with pytest.MonkeyPatch.context() as patch:
        same = {"run_dir": "", "data": (), "resume": False, "init_from": ""}
        patch.setattr(pretrain, "build", lambda config: build_once(dataclasses.replace(config, **same)))
        yield


@pytest.fixture(scope="module")
def narrow_run(tmp_path_factory) -> TrainConfig:
    """Without replicas, to compile quickly."""
    config = settings(
        tmp_path_factory.mktemp("narrow") / "run",
        "deepseek_v2_tiny",
        dtype="bfloat16",
        param_dtype="bfloat16",
        balance_loss=True,
        planner="none",
        ep=2,
        steps=3,
    )
    pretrain.train(config)
    return config


def test_parameters_are_their_masters_rounded(narrow_run):
    state = restored(narrow_run)
    params, masters = dict(state.params), state.opt_state.masters
    flat = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, master in jax.tree_util.tree_leaves_with_path(masters):
        assert master.dtype == jnp.float32
        np.testing.assert_array_equal(flat[path], master.astype(flat[path].dtype))
        assert flat[path].dtype == (jnp.float32 if path[-1].key == "router" else jnp.bfloat16)
    exact = masters["layers"]["moe"]["w"]
    assert (exact != exact.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.5, "masters keep what parameters drop"


def test_with_masters_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(narrow_run, tmp_path):
    changes = {**vars(narrow_run), "run_dir": str(tmp_path / "run")}
    pretrain.train(
        TrainConfig(**changes), on_step=lambda record: record["step"] == 1 and signal.raise_signal(signal.SIGINT)
    )
    pretrain.train(TrainConfig(**{**changes, "resume": True}))
    assert metrics_of(tmp_path / "run") == metrics_of(pathlib.Path(narrow_run.run_dir))
    jax.tree.map(np.testing.assert_array_equal, restored(TrainConfig(**changes)), restored(narrow_run))
    assert all(line["balance_loss"] > 0 for line in metrics_of(tmp_path / "run"))


def test_a_run_starts_from_weights_of_other_programs(narrow_run, tmp_path):
    trained = restored(narrow_run).params
    checkpoint.save(tmp_path / "weights", narrow_run.shapes(), trained, dtype=jnp.float32)
    config = dataclasses.replace(narrow_run, init_from=str(tmp_path / "weights"))
    state = pretrain.first_state(config, build(config))
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, trained)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.masters, wide(trained))
