"""How processes find each other and their devices, line by line: Slurm, Open MPI, Kubernetes, flags, and parts of them.

What a launcher would set is set here. Real processes come together in launch_processes_test.py.
"""

import importlib.machinery
import re
import socket
import sys
import types

import jax
import numpy as np
import pytest
from jax._src.clusters import k8s_cluster

from tools.cluster_check import cluster
from tools.gpu_check.runner import Setting
from topoep_jax import launch
from topoep_jax.cli import measure as cli_measure
from topoep_jax.launch import Job, Part, fault_of, find, local_device_ids
from train import pretrain
from train.config import TrainConfig


def slurm(process, nodes=4, tasks_per_node=1, **more):
    """Variables of a process of srun."""
    tasks = nodes * tasks_per_node
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_NODELIST": f"node[001-{nodes:03}]",
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})" if nodes > 1 else tasks_per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": process % tasks_per_node,
        "SLURM_NODEID": process // tasks_per_node,
        "SLURM_GPUS_ON_NODE": 8,
        **more,
    }


def open_mpi(process, processes=4, here=1, **more):
    """Variables of a process of mpirun."""
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": processes,
        "OMPI_COMM_WORLD_RANK": process,
        "OMPI_COMM_WORLD_LOCAL_RANK": process % here,
        "OMPI_COMM_WORLD_LOCAL_SIZE": here,
        **more,
    }


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


BATCH = without(slurm(0), *(name for name in slurm(0) if "STEP" in name))
"""The shell of sbatch -n4: srun has not started it."""
OF_LAUNCHERS = [*slurm(0), *open_mpi(0), "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"]
OF_LAUNCHERS += ["KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"]
OF_LAUNCHERS += ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS"]
SLURM_PORT = 61440 + 4242 % 4096
MPI_PORT = 61440 + 1531576320 // 4096 % 4096


@pytest.fixture
def start(monkeypatch):
    """Makes this a process that a launcher started."""
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.parametrize(
    ("variables", "flags", "job"),
    [
        ({}, (), Job()),
        (slurm(2), (), Job(4, 2, f"node001:{SLURM_PORT}")),
        (slurm(9, tasks_per_node=8), (), Job(32, 9, f"node001:{SLURM_PORT}")),
        (slurm(9, tasks_per_node=8, SLURM_GPUS_PER_TASK=1), (), Job(32, 9, f"node001:{SLURM_PORT}")),
        (slurm(2, SLURM_STEP_NODELIST="a7,b9"), (), Job(4, 2, f"a7:{SLURM_PORT}")),
        (slurm(2, JAX_COORDINATOR_ADDRESS="ib0:99"), (), Job(4, 2, "ib0:99")),
        (slurm(2, JAX_COORDINATOR_PORT=99), (), Job(4, 2, "node001:99")),
        (slurm(2), ("host:1", 2, 1), Job(2, 1, "host:1")),
        (slurm(2), (None, 1, None), Job()),
        (slurm(0, nodes=1), (), Job()),
        (slurm(0, SLURM_STEP_NUM_TASKS=1), (), Job()),  # the shell of salloc, as a step
        (BATCH, (), Job()),
        (open_mpi(3), (), Job(4, 3, f"10.96.0.1:{MPI_PORT}")),
        (open_mpi(3, here=2), (), Job(4, 3, f"10.96.0.1:{MPI_PORT}")),
        (open_mpi(0, processes=1), (), Job()),
        # mpirun starts its daemons by srun, whose variables come along.
        ({**slurm(1), **open_mpi(3, here=2)}, (), Job(4, 3, f"10.96.0.1:{MPI_PORT}")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (), Job()),  # any pod, as of a notebook
        ({}, ("host:1", 4, 3), Job(4, 3, "host:1")),
        ({}, ("host:1", 1, 0), Job()),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, (None, 1, None), Job()),
    ],
)
def test_who_a_process_is(start, variables, flags, job):
    start(variables)
    assert find(*flags) == job


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({}, ("host:1",), "--num_processes and --process_id missing"),
        ({}, (None, 4), "--coordinator and --process_id missing"),
        ({}, (None, None, 0), "--coordinator and --num_processes missing"),
        ({}, ("host:1", 4), "--process_id missing"),
        (slurm(2), ("host:1",), "--num_processes and --process_id missing: .* none of them under Slurm"),
        ({}, ("host:1", 4, 4), "--process_id=4 must be 0 to 3 with --num_processes=4"),
        ({}, (None, 1, 2), "--coordinator missing"),
        *[
            ({}, (address, 4, 3), rf"--coordinator={address} must be host:port .* from 1 to 65535")
            for address in ("host", "host:", ":1", "host:0", "host:70000", "host:1x")
        ],
        *[
            (
                slurm(2, **{name: value}),
                (),
                f"Slurm .* says {address!r}, which must be host:port .* from 1 to 65535: .* give --coord",
            )
            for name, value, address in (
                ("JAX_COORDINATOR_ADDRESS", "host0", "host0"),
                ("JAX_COORDINATOR_ADDRESS", "host0:0", "host0:0"),
                ("JAX_COORDINATOR_PORT", "70000", "node001:70000"),
            )
        ],
        *[
            (without(slurm(2), name), (), f"{name} missing: Slurm started this process")
            for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
        ],
        ({**BATCH, "SLURM_PROCID": 3}, (), "SLURM_STEP_NODELIST missing"),  # a container that keeps some of them
        (slurm(2, SLURM_NTASKS=8), (), "SLURM_NTASKS=8 and SLURM_STEP_NUM_TASKS=4 contradict each other"),
        (slurm(4), (), "process 4 of 4, which are 0 to 3"),
        (slurm(2, SLURM_PROCID="x"), (), "SLURM_PROCID='x' must be an integer"),
        *[
            (without(open_mpi(2), name), (), f"{name} missing: Open MPI started this process")
            for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
        ],
        (without(open_mpi(2), "OMPI_MCA_orte_hnp_uri"), (), "OMPI_MCA_orte_hnp_uri missing.* install mpi4py, or give"),
        (open_mpi(2, OMPI_MCA_orte_hnp_uri="1.0;x"), (), "Open MPI does not say which .*: Could not parse"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": 1},
            (),
            "JOB_COMPLETION_INDEX says .* the package kubernetes, .* is not installed",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, (), "JAX_COORDINATOR_ADDRESS is set, but nothing says"),
    ],
)
def test_parts_of_an_answer_are_named(start, variables, flags, message):
    start(variables)
    with pytest.raises(ValueError, match=message):
        find(*flags)


