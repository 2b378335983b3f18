"""Facts of the machine and versions, for the report."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence

from tools.gpu_check.runner import ROOT

_GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "clocks.max.memory")
_PACKAGES = re.compile(r"^(jax|numpy|nvidia-(nccl|cuda-nvcc|cuda-cccl|cuda-runtime))")


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpus() -> list[dict[str, str]]:
    """One entry for each GPU that the driver shows."""
    text = output_of(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"])
    rows = [re.split(r",\s*", line) for line in text.splitlines()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def facts() -> dict[str, object]:
    """GPUs, processor and memory."""
    processors = re.findall(r"^model name\s*:\s*(.*)$", output_of(["cat", "/proc/cpuinfo"]), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", output_of(["cat", "/proc/meminfo"]), re.MULTILINE)
    return {
        "gpus": gpus(),
        "processor": processors[0] if processors else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": int(memory[1]) >> 20 if memory else None,
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """The versions of the interpreter and the packages that matter; the build tells that of its compiler."""
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{k: v for k, v in sorted(found.items()) if _PACKAGES.match(k)}}


def commit() -> str:
    """The commit of the checkout, with a mark if files differ from it; "unknown" where there is none."""
    head = output_of(["git", "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    return head + (" with changes" if output_of(["git", "status", "--porcelain"]) else "")
