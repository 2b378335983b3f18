"""The parent of one process of a run: passes signals on, hears of processes that are lost, says which in one sentence.

The parents of a run are connected by TCP, each with that of process 0, which listens at the coordinator's address and
tells JAX's service another port once all are there. A process that is killed is reported by its own parent; a parent
that is gone, or its machine, by the connection that ends. Without JAX: this is a small process.
"""

import contextlib
import dataclasses
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from train import parent_io
from train.parent_io import CHANNEL, Errors, Line, Message, Place, write

JOIN_S = 300
"""Seconds for which the processes of a run wait for each other to start."""
_VERDICT_S = 5
"""Seconds after the first error in which a loss that explains it may become known: an error may be its consequence."""
_END_S = 5
"""Seconds that a process which has failed has for its own end."""
_TICK_S = 0.5
_LOOK_S = 0.1
"""How often process 0 is looked for, until it is there."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(command: Sequence[str]) -> int:
    """Runs a command under this process, which becomes its parent; the exit status."""
    return _Parent(command).run()


@dataclasses.dataclass(frozen=True)
class _Lost:
    """Why the run cannot go on.

    Attributes:
      what: the start of a sentence.
      process: which one was lost; None where the run could not start.
      said: that process tells an error by itself.
    """

    what: str
    process: int | None = None
    said: bool = False


class _Parent:
    def __init__(self, command: Sequence[str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._asked_at: float | None = None
        # Python calls handlers between its own instructions; the descriptor wakes `select`.
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake_end = wake
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        ours, theirs = socket.socketpair()
        # A group of its own: a terminal's Ctrl-C reaches the parent alone, which passes it on once.
        self._child = subprocess.Popen(
            ["env", f"{CHANNEL}={theirs.fileno()} {os.getpid()}", *command],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            process_group=0,
        )
        theirs.close()
        self._control = Line(ours)
        self._errors = Errors()
        self._place: Place | None = None
        self._server: socket.socket | None = None
        self._others: dict[int, Line] = {}
        """At process 0: the parents of the others."""
        self._lead: Line | None = None
        """Elsewhere: the parent of process 0."""
        self._join_by = 0.0
        self._going = False
        self._reports: dict[int, str] = {}
        """At process 0: how the processes that have failed did so, in order."""
        self._decide_at = 0.0
        self._done: set[int] = set()
        self._said = False
        """The child has told its own error."""
        self._reported_at = 0.0
        self._lost: _Lost | None = None

    def run(self) -> int:
        assert self._child.stderr is not None
        stderr = self._child.stderr.fileno()
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)
        self._selector.register(self._control.socket, selectors.EVENT_READ, self._on_control)
        self._selector.register(stderr, selectors.EVENT_READ, lambda: self._on_stderr(stderr))
        code = None
        while code is None:
            for key, _ in self._selector.select(_TICK_S if self._going else _LOOK_S):
                key.data()
            self._errors.tick()
            self._join()
            self._decide()
            code = self._status()
        # Not until its end: what the child has started may live on, and has it, too.
        os.set_blocking(stderr, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(stderr, 1 << 16):
                self._errors.feed(data)
        return self._end(code)

    def _on_signal(self) -> None:
        for number in self._wake.recv(1 << 10):
            if number not in _SIGNALS or self._child.poll() is not None:
                continue
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._child.send_signal(number)
            elif time.monotonic() - self._asked_at > parent_io.SAME_S:
                self._child.kill()

    def _on_stderr(self, stderr: int) -> None:
        data = os.read(stderr, 1 << 16)
        if data:
            self._errors.feed(data)
        else:
            self._selector.unregister(stderr)

    def _on_control(self) -> None:
        messages, alive = self._control.receive()
        if not alive:
            self._selector.unregister(self._control.socket)
        for message in messages:
            if "failed" in message:
                self._said = message["failed"] == "said"
                self._report("failed")
            else:
                self._place = Place(**message)
                self._join_by = time.monotonic() + JOIN_S
                if self._place.process == 0:
                    self._listen(self._place)

    def _listen(self, place: Place) -> None:
        port = int(place.coordinator.rpartition(":")[2])
        try:
            # Both families, where the machine has both.
            dual = socket.has_dualstack_ipv6()
            self._server = socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        except OSError as error:
            self._lost = _Lost(
                f"process 0 cannot listen at port {port} of this machine: {os.strerror(error.errno or 0)}"
            )
            return
        self._selector.register(self._server, selectors.EVENT_READ, self._on_stranger)

    def _on_stranger(self) -> None:
        assert self._server is not None
        line = Line(self._server.accept()[0])
        self._selector.register(line.socket, selectors.EVENT_READ, lambda: self._on_other(line))

    def _on_other(self, line: Line) -> None:
        """A message to process 0."""
        messages, alive = line.receive()
        for message in messages:
            if self._is_of_run(line, message):
                self._hear(message["process"], message["how"])
        if not alive:
            self._selector.unregister(line.socket)
            line.socket.close()
            for process, its in self._others.items():
                if its is line:
                    self._hear(process, "gone")

    def _is_of_run(self, line: Line, message: Message) -> bool:
        place, process = self._place, message.get("process")
        ours = place is not None and message.get("of") == place.processes and isinstance(message.get("how"), str)
        if not ours or not isinstance(process, int) or process not in range(self._processes()):
            line.send(dataclasses.asdict(_Lost(f"{place and place.coordinator} is of another run")))
            return False
        if process == 0 or self._others.setdefault(process, line) is not line:
            line.send(
                dataclasses.asdict(_Lost(f"process {process} is there already: give each a --process_id of its own"))
            )
            return False
        return True

    def _on_lead(self) -> None:
        """A message from process 0."""
        assert self._lead is not None
        messages, alive = self._lead.receive()
        for message in messages:
            if "port" in message:
                self._go(message["port"])
            elif "what" in message:
                self._lost = self._lost or _Lost(**message)
            else:
                self._done.add(0)
        if not alive:
            self._selector.unregister(self._lead.socket)
            if 0 not in self._done and self._lost is None:
                self._lost = _Lost(_how("gone", 0, self._processes()), 0)

    def _join(self) -> None:
        """Until all processes are there: looks for that of process 0, or gives up."""
        place = self._place
        if place is None or self._going or self._lost is not None or self._child.poll() is not None:
            return
        if place.process == 0:
            missing = [i for i in range(1, place.processes) if i not in self._others]
            if not missing:
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    port = probe.getsockname()[1]
                for line in self._others.values():
                    line.send({"port": port})
                self._go(port)
            elif time.monotonic() > self._join_by:
                who = ", ".join(map(str, missing))
                self._tell(
                    _Lost(f"of {place.processes} processes, {who} did not come to {place.coordinator} in {JOIN_S} s")
                )
        elif self._lead is None:
            host, _, port = place.coordinator.rpartition(":")
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=2)
            except OSError as error:
                if time.monotonic() > self._join_by:
                    self._lost = _Lost(f"process 0 was not found at {place.coordinator} in {JOIN_S} s ({error})")
                return
            connection.settimeout(None)
            self._lead = Line(connection)
            self._selector.register(connection, selectors.EVENT_READ, self._on_lead)
            self._say("here")

    def _go(self, port: int) -> None:
        self._going = True
        self._control.send({"port": port})

    def _processes(self) -> int:
        return self._place.processes if self._place else 1

    def _report(self, how: str) -> None:
        """Says how this process failed; the parent of process 0 decides whether that is the cause."""
        if self._place is None or self._reported_at:
            return
        self._reported_at = time.monotonic()
        if self._place.process == 0:
            self._hear(0, how)
        elif self._lead is not None:
            self._say(how)

    def _say(self, how: str) -> None:
        """To the parent of process 0."""
        assert self._lead is not None and self._place is not None
        self._lead.send({"process": self._place.process, "of": self._place.processes, "how": how})

    def _hear(self, process: int, how: str) -> None:
        """Hears, at process 0, what became of a process."""
        if how == "here":
            return
        if how == "done":
            self._done.add(process)
        elif process not in self._done and process not in self._reports:
            self._reports[process] = how
            first = self._decide_at or time.monotonic() + _VERDICT_S
            # Only an error may be the consequence of another's end.
            self._decide_at = first if how == "failed" else time.monotonic()

    def _decide(self) -> None:
        """Names, at process 0, the process that was lost first."""
        everyone = len(self._reports) == self._processes()
        if self._reports and self._lost is None and (everyone or time.monotonic() >= self._decide_at):
            causes = [process for process, how in self._reports.items() if how != "failed"] or list(self._reports)
            how, process = self._reports[causes[0]], causes[0]
            self._tell(_Lost(_how(how, process, self._processes()), process, how == "failed"))

    def _tell(self, lost: _Lost) -> None:
        self._lost = lost
        for line in self._others.values():
            line.send(dataclasses.asdict(lost))

    def _status(self) -> int | None:
        """The child's exit status once this process may end; None before."""
        code = self._child.poll()
        if self._lost is not None:
            if code is None and (not self._is_own() or self._late()):
                self._child.kill()
            return code
        if code is None:
            return None
        if code == 0:
            for line in self._others.values():
                line.send({"done": True})
            if self._lead is not None:
                self._say("done")
            return code
        if self._server is None and self._lead is None:
            return code
        self._report(_killed(code) if code < 0 and code != -signal.SIGABRT else "failed")
        return code if self._late() else None

    def _is_own(self) -> bool:
        """Whether the child says why by itself, and is to end by itself."""
        assert self._lost is not None and self._place is not None
        return self._said or self._place.process == self._lost.process

    def _late(self) -> bool:
        return time.monotonic() > self._reported_at + _VERDICT_S + _END_S

    def _end(self, code: int) -> int:
        if self._lost is None:
            self._errors.release()
            return code if code >= 0 else 128 - code
        lost, place = self._lost, self._place
        assert place is not None
        own = place.process == lost.process
        if own or self._said:
            self._errors.release()
        else:
            self._errors.drop()
        if lost.process is None:
            write(f"error: {lost.what}\n".encode())
        elif not lost.said or not (own or self._said):
            this = "the run" if own else "this one"
            write(f"error: {lost.what}, so {this} cannot go on. {_way_on(place)}\n".encode())
        return 128 - code if own and code < 0 else max(code, 1)


def _killed(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}"


def _how(how: str, process: int, processes: int) -> str:
    name = f"process {process} of {processes}"
    if how == "gone":
        return f"{name} is gone (killed, or its machine or network is down)"
    if how == "failed":
        return f"{name} ended with an error, which its own output tells"
    return f"{name} was {how}"


def _way_on(place: Place) -> str:
    saved = any(path.name.isdecimal() for path in pathlib.Path(place.run_dir, "checkpoints").glob("[0-9]*"))
    if saved:
        return f"Go on from the last checkpoint: start all processes again as before, with --resume: {place.resume}"
    if pathlib.Path(place.run_dir).exists():
        return f"Nothing was saved yet: remove {place.run_dir} and start all processes again"
    return "Nothing was saved yet: start all processes again"
