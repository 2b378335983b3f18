"""Checks of tests/tools/gpu_check_test.py that the runner starts in processes of their own; no JAX, so in no time."""

import subprocess
import time

from tools.gpu_check.runner import Condition, Setting, SkippedError


def passes(setting: Setting) -> dict[str, object]:
    return {"dry_run": setting.dry_run}


def fails(setting: Setting) -> None:
    raise RuntimeError("as it should")


def is_left_out(setting: Setting) -> None:
    raise SkippedError(Condition("nothing to see", lambda setting: setting.dry_run))


def is_left_out_in_vain(setting: Setting) -> None:
    raise SkippedError(Condition("this is no dry run", lambda setting: not setting.dry_run))


def hangs(setting: Setting) -> None:
    time.sleep(60)


def dies(setting: Setting) -> None:
    subprocess.run(["sh", "-c", "kill -9 $PPID"], check=False)
