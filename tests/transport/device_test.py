"""transport.init without a GPU: sizes, messages, the registry, what is agreed between processes and in which order."""

import importlib
import importlib.machinery
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tests.support.multiprocess_worker import run_processes
from topoep_jax import LayerConfig, transport
from topoep_jax.topology import Topology
from topoep_jax.transport import device
from topoep_jax.transport.native import UNIQUE_ID_BYTES, NativeError, nccl_path
from topoep_jax.transport.sizes import group_sizes

SIZES = transport.LayerSizes(num_mains=2, num_slots=2, expert_bytes=100)


class FakeNative:
    """Writes down what it is asked; `fails` names the step that refuses, `lsa_size` what NCCL would say.

    As with NCCL, who connects waits for all other processes.
    """

    def __init__(self, fails: str = "", lsa_size: int = 64, error: type[Exception] = NativeError) -> None:
        self.fails, self.lsa_size, self.error, self.calls, self.record = fails, lsa_size, error, [], None

    def _step(self, name, *args):
        self.calls.append((name, *args))
        if name == "connect":
            multihost_utils.sync_global_devices("connect")
        if self.fails == name:
            raise self.error(f"{name} does\nnot work")

    def unique_id(self):
        self._step("unique_id")
        made = sum(call[0] == "unique_id" for call in self.calls)
        return bytes([jax.process_index(), made]) + b"\xff" * (UNIQUE_ID_BYTES - 2)

    def prepare(self, group, local, spec):
        self._step("prepare", group, tuple(local), spec)

    def connect(self, group, local, unique_ids):
        self._step("connect", group, tuple(local), tuple(unique_ids))
        return self.lsa_size

    def destroy(self, group, local, everywhere=True):
        self._step("destroy", group, tuple(local), everywhere)

    def failure(self, group, device):
        return self.record if device == 1 else None

    def names(self):
        return [call[0] for call in self.calls]


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(device, "_registry", device._Registry())


@pytest.fixture
def on_gpus(monkeypatch):
    """Lets the emulated devices pass for GPUs."""
    monkeypatch.setattr(device, "_platforms", lambda mesh: ["gpu"])


def mesh_of(ranks: int = 4, data: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: ranks * data]).reshape(data, ranks), ("data", "ep"))


def init_with(native, **options):
    return transport.init(mesh_of(), sizes=SIZES, library=lambda: native, **options)


def test_importing_needs_no_cuda_library():
    # What JAX itself loads where its CUDA plugin is installed is not ours.
    code = (
        "import sys, topoep_jax, topoep_jax.transport\n"
        "assert 'topoep_jax._cuda' not in sys.modules\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libnccl' not in maps and 'libtopoep_cuda' not in maps\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent.parent)


def test_a_cpu_says_once_in_one_line_what_is_missing(caplog):
    with caplog.at_level(logging.WARNING, "topoep_jax"):
        group = transport.init(mesh_of(), sizes=SIZES)
    assert group.kind == "xla" and group.report() == {}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "transport for axis 'ep': lax collectives instead of device kernels, because the mesh's devices are of platform"
        " cpu, and the kernels are CUDA's"
    )
    assert group.reasons[0] in said
    assert transport.group("ep") == group


def test_require_raises_that_line():
    with pytest.raises(RuntimeError, match="of platform cpu"):
        transport.init(mesh_of(), sizes=SIZES, require=True)
    with pytest.raises(ValueError, match="no transport"):
        transport.group("ep")


