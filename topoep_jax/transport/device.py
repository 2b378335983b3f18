"""Groups of the device transport: who may move replicas with our own kernels, in which memory, and why not.

A group is made once, outside of any program, by every process of the mesh together; programs that are traced afterwards
name it by its number. Where the machine cannot do it, the group says so once and the layer takes lax collectives.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from topoep_jax.config import STAGING_BYTES, LayerConfig
from topoep_jax.topology import Topology, check_mesh
from topoep_jax.transport import agree
from topoep_jax.transport.native import UNIQUE_ID_BYTES, GroupSpec, Library, LocalRank, Native, NativeError
from topoep_jax.transport.sizes import GroupSizes, LayerSizes, group_sizes

NUM_WORKERS = 32
"""Blocks of a transfer kernel: enough to fill NVLink, few enough to leave the other SMs to the layer."""

_MAX_TIMEOUT_S = 1e6  # nanoseconds must fit 64 bits, also once they are counted as clock cycles

PHASES = (
    "its windows to be open for a pull",
    "its parameters to be ready",
    "its parameters to arrive",
    "the end of an earlier pull",
    "room for gradients",
    "its gradients",
    "the network to complete a copy",
    "a legal row of slot_expert, in which the step is a slot (out of range, one of its mains, or held twice)",
)
"""What a wait was for, by `enum Word` of xla_ffi/transfer/fabric.h, and on as xla_ffi/transport/device_group.h says."""

_FORESEEN = (ImportError, NativeError)  # something is missing here, and lax collectives serve
_STEP_BITS = 28  # of a stamp, as in fabric.h

_log = logging.getLogger("topoep_jax")


@dataclasses.dataclass(frozen=True)
class Group:
    """How the ranks of one expert-parallel axis move replicas."""

    axis: str
    ident: int
    """Number of the group: attribute `group` of the FFI calls, the same in every process."""
    kind: str
    """"device": our kernels. "xla": lax collectives, because of `reasons`."""
    topology: Topology
    sizes: GroupSizes | None
    """Bytes on every rank; None for kind "xla"."""
    reasons: tuple[str, ...] = ()
    compile_only: bool = False
    """Programs with this group compile, and refuse to run."""
    local: tuple[LocalRank, ...] = ()
    """Ranks that this process drives."""

    def report(self) -> dict[str, int]:
        """Bytes on every rank by purpose, and their "total"; empty for kind "xla"."""
        if self.sizes is None:
            return {}
        return {**self.sizes._asdict(), "total": sum(self.sizes)}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A wait of a transfer kernel that ran out of time; the kernel then ended its CUDA context."""

    axis: str
    rank: int
    """Who waited."""
    peer: int
    """For whom; -1 where no single peer is to blame."""
    phase: str
    """For what."""
    epoch: int
    """In which call, counted from 1, pulls and pushes apart."""
    step: int
    """In which hop of a pull, or for which piece of a push."""

    def __str__(self) -> str:
        peer = f"rank {self.peer}" if self.peer >= 0 else "no single peer"
        return (
            f"axis {self.axis!r}: rank {self.rank} waited in vain for {peer}: {self.phase} (call {self.epoch}, step"
            f" {self.step})"
        )


@dataclasses.dataclass
class _Registry:
    groups: dict[str, Group] = dataclasses.field(default_factory=dict)
    native: dict[str, Native] = dataclasses.field(default_factory=dict)
    devices: dict[str, list[jax.Device]] = dataclasses.field(default_factory=dict)  # of this process, of `native`
    next_ident: int = 0  # processes make groups in the same order, so they agree


_registry = _Registry()