def test_a_command_names_its_own_flags(start):
    start({})
    with pytest.raises(ValueError, match=r"^--node missing: .* all of --coordinator, --nodes, --node"):
        find("host:1", 4, flags=("--coordinator", "--nodes", "--node"))


@pytest.fixture
def kubernetes(monkeypatch, tmp_path):
    """A client of Kubernetes that knows one job of two pods, of which this is one."""

    def things(**fields):
        return types.SimpleNamespace(**fields)

    owner = things(controller=True, kind="Job")
    metadata = things(name="train-1-x", labels={"job-name": "train"}, owner_references=[owner])
    pod = things(metadata=metadata, spec=things(subdomain="pods"))
    job = things(metadata=things(name="train", labels={}), spec=things(parallelism=2))
    client = types.ModuleType("kubernetes")
    client.__spec__ = importlib.machinery.ModuleSpec("kubernetes", None)
    client.config = things(load_incluster_config=lambda: None)
    client.client = things(
        CoreV1Api=lambda: things(list_namespaced_pod=lambda **_: things(items=[pod])),
        BatchV1Api=lambda: things(read_namespaced_job=lambda **_: job),
        exceptions=things(ApiException=ZeroDivisionError),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", client)
    (tmp_path / "namespace").write_text("space")
    monkeypatch.setattr(k8s_cluster, "open", lambda _: (tmp_path / "namespace").open(), raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    drawn = np.random.get_state()  # noqa: NPY002  JAX draws how long it waits between attempts
    yield pod
    np.random.set_state(drawn)  # noqa: NPY002
    for name in ("_namespace", "_pod", "_job", "_controller", "_headless_svc"):
        vars(k8s_cluster.K8sCluster)[name].__func__.cache_clear()
    for name in {"_core_api", "_batch_api", "_ApiException"} & vars(k8s_cluster.K8sCluster).keys():
        delattr(k8s_cluster.K8sCluster, name)


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": 1, "HOSTNAME": "train-1"}


def test_a_pod_of_a_job_finds_the_others(start, kubernetes):
    start(POD)
    assert find() == Job(2, 1, "train-0.pods:55527")
    assert local_device_ids(8) == []


def test_a_pod_that_cannot_reach_the_others_says_so(start, kubernetes):
    start(POD)
    kubernetes.metadata.owner_references = []
    with pytest.raises(ValueError, match=r"Kubernetes does not say .* does not have a controller\.; give --coord"):
        find()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Exception("Service host/port is not set."), r"Service host/port is not set\."),
        (socket.gaierror(-2, "Name or service\nnot known"), r"\[Errno -2\] Name or service not known"),
        (TypeError(), "TypeError"),
    ],
)
def test_whatever_goes_wrong_in_a_pod_is_one_sentence(start, kubernetes, monkeypatch, fault, message):
    def fail():
        raise fault

    start(POD)
    monkeypatch.setattr(sys.modules["kubernetes"].config, "load_incluster_config", fail)
    with pytest.raises(ValueError, match=rf"^Kubernetes does not say [^\n]*: {message}; give --coord[^\n]*$"):
        find()


