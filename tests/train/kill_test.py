"""Whenever a run is ended, and however, it goes on bit for bit; SIGTERM loses nothing, no message is a traceback."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

from models.checkpoint import digests
from tests.support.train_runs import metrics_of, restored, text_of
from tests.support.xla_flags import xla_flags
from train import pretrain
from train.config import TrainConfig
from train.resume import ResumeError
from train.step import build

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent.parent
SHAPE = "num_layers=1,num_experts=4,top_k=2,hidden=16,ffn=8,num_heads=2,num_kv_heads=1,head_dim=8"
SMALL = {"shape": SHAPE, "dtype": "float32", "seq_len": 8, "batch_size": 2, "planner": "none", "domains": 1}
SHORT = {**SMALL, "ep": 1, "steps": 8, "save_every": 2}


@pytest.fixture(autouse=True, scope="module")
def the_step_is_compiled_once():
    build_once = functools.cache(build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "build", lambda config: build_once(same(config)))
        yield


def same(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, run_dir="", data=(), resume=False, restore=-1, of_data="", seed=0, save_every=1)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("whole")
    config = TrainConfig(**SHORT, run_dir=str(folder / "run"), data=(str(text_of(folder)),))
    pretrain.train(config)
    return config


def assert_equal_runs(config: TrainConfig, other: TrainConfig) -> None:
    ours, theirs = (pathlib.Path(run.run_dir) for run in (config, other))
    assert metrics_of(ours) == metrics_of(theirs)
    for name in ("expert_load.npy", "loss.png"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    jax.tree.map(np.testing.assert_array_equal, restored(config), restored(other))


def test_asked_to_end_in_a_step_and_in_the_last_save(whole_run, tmp_path, monkeypatch, capfd):
    # Its last save is none of those of the loop.
    config = dataclasses.replace(whole_run, run_dir=str(tmp_path / "run"), save_every=3)
    before = signal.getsignal(signal.SIGTERM)

    def ask(record) -> None:
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == before, "the next signal kills"

    assert pretrain.train(config, on_step=ask)["steps"] == 3
    told = capfd.readouterr()
    assert "SIGTERM: the run ends after this step, and saves it; another signal kills" in told.err
    assert "Stopped after step 3, which is saved. Go on with: " in told.out

    write = digests.write

    def ask_in_the_last_save(folder: pathlib.Path, entries: digests.Entries) -> None:
        if folder.parent.name == ".8.half":
            signal.raise_signal(signal.SIGTERM)
        write(folder, entries)

    monkeypatch.setattr(digests, "write", ask_in_the_last_save)
    assert pretrain.train(dataclasses.replace(config, resume=True))["steps"] == 8
    assert "SIGTERM: the run ends" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert_equal_runs(config, whole_run)


def test_killed_in_a_save(whole_run, tmp_path):
    config = dataclasses.replace(whole_run, run_dir=str(tmp_path / "run"))
    run = Run(config, tmp_path)
    run.wait_for(lambda: any(list((tmp_path / "run/checkpoints").glob(name)) for name in (".4.*", "[468]")))
    assert run.end(signal.SIGKILL) == [-signal.SIGKILL]
    assert not (tmp_path / "run/summary.json").exists()
    summary = pretrain.train(dataclasses.replace(config, resume=True))
    assert summary["steps"] == 8
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["6", "8", "config.json"]
    assert_equal_runs(config, whole_run)

    # Killed behind the last save, it only has to report, whatever else was torn.
    for name in ("summary.json", "loss.png", "expert_load.npy"):
        (tmp_path / "run" / name).unlink()
    with (tmp_path / "run/metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 9, "lo')
    assert pretrain.train(dataclasses.replace(config, resume=True)) == summary
    assert (tmp_path / "run/loss.png").is_file()
    with pytest.raises(ValueError, match="has done 8 of --steps=8: ask for more with --steps"):
        pretrain.train(dataclasses.replace(config, resume=True))

    # A run may end where an older checkpoint is: what lies behind it is no part of its report.
    (tmp_path / "run/summary.json").unlink()
    assert pretrain.train(dataclasses.replace(config, resume=True, restore=6, steps=6))["steps"] == 6
    assert (tmp_path / "run/checkpoints/8.aside").is_dir()


def test_other_settings_and_an_older_checkpoint(whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run.run_dir, tmp_path / "run")
    before = (folder / "config.json").read_bytes()
    config = dataclasses.replace(whole_run, run_dir=str(folder), resume=True, restore=6)
    with pytest.raises(ResumeError, match=r"trains another model .*top_k is 2, not 4.*: resume without --model"):
        pretrain.train(dataclasses.replace(config, shape=SHAPE.replace("top_k=2", "top_k=4")))
    assert (folder / "config.json").read_bytes() == before
    pretrain.train(dataclasses.replace(config, seed=1))
    told = capsys.readouterr().out
    assert "from step 7 on: --seed=1 instead of 0; the data come in another order\n" in told
    assert f"the checkpoint of step 8 is now {folder}/checkpoints/8.aside; remove it some day\n" in told
    assert [start["after_step"] for start in json.loads((folder / "config.json").read_text())["history"]] == [0, 6]
    ours, theirs = metrics_of(folder), metrics_of(pathlib.Path(whole_run.run_dir))
    assert len(ours) == 8
    assert ours[:6] == theirs[:6]
    assert all(mine["loss"] != other["loss"] for mine, other in zip(ours[6:], theirs[6:], strict=True))


class Run:
    """The processes of a run, started as a user would, and what they print."""

    def __init__(self, config: TrainConfig, folder: pathlib.Path, flags: str = "", *, processes: int = 1) -> None:
        self.folder = pathlib.Path(config.run_dir)
        self._began = time.time()
        changed = {k: v for k, v in vars(config).items() if v != getattr(TrainConfig(), k) and not k.startswith("of_")}
        data = changed.pop("data")
        arguments = [f"--{name}={value}" for name, value in changed.items()] + [f"--data={path}" for path in data]
        if processes > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                arguments += [f"--coordinator=127.0.0.1:{probe.getsockname()[1]}", f"--num_processes={processes}"]
        self.processes, self._logs = [], []
        devices = ["env", f"XLA_FLAGS={flags}"] if flags else []  # else those of the tests
        for index in range(processes):
            own = [f"--process_id={index}"] if processes > 1 else []
            self._logs.append(folder / f"log_{index}.txt")
            with self._logs[-1].open("w") as log:
                command = [*devices, sys.executable, "-m", "train.pretrain", *arguments, *own]
                self.processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))

    def wait_for(self, moment: Callable[[], bool], timeout_s: float = 1200) -> None:
        """Looks again and again until the moment has come, or a process has ended."""
        deadline = time.monotonic() + timeout_s
        while not moment() and all(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.002)

    def end(self, number: int | None = None, victim: int = 0, timeout_s: float = 1200) -> list[int]:
        """Sends a signal to one process, if any, and waits for all: their exit statuses. No output has a traceback."""
        try:
            if number is not None:
                self.processes[victim].send_signal(number)
            codes = [process.wait(timeout_s) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        assert "Traceback" not in self.printed(), self.printed()
        return codes

    def printed(self) -> str:
        return "\n".join(log.read_text() for log in self._logs)

    def made(self, path: pathlib.Path) -> bool:
        """Whether it is there, since this run began."""
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime >= self._began
        return False

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a run is ended, and how: `kind` at `step`, and `delay_s` later."""

    kind: str
    step: int
    delay_s: float
    signal: str
    victim: int

    def has_come(self, run: Run) -> bool:
        """Whether this run has come to it: what one before it has left does not count."""
        checkpoints = run.folder / "checkpoints"
        if self.kind == "start":
            return True
        if self.kind == "step":
            return run.made(run.folder / "metrics.jsonl") and run.steps() >= self.step
        saved = run.made(checkpoints / str(self.step))
        return saved or (self.kind == "save" and run.made(checkpoints / f".{self.step}.half"))