def test_a_connected_group(on_gpus, caplog):
    native = FakeNative()
    group = transport.init(
        mesh_of(4, 2), sizes=SIZES, library=lambda: native, timeout_s=1.5, topology=Topology((0, 0, 1, 1))
    )
    assert (group.kind, group.ident, group.reasons) == ("device", 0, ())
    assert not caplog.records
    assert native.names() == ["unique_id", "unique_id", "prepare", "connect"], "two cliques: the positions on `data`"
    _, ident, local, spec = native.calls[2]
    assert ident == 0 and sorted((one.rank, one.clique) for one in local) == [
        (r, c) for r in range(4) for c in range(2)
    ]
    by_device = {one.device: (one.rank, one.clique) for one in local}
    assert by_device == {jax.devices()[c * 4 + r].local_hardware_id: (r, c) for r in range(4) for c in range(2)}
    assert spec.domain_of_rank == (0, 0, 1, 1) and spec.timeout_ns == 1_500_000_000
    assert spec.sizes == tuple(group.sizes)
    assert len({one[:2] for one in native.calls[3][3]}) == 2, "each clique has an id of its own"
    transport.shutdown("ep")
    assert native.calls[-1][0] == "destroy" and native.calls[-1][3] is True
    transport.shutdown("ep")  # nothing is left to end
    assert transport.init(mesh_of(), sizes=SIZES, library=FakeNative).ident == 1, "numbers are not used twice"


@pytest.mark.parametrize("step", ["unique_id", "prepare", "connect"])
def test_a_step_that_fails_leaves_nothing(step, on_gpus, caplog):
    native = FakeNative(step)
    group = init_with(native)
    assert group.kind == "xla" and group.reasons == (f"{step} does not work",)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    assert native.calls[-1][0] == "destroy" and native.calls[-1][3] is False, "other ranks may be gone"
    assert "connect" not in native.names() or step == "connect"


def test_no_library_is_a_reason(on_gpus):
    def broken():
        raise ImportError("no nvcc: install something")

    group = transport.init(mesh_of(), sizes=SIZES, library=broken)
    assert group.reasons == ("no nvcc: install something",)


@pytest.mark.parametrize("error", [OSError, ImportError])
def test_what_nobody_foresaw_is_raised_after_all(error, on_gpus):
    native = FakeNative("prepare", error=error)
    if error is ImportError:
        assert init_with(native).reasons == ("prepare does not work",)
    else:
        with pytest.raises(error, match="prepare does"):
            init_with(native)
        with pytest.raises(ValueError, match="no transport"):
            transport.group()
    assert native.names()[-1] == "destroy"


def test_an_error_without_words_is_a_reason(on_gpus):
    def broken():
        raise ImportError

    assert transport.init(mesh_of(), sizes=SIZES, library=broken).reasons == ("ImportError",)


def test_what_runs_ends_before_the_group(on_gpus, monkeypatch):
    native = FakeNative()
    init_with(native)
    wait = jax.block_until_ready
    monkeypatch.setattr(
        jax, "block_until_ready", lambda results: native.calls.append(("wait", wait(results).sharding.device_set))
    )
    transport.shutdown()
    assert native.calls[-2] == ("wait", set(mesh_of().devices.flat))
    assert native.names()[-1] == "destroy"


def test_a_device_that_has_failed_holds_nothing_up(on_gpus, monkeypatch, caplog):
    def failed(results):
        raise jax.errors.JaxRuntimeError("INTERNAL: an illegal instruction")

    native = FakeNative()
    init_with(native)
    monkeypatch.setattr(jax, "block_until_ready", failed)
    transport.shutdown()
    assert native.names()[-1] == "destroy"
    assert "ends on a device that has failed: JaxRuntimeError: INTERNAL: an illegal instruction" in caplog.text


def test_domains_must_lie_inside_of_nccls_teams(on_gpus):
    refused = init_with(FakeNative(lsa_size=2), topology=Topology((0, 0, 0, 0)))
    assert refused.kind == "xla" and "only blocks of 2 ranks share memory" in refused.reasons[0]
    transport.shutdown()
    assert init_with(FakeNative(lsa_size=2), topology=Topology((0, 0, 1, 1))).kind == "device"
    transport.shutdown()
    assert init_with(FakeNative(lsa_size=4), topology=Topology((0, 0, 1, 1))).kind == "device", (
        "small domains may share"
    )


def test_domains_must_be_neighbours(on_gpus):
    refused = init_with(FakeNative(), topology=Topology((0, 1, 0, 1)))
    assert "do not lie one after the other" in refused.reasons[0]


