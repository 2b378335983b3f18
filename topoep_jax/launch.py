"""How a process finds the others of its run, and the devices that are its own.

Flags say it, or the launcher that started the process: Slurm and Open MPI by their variables, Kubernetes by its API, as
JAX detects them. `find` decides and starts nothing; `connect` starts `jax.distributed` and compares devices.

A process takes all devices that it sees, unless the launcher put several processes on its machine that see the same
ones: then each takes an equal part. JAX's own choice would be one device, that of the process' number on its machine,
which leaves seven of eight GPUs idle with one process for each machine, and names a GPU that is not there where each
process sees but its own. `JAX_LOCAL_DEVICE_IDS` overrides this.
"""

import collections
import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from topoep_jax import _compat

HEARTBEAT_S = 30
"""Seconds without a sign of life after which JAX gives a process up; its own default is 100."""
JOIN_S = 300
"""Seconds for which a process waits for the others to start."""

FLAGS = ("--coordinator", "--num_processes", "--process_id")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OF_A_STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE")
"""Set by srun alone: an sbatch script and a shell of salloc have the others, and are no processes of a run."""
_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_MPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"
_IN_A_POD, _POD = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"
_MAX_PORT = 65535
_ADDRESS = f"host:port of process 0, with a port from 1 to {_MAX_PORT}"
_UUID_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Job:
    """One process among those of a run.

    Attributes:
      num_processes: 1 for a process that runs alone.
      process_id: which of them this is.
      coordinator: "host:port" of process 0; "" for one alone.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process says of its devices.

    Attributes:
      host: name of its machine.
      devices: how many JAX has there for this process.
      visible: identities of the GPUs that it sees; none on a CPU.
      taken: those of them that are its own.
    """

    host: str
    devices: int
    visible: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def find(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    flags: Sequence[str] = FLAGS,
) -> Job:
    """The job that three flags name, or the launcher where none of them is given; else one process alone.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: of the job; 1 is alone whatever started it.
      process_id: which of them this is.
      flags: names under which a command takes the three.

    Raises:
      ValueError: some of the flags or variables are given and others are not, or they contradict each other.
    """
    address, count, number = flags
    given = {address: coordinator or None, count: num_processes, number: process_id}
    missing = [name for name, value in given.items() if value is None]
    if num_processes == 1 and process_id in (None, 0):
        return Job()
    if len(missing) == len(given):
        return _found(flags)
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} missing: a run of several processes needs all of {', '.join(flags)}, or none of"
            f" them under Slurm, Open MPI or Kubernetes; {count}=1 runs alone"
        )
    assert coordinator is not None and num_processes is not None and process_id is not None
    if not 0 <= process_id < num_processes:
        raise ValueError(f"{number}={process_id} must be 0 to {num_processes - 1} with {count}={num_processes}")
    if not _is_address(coordinator):
        raise ValueError(f"{address}={coordinator} must be {_ADDRESS}")
    return Job(num_processes, process_id, coordinator)


