"""Checks the device transport among the GPUs of one node or several, and writes one JSON to results/cluster/.

    tools/cluster_check.sh                                                      one node, all its GPUs
    srun .. tools/cluster_check.sh --folder SHARED                              under Slurm, or mpirun
    tools/cluster_check.sh --nodes 4 --node I --coordinator HOST:PORT --folder SHARED      on each of four nodes
    tools/cluster_check.sh --dry-run          two processes of four emulated CPU devices: lax collectives alone

One process for each node takes all its GPUs, and one for each GPU that alone; all must be given the same folder, which
all of them see. Every check uses a port of its own, from the coordinator's on. Exit status 1 if a check failed here.
"""

import argparse
import dataclasses
import datetime
import socket
import subprocess
import sys
import time
from pathlib import Path

from tools.cluster_check.cluster import Cluster
from tools.gpu_check import machine
from tools.gpu_check.report import status_of, tell, write_report
from tools.gpu_check.runner import ROOT, Check, Result, Setting, run_checks
from topoep_jax import launch

CHECKS = (
    Check("bring_up", "tools.cluster_check.transfers:bring_up", 900),  # the first builds the CUDA library, too
    Check("exact", "tools.cluster_check.transfers:exact", 600),
    Check("times", "tools.cluster_check.transfers:times", 600),
    Check("train_xla", "tools.cluster_check.training:with_collectives", 900),
    Check("train_device", "tools.cluster_check.training:with_kernels", 900),
    Check("same_steps", "tools.cluster_check.training:same_steps", 60),
)
EMULATED = "XLA_FLAGS=--xla_force_host_platform_device_count=4"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, help="processes; default: what Slurm or Open MPI says, else 1")
    parser.add_argument("--node", type=int, help="which of them this is, from 0")
    parser.add_argument("--coordinator", help="HOST:PORT of node 0; the next few ports are used, too")
    parser.add_argument("--budget-minutes", type=float, default=30)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/cluster_check", help="seen by all nodes")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=[check.name for check in CHECKS])
    parser.add_argument("--plant", default="", choices=["exact"], help="plant a fault, which the check must find")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run and not args.coordinator:
        return _emulate(sys.argv[1:])
    try:
        job = launch.find(args.coordinator, args.nodes, args.node, flags=("--coordinator", "--nodes", "--node"))
    except ValueError as error:
        parser.error(str(error))
    if not args.dry_run and not machine.gpus():
        print("no GPU here (nvidia-smi shows none): --dry-run does what a CPU can")
        return 2
    if job.process_id == 0 and any(args.folder.glob("train_*")):
        parser.error(f"{args.folder} holds an earlier check: remove it, or name another --folder")
    started = datetime.datetime.now(datetime.UTC)
    start = time.monotonic()
    results = _run(args, job, start + 60 * args.budget_minutes)
    if job.process_id != 0:
        return status_of(results)
    path = args.folder / "report.json"
    if not args.dry_run and not args.plant:
        path = ROOT / "results/cluster" / f"{started:%Y%m%d_%H%M}_{job.num_processes}x{launch.own_gpus()}.json"
    label = "dry-run" if args.dry_run else "cluster"
    return write_report(path, label, started, args.plant, results, nodes=job.num_processes)


def _run(args: argparse.Namespace, job: launch.Job, deadline: float) -> list[Result]:
    results = []
    own = args.folder.resolve() / f"node{job.process_id}"
    own.mkdir(parents=True, exist_ok=True)
    setting = Setting(own, args.dry_run, args.plant)
    host, _, port = job.coordinator.rpartition(":")
    for i, check in enumerate(CHECKS):
        if args.only and check.name not in args.only:
            continue
        # Upwards, but for the last ports that there are: JAX takes high ones under Slurm.
        coordinator = f"{host}:{int(port) + (i if int(port) < 65_000 else -i)}" if job.coordinator else ""
        Cluster(job.num_processes, job.process_id, coordinator, str(args.folder.resolve())).save(setting)
        if args.dry_run:
            check = dataclasses.replace(check, environment=(EMULATED,))
        results += run_checks([check], setting, deadline, tell)
    return results


def _emulate(arguments: list[str]) -> int:
    """Two nodes on this machine; the worse of their statuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tools.cluster_check", *arguments, "--nodes=2", f"--coordinator={coordinator}"]
    nodes = [
        subprocess.Popen([*command, f"--node={i}"], cwd=ROOT, stdout=None if i == 0 else subprocess.DEVNULL)
        for i in range(2)
    ]
    statuses = [node.wait() for node in nodes]
    if statuses[1] != 0:
        print("node 1 failed; its logs are in node1/ of the folder")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
