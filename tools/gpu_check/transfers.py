"""Copies inside one GPU, and replica transfers among several ranks on it where NCCL allows that."""

import json
import subprocess

from tools.gpu_check.runner import Condition, Setting, SkippedError

SHORT = ("--elements", "65536", "--epochs", "20")
RUNS = (
    *(("--ranks", "2", "--pulls", str(pulls), *SHORT) for pulls in range(4)),
    *(("--ranks", "4", "--domains", "2", "--pulls", str(pulls), *SHORT) for pulls in range(4)),
    ("--ranks", "2", "--elements", "1048576", "--epochs", "3"),
    ("--ranks", "3", "--elements", "1001", "--epochs", "40", "--pulls", "3"),
    ("--ranks", "2", "--elements", "1024", "--epochs", "2", "--stop"),
)


def copies(setting: Setting) -> dict[str, object]:
    """Bulk copies (TMA) against cudaMemcpyAsync and what plain loads and stores reach; every byte is compared."""
    return _run(setting, "copies")


def among_ranks(setting: Setting) -> dict[str, object]:
    """Every mode of pulls, pushes after each, and a rank that stays away: bit for bit against sums on the host."""
    if NO_RANKS.holds(setting):
        raise SkippedError(NO_RANKS)
    return {"runs": [_run(setting, "ranks_on_one_gpu", *_nccl(), *arguments) for arguments in RUNS]}


def _nccl() -> tuple[str, str]:
    from topoep_jax.transport.native import nccl_path

    return "--nccl", nccl_path() or "libnccl.so.2"


def _no_ranks(setting: Setting) -> bool:
    try:
        _run(setting, "ranks_on_one_gpu", *_nccl(), "--epochs", "0", "--elements", "1024")
    except AssertionError as error:
        print(error)  # into the check's log
        return True
    return False


NO_RANKS = Condition("NCCL does not bring up two ranks on one GPU here (transfers.log says how it fails)", _no_ranks)


def _run(setting: Setting, program: str, *arguments: str) -> dict[str, object]:
    """The JSON that a program prints last."""
    done = subprocess.run([setting.folder / program, *arguments], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(lines[-1]) if lines else {"ok": False, "reason": "printed no JSON"}
    assert done.returncode == 0 and answer["ok"], (
        f"{program} {' '.join(arguments)}: {answer.get('reason')}; status {done.returncode}\n{done.stderr[-2000:]}"
    )
    return answer
