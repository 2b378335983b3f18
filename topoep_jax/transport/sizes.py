"""How much memory a group of the device transport takes on every rank, and for what."""

from collections.abc import Iterable
from typing import NamedTuple

from topoep_jax import _xla_ffi
from topoep_jax._native import PULL_IDS
from topoep_jax.topology import Topology

STAGING_BYTES = 64 * 2**20
"""Default of the buffer in which an owner receives replica gradients before it adds them."""

_BOUNCE_BYTES = 8 * 2**20  # the workers' shares, together
_GRAIN = 16


class LayerSizes(NamedTuple):
    """What a layer's replicas need of a group."""

    num_mains: int
    """Em, main experts per rank."""
    num_slots: int
    """N, replica slots per rank."""
    expert_bytes: int
    """Bytes of one expert's parameters as they travel."""
    pulls: str = "direct"
    """As in `CostModel.pulls`."""


class GroupSizes(NamedTuple):
    """Bytes on every rank, outside of XLA's pool; NCCL rounds windows up to its pages."""

    mains: int
    """Window with parameters of own experts, as other ranks read them."""
    slots: int
    """Window with parameters of the experts in the replica slots."""
    stripes: int
    """Window with slices of experts on their way; 0 unless pulls are striped."""
    staging: int
    """Window in which replica gradients arrive, in two halves."""
    signals: int
    """Window with the words by which ranks tell each other how far they are."""
    bounce: int
    """Window from which gradients leave by the network; 0 within one domain."""
    pull_schedule: int
    push_schedule: int


def group_sizes(layers: Iterable[LayerSizes], topology: Topology, staging_bytes: int = STAGING_BYTES) -> GroupSizes:
    """The bytes that serve several layers in turn: of everything the most that one of them needs.

    Raises:
      ValueError: no layer has replica slots, a layer's sizes are out of range, or there is too little staging.
    """
    moving = [layer for layer in layers if layer.num_slots > 0]
    if not moving:
        raise ValueError("no layer has replica slots, and the device transport moves nothing but replicas")
    for layer in moving:
        if layer.num_mains < 1 or layer.expert_bytes < 1 or layer.pulls not in PULL_IDS:
            raise ValueError(f"{layer} needs a main, a byte and one of {tuple(PULL_IDS)}")
    replicas = topology.num_ranks * max(layer.num_slots for layer in moving)
    least = 2 * _GRAIN * replicas
    if staging_bytes < least:
        raise ValueError(
            f"staging_bytes={staging_bytes} is too small: {replicas} replicas need {least} at the very least, and some"
            f" MiB to be quick; the default is {STAGING_BYTES}"
        )
    bounce_bytes = _BOUNCE_BYTES if topology.num_domains > 1 else 0
    domains = list(topology.domain_of_rank)
    sizes = [
        _xla_ffi.group_sizes(
            domains,
            layer.num_mains,
            layer.num_slots,
            layer.expert_bytes,
            PULL_IDS[layer.pulls],
            staging_bytes,
            bounce_bytes,
        )
        for layer in moving
    ]
    return GroupSizes(*(max(column) for column in zip(*sizes, strict=True)))
