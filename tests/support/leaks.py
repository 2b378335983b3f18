"""What a test must leave as it found it, and what is still there of a test that did not.

conftest.py looks before and after every test and doctest, and before and after every file. Tests run in any order, so
what one makes and leaves is what another one, some day, trips over.

What libraries keep for good is no leak where a rule below says so, and why. Everything else is one, and has to be ended
by who made it: a fixture that yields, a `with`, `monkeypatch`.
"""

import contextlib
import ctypes
import gc
import logging
import os
import random
import reprlib
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

State = Mapping[Any, Any]
"""What there is of one kind, by name."""

_SIGNALS = [
    signal.SIGALRM,
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGUSR1,
]
_CHILDREN = f"/proc/self/task/{os.getpid()}/children"
_MT19937 = np.random.get_bit_generator()
_MT19937_BYTES = 625 * 4  # its words and its place among them
_PACKAGES = sysconfig.get_path("purelib")
_PATIENCE_S = 10.0  # for threads that are about to end; only a test that leaves one waits


def environment() -> State:
    # pytest itself notes there which test runs, and in which phase.
    found = dict(os.environ._data)  # as it lies there: to decode all of it takes longer than the rest of these
    found.pop(b"PYTEST_CURRENT_TEST", None)
    for name in (b"MOSAIC_GPU_CUDA_ROOT", b"MOSAIC_GPU_RUNTIME_LIB_PATH"):  # JAX notes them where Pallas is first used
        found.pop(name, None)
    return found


def transport_groups() -> State:
    module = sys.modules.get("topoep_jax.transport.device")
    return dict(module._registry.groups) if module else {}


def jax_options() -> State:
    """The configuration, with what a `with` sets in this thread, such as a mesh or a policy of promotion."""
    jax = sys.modules.get("jax")
    return {**jax.config.values, "the mesh": jax.sharding.get_abstract_mesh()} if jax else {}


def random_states() -> State:
    return {
        "random": random.getstate(),
        "numpy.random": ctypes.string_at(_MT19937.ctypes.state_address, _MT19937_BYTES),
    }


def numpy_options() -> State:
    return {**np.geterr(), **np.get_printoptions()}


def folder() -> State:
    return {"the working directory": os.getcwd()}


def open_files() -> State:
    """Files and folders. Sockets, pipes and the like belong to loops of events and pools, which libraries keep.

    So do they with files of their own: matplotlib keeps fonts open.
    """
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {
        number: path
        for number, path in found.items()
        if path.startswith("/") and not path.startswith(("/dev/", "/memfd:", _PACKAGES))
    }


def temporary_files() -> State:
    return dict.fromkeys(os.listdir(tempfile.gettempdir()), "")


def threads() -> State:
    """Those of Python. A dummy stands for one of XLA's pools, in which a callback ran."""
    return {thread: "" for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def children() -> State:
    try:
        with open(_CHILDREN) as file:
            return dict.fromkeys(file.read().split(), "")
    except FileNotFoundError:  # a kernel without this list
        return {}


def signal_handlers() -> State:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def interpreter() -> State:
    """What imports and programs read of `sys`."""
    lists = {name: tuple(getattr(sys, name)) for name in ("argv", "path", "meta_path", "path_hooks")}
    return {**lists, "excepthook": sys.excepthook, "stdout": sys.__stdout__, "recursionlimit": sys.getrecursionlimit()}


def modules() -> State:
    """In the order in which they were imported. One that is imported when it is first needed stays."""
    return {"all": tuple(sys.modules.values())}


def logs() -> State:
    logger = logging.getLogger("topoep_jax")
    return {"the root": logging.root.level, "topoep_jax": (logger.level, logger.propagate, tuple(logger.handlers))}


def figures() -> State:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return dict.fromkeys(pyplot.get_fignums(), "") if pyplot else {}


KINDS: dict[str, Callable[[], State]] = {
    "transport group": transport_groups,
    "environment variable": environment,
    "JAX option": jax_options,
    "random state": random_states,
    "NumPy option": numpy_options,
    "folder": folder,
    "open file": open_files,
    "temporary file": temporary_files,
    "thread": threads,
    "child process": children,
    "signal handler": signal_handlers,
    "attribute of sys": interpreter,
    "module": modules,
    "logger": logs,
    "figure": figures,
}

Snapshot = dict[str, State]

_MAY_END = {"open file", "temporary file", "thread", "child process", "figure"}
_NOTHING = object()
_reported: set[tuple[str, str]] = set()


def look() -> Snapshot:
    return {kind: state() for kind, state in KINDS.items()}


def left_since(before: Snapshot) -> dict[tuple[str, str], str]:
    """What changed since `before` and is a leak: a line for each kind and name."""
    changed = [kind for kind, state in KINDS.items() if state() != before[kind]]
    if any(_differences(kind, before[kind]) for kind in changed):
        # What nobody holds is closed when it is collected, and a thread may be at its last instruction.
        gc.collect()
        for thread in threads().keys() - before["thread"].keys():
            thread.join(_PATIENCE_S)
    return {(kind, str(name)): line for kind in changed for name, line in _differences(kind, before[kind]).items()}


def of_a_test() -> Iterator[None]:
    """The body of a fixture: looks, lets the test run, and fails where it left something."""
    before = look()
    yield
    found = left_since(before)
    _reported.update(found)
    _complain("this test", found)


def of_a_file() -> Iterator[None]:
    """The same of what a file's fixtures left; its tests have been told what they did."""
    before = look()
    _reported.clear()
    yield
    found = left_since(before)
    _complain("this file", {leak: line for leak, line in found.items() if leak not in _reported})


def _complain(owner: str, found: dict[tuple[str, str], str]) -> None:
    if found:
        pytest.fail(f"{owner} leaves behind:\n" + "\n".join(f"  {line}" for line in found.values()), pytrace=False)


def _differences(kind: str, before: State) -> dict[Any, str]:
    after = KINDS[kind]()
    if kind == "module":
        present = {id(module) for module in after["all"]}
        lost = [
            str(getattr(module, "__name__", module))
            for module in before["all"]
            if module is not None and id(module) not in present
        ]
        return {name: f"module {name} is gone, or another is in its place" for name in lost}
    found = {}
    for name in {**before, **after}:
        was, now = before.get(name, _NOTHING), after.get(name, _NOTHING)
        # Whoever made a file, a thread or the like may end it at any time.
        if was != now and not (now is _NOTHING and kind in _MAY_END):
            found[name] = f"{kind} {_told(kind, name, was, now)}"
    return found


def _told(kind: str, name: Any, was: Any, now: Any) -> str:
    if kind == "environment variable":
        name, was, now = (os.fsdecode(text) if isinstance(text, bytes) else text for text in (name, was, now))
    if kind == "random state":
        return f"{name}: was changed"
    if was is _NOTHING:
        return f"{name}: {reprlib.repr(now)} is new"
    if now is _NOTHING:
        return f"{name}: {reprlib.repr(was)} is gone"
    return f"{name}: {reprlib.repr(was)} became {reprlib.repr(now)}"