def test_ranks_must_lie_node_by_node(on_gpus, monkeypatch):
    monkeypatch.setattr(device, "_processes", lambda column: [0, 1, 0, 1])
    refused = init_with(FakeNative())
    assert "do not lie node by node (processes [0, 1, 0, 1])" in refused.reasons[0]


def test_failures_name_peer_phase_and_call(on_gpus):
    native = FakeNative()
    init_with(native)
    assert transport.failure() is None
    native.record = (1, 3, 7 << 28 | 2)
    failure = transport.failure()
    assert (failure.rank, failure.peer, failure.epoch, failure.step) == (1, 3, 7, 2)
    assert str(failure) == ("axis 'ep': rank 1 waited in vain for rank 3: its parameters to be ready (call 7, step 2)")
    native.record = (6, -1, 0)
    assert "no single peer: the network" in str(transport.failure())
    native.record = (7, 3, 7 << 28 | 2)
    assert "for rank 3: a legal row of slot_expert" in str(transport.failure())


def test_compile_only_makes_a_device_group_without_a_device():
    group = transport.init(mesh_of(), sizes=SIZES, compile_only=True)
    assert (group.kind, group.compile_only, group.local) == ("device", True, ())
    assert group.report()["mains"] == 2 * 112 and group.report()["total"] == sum(group.sizes)


def test_the_registry_refuses_a_second_group_and_names_what_is_there():
    with pytest.raises(ValueError, match=r"there is none yet.*call topoep_jax.transport.init\(mesh, 'ep', "):
        transport.group()
    transport.init(mesh_of(), sizes=SIZES, compile_only=True)
    with pytest.raises(ValueError, match="has a transport already"):
        transport.init(mesh_of(), sizes=SIZES, compile_only=True)
    with pytest.raises(ValueError, match=r"there are groups for \['ep'\]"):
        transport.group("expert")


def config(**changes) -> LayerConfig:
    fields = {
        "hidden": 64,
        "ffn": 32,
        "num_experts": 16,
        "top_k": 2,
        "topology": Topology.uniform(1, 4),
        "num_slots": 2,
    }
    return LayerConfig(**(fields | changes))


def test_windows_fit_every_layer():
    wide = config(hidden=128, num_slots=1)
    group = transport.init(mesh_of(), configs=[config(), wide], compile_only=True, dtype=jnp.float32)
    assert group.sizes.mains == 4 * 3 * 128 * 32 * 4
    assert group.sizes.slots == max(2 * 3 * 64 * 32 * 4, 3 * 128 * 32 * 4)
    assert group.sizes.staging == 64 * 2**20 and group.sizes.signals == 6 * 4 * 8
    assert (group.sizes.stripes, group.sizes.bounce) == (0, 0)


def test_sizes_of_stripes_and_of_the_network():
    two = Topology.uniform(2, 2)
    striped = group_sizes([SIZES._replace(pulls="striped")], two)
    assert striped.stripes > 0 and striped.bounce > 0
    assert group_sizes([SIZES], two).stripes == 0
    assert all(size >= 0 for size in striped) and striped.pull_schedule > 0


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="pass configs="):
        transport.init(mesh_of())
    with pytest.raises(ValueError, match="staging_bytes=64 is too small: 8 replicas need 256"):
        transport.init(mesh_of(), sizes=SIZES, staging_bytes=64)
    with pytest.raises(ValueError, match="no layer has replica slots"):
        transport.init(mesh_of(), sizes=SIZES._replace(num_slots=0))
    with pytest.raises(ValueError, match="one topology"):
        transport.init(mesh_of(), configs=config(), topology=Topology.uniform(2, 2))
    with pytest.raises(ValueError, match="the topology has 2 ranks"):
        transport.init(mesh_of(), sizes=SIZES, topology=Topology((0, 0)))
    for timeout_s in (0, -1.0, 1e10, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"timeout_s={timeout_s} must be positive, and at most 1000000 seconds"):
            transport.init(mesh_of(), sizes=SIZES, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="staging_bytes=281474976710657 must be an integer up to 281474976710656"):
        transport.init(mesh_of(), sizes=SIZES, staging_bytes=2**48 + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"num_mains": 0},
        {"num_mains": 2.5},
        {"num_mains": 2**29, "expert_bytes": 1},
        {"num_slots": 7},
        {"num_mains": 10**4, "num_slots": 2**14 + 1},
        {"expert_bytes": 0},
        {"expert_bytes": 2**62},
        {"expert_bytes": 2**44 + 1},
        {"pulls": "pushed"},
    ],
)
def test_sizes_beyond_bounds_are_refused_with_the_bounds(change):
    bounds = (
        r"num_mains is at most 536870911, num_slots at most num_mains x 3 and 16384, and expert_bytes x 4 x .* at most"
    )
    with pytest.raises(ValueError, match=rf"(?s)LayerSizes\(.*\) on 4 ranks: .*{bounds} 281474976710656"):
        transport.init(mesh_of(), sizes=SIZES._replace(**change), staging_bytes=2**40, compile_only=True)


