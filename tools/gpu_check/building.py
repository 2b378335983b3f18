"""Builds what the other checks need: the extension, the CUDA library, and the programs of this folder."""

import concurrent.futures
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.runner import ROOT, Setting

PROGRAMS = ROOT / "tools/gpu"
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def run(command: Sequence[str | Path]) -> str:
    """What a command prints.

    Raises:
      RuntimeError: it failed; the text holds its output.
    """
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def extension(setting: Setting) -> dict[str, object]:
    """Makes sure that the package imports with its C++ extension: as it is, or installed into the folder.

    NCCL headers that were named come before those of an installed package.
    """
    site = setting.folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    code = "import topoep_jax._xla_ffi as e; print(e.__file__)"
    if setting.nccl_include:
        headers = site / "nvidia/nccl/include"
        headers.parent.mkdir(parents=True)
        headers.symlink_to(Path(setting.nccl_include).resolve())
    try:
        return {"installed": run(["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-c", code]).strip()}
    except RuntimeError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        run([*pip, "--target", site, ROOT])
    return {"built": run(["env", f"PYTHONPATH={site}", sys.executable, "-P", "-c", code]).strip()}


def build(setting: Setting) -> dict[str, object]:
    """The CUDA library and the programs; on a dry run plan_check alone, around the planner of the host."""
    if setting.dry_run:
        own = [PROGRAMS / name for name in ("plan_check.cc", "problem_file.cc", "plan_runner_host.cc")]
        sources = [*own, ROOT / "xla_ffi/plan/solver.cc", ROOT / "xla_ffi/plan/owned_problem.cc", "-pthread"]
        run(["g++", "-std=c++17", "-O2", *WARNINGS, f"-I{ROOT}", *sources, "-o", setting.folder / "plan_check"])
        return {"compiler": run(["g++", "--version"]).splitlines()[0]}

    from topoep_jax import _cuda_build

    jobs: dict[str, concurrent.futures.Future] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            toolchain = _cuda_build.find()
        except _cuda_build.BuildError as error:
            # The planner's own programs need neither NCCL nor XLA: they are checked all the same.
            names = sorted({f"sm_{gpu['compute_cap'].replace('.', '')}" for gpu in machine.gpus()})
            commands = program_commands(_cuda_build.find_nvcc(), None, names, setting.folder)
            failed = [str(error)]
            facts: dict[str, object] = {}
        else:
            commands = program_commands(toolchain.nvcc, toolchain.nccl_include, toolchain.architectures, setting.folder)
            failed = []
            facts = {"architectures": toolchain.architectures, **toolchain.versions()}
            jobs["library"] = pool.submit(_timed, _cuda_build.build, toolchain)
        jobs |= {name: pool.submit(_timed, run, command) for name, command in commands.items()}
    failed += [str(job.exception()) for job in jobs.values() if job.exception() is not None]
    if failed:
        raise RuntimeError("\n".join(failed))
    return {"seconds": {name: job.result() for name, job in jobs.items()}, **facts}


def program_commands(
    nvcc: Path, nccl_include: Path | None, architectures: Sequence[str], folder: Path
) -> dict[str, list[str | Path]]:
    """What compiles each program of tools/gpu into `folder`; without NCCL's headers, those that need none."""
    from topoep_jax import _cuda_build

    planner = [ROOT / "xla_ffi/plan" / name for name in ("owned_problem.cc", "plan.cu")]
    sources: dict[str, list[str | Path]] = {
        "plan_check": ["plan_check.cc", "problem_file.cc", "plan_runner_cuda.cu", *planner],
        "copies": ["copies.cu"],
    }
    flags: list[str | Path] = ["-std=c++17", "-O3", "-lineinfo", "-cudart=static", f"-I{ROOT}"]
    flags += _cuda_build.link_flags(nvcc)
    if nccl_include is not None:
        flags += ["-isystem", nccl_include]
        names = ("transfer/transfer.cu", "transport/group.cc", "transport/nccl_api.cc")
        sources["ranks_on_one_gpu"] = ["ranks_on_one_gpu.cu", *(ROOT / "xla_ffi" / name for name in names)]
    flags += [f"-gencode=arch={name.replace('sm_', 'compute_')},code={name}" for name in architectures]
    return {
        name: [nvcc, *flags, *(PROGRAMS / path for path in paths), "-ldl", "-lpthread", "-o", folder / name]
        for name, paths in sources.items()
    }


def _timed(work: Callable[..., object], *arguments: object) -> float:
    start = time.monotonic()
    work(*arguments)
    return round(time.monotonic() - start, 1)
