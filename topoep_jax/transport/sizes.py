"""How much memory a group of the device transport takes on every rank, and for what."""

from collections.abc import Iterable
from typing import NamedTuple

from topoep_jax._integers import is_integer
from topoep_jax._native_ids import PULL_IDS
from topoep_jax.config import STAGING_BYTES
from topoep_jax.plan.problem import MAX_REPLICAS
from topoep_jax.topology import Topology

_BOUNCE_BYTES = 8 * 2**20  # the workers' shares, together
_GRAIN = 16
_MAX_EXPERTS = 2**31 - 1
_MAX_BYTES = 2**48  # of all experts and replicas, or of staging: beyond any cluster, and sums of it fit 64 bits


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
      ImportError: the native extension does not load.
    """
    from topoep_jax._native import window_sizes  # Here, so that the library imports without the extension.

    moving = [layer for layer in layers if layer.num_slots > 0]
    if not moving:
        raise ValueError("no layer has replica slots, and the device transport moves nothing but replicas")
    for layer in moving:
        _check(layer, topology.num_ranks)
    if not is_integer(staging_bytes) or staging_bytes > _MAX_BYTES:
        raise ValueError(f"staging_bytes={staging_bytes!r} must be an integer up to {_MAX_BYTES}")
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
        window_sizes(
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


def _check(layer: LayerSizes, ranks: int) -> None:
    numbers = (layer.num_mains, layer.num_slots, layer.expert_bytes)
    if (
        layer.pulls not in PULL_IDS
        or not all(is_integer(number, 1) for number in numbers)
        or layer.num_mains > _MAX_EXPERTS // ranks
        or layer.num_slots > min(layer.num_mains * (ranks - 1), MAX_REPLICAS // ranks)
        or layer.expert_bytes * ranks * (layer.num_mains + layer.num_slots) > _MAX_BYTES
    ):
        raise ValueError(
            f"{layer} on {ranks} ranks: give positive integers and pulls of {tuple(PULL_IDS)}; num_mains is at most"
            f" {_MAX_EXPERTS // ranks}, num_slots at most num_mains x {ranks - 1} and {MAX_REPLICAS // ranks}, and"
            f" expert_bytes x {ranks} x (num_mains + num_slots) at most {_MAX_BYTES}"
        )
