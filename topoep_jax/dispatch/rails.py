"""Who forwards whose tokens: gateways, rails and slots, from the topology alone.

A token that has experts in another domain crosses to it once, to its *gateway* there: the rank of the source's own
local index, which forwards it. The ranks of one local index, one in each domain, are a *rail*. Each gateway serves the
other sources of its rail, slot by slot in the order of their domains.
"""

import dataclasses
import functools

import numpy as np

from topoep_jax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Rails:
    """Tables of M domains of G ranks each.

    Attributes:
      domain: int32 [R], of each rank.
      members: int32 [M, G], ranks of each domain, ascending.
      local: int32 [R], index of each rank within its domain.
      others: int32 [R, M - 1], the domains other than a rank's own, ascending.
    """

    domain: np.ndarray
    members: np.ndarray
    local: np.ndarray
    others: np.ndarray

    @classmethod
    @functools.lru_cache
    def of(cls, topology: Topology) -> "Rails | None":
        """None where there is one domain, or where domains have different sizes."""
        groups = [topology.ranks_of_domain(m) for m in range(topology.num_domains)]
        if len(groups) == 1 or len({len(group) for group in groups}) > 1:
            return None
        members, domain = np.array(groups, np.int32), np.array(topology.domain_of_rank, np.int32)
        local = np.zeros_like(domain)
        local[members] = np.arange(members.shape[1])
        every = np.arange(len(groups), dtype=np.int32)
        return cls(domain, members, local, np.stack([every[every != own] for own in domain]))

    @property
    def served(self) -> np.ndarray:
        """int32 [R, M - 1]: the source in each slot of a gateway, which is also the source's gateway in that domain."""
        return self.members[self.others, self.local[:, None]]

    @property
    def groups(self) -> list[list[int]]:
        """Ranks of each domain, for collectives inside domains."""
        groups: list[list[int]] = self.members.tolist()
        return groups

    @property
    def rails(self) -> list[list[int]]:
        """Ranks of each rail, for collectives along rails."""
        rails: list[list[int]] = self.members.T.tolist()
        return rails


@functools.lru_cache
def receive_order(topology: Topology) -> np.ndarray:
    """int32 [R, R]: for each receiving rank, the sources in the order in which their rows lie inside an instance.

    Those of its own domain come first, ascending: no row waits for one that crosses domains. Remote ones follow by
    gateway and then by slot, so that what one gateway forwards lies together; where there are no gateways, they ascend.
    """
    rails, domain = Rails.of(topology), topology.domain_of_rank

    def place(source: int, rank: int) -> tuple[int, ...]:
        remote = (int(rails.local[source]), domain[source]) if rails and domain[source] != domain[rank] else (0, 0)
        return (domain[source] != domain[rank], *remote, source)

    ranks = range(topology.num_ranks)
    return np.array([sorted(ranks, key=functools.partial(place, rank=rank)) for rank in ranks], np.int32)
