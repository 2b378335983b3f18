"""Runs of the other models: any mesh trains alike, masters and rules are kept, and a run starts from given weights."""

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
from train.optimizer import BIAS_RATE, wide, without_bias
from train.step import Program, build

SPREAD = {"dp": 2, "ep": 2, "fsdp": True, "microbatches": 2}


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
    """GLM-4.5 with parameters in bfloat16 and what it is balanced with; without replicas, to compile quickly."""
    config = settings(
        tmp_path_factory.mktemp("narrow") / "run",
        "glm4_tiny",
        dtype="bfloat16",
        param_dtype="bfloat16",
        balance_loss=True,
        planner="none",
        ep=2,
        steps=3,
    )
    pretrain.train(config)
    return config


def test_data_groups_and_sharded_parameters_change_nothing_nor_does_balancing(tmp_path):
    plain = settings(tmp_path / "plain", "deepseek_v2_tiny", lr=1e-2, ep=4, planner="none")
    spread = settings(tmp_path / "spread", "deepseek_v2_tiny", lr=1e-2, **SPREAD)
    pretrain.train(plain)
    pretrain.train(spread)
    pairs = list(zip(metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "spread"), strict=True))
    for one, other in pairs:
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert np.shape(other["expert_load"]) == (2, 8), "the dense layer has no experts"
        assert one["replica"] == one["balance_loss"] == other["balance_loss"] == 0
    assert max(other["replica"] for _, other in pairs) > 0
    assert pairs[0][0]["expert_load"] == pairs[0][1]["expert_load"]
    assert pairs[-1][0]["loss"] < pairs[0][0]["loss"]
    state = restored(spread)
    kernel = state.params["layers"]["attention"]["query_down"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16 // 4, 8), "fsdp"


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


def test_the_selection_bias_follows_its_rule_alone(narrow_run):
    state = restored(narrow_run)
    bias = np.asarray(state.params["layers"]["moe"]["correction_bias"])
    load = np.array([line["expert_load"] for line in metrics_of(pathlib.Path(narrow_run.run_dir))], np.float64)
    moves = np.sign(load.mean(axis=2, keepdims=True) - load).sum(axis=0)
    np.testing.assert_allclose(bias, BIAS_RATE * moves, rtol=1e-5)
    assert np.abs(bias).max() > BIAS_RATE / 2
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("router" in path for path in paths)
    assert not any("correction_bias" in path for path in paths)
    assert all(line["balance_loss"] > 0 for line in metrics_of(pathlib.Path(narrow_run.run_dir)))


def test_with_masters_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(narrow_run, tmp_path):
    changes = {**vars(narrow_run), "run_dir": str(tmp_path / "run")}
    pretrain.train(
        TrainConfig(**changes), on_step=lambda record: record["step"] == 1 and signal.raise_signal(signal.SIGINT)
    )
    pretrain.train(TrainConfig(**{**changes, "resume": True}))
    assert metrics_of(tmp_path / "run") == metrics_of(pathlib.Path(narrow_run.run_dir))
    jax.tree.map(np.testing.assert_array_equal, restored(TrainConfig(**changes)), restored(narrow_run))


def test_a_run_starts_from_weights_of_other_programs(narrow_run, tmp_path):
    trained = restored(narrow_run).params
    checkpoint.save(tmp_path / "weights", narrow_run.shapes(), trained, dtype=jnp.float32)
    config = dataclasses.replace(narrow_run, init_from=str(tmp_path / "weights"))
    state = pretrain.first_state(config, build(config))
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, trained)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.masters, wide(without_bias(trained)))
