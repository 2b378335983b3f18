"""Training end to end on a tiny model: exact repeats and resumes, other numbers of ranks, and stopping when it must."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from tests.multiprocess_worker import run_processes
from train import pretrain
from train.checkpoint import CheckpointError, Checkpoints
from train.config import TrainConfig
from train.step import TrainState, build, make_mesh

# One program for the whole file: all runs below share it through JAX's compilation cache.
TINY = TrainConfig(
    shape="hidden=16,num_layers=2,num_heads=2,num_kv_heads=1,head_dim=8,ffn=8,num_experts=16,top_k=2",
    dtype="float32",
    steps=4,
    save_every=2,
    warmup=1,
    seq_len=16,
    block_rows=8,
    domains=2,
)
WANTED = {
    *("step", "loss", "grad_norm", "tokens_per_s", "imbalance_before", "imbalance", "inter_domain_before"),
    *("inter_domain", "replica", "overflow_rows", "slots_used", "dropped_rows", "passes", "status", "expert_load"),
}


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def settings(run_dir: pathlib.Path, **changes) -> TrainConfig:
    return TrainConfig(**{**vars(TINY), "run_dir": str(run_dir), "data": (str(text_of(run_dir.parent)),), **changes})


def text_of(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{number} squared is {number * number}. " for number in range(2000)))
    return path


def metrics_of(run_dir: pathlib.Path) -> list[dict]:
    """The lines of a run without what a clock measured."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def restored(config: TrainConfig) -> TrainState:
    with Checkpoints(pathlib.Path(config.run_dir) / "checkpoints") as checkpoints:
        return checkpoints.restore(build(config))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> TrainConfig:
    config = settings(tmp_path_factory.mktemp("whole") / "run")
    pretrain.train(config)
    return config


def test_a_run_leaves_its_files(whole_run):
    run_dir = pathlib.Path(whole_run.run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= WANTED for line in lines)
    assert all(np.shape(line["expert_load"]) == (2, 16) for line in lines)
    assert all(line["dropped_rows"] == 0 and line["inter_domain"] < line["inter_domain_before"] for line in lines)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["last_loss"] == lines[-1]["loss"] < lines[0]["loss"]
    for name in ("loss.png", "imbalance.png", "expert_load.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(whole_run, tmp_path, capsys):
    config = settings(tmp_path / "run")
    before = signal.getsignal(signal.SIGINT)
    pretrain.train(config, on_step=lambda record: record["step"] == 1 and signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) == before
    printed = capsys.readouterr().out
    assert "Stopped after step 1, which is saved. Go on with: " in printed
    assert f"python -m train.pretrain --resume --run_dir={config.run_dir}" in printed
    assert len(metrics_of(tmp_path / "run")) == 1

    pretrain.train(settings(tmp_path / "run", resume=True))
    assert metrics_of(tmp_path / "run") == metrics_of(pathlib.Path(whole_run.run_dir))
    jax.tree.map(np.testing.assert_array_equal, restored(config), restored(whole_run))
    with pytest.raises(ValueError, match="has done 4 of --steps=4: ask for more with --steps"):
        pretrain.train(settings(tmp_path / "run", resume=True))


@pytest.mark.parametrize(("ep", "domains"), [(4, 2), (1, 1)])
def test_a_checkpoint_restores_on_fewer_ranks(whole_run, ep, domains):
    few = restored(TrainConfig(**{**vars(whole_run), "ep": ep, "domains": domains}))
    experts = few.params["layers"]["moe"]["w"]
    assert experts.sharding.num_devices == ep
    assert experts.addressable_shards[0].data.shape[1] == 16 // ep
    jax.tree.map(np.testing.assert_array_equal, few, restored(whole_run))


def test_a_checkpoint_of_another_shape_is_refused(whole_run):
    other = TrainConfig(**{**vars(whole_run), "shape": whole_run.shape.replace("ffn=8", "ffn=16")})
    message = r"params/layers/moe/w has shape \(2, 16, 384\), this model wants \(2, 16, 768\)"
    with pytest.raises(CheckpointError, match=message):
        restored(other)
    other = TrainConfig(**{**vars(whole_run), "run_dir": whole_run.run_dir + "x"})
    with pytest.raises(CheckpointError, match="holds no checkpoint: start without --resume"):
        restored(other)


def test_bad_logits_stop_the_run(whole_run, tmp_path):
    state = restored(whole_run)._replace(step=np.array(2, np.int32))
    router = state.params["layers"]["moe"]["router"]
    state.params["layers"]["moe"]["router"] = router.at[1, 0, 0].set(np.nan)
    config = settings(tmp_path / "run", resume=True, dtype="bfloat16")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text((pathlib.Path(whole_run.run_dir) / "metrics.jsonl").read_text())
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(state)
    message = (
        r"step 3: the planner refused the demand of layer 1 \(BAD_INPUT.*last checkpoint is of step 2; try a lower rate"
    )
    with pytest.raises(pretrain.RunStopped, match=message):
        pretrain.train(config)
    assert len(metrics_of(tmp_path / "run")) == 2
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        assert checkpoints.latest() == 2, "the state that led to a bad step must not become the newest checkpoint"


def test_balancing_does_not_change_training(whole_run, tmp_path):
    pretrain.train(settings(tmp_path / "run", planner="none"))
    plain, balanced = metrics_of(tmp_path / "run"), metrics_of(pathlib.Path(whole_run.run_dir))
    for without, with_replicas in zip(plain, balanced, strict=True):
        assert without["replica"] == 0 < with_replicas["replica"]
        assert without["imbalance"] == without["imbalance_before"] == with_replicas["imbalance_before"]
        assert with_replicas["loss"] == pytest.approx(without["loss"], rel=1e-5)


def test_too_few_devices_says_how_to_emulate():
    with pytest.raises(ValueError, match=r"--ep=64 needs 64 devices, but JAX sees 32 .*device_count=64"):
        make_mesh(TrainConfig(ep=64, batch_size=64))


def one_step_here(folder: str) -> None:
    """One process's part of a run of two."""
    pretrain.train(settings(pathlib.Path(folder) / "run", steps=1))


def test_two_processes_start_like_one(whole_run, tmp_path):
    run_processes("tests.train_test:one_step_here", str(tmp_path))
    (there,), here = metrics_of(tmp_path / "run"), metrics_of(pathlib.Path(whole_run.run_dir))[0]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-5)
    assert there["expert_load"] == here["expert_load"]
