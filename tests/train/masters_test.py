"""Parameters in bfloat16 are masters, rounded, whatever comes between; and a run starts from given weights."""

import dataclasses
import functools
import json
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint
from models.checkpoint.commands import main
from tests.support.train_runs import metrics_of, restored, settings
from train import pretrain
from train.checkpoint import CheckpointError, Checkpoints
from train.config import TrainConfig, define, from_flags
from train.optimizer import wide
from train.step import Program, build

pytestmark = pytest.mark.usefixtures("standard_promotion")


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
    """A run in bf16, without replicas, to compile quickly."""
    config = settings(
        tmp_path_factory.mktemp("narrow") / "run",
        "qwen3-tiny",
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


def test_a_run_starts_from_weights_as_they_are_stored(narrow_run, tmp_path):
    """Masters drop no bit of what is read: of f32 weights, of bf16 ones, and of a run's own masters."""
    run_dir, trained = pathlib.Path(narrow_run.run_dir), restored(narrow_run)
    masters = trained.opt_state.masters
    weights = tmp_path / "weights"
    checkpoint.save(weights, narrow_run.shapes(), masters)
    checkpoint.save(tmp_path / "narrow", narrow_run.shapes(), trained.params, dtype=jnp.bfloat16)
    program = build(narrow_run)
    for folder, expected in (
        (weights, masters),
        (run_dir / "checkpoints", masters),
        (run_dir / "checkpoints" / "3", masters),
        (tmp_path / "narrow", wide(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained.params))),
    ):
        state = pretrain.first_state(dataclasses.replace(narrow_run, init_from=str(folder)), program)
        assert int(state.step) == 0
        jax.tree.map(np.testing.assert_array_equal, state.opt_state.masters, expected)
        if expected is masters:
            jax.tree.map(np.testing.assert_array_equal, state.params, trained.params)
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(lambda leaf: leaf.dtype, trained)
    # `convert` reads them too.
    assert main(["convert", f"--from={run_dir / 'checkpoints'}", f"--to={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()


def test_the_dtype_of_parameters_is_kept_with_the_run(narrow_run, tmp_path, monkeypatch):
    """On CPU they are f32 unless asked otherwise, on GPUs bf16: a run goes on as it began."""
    kept = json.loads(pathlib.Path(narrow_run.run_dir, "config.json").read_text())
    assert kept["param_dtype"] == "bfloat16"
    config = settings(tmp_path / "run", planner="none", ep=1, domains=1, steps=1)
    program = build(config)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract)
    monkeypatch.setattr(pretrain, "build", lambda _: program)
    monkeypatch.setattr(pretrain, "first_state", lambda *_: state)
    monkeypatch.setattr(pretrain, "_loop", lambda *_: None)
    monkeypatch.setattr(pretrain, "_finish", lambda *_: None)
    pretrain.train(config)
    assert json.loads((tmp_path / "run/config.json").read_text())["param_dtype"] == "float32"
    other = dataclasses.replace(narrow_run, param_dtype="")
    message = (
        "it holds f32 masters of the parameters, and this run no f32 masters. Resume with the --param_dtype=bfloat16"
    )
    with pytest.raises(CheckpointError, match=message):
        restored(other)
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(state)
        with pytest.raises(CheckpointError, match=r"no f32 masters of .* Resume with the --param_dtype=float32, and"):
            checkpoints.restore(build(dataclasses.replace(config, param_dtype="bfloat16")))


def test_a_run_takes_the_model_of_its_weights(narrow_run, tmp_path):
    """No --model is needed; the folder may be gone when the run goes on; a --model that does not fit is refused."""

    def parse(*arguments: str) -> TrainConfig:
        values = define()
        values(["train", *arguments])
        return from_flags(values)

    shapes = dataclasses.replace(narrow_run.shapes(), rope_theta=5e3, max_positions=77)
    like = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), checkpoint.abstract(shapes))
    checkpoint.save(tmp_path / "weights", shapes, like)
    weights, run_dir = f"--init_from={tmp_path / 'weights'}", f"--run_dir={tmp_path / 'run'}"
    config = parse(weights, run_dir)
    assert (config.shapes(), config.model) == (shapes, "weights")
    (tmp_path / "run").mkdir()
    config.save(tmp_path / "run/config.json")
    (tmp_path / "weights").rename(tmp_path / "moved")
    assert parse("--resume", run_dir) == dataclasses.replace(config, resume=True)
    assert parse("--resume", run_dir, "--model=glm4-tiny").shapes() == TrainConfig(model="glm4-tiny").shapes()
    (tmp_path / "moved").rename(tmp_path / "weights")
    new = f"--run_dir={tmp_path / 'new'}"
    for given, message in (
        ([weights, "--model=glm4-tiny"], "wrong model type: Qwen3MoEConfig, not GLM4MoEConfig. Leave both away"),
        ([weights, "--model=qwen3-tiny"], "other config: hidden is 16, not 128.*Leave both away to take the"),
        ([weights, "--shape=ffn=4"], "other config: ffn is 8, not 4. Leave both away"),
        ([f"--init_from={tmp_path / 'none'}", "--model=glm4-tiny"], "none is no folder: name one with config.json"),
        ([f"--init_from={tmp_path}"], "has no config.json that says its model: name it with --model"),
        ([weights, "--resume", run_dir], "starts a new run: leave --resume away"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(new, *given)
    # How long sequences may be is not part of the computation.
    same = dataclasses.replace(shapes, rope_theta=narrow_run.shapes().rope_theta)
    checkpoint.save(tmp_path / "same", same, like)
    fitting = [f"--model={narrow_run.model}", f"--shape={narrow_run.shape}", f"--init_from={tmp_path / 'same'}"]
    assert parse(new, *fitting).of_weights is None
    config = dataclasses.replace(narrow_run, init_from=str(tmp_path / "same"))
    assert int(pretrain.first_state(config, build(config)).step) == 0