def moments(seed: int, kinds: list[str], *, steps: int, save_every: int, processes: int) -> list[Moment]:
    """Random moments in the order of a run, at most one between two saves, and those at its end."""
    draw = random.Random(seed)
    last = [kind.split()[1:] for kind in kinds if kind.startswith("last")]
    kinds = [kind for kind in kinds if not kind.startswith("last")]
    draw.shuffle(kinds)
    parts = sorted(draw.sample(range(1, steps // save_every - 1), sum(kind != "start" for kind in kinds)))
    planned = []
    for number, kind in enumerate(kinds):
        step = 0 if kind == "start" else save_every * parts.pop(0)
        step += {"start": 0, "step": draw.randrange(1, save_every), "save": save_every}[kind]
        delay = {"start": 8.0, "step": 0.05, "save": 0.3}[kind]
        name = ("SIGKILL", "SIGTERM")[number % 2]
        planned.append(Moment(kind, step, draw.uniform(0, delay), name, draw.randrange(processes)))
    ends = [Moment(kind, steps, draw.uniform(0, 0.02), name, draw.randrange(processes)) for kind, name in last]
    return [*planned, *ends]


KILLS = {
    1: ["start", *["step"] * 4, *["save"] * 4, "last save SIGKILL", "last report SIGKILL"],
    2: [*["step"] * 4, *["save"] * 3, "last save SIGKILL", "last save SIGTERM"],
}


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_random_moments(tmp_path, processes):
    seed, steps, save_every = 15, 200, 20
    flags = xla_flags(2 // processes)
    whole = TrainConfig(
        **SMALL,
        ep=2,
        steps=steps,
        save_every=save_every,
        run_dir=str(tmp_path / "whole"),
        data=(str(text_of(tmp_path)),),
    )
    assert Run(whole, tmp_path, flags, processes=processes).end() == [0] * processes
    config = dataclasses.replace(whole, run_dir=str(tmp_path / "run"))
    plan = moments(seed, KILLS[processes], steps=steps, save_every=save_every, processes=processes)
    print("seed", seed, *plan, sep="\n")
    told = []
    for moment in [*plan, None]:
        saved = [int(path.name) for path in (tmp_path / "run/checkpoints").glob("*") if path.name.isdecimal()]
        if not saved:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        if (tmp_path / "run/summary.json").exists() and max(saved) == steps:
            break
        began = time.monotonic()
        run = Run(dataclasses.replace(config, resume=bool(saved)), tmp_path, flags, processes=processes)
        if moment is None:
            assert run.end() == [0] * processes, run.printed()
            break
        run.wait_for(lambda run=run, moment=moment: moment.has_come(run))
        time.sleep(moment.delay_s)
        at, in_save = run.steps(), any((tmp_path / "run/checkpoints").glob(".*.half"))
        codes = run.end(signal.Signals[moment.signal], moment.victim)
        told.append(
            {
                **dataclasses.asdict(moment),
                "processes": processes,
                "resumed_from": max(saved, default=0),
                "steps_logged": at,
                "in_save": in_save,
                "exit": codes,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(told[-1], flush=True)
        started = "compiling" in run.printed()
        if moment.signal == "SIGTERM" and started:
            assert codes == [0] * processes, run.printed()
        if moment.signal == "SIGKILL":
            assert 0 not in codes or moment.kind == "report", run.printed()
    assert len(told) == len(plan)
    assert_equal_runs(config, whole)
    path = ROOT / "results" / "full" / "kills.json"
    kept = json.loads(path.read_text())["kills"] if path.exists() else []
    others = [kill for kill in kept if kill["processes"] != processes]
    kills = sorted([*others, *told], key=lambda kill: kill["processes"])
    path.write_text(json.dumps({"seed": seed, "steps": steps, "equal": True, "kills": kills}, indent=2) + "\n")