@pytest.mark.parametrize(
    "sizes",
    [
        transport.LayerSizes(2**29 - 1, 1, 2**17 - 1, "striped"),
        transport.LayerSizes(10**4, 2**14, 1, "best"),
        SIZES._replace(num_slots=6, expert_bytes=2**43, pulls="best"),
    ],
)
def test_the_largest_sizes_fit_64_bits(sizes):
    made = transport.init(
        mesh_of(), sizes=sizes, staging_bytes=2**48, compile_only=True, topology=Topology((0, 1, 1, 1))
    )
    assert all(0 < size < 2**56 for size in made.sizes)
    assert made.sizes.slots >= sizes.num_slots * sizes.expert_bytes


def test_nccl_of_a_wheel_is_found_without_importing_it(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    assert nccl_path() is None, "no package of NVIDIA"
    library = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    importlib.invalidate_caches()
    assert nccl_path() is None, "a package without the library"
    library.touch()
    assert nccl_path() == str(library)
    assert "nvidia" not in sys.modules


def connect_everywhere(folder: str) -> None:
    """One process's part: both of them must end with the ids of process 0, and refuse together."""
    here = jax.process_index()
    device._platforms = lambda mesh: ["gpu"]
    devices = np.array(jax.devices()).reshape(2, 2, 2)  # process, clique, place
    mesh = Mesh(devices.swapaxes(0, 1).reshape(2, 4), ("data", "ep"))
    native = FakeNative()
    group = transport.init(mesh, sizes=SIZES, topology=Topology.uniform(2, 2), library=lambda: native)
    assert group.kind == "device", group
    ids = native.calls[-1][3]
    assert len(ids) == 2 and all(one[0] == 0 and len(one) == UNIQUE_ID_BYTES for one in ids), "made by process 0"
    assert (("unique_id",) in native.calls) == (here == 0)
    transport.shutdown()
    for step in ("prepare", "connect"):
        native = FakeNative(step if here == 1 else "")
        refused = transport.init(mesh, sizes=SIZES, topology=Topology.uniform(2, 2), library=lambda: native)  # noqa: B023
        assert refused.reasons == (f"{step} does not work (process 1)",)
        assert ("connect" in native.names()) == (step == "connect") and native.names()[-1] == "destroy"
        transport.shutdown()
        # Not foreseen: the other process must not wait for one that has left.
        native = FakeNative(step if here == 1 else "", error=OSError)
        try:
            refused = transport.init(mesh, sizes=SIZES, topology=Topology.uniform(2, 2), library=lambda: native)  # noqa: B023
        except OSError:
            assert here == 1
        else:
            assert here == 0 and refused.reasons == (f"OSError: {step} does not work (process 1)",)
        assert native.names()[-1] == "destroy"
        transport.shutdown()
    Path(folder, str(here)).write_text("done")


def test_two_processes_connect_together_or_not_at_all(tmp_path):
    run_processes("tests.transport.device_test:connect_everywhere", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
