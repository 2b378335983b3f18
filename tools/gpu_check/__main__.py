"""Checks on one GPU what no CPU can tell, the most valuable first, and writes one JSON to results/gpu/.

    tools/gpu_check.sh [--budget-minutes 12] [--only plans ...]
    tools/gpu_check.sh --dry-run      on a machine without a GPU: all that a CPU can do, and no JSON in results/gpu/

A check is passed, failed or skipped, with the reason. The exit status is 1 if one failed. `--plant NAME` makes a check
plant a fault, which it must find: then the exit status must be 1.
"""

import argparse
import datetime
import re
import sys
import time
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.report import tell, write_report
from tools.gpu_check.runner import ROOT, Check, Setting, run_checks

GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,WHILE --xla_gpu_graph_min_graph_size=1"

CHECKS = (
    Check("extension", "tools.gpu_check.building:extension", 300),
    Check("build", "tools.gpu_check.building:build", 420),
    Check("plans", "tools.gpu_check.plans:small", 240),
    Check("programs", "tools.gpu_check.plans:in_programs", 240),
    Check("programs_in_graphs", "tools.gpu_check.plans:in_programs", 240, (GRAPHS,)),
    Check("gemms", "tools.gpu_check.products:products", 240),
    Check("copies", "tools.gpu_check.transfers:copies", 120, needs_gpu=True),
    # Each rank has streams of its own, which would wait for each other if they shared a connection.
    Check(
        "transfers", "tools.gpu_check.transfers:among_ranks", 240, ("CUDA_DEVICE_MAX_CONNECTIONS=32",), needs_gpu=True
    ),
    Check("plan_times", "tools.gpu_check.plans:times", 240),
    Check("large_plans", "tools.gpu_check.plans:large", 300),
    Check("memcheck", "tools.gpu_check.sanitizers:memcheck", 300, needs_gpu=True),
    Check("racecheck", "tools.gpu_check.sanitizers:racecheck", 300, needs_gpu=True),
    Check("synccheck", "tools.gpu_check.sanitizers:synccheck", 300, needs_gpu=True),
)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-minutes", type=float, default=12)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=[check.name for check in CHECKS])
    parser.add_argument("--plant", default="", choices=["plans", "programs", "gemms"])
    parser.add_argument("--nccl-include", default="", help="NCCL's headers, where the installed ones are too old")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu_check", help="for programs, logs and the like")
    args = parser.parse_args()
    gpus = machine.gpus()
    if not gpus and not args.dry_run:
        print("no GPU here (nvidia-smi shows none): --dry-run does what a CPU can")
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    started = datetime.datetime.now(datetime.UTC)
    checks = [check for check in CHECKS if not args.only or check.name in args.only]
    setting = Setting(args.folder.resolve(), args.dry_run, args.plant, args.nccl_include)
    results = run_checks(checks, setting, start + 60 * args.budget_minutes, tell)
    if args.dry_run or args.plant:
        path = args.folder / "report.json"
    else:
        name = re.sub(r"\W+", "_", gpus[0]["name"])
        path = ROOT / "results/gpu" / f"{started:%Y%m%d_%H%M}_{name}.json"
    label = "dry-run" if args.dry_run else "gpu"
    return write_report(path, label, started, args.plant, results, budget_minutes=args.budget_minutes)


if __name__ == "__main__":
    sys.exit(main())
