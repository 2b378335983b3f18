"""Processes of a launcher come together on this machine, each with its part of what a stand-in driver shows."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.launch_test import OF_LAUNCHERS, open_mpi, slurm
from tests.support.multiprocess_worker import ROOT
from tests.support.xla_flags import xla_flags

DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = device + 1; return 0; }
"""
PROCESS = """
import json, sys
import jax
from topoep_jax import launch

job = launch.find(*json.loads(sys.argv[1]))
launch.connect(job)
jax.config.update("jax_platforms", "cpu")  # The driver is no more than what it says.
machines = launch.check_devices(job)
visible = jax.config._read("jax_cuda_visible_devices")
print(json.dumps([jax.process_count(), jax.process_index(), len(jax.devices()), visible, list(machines.values())]))
jax.distributed.shutdown()
"""


def free_port_from(low):
    for port in range(low, 65536):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no free port")


def on_loopback(row, port):
    """Variables and flags of two processes of one machine with two GPUs."""
    job = 4096 + port - 61440
    flags = [None, None, None]
    both = []
    for process in range(2):
        if row == "slurm, one for each node":  # Nothing but the name says that this is one machine.
            variables = slurm(process, nodes=2)
        elif row == "slurm, one for each GPU":
            variables = slurm(process, nodes=1, tasks_per_node=2)
        elif row == "slurm, gpus per task":
            variables = slurm(process, nodes=1, tasks_per_node=2, SLURM_GPUS_PER_TASK=2)
        elif row == "open mpi":
            uri = f"{4096 * job}.0;tcp://127.0.0.1:1"
            variables = open_mpi(process, processes=2, here=2, OMPI_MCA_orte_hnp_uri=uri)
        else:
            variables, flags = {}, [f"127.0.0.1:{port}", 2, process]
        if "SLURM_JOB_ID" in variables:
            variables |= {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost"}
        both.append((variables, list(flags)))
    return both


@pytest.mark.parametrize(
    ("row", "visible"),
    [
        pytest.param("slurm, one for each node", ["all", "all"], marks=pytest.mark.full),
        ("slurm, one for each GPU", ["0", "1"]),
        pytest.param("slurm, gpus per task", ["all", "all"], marks=pytest.mark.full),
        pytest.param("open mpi", ["0", "1"], marks=pytest.mark.full),
        pytest.param("flags", ["all", "all"], marks=pytest.mark.full),
    ],
)
def test_processes_come_together(tmp_path, row, visible):
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    environment = ["env", *(f"-u{name}" for name in (*OF_LAUNCHERS, "JAX_PLATFORMS"))]
    environment += [f"LD_LIBRARY_PATH={tmp_path}", f"XLA_FLAGS={xla_flags(2)}"]
    with contextlib.ExitStack() as stack:
        processes = []
        for variables, flags in on_loopback(row, free_port_from(61440)):
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [*environment, *(f"{name}={value}" for name, value in variables.items())]
            command += [sys.executable, "-c", PROCESS, json.dumps(flags)]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
            stack.callback(process.kill)
            processes.append((process, log))
        said = []
        for process, log in processes:
            code = process.wait(timeout=300)
            log.seek(0)
            said.append(log.read())
            assert code == 0, said[-1]
    for i, text in enumerate(said):
        assert json.loads(text.splitlines()[-1]) == [2, i, 4, visible[i], [4]]
