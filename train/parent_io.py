"""What the parent of a process (`train.parent`) hears: where its child stands, messages of others, and errors."""

import contextlib
import dataclasses
import json
import re
import socket
import sys
import time
from typing import Any

CHANNEL = "TOPOEP_PARENT"
"""Environment variable with "descriptor process": the socket to the parent, and the parent's process id."""
Message = dict[str, Any]
SAME_S = 1
"""Seconds after a signal in which another one is the same: a launcher sends it to a process and to its group."""
HOLD_S = 12
"""Seconds for which what looks like the report of an error is held back: longer than a verdict takes."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A machine that is gone without a word is missed after 25 s."""
_FAULT = re.compile(rb"Traceback \(most recent call last\)|[WEF]\d{4} \d\d:\d\d:\d|Fatal Python error|terminate called")


@dataclasses.dataclass(frozen=True)
class Place:
    """What a process tells its parent before it looks for the others.

    Attributes:
      process: which one this is.
      processes: of how many.
      coordinator: "host:port" at which the parent of process 0 waits.
      run_dir: folder of the run.
      resume: command that goes on with it.
    """

    process: int
    processes: int
    coordinator: str
    run_dir: str
    resume: str


class Line:
    """Messages over a socket, one JSON value a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # Its end is heard where messages are received.

    def receive(self) -> tuple[list[Message], bool]:
        """What has come, and whether the other side is still there."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages: list[Message] = []
        with contextlib.suppress(ValueError):  # Whoever writes something else to an open port is none of us.
            messages = [message for message in map(json.loads, lines) if isinstance(message, dict)]
        return messages, bool(data)


class Errors:
    """The child's stderr: passed on, but for what may be the report of another process' loss."""

    def __init__(self) -> None:
        self._rest = b""
        self._held: list[bytes] = []
        self._since = 0.0

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).splitlines(keepends=True) or [b""]
        if self._rest.endswith(b"\n"):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if self._held or _FAULT.match(line):
                self._since = self._since if self._held else time.monotonic()
                self._held.append(line)
            else:
                write(line)

    def release(self) -> None:
        write(b"".join(self._held) + self._rest)
        self.drop()

    def drop(self) -> None:
        self._held, self._rest = [], b""

    def tick(self) -> None:
        if not self._held and self._rest:
            self.release()  # A line that does not end, as of a question.
        if self._held and time.monotonic() - self._since > HOLD_S:
            self.release()


def write(data: bytes) -> None:
    """To the stderr of this process."""
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
