"""A run of several processes ends everywhere when one is lost, with one sentence that says which and how to go on."""

import contextlib
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import time
import types

import pytest

from tests.support.multiprocess_worker import ROOT, _free_port
from tests.support.train_runs import SHAPES, TINY, text_of
from train import interrupt
from train.supervise import maybe_one_of_several

LIMIT_S = 60


class Run:
    """Processes that only wait (tests/support/supervised.py), each with its parent."""

    def __init__(self, folder, count=3, **patience):
        self.folder, self.count, self.port = folder, count, _free_port()
        self._patience = [f"--{name}={value}" for name, value in patience.items()]
        self.parents, self.children = {}, {}

    def start(self, *processes, port=None, count=None):
        """Starts some of them, and waits until they are up."""
        for process in processes:
            flags = [f"--num_processes={count or self.count}", f"--process_id={process}", f"--run_dir={self.folder}"]
            flags.append(f"--coordinator=127.0.0.1:{port or self.port}")
            command = [sys.executable, "-m", "tests.support.supervised", *flags, *self._patience]
            made = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.parents[process] = made
        for process in processes:
            self.children[process] = int(self.parents[process].stdout.readline())
        return self

    def met(self):
        """Waits until all have met; where JAX is to meet."""
        said = {self.parents[process].stdout.readline().strip() for process in self.parents}
        assert len(said) == 1
        return said.pop()

    def end(self, process):
        """Exit status and stderr of one that ends."""
        made = self.parents[process]
        _, error = made.communicate(timeout=LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while alive(self.children[process]):  # The system kills it when its parent is gone, not before.
            assert time.monotonic() < deadline
        return made.returncode, error

    def kill(self, process, whom):
        os.kill(self.children[process] if whom == "child" else self.parents[process].pid, signal.SIGKILL)


def connected(port):
    """A connection to a process that listens there, or soon will."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # One that has ended, but whose new parent has not looked yet, is none.
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def runs(tmp_path):
    """Makes runs, and leaves nothing of them."""
    made = []

    def make(count=3, **patience):
        made.append(Run(tmp_path, count, **patience))
        return made[-1]

    yield make
    for run in made:
        for parent in run.parents.values():
            with parent:
                parent.kill()


@pytest.mark.parametrize("whom", ["child", "parent"])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_lost_process_is_named_everywhere(runs, tmp_path, lost, whom):
    (tmp_path / "checkpoints/20").mkdir(parents=True)
    run = runs().start(0, 1, 2)
    assert run.met() != f"at 127.0.0.1:{run.port}"  # where the parents meet
    run.kill(lost, whom)
    how = r"was killed by SIGKILL" if whom == "child" else r"is gone \(killed, or its machine or network is down\)"
    sentence = rf"error: process {lost} of 3 {how}, so %s cannot go on\. Go on from the last checkpoint: .*: RESUME\n"
    for process in range(3):
        code, said = run.end(process)
        if process != lost:
            assert (code, bool(re.fullmatch(sentence % "this one", said))) == (1, True), said
        else:
            assert code == (137 if whom == "child" else -9)
            assert re.fullmatch(sentence % "the run" if whom == "child" else "", said), said


def test_a_process_may_be_lost_before_all_are_there(runs):
    run = runs().start(0)
    with connected(run.port) as other:
        other.sendall(json.dumps({"process": 1, "of": 3, "how": "here"}).encode() + b"\n")
    code, said = run.end(0)
    assert code == 1
    assert said.startswith("error: process 1 of 3 is gone (killed, or its machine or network is down), so this one")
    with socket.create_server(("127.0.0.1", 0)) as lead:
        run = runs().start(1, port=lead.getsockname()[1])
        lead.accept()[0].close()
    code, said = run.end(1)
    assert code == 1
    assert said.startswith("error: process 0 of 3 is gone (killed, or its machine or network is down), so this one")


def test_an_error_that_a_loss_explains_is_not_told(runs):
    run = runs(2).start(0, 1)
    run.met()
    os.kill(run.children[0], signal.SIGUSR1)  # a collective fails, as where the other side has gone
    run.kill(1, "child")
    code, said = run.end(0)
    assert code == 1
    assert re.fullmatch(r"error: process 1 of 2 was killed by SIGKILL, .*\n", said), said


def test_an_error_of_one_process_ends_the_others(runs):
    run = runs(2, verdict_s=0.2).start(0, 1)
    run.met()
    os.kill(run.children[1], signal.SIGUSR2)
    assert run.end(1) == (1, "error: no more room\n")
    code, said = run.end(0)
    assert code == 1
    assert re.fullmatch(r"error: process 1 of 2 ended with an error, which its own output tells, .*\n", said), said


def test_an_error_that_all_tell_is_told_by_each(runs):
    run = runs(2).start(0, 1)
    run.met()
    for process in range(2):
        os.kill(run.children[process], signal.SIGUSR2)
    assert [run.end(process) for process in range(2)] == [(1, "error: no more room\n")] * 2


def test_the_traceback_of_the_process_that_failed_is_shown(runs):
    run = runs(2, verdict_s=0.2).start(0, 1)
    run.met()
    os.kill(run.children[1], signal.SIGUSR1)
    code, said = run.end(1)
    assert code == 1
    assert said.startswith("Traceback") and said.endswith("RuntimeError: a collective failed\n")
    assert "process 1 of 2 ended with an error" in run.end(0)[1]


def test_a_signal_asks_and_the_second_one_kills(runs):
    run = runs(1, same_s=0).start(0)
    run.met()
    [parent] = run.parents.values()
    parent.send_signal(signal.SIGTERM)
    assert parent.stdout.readline() == "asked\n"
    parent.send_signal(signal.SIGTERM)
    assert run.end(0)[0] == 137


def test_a_signal_that_comes_twice_asks_once(runs):
    run = runs(1, same_s=LIMIT_S).start(0)
    run.met()
    [parent] = run.parents.values()
    parent.send_signal(signal.SIGTERM)
    assert parent.stdout.readline() == "asked\n"
    parent.send_signal(signal.SIGTERM)
    assert not select.select([parent.stdout], [], [], 0.5)[0]  # neither asked again nor killed
    os.kill(run.children[0], signal.SIGHUP)
    assert run.end(0) == (0, "")


def test_without_a_parent_a_signal_that_comes_twice_asks_once(monkeypatch, capfd):
    came = []
    patience = types.SimpleNamespace(sleep=lambda _: came.append(signal.raise_signal(signal.SIGTERM)))
    monkeypatch.setattr(interrupt, "time", patience, raising=False)
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("killed"))
    try:
        with interrupt.Interrupt() as asked:
            signal.raise_signal(signal.SIGTERM)
            assert (asked.asked(), came) == (True, [None])
            signal.raise_signal(signal.SIGTERM)
            assert came == [None, "killed"]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err.count("SIGTERM: the run ends after this step") == 1


def test_what_a_process_has_started_does_not_keep_its_parent(runs):
    run = runs(1).start(0)
    run.met()
    os.kill(run.children[0], signal.SIGALRM)
    another = int(run.parents[0].stdout.readline())
    try:
        os.kill(run.children[0], signal.SIGUSR2)
        assert run.end(0) == (1, "error: no more room\n")
    finally:
        os.kill(another, signal.SIGKILL)


def test_processes_that_are_done_are_not_lost(runs):
    run = runs(2).start(0, 1)
    run.met()
    for process in range(2):
        os.kill(run.children[process], signal.SIGHUP)
        assert run.end(process) == (0, "")


def test_who_does_not_come_is_named(runs):
    run = runs(join_s=0.5).start(0)
    assert run.end(0) == (1, f"error: of 3 processes, 1, 2 did not come to 127.0.0.1:{run.port} in 0.5 s\n")
    code, said = runs(join_s=0.5).start(1).end(1)
    assert code == 1
    assert re.fullmatch(r"error: process 0 was not found at 127\.0\.0\.1:\d+ in 0\.5 s \(.*refused\)\n", said), said


def test_processes_that_do_not_belong_together(runs):
    run = runs().start(0, 1)
    for process, count, message in ((1, 3, "process 1 is there already"), (2, 4, "is of another run")):
        other = runs().start(process, port=run.port, count=count)
        code, said = other.end(process)
        assert code == 1
        assert re.fullmatch(rf"error: .*{message}.*\n", said), said
    run.start(2)
    run.met()


def test_strangers_at_the_port_do_no_harm(runs):
    run = runs(2).start(0)
    with connected(run.port) as stranger, connected(run.port) as like_us:
        stranger.sendall(b"GET / HTTP/1.1\n\n[1]\n{}\n")
        like_us.sendall(b'{"process": 1, "of": 2}\n{"process": 1, "of": 2, "how": 3}\n')
        like_us.sendall(b'{"process": 2, "of": 2, "how": "here"}\n')
        like_us.close()
        run.start(1)
        run.met()
        os.kill(run.children[0], signal.SIGHUP)
        assert run.end(0) == (0, "")


def test_a_port_that_is_taken_is_said(runs):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = runs().start(0, port=port).end(0)
    assert (code, said) == (
        1,
        f"error: process 0 cannot listen at port {port} of this machine: Address already in use\n",
    )


def test_a_run_that_saved_nothing_starts_anew(runs, tmp_path):
    run = runs(2).start(0, 1)
    run.met()
    run.kill(1, "child")
    assert f"Nothing was saved yet: remove {tmp_path} and start all processes again\n" in run.end(0)[1]


@pytest.mark.parametrize(
    ("arguments", "variables", "parent"),
    [
        ("", {}, False),
        ("--steps=3 --run_dir=--num_processes", {}, False),
        ("--num_processes=2", {}, True),
        ("-process_id 1", {}, True),
        ("--coordinator host:1", {}, True),
        ("--flagfile=F", {}, True),  # which may hold them
        ("-flagfile F", {}, True),
        ("", {"SLURM_PROCID": "0"}, True),
        ("", {"SLURM_JOB_ID": "1"}, False),
        ("", {"OMPI_COMM_WORLD_RANK": "0"}, True),
        ("", {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_one_process_needs_no_parent(arguments, variables, parent):
    assert maybe_one_of_several(arguments.split(), variables) == parent


def test_a_parent_imports_no_jax():
    code = "import sys, train.parent; print([name for name in sys.modules if name in ('jax', 'numpy', 'absl')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
@pytest.mark.parametrize("whom", ["child", "parent"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_training_run_ends_where_a_process_is_killed(tmp_path, lost, whom):
    run_dir = tmp_path / "run"
    settings = {**TINY, "steps": 100_000, "domains": 0, "ep": 2, "batch_size": 2, "planner": "none"}
    settings |= {"shape": SHAPES["qwen3-tiny"], "data": text_of(tmp_path), "run_dir": run_dir, "num_processes": 2}
    settings["coordinator"] = f"127.0.0.1:{_free_port()}"
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(2):
            command = ["env", "-uXLA_FLAGS", sys.executable, "-m", "train.pretrain", *flags, f"--process_id={i}"]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        while not any(path.name.isdecimal() for path in (run_dir / "checkpoints").glob("*")):
            assert [process.poll() for process in processes] == [None, None]
            select.select([], [], [], 0.2)
        own = processes[lost].pid
        [child] = map(int, pathlib.Path(f"/proc/{own}/task/{own}/children").read_text().split())
        os.kill(child if whom == "child" else own, signal.SIGKILL)
        began = time.monotonic()
        processes[lost].communicate(timeout=LIMIT_S)
        _, said = processes[1 - lost].communicate(timeout=LIMIT_S - (time.monotonic() - began))
    assert processes[1 - lost].returncode == 1
    sentence = (
        rf"error: process {lost} of 2 (was killed by SIGKILL|is gone .*), so this one cannot go on\. Go on .*--resume"
    )
    assert re.search(sentence, said), said
    assert not re.search("Traceback|coordination_service|Check failure", said), said