def _found(flags: Sequence[str]) -> Job:
    """The job of the launcher that started this process."""
    environ, method = os.environ, None
    way_out = f"give {', '.join(flags)} ({flags[1]}=1 to run alone)"
    if _MPI_ADDRESS in environ or any(name in environ for name in _MPI):
        launcher = "Open MPI"
        _demand(launcher, _MPI, way_out)
        if _integer(environ, "OMPI_COMM_WORLD_SIZE") == 1:
            return Job()
        if _MPI_ADDRESS not in environ:  # Open MPI 5, which jax 0.10 does not know
            method = "mpi4py"
            if importlib.util.find_spec(method) is None:
                raise ValueError(
                    f"{_MPI_ADDRESS} missing, by which Open MPI 4 says where process 0 is: under Open MPI 5 install"
                    f" mpi4py, or give {flags[0]}=host:port {flags[1]}=$OMPI_COMM_WORLD_SIZE"
                    f" {flags[2]}=$OMPI_COMM_WORLD_RANK"
                )
    elif any(name in environ for name in _OF_A_STEP) or _integer(environ, "SLURM_PROCID") > 0:
        launcher = "Slurm"
        # The shell of salloc may be a step of one task, which keeps the job's SLURM_NTASKS.
        if "1" in (environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_NTASKS")):
            return Job()
        _demand(launcher, _SLURM, way_out)
        tasks, of_step = environ["SLURM_NTASKS"], environ.get("SLURM_STEP_NUM_TASKS")
        if of_step not in (None, tasks):
            raise ValueError(
                f"SLURM_NTASKS={tasks} and SLURM_STEP_NUM_TASKS={of_step} contradict each other: {way_out}"
            )
    elif _IN_A_POD in environ and _POD in environ:
        launcher = "Kubernetes"
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                f"{_POD} says that this pod is one of a job, but the package kubernetes, which finds the others, is not"
                f" installed: install it, or {way_out}"
            )
    elif "JAX_COORDINATOR_ADDRESS" in environ:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS is set, but nothing says of how many processes: {way_out}")
    else:
        return Job()
    try:
        address, count, number = _compat.detect_processes(environ.get("JAX_COORDINATOR_ADDRESS"), method, JOIN_S)
    except Exception as error:
        # Clients of launchers have errors of their own, those of the network come on top, and all mean the same.
        why = " ".join(f"{error}".split()) or type(error).__name__
        raise ValueError(f"{launcher} does not say which processes belong together: {why}; {way_out}") from error
    if address is None or count is None or number is None:
        raise ValueError(f"{launcher} started this process, but JAX does not find the others: {way_out}")
    if not 0 <= number < count:
        raise ValueError(
            f"{launcher} says that this is process {number} of {count}, which are 0 to {count - 1}: {way_out}"
        )
    if count == 1:
        return Job()
    if not _is_address(address):
        raise ValueError(
            f"{launcher} with JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_PORT, where they are set, says {address!r},"
            f" which must be {_ADDRESS}: correct them, or {way_out}"
        )
    return Job(count, number, address)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and re.fullmatch(r"[0-9]{1,5}", port) is not None and 1 <= int(port) <= _MAX_PORT


def _demand(launcher: str, names: Sequence[str], way_out: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} missing: {launcher} started this process, but not all of its variables are here;"
            f" pass them on, or {way_out}"
        )
    for name in names:
        if name != "SLURM_STEP_NODELIST":
            _integer(os.environ, name)


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "0")
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} must be an integer")
    return int(text)


def local_device_ids(gpus: int, environ: Mapping[str, str] = os.environ) -> list[int]:
    """Which of the `gpus` that a process sees are its own, as JAX counts them; empty for all.

    Raises:
      ValueError: the processes of this machine cannot share them equally.
    """
    if ids := environ.get("JAX_LOCAL_DEVICE_IDS"):
        if not re.fullmatch(r"\d+(,\d+)*", ids):
            raise ValueError(f"JAX_LOCAL_DEVICE_IDS={ids!r} must be numbers of devices, as in 0,1")
        return [int(i) for i in ids.split(",")]
    here, number = _neighbours(environ)
    if gpus <= 1 or here <= 1 or gpus < here or gpus == _gpus_per_task(environ):
        return []  # Alone on its machine, or the launcher shows each process its own.
    if gpus % here:
        raise ValueError(
            f"{here} processes on this machine cannot share its {gpus} GPUs equally: start as many as divide them, or"
            " show each its own (srun --gpus-per-task, CUDA_VISIBLE_DEVICES)"
        )
    share = gpus // here
    return list(range(number * share, (number + 1) * share))


def _neighbours(environ: Mapping[str, str]) -> tuple[int, int]:
    """Processes that the launcher put on this machine, and which of them this is; (1, 0) where there is none."""
    if all(name in environ for name in _MPI):
        number = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
        here = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
        wanted = "OMPI_COMM_WORLD_LOCAL_SIZE"
    elif any(name in environ for name in _OF_A_STEP):
        number = _integer(environ, "SLURM_LOCALID")
        here = _slurm_tasks_here(environ)
        wanted = "SLURM_STEP_TASKS_PER_NODE"
    else:
        return 1, 0
    if here <= number and (here or number):
        raise ValueError(
            f"{wanted}={environ.get(wanted)} does not hold process {number} of this machine: set it to the number"
            " of processes on each machine, or say with JAX_LOCAL_DEVICE_IDS which devices this one has"
        )
    return max(here, 1), number


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of the step on this node; 0 if Slurm does not say."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):  # "8(x3),4"
        counts += [int(count)] * int(times or 1)
    node = _integer(environ, "SLURM_NODEID")
    if node < len(counts):
        return counts[node]
    nodes, tasks = _integer(environ, "SLURM_STEP_NUM_NODES"), _integer(environ, "SLURM_NTASKS")
    return tasks // nodes if nodes and tasks % nodes == 0 else 0


