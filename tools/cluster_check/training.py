"""A short training run by each transport: both must take the same steps."""

import json
import subprocess
import sys
from pathlib import Path

from tools.cluster_check.cluster import load
from tools.gpu_check.runner import ROOT, Setting

STEPS = 20


def with_collectives(setting: Setting) -> dict[str, object]:
    """Replicas travel by lax collectives."""
    return _train(setting, "xla")


def with_kernels(setting: Setting) -> dict[str, object]:
    """Replicas travel by our kernels."""
    return _train(setting, "device")


def same_steps(setting: Setting) -> dict[str, object]:
    """Every loss and gradient norm is the same, bit for bit."""
    runs = [_records(setting, transport) for transport in ("xla", "device")]
    for ours, theirs in zip(*runs, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == theirs[name], f"step {ours['step']}: {name} is {theirs[name]}, not {ours[name]}"
    last = {transport: run[-1] for transport, run in zip(("xla", "device"), runs, strict=True)}
    return {"steps": len(runs[0]), "loss": last["xla"]["loss"], "last": last}


def _folder(setting: Setting, transport: str) -> Path:
    return Path(load(setting).shared) / f"train_{transport}"


def _records(setting: Setting, transport: str) -> list[dict[str, float]]:
    lines = (_folder(setting, transport) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _train(setting: Setting, transport: str) -> dict[str, object]:
    cluster = load(setting)
    ranks = cluster.nodes * _devices(setting)
    flags = [f"--transport={transport}", f"--run_dir={_folder(setting, transport)}", f"--ep={ranks}"]
    flags += [f"--steps={3 if setting.dry_run else STEPS}", f"--batch_size={ranks}", "--skew=-2"]
    if setting.dry_run:
        flags += ["--seq_len=32", "--shape=num_layers=1"]
    if cluster.nodes > 1:
        flags += [f"--coordinator={cluster.coordinator}", f"--num_processes={cluster.nodes}"]
        flags.append(f"--process_id={cluster.node}")
    done = subprocess.run(
        [sys.executable, "-m", "train.pretrain", *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"train.pretrain {' '.join(flags)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    said = done.stdout + done.stderr
    assert setting.dry_run or "lax collectives instead" not in said, f"the run had no kernels:\n{said[-3000:]}"
    return {"output": done.stdout[-1500:]}


def _devices(setting: Setting) -> int:
    """The number of devices of this process; counted in another one, for the run needs them."""
    code = "import jax; from topoep_jax import launch; print(launch.own_gpus() or jax.local_device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