def init(
    mesh: Mesh,
    axis: str = "ep",
    *,
    configs: LayerConfig | Sequence[LayerConfig] = (),
    sizes: LayerSizes | Sequence[LayerSizes] = (),
    topology: Topology | None = None,
    dtype: DTypeLike = jnp.float32,
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = agree.TIMEOUT_S,
    require: bool = False,
    compile_only: bool = False,
    library: Callable[[], Native] = Library,
) -> Group:
    """Makes the group of `axis`: communicators, windows and what the kernels remember. Collective over all processes.

    Call it once before programs with `transport="device"` are traced. Where something is missing it logs one line that
    says what, and the group is of kind "xla": every process then takes lax collectives, with the same results.

    Args:
      mesh: of the training program; ranks along `axis` lie node by node.
      axis: the expert-parallel axis. Each position on the mesh's other axes is a communicator of its own.
      configs: the layers that will use the group; windows fit the largest.
      sizes: further layers, by their sizes alone.
      topology: domains of the ranks; by default those of `configs`, else `Topology.from_mesh(mesh, axis)`.
      dtype: the widest in which parameters travel, which is that of a layer's tokens; windows for bfloat16 are half as
        large as for float32.
      staging_bytes: of the buffer in which replica gradients arrive.
      timeout_s: how long a kernel waits for a peer before it gives up, at most 1e6 seconds; see `failure`.
        The peer may still compile: processes should `meet` after that.
      require: raise instead of taking lax collectives.
      compile_only: for ahead-of-time compilation; no communicator is made, and a program refuses to run.
      library: makes the native part, for tests.

    Raises:
      ValueError: the arguments contradict each other, or the axis has a group already.
      RuntimeError: with `require`, what is missing.
      Exception: what this process alone ran into and nobody foresaw, such as an OSError. The other processes have heard
        of it by then, as of something that is missing.
    """
    if axis in _registry.groups:
        raise ValueError(f"axis {axis!r} has a transport already: call topoep_jax.transport.shutdown({axis!r}) first")
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s={timeout_s} must be positive, and at most {_MAX_TIMEOUT_S:.0f} seconds")
    topology, needed = _needed(mesh, axis, configs, sizes, topology, dtype, staging_bytes)
    ident = _registry.next_ident
    _registry.next_ident += 1
    device = Group(axis, ident, "device", topology, needed, compile_only=compile_only)
    if compile_only:
        return _keep(device, None)
    local = _local_ranks(mesh, axis)
    spec = GroupSpec(topology.domain_of_rank, NUM_WORKERS, int(timeout_s * 1e9), tuple(needed))
    native, reason = _connect(ident, mesh, axis, local, spec, library)
    if reason is None:
        _registry.devices[axis] = _local_devices(mesh)
        return _keep(dataclasses.replace(device, local=tuple(local)), native)
    line = f"transport for axis {axis!r}: lax collectives instead of device kernels, because {reason}"
    if require:
        raise RuntimeError(line)
    if jax.process_index() == 0:
        _log.warning("%s", line)
    return _keep(Group(axis, ident, "xla", topology, None, (reason,)), None)


def group(axis: str = "ep") -> Group:
    """The group that `init` made for `axis`.

    Raises:
      ValueError: there is none.
    """
    if axis not in _registry.groups:
        known = f"there are groups for {sorted(_registry.groups)}" if _registry.groups else "there is none yet"
        raise ValueError(
            f"axis {axis!r} has no transport ({known}): call topoep_jax.transport.init(mesh, {axis!r},"
            " configs=layer.config) before the layer, or make the layer with transport='xla', which needs no kernels"
        )
    return _registry.groups[axis]


def shutdown(axis: str = "ep") -> None:
    """Ends the group of `axis`, if there is one, and frees its memory. Collective; no program may use it any more.

    Programs that this process has started end first. Those of *other* processes may still read this process's memory:
    where there are several, let them meet before (`jax.experimental.multihost_utils.sync_global_devices`), each after
    `jax.block_until_ready` on its last results.
    """
    ended, native = _registry.groups.pop(axis, None), _registry.native.pop(axis, None)
    devices = _registry.devices.pop(axis, [])
    if ended is not None and native is not None:
        try:
            _finish(devices)
        except jax.errors.JaxRuntimeError as error:  # a device that has failed runs nothing any more
            _log.warning("transport for axis %r ends on a device that has failed: %s", axis, _line(error))
        native.destroy(ended.ident, ended.local)


def _finish(devices: list[jax.Device]) -> None:
    """Waits until these devices have run all that they were given.

    JAX returns before a program is launched, and a GPU runs programs in the order in which it got them; so one more
    program on every device ends after all others, whether somebody still holds their results or not.
    """
    if devices:
        one_each = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
        jax.block_until_ready(jax.jit(jnp.negative)(jax.device_put(np.zeros(len(devices), np.int32), one_each)))


def failure() -> Failure | None:
    """The first wait that ran out of time on a rank of this process; None if none did. Works after CUDA has failed."""
    for axis, native in _registry.native.items():
        ended = _registry.groups[axis]
        for one in ended.local:
            record = native.failure(ended.ident, one.device)
            if record is not None:
                word, peer, value = record
                return Failure(axis, one.rank, peer, PHASES[word], value >> _STEP_BITS, value % (1 << _STEP_BITS))
    return None


def _keep(made: Group, native: Native | None) -> Group:
    _registry.groups[made.axis] = made
    if native is not None:
        _registry.native[made.axis] = native
    return made