def _gpus_per_task(environ: Mapping[str, str]) -> int | None:
    """What srun's --gpus-per-task asked for, as in "2", "h200:2" and "cpu=8,gres/gpu:h200=2"."""
    asked = re.search(r"(\d+)$", environ.get("SLURM_GPUS_PER_TASK", ""))
    asked = asked or re.search(r"gres/gpu(?:[:=][^,:=]+)?[:=](\d+)(?:,|$)", environ.get("SLURM_TRES_PER_TASK", ""))
    return int(asked[1]) if asked else None


def connect(job: Job) -> None:
    """Starts `jax.distributed` for the job, if it has several processes, with this process' own devices.

    Call it before JAX touches a device, and `check_devices` once it may.

    Raises:
      ValueError: the processes of this machine cannot share its GPUs.
    """
    if job.num_processes == 1 or jax.distributed.is_initialized():
        return
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        # Never None, for which JAX's detection would put one device in its place.
        local_device_ids=local_device_ids(len(_visible_gpus())),
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )


def own_gpus() -> int:
    """How many of the GPUs that this process sees are its own."""
    gpus = len(_visible_gpus())
    return len(local_device_ids(gpus)) or gpus


def check_devices(job: Job) -> dict[str, int]:
    """Compares the devices of all processes of a job. Collective; starts them.

    Returns:
      Devices of each machine, by its name.

    Raises:
      ValueError: on all processes alike, if devices do not add up.
    """
    devices = jax.local_devices()
    several = job.num_processes > 1
    visible = _visible_gpus() if several and devices[0].platform == "gpu" else ()
    ids = local_device_ids(len(visible)) or range(len(visible))
    part = Part(socket.gethostname(), len(devices), visible, tuple(visible[i] for i in ids if i < len(visible)))
    text = json.dumps(dataclasses.asdict(part))
    texts = _compat.exchange("devices", text) if several else [text]
    parts = [
        Part(said["host"], said["devices"], tuple(said["visible"]), tuple(said["taken"]))
        for said in map(json.loads, texts)
    ]
    if fault := fault_of(parts):
        raise ValueError(fault)
    machines: dict[str, int] = {}
    for part in parts:
        machines[part.host] = machines.get(part.host, 0) + part.devices
    return machines


def fault_of(parts: Sequence[Part]) -> str | None:
    """Why the devices of the processes do not add up to those of their machines; None if they do."""
    usual = collections.Counter(part.devices for part in parts).most_common(1)[0][0]
    if odd := [i for i, part in enumerate(parts) if part.devices != usual]:
        return (
            f"process {odd[0]} on {parts[odd[0]].host} has {parts[odd[0]].devices} devices, and others have {usual}:"
            " start processes of equal size, and look whether a machine lacks GPUs"
        )
    owner: dict[str, int] = {}
    for i, part in enumerate(parts):
        for gpu in part.taken:
            if gpu in owner:
                return (
                    f"processes {owner[gpu]} and {i} on {part.host} both take GPU {gpu}: start one process for each"
                    " machine, or show each its own GPUs (srun --gpus-per-task, CUDA_VISIBLE_DEVICES)"
                )
            owner[gpu] = i
    for host in dict.fromkeys(part.host for part in parts):
        there = [part for part in parts if part.host == host]
        seen = {gpu for part in there for gpu in part.visible}
        taken = sum(len(part.taken) for part in there)
        if taken < len(seen):
            return (
                f"{host} shows {len(seen)} GPUs, and its {len(there)} processes take {taken}: start one process for"
                " each machine or for each GPU, or show processes no more than they are to take (CUDA_VISIBLE_DEVICES)"
            )
        if any(part.devices != len(part.taken) for part in there if part.visible):
            return f"JAX has other devices on {host} than the {taken} GPUs that its processes are to take"
    return None


def _visible_gpus() -> tuple[str, ...]:
    """Identities of the GPUs that the driver shows to this process; none where JAX is kept from them."""
    config: Any = jax.config  # Not all of its attributes are declared.
    platforms = config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, identity = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    gpus = []
    for ordinal in range(count.value):
        if driver.cuDeviceGetUuid_v2(identity, ordinal):
            return ()
        gpus.append(bytes(identity).hex())
    return tuple(gpus)
