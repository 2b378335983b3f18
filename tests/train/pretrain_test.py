"""Training end to end on a tiny model: exact repeats and resumes, other numbers of ranks, and stopping when it must."""

import dataclasses
import functools
import json
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from tests.support.multiprocess_worker import run_processes
from tests.support.train_runs import loads_of, metrics_of, restored, settings, text_of
from topoep_jax import Topology, open_trace, transport
from train import pretrain
from train.checkpoint import CheckpointError, Checkpoints
from train.config import TrainConfig
from train.data import batches, load_tokens
from train.lock import sole_writer
from train.mesh import make_mesh
from train.step import Program, build

pytestmark = pytest.mark.usefixtures("standard_promotion")

WANTED = {
    *("step", "loss", "grad_norm", "tokens_per_s", "imbalance_before", "imbalance", "inter_domain_before"),
    *("inter_domain", "replica", "overflow_rows", "slots_used", "dropped_rows", "passes", "status", "rerun"),
    "planner",
}
# Without replicas, and with receive buffers that three of the four batches do not fit.
TIGHT = {"planner": "none", "cap_factor": 1.5}
# Two policies are two programs, which the tests' quick compiles fuse, and round, differently; not so with these.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


@pytest.fixture(autouse=True, scope="module")
def each_step_is_compiled_once():
    """Runs of equal settings share a program, whatever their folders; those of both policies share the exact step."""

    @functools.cache
    def build_once(config: TrainConfig) -> Program:
        program = build(config)
        options = EMITTERS if config.cap_factor == TIGHT["cap_factor"] else None
        once, again = (
            jax.jit(step, donate_argnums=0, compiler_options=options) for step in (program.step, program.exact_step)
        )
        return dataclasses.replace(program, step=once, exact_step=again)

    def shared(config: TrainConfig) -> Program:
        same = {"overflow": "flag", "run_dir": "", "data": (), "resume": False, "record_routing": 1}
        program = build_once(dataclasses.replace(config, **same))
        if config.overflow == "flag":
            return program
        return dataclasses.replace(program, step=program.exact_step, exact_step=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "build", shared)
        yield


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> TrainConfig:
    config = settings(tmp_path_factory.mktemp("whole") / "run", record_routing=1)
    pretrain.train(config)
    return config


@pytest.fixture(scope="module")
def tight_run(tmp_path_factory) -> TrainConfig:
    config = settings(tmp_path_factory.mktemp("tight") / "run", **TIGHT)
    pretrain.train(config)
    return config


def test_a_run_leaves_its_files(whole_run):
    run_dir = pathlib.Path(whole_run.run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= WANTED for line in lines)
    assert np.shape(loads_of(run_dir)) == (4, 2, 16)
    assert all(line["dropped_rows"] == 0 and line["inter_domain"] < line["inter_domain_before"] for line in lines)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["last_loss"] == lines[-1]["loss"] < lines[0]["loss"]
    for name in ("loss.png", "imbalance.png", "expert_load.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")


def test_recorded_routing_is_what_the_metrics_counted(whole_run):
    lines = metrics_of(pathlib.Path(whole_run.run_dir))
    with open_trace(pathlib.Path(whole_run.run_dir, "routing.npz")) as trace:
        info = trace.info
        assert trace.steps == (1, 2, 3, 4)
        assert (info.num_experts, info.num_ranks, info.topology) == (16, 8, Topology.uniform(2, 4))
        assert (info.layers, info.model, info.hidden, info.ffn) == ((0, 1), "qwen3-tiny", 16, 8)
        omega = np.stack([trace.omega(index) for index in range(4)])
    assert loads_of(pathlib.Path(whole_run.run_dir)) == omega.sum(axis=2).tolist()
    load = omega.sum(axis=2).reshape(4, 2, 8, 2).sum(axis=3)
    means = (load.max(axis=2) / load.mean(axis=2)).mean(axis=1)
    np.testing.assert_allclose([line["imbalance_before"] for line in lines], means, rtol=1e-6)


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(whole_run, tmp_path, capsys):
    config = settings(tmp_path / "run", record_routing=1)
    before = signal.getsignal(signal.SIGINT)
    pretrain.train(config, on_step=lambda record: record["step"] == 1 and signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) == before
    printed = capsys.readouterr().out
    assert "Stopped after step 1, which is saved. Go on with: " in printed
    assert f"python -m train.pretrain --resume --run_dir={config.run_dir}" in printed
    assert len(metrics_of(tmp_path / "run")) == 1

    path, whole = (pathlib.Path(run.run_dir, "routing.npz") for run in (config, whole_run))
    # As if the process had died in a step behind its checkpoint.
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    pretrain.train(dataclasses.replace(config, resume=True))
    for of in (metrics_of, loads_of):
        assert of(tmp_path / "run") == of(pathlib.Path(whole_run.run_dir))
    assert path.read_bytes() == whole.read_bytes()
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
    config = settings(tmp_path / "run", resume=True)
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


