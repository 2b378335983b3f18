"""Runs checks one after another, each in a process of its own, until a budget of time ends."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NEEDS_GPU = "needs a GPU, and a dry run uses none"

_TAIL = 4000


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a check is told.

    Attributes:
      folder: where checks leave what later ones need.
      dry_run: the machine has no GPU: do what a CPU can.
      plant: name of the check that is to find a fault that it plants itself; "" for none.
      nccl_include: folder of NCCL's headers, where the installed ones are too old; "" for those.
    """

    folder: Path
    dry_run: bool
    plant: str
    nccl_include: str = ""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Why a check cannot be made here, and whether that is so: the runner asks, and who skips without it has failed."""

    reason: str
    holds: Callable[[Setting], bool]


class SkippedError(Exception):
    """The check cannot be made here."""

    def __init__(self, condition: Condition) -> None:
        super().__init__(condition.reason)
        self.condition = condition


@dataclasses.dataclass(frozen=True)
class Check:
    """A function of one setting in a module.

    Attributes:
      name: in the report.
      entry: "module:function"; it returns what is worth reporting, raises SkippedError, or fails with any other error.
      limit_s: a check that takes longer has failed.
      environment: variables of its process, as "NAME=value".
      needs_gpu: a CPU can do nothing of it, so a dry run leaves it out.
    """

    name: str
    entry: str
    limit_s: int
    environment: tuple[str, ...] = ()
    needs_gpu: bool = False


@dataclasses.dataclass
class Result:
    """One entry of the report."""

    name: str
    status: str
    reason: str
    seconds: float
    details: dict[str, object]


def run_checks(
    checks: Sequence[Check], setting: Setting, deadline: float, tell: Callable[[Result], None]
) -> list[Result]:
    """Runs the checks in order; those that start too late, or are cut short by time.monotonic() `deadline`, skip."""
    results = []
    for check in checks:
        left = deadline - time.monotonic()
        if left < 1:
            result = Result(check.name, SKIPPED, "the budget had ended", 0.0, {})
        elif check.needs_gpu and setting.dry_run:
            result = Result(check.name, SKIPPED, NEEDS_GPU, 0.0, {})
        else:
            result = _run(check, setting, left)
        tell(result)
        results.append(result)
    return results


def _run(check: Check, setting: Setting, left_s: float) -> Result:
    start = time.monotonic()
    answer = setting.folder / f"{check.name}.json"
    answer.unlink(missing_ok=True)
    # -P: an installed package in `site` comes before the checkout, where the process starts.
    environment = [f"PYTHONPATH={setting.folder / 'site'}:{ROOT}", *check.environment]
    if setting.dry_run:
        environment.append("JAX_PLATFORMS=cpu")
    command = ["env", *environment, sys.executable, "-P", "-m", "tools.gpu_check.runner"]
    command += [check.entry, str(answer), str(setting.folder), str(int(setting.dry_run)), setting.plant]
    command.append(setting.nccl_include)
    log = setting.folder / f"{check.name}.log"
    with log.open("w") as output:
        # A new session, so that what a check started is stopped with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(min(left_s, check.limit_s))
        except subprocess.TimeoutExpired:
            subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False)
            process.wait()
            code = None
    seconds = round(time.monotonic() - start, 1)
    if code is None and seconds < check.limit_s:
        return Result(check.name, SKIPPED, f"the budget ended after {seconds} s of it", seconds, {})
    tail = log.read_text(errors="replace")[-_TAIL:]
    if code is None:
        return Result(check.name, FAILED, f"did not end in {check.limit_s} s", seconds, {"output": tail})
    if code != 0 or not answer.is_file():
        errors = [line for line in tail.splitlines() if re.match(r"[\w.]+(Error|Exit|Exception)\b", line)]
        return Result(check.name, FAILED, f"status {code}: {(errors or [''])[-1]}", seconds, {"output": tail})
    return Result(check.name, seconds=seconds, **json.loads(answer.read_text()))


def _answer(entry: str, setting: Setting) -> dict[str, object]:
    module, function = entry.split(":")
    try:
        details = getattr(importlib.import_module(module), function)(setting)
    except SkippedError as error:
        if not error.condition.holds(setting):
            raise RuntimeError(f"skips itself for a reason that is not so: {error}") from error
        return {"status": SKIPPED, "reason": str(error), "details": {}}
    return {"status": PASSED, "reason": "", "details": details or {}}


def main() -> None:
    """Runs one check in this process; any error but a skip ends it."""
    entry, answer, folder, dry_run, plant, nccl_include = sys.argv[1:]
    # By the name under which the checks know it, or their SkippedError would be another class.
    runner = importlib.import_module("tools.gpu_check.runner")
    setting = runner.Setting(Path(folder), bool(int(dry_run)), plant, nccl_include)
    try:
        Path(answer).write_text(json.dumps(runner._answer(entry, setting)))
    except Exception:  # noqa: BLE001  whatever it was ends the process
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: JAX's own exit would wait for processes that wait for this one


if __name__ == "__main__":
    main()
