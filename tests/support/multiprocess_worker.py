"""Runs one function in several processes that form one JAX program over loopback, as a cluster would.

    outputs = run_processes("tests.plan.multiprocess_test:plan_everywhere", str(folder))

Each process has its own emulated CPU devices and calls the function with the given text; collectives go through gloo.
The function looks up `jax.process_index()` and writes what it wants to hand back into files.
"""

import argparse
import contextlib
import importlib
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.xla_flags import xla_flags

ROOT = Path(__file__).parent.parent.parent


def run_processes(
    entry: str, argument: str, *, num_processes: int = 2, devices_per_process: int = 4, timeout_s: int = 300
) -> list[str]:
    """Runs `entry` ("module:function") with `argument` everywhere; the output of each process.

    Raises:
      AssertionError: a process failed or ran out of time; all are stopped, and the message holds their output.
    """
    flags = f"XLA_FLAGS={xla_flags(devices_per_process)}"
    command = [
        "env",
        flags,
        "JAX_PLATFORMS=cpu",
        sys.executable,
        "-m",
        "tests.support.multiprocess_worker",
        entry,
        argument,
    ]
    command += [f"--address=127.0.0.1:{_free_port()}", f"--num_processes={num_processes}"]
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a full pipe would block one process and, through a collective, the others.
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_processes)]
        processes = [
            subprocess.Popen([*command, f"--process_id={i}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            for i, log in enumerate(logs)
        ]
        stack.callback(_stop, processes)
        deadline = time.monotonic() + timeout_s
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + 2)  # for the others to say what they saw
            time.sleep(0.1)
        outputs = []
        for log in logs:
            log.seek(0)
            outputs.append(log.read())
    results = ["timed out" if code is None else f"exit {code}" for code in codes]
    assert not any(codes) and None not in codes, f"{results}\n" + "\n----\n".join(outputs)
    return outputs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry")
    parser.add_argument("argument")
    parser.add_argument("--address", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--process_id", type=int, required=True)
    args = parser.parse_args()

    import jax

    jax.distributed.initialize(args.address, args.num_processes, args.process_id)
    module, function = args.entry.split(":")
    getattr(importlib.import_module(module), function)(args.argument)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