def test_balancing_does_not_change_training(whole_run, tight_run):
    plain, balanced = (metrics_of(pathlib.Path(run.run_dir)) for run in (tight_run, whole_run))
    for without, with_replicas in zip(plain, balanced, strict=True):
        assert without["replica"] == 0 < with_replicas["replica"]
        assert without["imbalance"] == without["imbalance_before"] == with_replicas["imbalance_before"]
        assert with_replicas["loss"] == pytest.approx(without["loss"], rel=1e-5)


def test_what_overflows_runs_again_and_equals_extra_passes_bit_for_bit(tight_run, tmp_path, capsys):
    config = settings(tmp_path / "run", overflow="flag", **TIGHT)
    summary = pretrain.train(config)
    flagged, looped = metrics_of(tmp_path / "run"), metrics_of(pathlib.Path(tight_run.run_dir))
    assert [line["rerun"] for line in flagged] == [line["passes"] > 1 for line in looped] == [False, True, True, True]
    assert [{**line, "rerun": False} for line in flagged] == looped
    jax.tree.map(np.testing.assert_array_equal, restored(config), restored(tight_run))
    assert summary["steps_run_again"] == 3
    assert "ran in 75.0%, by a second run of the step." in capsys.readouterr().out


def test_a_step_that_overflows_changes_nothing(tight_run):
    program = pretrain.build(dataclasses.replace(tight_run, overflow="flag"))
    text = load_tokens(tight_run.data)
    batch = batches(text, batch_size=8, seq_len=16, seed=0)[1]
    before = jax.device_get(program.init())
    after, metrics = program.step(program.init(), program.place(batch))
    assert metrics.moe.passes.max() == 2
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_on_cpu_steps_take_extra_passes_by_themselves(whole_run):
    assert build(whole_run).exact_step is None


def test_a_refused_resume_leaves_the_run_as_it_was(whole_run, tmp_path):
    folder = shutil.copytree(whole_run.run_dir, tmp_path / "run")
    before = (folder / "config.json").read_text(), (folder / "metrics.jsonl").read_text()
    config = dataclasses.replace(whole_run, run_dir=str(folder), resume=True, steps=6, ep=4)
    with pytest.raises(ValueError, match=r"cannot be continued: it was recorded with num_ranks=8"):
        pretrain.train(config)
    assert before == ((folder / "config.json").read_text(), (folder / "metrics.jsonl").read_text())


def test_two_runs_do_not_share_a_folder(whole_run, tmp_path):
    config = dataclasses.replace(whole_run, run_dir=str(tmp_path / "run"))
    with (
        sole_writer(tmp_path / "run", "--run_dir"),
        pytest.raises(ValueError, match=r"another command is writing to .*run: wait for it, or name another folder"),
    ):
        pretrain.train(config)
    assert not (tmp_path / "run").exists(), "nothing was put there"
    with sole_writer(tmp_path / "run", "--run_dir"):
        (tmp_path / "run" / "kept").touch()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "kept"]


def test_too_few_devices_says_how_to_emulate():
    with pytest.raises(ValueError, match=r"--ep=64 needs 64 devices, but JAX sees 32 .*device_count=64"):
        make_mesh(TrainConfig(ep=64, batch_size=64))


def one_step_here(folder: str) -> None:
    """One process's part of a run of two; each keeps the line that it saw itself."""
    path = pathlib.Path(folder) / f"seen_{jax.process_index()}.json"
    # Buffers so small that no plan fits them.
    config = settings(pathlib.Path(folder) / "run", steps=1, overflow="flag", cap_factor=0.25, record_routing=1)
    meet, met = transport.meet, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "meet", lambda *arguments: (met.append(arguments), meet(*arguments)))
        pretrain.train(config, on_step=lambda record: path.write_text(json.dumps({**record, "tokens_per_s": None})))
    assert len(met) == 2, "behind the compilation of either step"


@pytest.mark.full  # two processes train in CI's check for clusters, too
def test_two_processes_start_like_one_and_run_what_overflows_again(whole_run, tmp_path):
    text_of(tmp_path)
    run_processes("tests.train.pretrain_test:one_step_here", str(tmp_path))
    there, same = (json.loads((tmp_path / f"seen_{process}.json").read_text()) for process in range(2))
    assert there == same
    assert there["rerun"]
    assert there["passes"] > 1
    here = metrics_of(pathlib.Path(whole_run.run_dir))[0]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-5)
    (load,) = loads_of(tmp_path / "run")
    assert load == loads_of(pathlib.Path(whole_run.run_dir))[0]
    with open_trace(tmp_path / "run" / "routing.npz") as trace:
        assert trace.omega(0).sum(axis=1).tolist() == load
