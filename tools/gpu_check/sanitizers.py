"""The planner's kernels under compute-sanitizer, on a few small problems: it slows kernels down a hundred times."""

import shutil
import subprocess
from pathlib import Path

from tools.gpu_check import problems
from tools.gpu_check.runner import Condition, Setting, SkippedError

EVERY = 61
"""Of the small problems; a prime, so that the sample goes through cases, options and kinds of demand."""
_ERROR_STATUS = 9


def memcheck(setting: Setting) -> dict[str, object]:
    """Accesses out of bounds or misaligned, and leaks."""
    return _sanitize(setting, "memcheck", "--leak-check=full")


def racecheck(setting: Setting) -> dict[str, object]:
    """Races in shared memory."""
    return _sanitize(setting, "racecheck")


def synccheck(setting: Setting) -> dict[str, object]:
    """Barriers that not all threads reach."""
    return _sanitize(setting, "synccheck")


def _sanitize(setting: Setting, tool: str, *flags: str) -> dict[str, object]:
    sanitizer = _find()
    if sanitizer is None:
        raise SkippedError(NO_SANITIZER)
    questions = list(problems.small_questions())[::EVERY]
    path = setting.folder / "sanitized.problems"
    problems.write(questions, path)
    command = [sanitizer, f"--tool={tool}", *flags, f"--error-exitcode={_ERROR_STATUS}", "--print-limit=5"]
    done = subprocess.run([*command, setting.folder / "plan_check", path], capture_output=True, text=True)
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, (
        f"status {done.returncode}\n{done.stdout[-3500:]}{done.stderr[-500:]}"
    )
    return {"plans": len(questions), "summary": done.stdout.strip().splitlines()[-1]}


def _find() -> Path | None:
    from topoep_jax import _cuda_build

    on_path = shutil.which("compute-sanitizer")
    if on_path is not None:
        return Path(on_path)
    try:
        beside = _cuda_build.find_nvcc().resolve().parent / "compute-sanitizer"
    except _cuda_build.BuildError:
        return None
    return beside if beside.is_file() else None


NO_SANITIZER = Condition("no compute-sanitizer on PATH or beside nvcc", lambda setting: _find() is None)
