"""A process of a run that only waits: what `train.parent` does with it costs no JAX.

python -m tests.support.supervised --num_processes=3 --process_id=1 --coordinator=127.0.0.1:PORT --run_dir=DIR
"""

import argparse
import os
import signal
import subprocess
import sys

from train import parent, parent_io, supervise


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, kind in (("num_processes", int), ("process_id", int), ("coordinator", str), ("run_dir", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--join_s", type=float, default=parent.JOIN_S)
    parser.add_argument("--verdict_s", type=float, default=parent._VERDICT_S)
    parser.add_argument("--same_s", type=float, default=parent_io.SAME_S)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    signal.signal(signal.SIGUSR1, _crash)
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit("error: no more room"))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))
    signal.signal(signal.SIGALRM, _start_another)
    print(os.getpid(), flush=True)
    place = parent_io.Place(args.process_id, args.num_processes, args.coordinator, args.run_dir, "RESUME")
    print("at", supervise.meet(place), flush=True)
    while True:
        signal.pause()


def _crash(*_: object) -> None:
    raise RuntimeError("a collective failed")


def _start_another(*_: object) -> None:
    """One that outlives this process, and has its stderr."""
    print(subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL).pid, flush=True)


if __name__ == "__main__":
    given = read_arguments()
    parent.JOIN_S, parent._VERDICT_S, parent_io.SAME_S = given.join_s, given.verdict_s, given.same_s
    supervise.under_a_parent("tests.support.supervised")
    with supervise.failures_told():
        main(given)