@pytest.mark.parametrize(
    ("variables", "gpus", "ids"),
    [
        ({}, 8, []),
        (slurm(2), 8, []),
        (slurm(2), 0, []),
        (slurm(13, tasks_per_node=8), 8, [5]),
        (slurm(5, tasks_per_node=4), 8, [2, 3]),
        (slurm(13, tasks_per_node=8, SLURM_GPUS_PER_TASK=1), 1, []),
        (slurm(3, tasks_per_node=2, SLURM_GPUS_PER_TASK="h200:4"), 4, []),
        (slurm(3, tasks_per_node=2, SLURM_TRES_PER_TASK="cpu:8,gres/gpu:h200:4"), 4, []),
        (slurm(3, tasks_per_node=2, SLURM_GPUS_PER_TASK=1), 2, [1]),  # --gpu-bind=none
        (slurm(5, nodes=2, tasks_per_node=4), 2, []),  # bound by something else
        (
            slurm(3, nodes=2, SLURM_NTASKS=5, SLURM_STEP_TASKS_PER_NODE="1,4", SLURM_LOCALID=2, SLURM_NODEID=1),
            8,
            [4, 5],
        ),
        (without(slurm(2), "SLURM_STEP_TASKS_PER_NODE"), 8, []),
        (without(slurm(2), "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"), 8, []),
        (without(slurm(13, tasks_per_node=8), "SLURM_STEP_TASKS_PER_NODE"), 8, [5]),
        (BATCH, 8, []),
        (open_mpi(3), 8, []),
        (open_mpi(3, here=4), 4, [3]),
        (open_mpi(3, here=4), 1, []),
        ({**slurm(1), **open_mpi(3, here=4)}, 4, [3]),
        (slurm(13, tasks_per_node=8, JAX_LOCAL_DEVICE_IDS="0,3"), 8, [0, 3]),
    ],
)
def test_the_devices_of_a_process(start, variables, gpus, ids):
    start(variables)
    assert local_device_ids(gpus) == ids


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (slurm(2, tasks_per_node=3), "3 processes on this machine cannot share its 8 GPUs equally"),
        (open_mpi(2, here=3), "3 processes on this machine cannot share its 8 GPUs equally"),
        (without(open_mpi(3, here=4), "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE=None does not hold"),
        (
            without(slurm(13, tasks_per_node=8), "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
            "SLURM_STEP_TASKS_PER_NODE=None does not hold process 5 of this machine",
        ),
        ({"JAX_LOCAL_DEVICE_IDS": "all"}, "JAX_LOCAL_DEVICE_IDS='all' must be numbers of devices"),
    ],
)
def test_devices_that_cannot_be_shared(start, variables, message):
    start(variables)
    with pytest.raises(ValueError, match=message):
        local_device_ids(8)


def node(name, *taken, visible=None):
    """A process for each entry of `taken`, which names the GPUs that it takes by letters."""
    return [Part(name, len(own), tuple(visible or own), tuple(own)) for own in taken]


def test_devices_that_add_up():
    whole, each = node("a", "abcd") + node("b", "efgh"), node("a", *"abcd", visible="abcd")
    bound = node("a", *"abcd")  # each sees its own
    assert [fault_of(parts) for parts in (whole, each, bound, [Part("a", 4), Part("a", 4)])] == [None] * 4


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        # What JAX does under Slurm if it is not told which devices are a process' own.
        (
            node("a", "a", visible="abcd") + node("b", "e", visible="efgh"),
            "a shows 4 GPUs, and its 1 processes take 1",
        ),
        (node("a", "abcd") + node("a", "abcd"), "processes 0 and 1 on a both take GPU a"),
        (node("a", "abcd") + node("b", "efg"), "process 1 on b has 3 devices, and others have 4"),
        (node("a", *"ab", visible="abcd"), "a shows 4 GPUs, and its 2 processes take 2"),
        ([Part("a", 1, ("a", "b"), ("a", "b"))], "JAX has other devices on a than the 2 GPUs"),
        ([Part("a", 4), Part("b", 2), Part("c", 4)], "process 1 on b has 2 devices, and others have 4"),
    ],
)
def test_devices_that_do_not_add_up(parts, message):
    assert re.search(message, fault_of(parts))


def train(folder):
    of_run = {"num_processes": 4, "process_id": 0, "coordinator": f"node001:{SLURM_PORT}"}
    pretrain.train(TrainConfig(ep=32, batch_size=32, run_dir=str(folder / "run"), **of_run))


def check(folder):
    cluster.Cluster(4, 0, f"node001:{SLURM_PORT}", str(folder)).save(setting := Setting(folder, True, ""))
    cluster.connect(setting)


def measure(folder):
    values = cli_measure.define()
    values(["measure", f"--out={folder}/rates.json"])
    list(cli_measure.run(values))


@pytest.mark.parametrize("command", [train, check, measure])
def test_every_command_takes_all_devices_under_slurm(start, monkeypatch, tmp_path, command):
    class Started(Exception):
        pass

    def initialize(coordinator, num_processes, process_id, *, local_device_ids, **_):
        raise Started(coordinator, num_processes, process_id, local_device_ids)

    start(slurm(0))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(Started) as started:
        command(tmp_path)
    assert started.value.args == (f"node001:{SLURM_PORT}", 4, 0, [])


def test_a_process_alone_starts_nothing():
    launch.connect(Job())
    assert not jax.distributed.is_initialized()
    assert list(launch.check_devices(Job()).values()) == [jax.local_device_count()]