def _needed(
    mesh: Mesh,
    axis: str,
    configs: LayerConfig | Sequence[LayerConfig],
    sizes: LayerSizes | Sequence[LayerSizes],
    topology: Topology | None,
    dtype: DTypeLike,
    staging_bytes: int,
) -> tuple[Topology, GroupSizes]:
    """The topology of the axis and the bytes that its layers need."""
    configs = [configs] if isinstance(configs, LayerConfig) else list(configs)
    layers = [sizes] if isinstance(sizes, LayerSizes) else list(sizes)
    if not configs and not layers:
        raise ValueError("pass configs=, the LayerConfig of every layer that uses the group, or sizes=")
    check_mesh(mesh)
    topologies = {config.topology for config in configs} | ({topology} if topology else set())
    if len(topologies) > 1:
        raise ValueError(
            f"the layers of one group need one topology, not {sorted(t.domain_of_rank for t in topologies)}"
        )
    found = topologies.pop() if topologies else Topology.from_mesh(mesh, axis)
    if axis not in mesh.axis_names or mesh.shape[axis] != found.num_ranks:
        raise ValueError(f"the topology has {found.num_ranks} ranks, but axis {axis!r} of the mesh {dict(mesh.shape)}")
    item = jnp.dtype(dtype).itemsize
    layers += [LayerSizes(c.num_mains, c.num_slots, c.expert_size * item, c.cost.pulls) for c in configs]
    return found, group_sizes(layers, found, staging_bytes)


def _columns(mesh: Mesh, axis: str) -> np.ndarray:
    """[R, C] devices: a column for each position on the mesh's other axes."""
    return np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)


def _local_ranks(mesh: Mesh, axis: str) -> list[LocalRank]:
    local = _local_devices(mesh)
    return [
        LocalRank(device.local_hardware_id, rank, clique)
        for (rank, clique), device in np.ndenumerate(_columns(mesh, axis))
        if device in local and device.local_hardware_id is not None
    ]


def _local_devices(mesh: Mesh) -> list[jax.Device]:
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _platforms(mesh: Mesh) -> list[str]:
    return sorted({device.platform for device in mesh.devices.flat})


def _processes(column: np.ndarray) -> list[int]:
    return [device.process_index for device in column]


def _misplaced(mesh: Mesh, axis: str, topology: Topology) -> str | None:
    """Why the ranks' places do not suit NCCL; the same on every process."""
    if (platforms := _platforms(mesh)) != ["gpu"]:
        return f"the mesh's devices are of platform {', '.join(platforms)}, and the kernels are CUDA's"
    for column in _columns(mesh, axis).T:
        places = _processes(column)
        blocks = [place for i, place in enumerate(places) if i == 0 or place != places[i - 1]]
        if len(blocks) != len(set(blocks)):
            return (
                f"the ranks of axis {axis!r} do not lie node by node (processes {places}): order the mesh so that the"
                " devices of one process are neighbours on that axis"
            )
    domains = topology.domain_of_rank
    if any(domain < before for before, domain in itertools.pairwise(domains)):
        return f"the domains {domains} do not lie one after the other on axis {axis!r}: order the mesh by domains"
    return None


def _connect(
    ident: int, mesh: Mesh, axis: str, local: list[LocalRank], spec: GroupSpec, library: Callable[[], Native]
) -> tuple[Native | None, str | None]:
    """The native part with the group connected on every rank, or the reason of the first process that cannot.

    Each step that can fail on one process alone ends with an agreement, before others enter a call of NCCL that would
    wait for it forever. So nothing that is raised may leave before; what was not foreseen is raised again at the end.
    """
    topology = Topology(spec.domain_of_rank)
    reason = _misplaced(mesh, axis, topology)
    if reason is not None:
        return None, reason
    native: Native | None = None
    fault: Exception | None = None
    ids: list[bytes] = [bytes(UNIQUE_ID_BYTES)] * _columns(mesh, axis).shape[1]
    try:
        native = library()
        if jax.process_index() == 0:
            ids = [native.unique_id() for _ in ids]
        native.prepare(ident, local, spec)
    except Exception as error:  # noqa: BLE001
        fault, reason = error, _line(error)
    reason = agree.first_reason(reason)
    if reason is None and native is not None:
        ids = agree.from_process_0(ids, UNIQUE_ID_BYTES)
        try:
            reason = _split_domain(topology, native.connect(ident, local, ids))
        except Exception as error:  # noqa: BLE001
            fault, reason = error, _line(error)
        reason = agree.first_reason(reason)
    if reason is not None and native is not None:
        native.destroy(ident, local, everywhere=False)
    if fault is not None and not isinstance(fault, _FORESEEN):
        raise fault
    return native, reason


def _split_domain(topology: Topology, lsa_size: int) -> str | None:
    """Whether a domain is larger than what NCCL can address; teams are blocks of `lsa_size` neighbouring ranks."""
    for domain in range(topology.num_domains):
        ranks = topology.ranks_of_domain(domain)
        if ranks[0] // lsa_size != ranks[-1] // lsa_size:
            return (
                f"ranks {ranks[0]}..{ranks[-1]} are one domain of the topology, but only blocks of {lsa_size} ranks"
                " share memory: correct the topology"
            )
    return None


def _line(error: Exception) -> str:
    """What an error says, in one line that is not empty; of what was not foreseen also its type."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    if not text:
        return kind
    return text if isinstance(error, _FORESEEN) else f"{kind}: {text}"
