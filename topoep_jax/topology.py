"""Ranks and the scale-up domains (NVLink islands) they live in; static, hashable and free of bandwidths.

Every planner and every mask of "same domain / across domains" is derived from this one tuple.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from topoep_jax._integers import is_integer


@dataclasses.dataclass(frozen=True)
class Topology:
    """The domain of each rank of the expert-parallel axis.

    Attributes:
      domain_of_rank: one domain index per rank. Domains are numbered 0..num_domains-1, each has at least one rank, and
        they may be uneven: `(0, 0, 0, 1)` is three ranks beside one. Ranks of a domain need not be neighbours.

    Raises:
      ValueError: no rank, or domain indices that leave a gap.
    """

    domain_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.domain_of_rank
        domains = tuple(given) if isinstance(given, Iterable) else (None,)
        if not all(is_integer(d) for d in domains):
            raise ValueError(f"domain_of_rank={given} must hold one integer per rank, as in Topology((0, 0, 1, 1))")
        domains = tuple(int(d) for d in domains)
        if not domains:
            raise ValueError("domain_of_rank is empty: a topology needs at least one rank, as in Topology((0,))")
        if sorted(set(domains)) != list(range(len(set(domains)))):
            raise ValueError(
                f"domain_of_rank={domains} must use every domain 0..{max(domains)} at least once: renumber the domains"
                " without gaps"
            )
        object.__setattr__(self, "domain_of_rank", domains)

    @property
    def num_ranks(self) -> int:
        """R, the length of the expert-parallel axis."""
        return len(self.domain_of_rank)

    @property
    def num_domains(self) -> int:
        """M, the number of scale-up domains."""
        return max(self.domain_of_rank) + 1

    def ranks_of_domain(self, domain: int) -> tuple[int, ...]:
        """Ranks of `domain`, ascending."""
        return tuple(r for r, d in enumerate(self.domain_of_rank) if d == domain)

    def crosses_domains(self) -> np.ndarray:
        """bool [R, R]: whether a row from rank s to rank r leaves its domain."""
        domain = np.asarray(self.domain_of_rank)
        return domain[:, None] != domain[None, :]

    @classmethod
    def uniform(cls, num_domains: int, ranks_per_domain: int) -> "Topology":
        """`num_domains` domains of `ranks_per_domain` neighbouring ranks each."""
        counts = (num_domains, ranks_per_domain)
        if not all(is_integer(count, 1) for count in counts):
            raise ValueError(
                f"num_domains={num_domains!r} and ranks_per_domain={ranks_per_domain!r} must be integers of at least 1"
            )
        ranks_per_domain = int(ranks_per_domain)
        return cls(tuple(r // ranks_per_domain for r in range(int(num_domains) * ranks_per_domain)))

    @classmethod
    def from_mesh(cls, mesh: Mesh, axis: str = "ep", *, group_by: str | None = None) -> "Topology":
        """Reads the domains from the devices along `axis` of `mesh`.

        Args:
          mesh: the device mesh of the training program.
          axis: the expert-parallel axis.
          group_by: "slice" takes each device's slice index (one scale-up island on platforms that report it), "process"
            its process index (right where one process drives all devices of a node). None takes "slice" where every
            device reports one and they differ or are GPUs, else "process".

        Raises:
          ValueError: no such axis, an unknown `group_by`, or groups of the mesh's other axes that see different domains
            (then write the topology by hand: `Topology(domain_of_rank=...)`).
        """
        check_mesh(mesh)
        if axis not in mesh.axis_names:
            raise ValueError(
                f"the mesh has axes {tuple(mesh.axis_names)} but no axis {axis!r}: name the expert-parallel axis"
            )
        devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
        columns = {_number_in_order([_island(d, group_by, devices) for d in column]) for column in devices.T}
        if len(columns) > 1:
            raise ValueError(
                f"the groups of axis {axis!r} see different domains {sorted(columns)}: reorder the mesh or pass"
                " Topology(domain_of_rank=...) by hand"
            )
        return cls(columns.pop())


def check_mesh(mesh: Any) -> None:
    """Raises ValueError for what is no mesh of devices."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f'mesh={mesh!r} must be a jax.sharding.Mesh, as in Mesh(np.array(jax.devices()), ("ep",))')


def _island(device: jax.Device, group_by: str | None, devices: np.ndarray) -> int:
    if group_by not in (None, "slice", "process"):
        raise ValueError(f"group_by={group_by!r} must be 'slice', 'process' or None")
    if group_by is None:
        slices = {getattr(d, "slice_index", None) for d in devices.flat}
        # On GPUs a slice is a host, also where every GPU has a process of its own.
        on_gpus = all(d.platform == "gpu" for d in devices.flat)
        group_by = "slice" if None not in slices and (on_gpus or len(slices) > 1) else "process"
    if group_by == "slice":
        index = getattr(device, "slice_index", None)
        if index is None:
            raise ValueError(f"{device} reports no slice index: use group_by='process' or Topology(domain_of_rank=...)")
        return int(index)
    return int(device.process_index)


def _number_in_order(islands: Sequence[int]) -> tuple[int, ...]:
    """Renumbers arbitrary island ids 0, 1, .. in order of first appearance."""
    order = {island: i for i, island in enumerate(dict.fromkeys(islands))}
    return tuple(order[i] for i in islands)
