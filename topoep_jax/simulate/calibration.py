"""The paper's cluster as constants: a sum of phases that fits its Figures 12, 13a and 15, and no other cluster.

    step  = base + rho x layers x layer
    layer = experts + four exchanges + replicas + planning, forward and backward, added: what overlaps is in the rates

Milliseconds and megabytes of 10^6 bytes, so that megabytes per millisecond are GB/s. One microbatch of 4,096 tokens
per rank and step.
"""

import dataclasses
from typing import NamedTuple

from topoep_jax.plan.hardware import Hardware
from topoep_jax.shapes import SHAPES, Shape
from topoep_jax.simulate.published import LAYERS, UNIFORM_THROUGHPUT

TOKENS = 4096
"""Per rank: the only size for which the phases of Figure 15 add up to the steps of Figure 13a."""
UNIFORM_IMBALANCE = 1.01
"""Rows of the busiest rank over the mean without replicas, where routing is uniform."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of one fit.

    Attributes:
      name: what reports call it.
      gflops: GFLOP/s of expert products.
      nic_gbs: GB/s of a NIC per direction; line rate, where every free fit ended.
      nvlink_gbs: GB/s of NVLink per rank and direction.
      phase_ms: fixed time of an exchange.
      hot_share: by how much of its excess load the busiest rank slows an exchange (theta).
      size_ms: per GB of all experts and layer, with a balancing back end: whatever grows with their size (c_grad).
      plan_ms: planning, with a balancing back end.
      rho: factor of all layers.
      backward: inflation of the experts' backward pass by a balancing back end (1 + chi).
      memory_gbs: GB/s of what is read and written beside the products.
      replica_ms: fixed time of a pull or a push.
      replica_gbs: GB/s of a pull or a push.
    """

    name: str
    gflops: float = Hardware.h800_fitted().gflops
    nic_gbs: float = 1e6 / Hardware.h800_fitted().inter_fs_per_byte
    nvlink_gbs: float = 1e6 / Hardware.h800_fitted().intra_fs_per_byte
    phase_ms: float = 0.51
    hot_share: float = 0.46
    size_ms: float = 2.35
    plan_ms: float = 0.4
    rho: float = 1.0
    backward: float = 1.26
    memory_gbs: float = 2500.0
    replica_ms: float = 0.9
    replica_gbs: float = 120.0


class Traits(NamedTuple):
    """What the sum knows of a plan.

    Attributes:
      imbalance: rows of the busiest rank over the mean.
      inter: share of the assignments that are executed on another node.
      intra: share executed on another rank of the same node.
      nodes: distinct pairs of token and node per inter-node assignment.
      balanced: whether a balancing back end runs; without one, each assignment travels by itself.
      slots: that are pulled and pushed on every rank.
      sized: whether what grows with the experts' size is paid.
    """

    imbalance: float
    inter: float
    intra: float
    nodes: float = 1.0
    balanced: bool = False
    slots: int = 0
    sized: bool = False


class Phases(NamedTuple):
    """Milliseconds of one layer by phase, as Figure 15 shows them: without `rho`."""

    plan: float
    size: float
    replicas: float
    """Of the pull, and of the push."""
    exchange: float
    """Each of four."""
    experts_forward: float
    experts_backward: float

    @property
    def layer_ms(self) -> float:
        """Forward and backward."""
        experts = self.experts_forward + self.experts_backward
        return self.plan + self.size + 2 * self.replicas + 4 * self.exchange + experts

    def times(self, factor: float) -> "Phases":
        """All of them, longer or shorter."""
        return Phases(*(factor * ms for ms in self))


R = Calibration("R")
A = Calibration(
    "A",
    gflops=0.481 * 989e3,
    nvlink_gbs=80.4,
    phase_ms=0.636,
    hot_share=0.311,
    size_ms=0.0,
    plan_ms=3.40,
    rho=1.245,
)
C = Calibration("C", gflops=0.479 * 989e3, nvlink_gbs=91.4, phase_ms=0.779, hot_share=0.370, size_ms=2.95)
CALIBRATIONS = (R, A, C)
"""R: fitted to Qwen and GLM, the recommended one. A: the same data without the term of size, planning and rho fitted
instead. C: as R, fitted to all three models. A and C are refitted here (`tests/simulate/fit_test.py` repeats it)."""


def phases(shape: Shape, traits: Traits, calibration: Calibration, rows: float) -> Phases:
    """Times of a layer in which each rank sends `rows` assignments."""
    c = calibration
    product, expert_mb = 6 * shape.hidden * shape.ffn, 6 * shape.hidden * shape.ffn / 1e6
    row_ms = product / (c.gflops * 1e6) + (4 * shape.hidden + 12 * shape.ffn) / (c.memory_gbs * 1e6)
    forward = traits.imbalance * rows * row_ms
    sent_mb = rows * 2 * shape.hidden / 1e6
    hot = 1 + c.hot_share * (traits.imbalance - 1)
    if traits.balanced:
        between, inside = traits.inter * traits.nodes / c.nic_gbs, (traits.inter + traits.intra) / c.nvlink_gbs * hot
    else:
        between, inside = traits.inter / c.nic_gbs * hot, traits.intra / c.nvlink_gbs * hot
    replicas = c.replica_ms + traits.slots * expert_mb / c.replica_gbs if traits.slots else 0.0
    return Phases(
        c.plan_ms * traits.balanced,
        c.size_ms * shape.num_experts * expert_mb / 1000 * traits.sized,
        replicas,
        c.phase_ms + sent_mb * (between + inside),
        forward,
        2 * forward * (c.backward if traits.balanced else 1),
    )


def nodes_per_assignment(inter: float, num_nodes: int, top_k: int) -> float:
    """Distinct pairs of token and node per inter-node assignment, if a token's assignments were independent."""
    away = num_nodes - 1
    if not inter or not away:
        return 1.0
    return away * (1 - (1 - min(inter / away, 1)) ** top_k) / (top_k * inter)


def published_traits(shape: Shape, imbalance: float, inter: float, *, balanced: bool, slots: int = 2) -> Traits:
    """Traits from the two ratios that the paper prints.

    Rows inside a node are spread evenly, and tokens meet as many nodes per assignment as without replicas.
    """
    nodes = shape.topology.num_domains
    local = nodes / shape.topology.num_ranks
    return Traits(
        imbalance,
        inter,
        (1 - inter) * (1 - local),
        nodes_per_assignment(1 - 1 / nodes, nodes, shape.top_k),
        balanced,
        slots if balanced else 0,
        balanced,
    )


def tokens_per_second(shape: Shape, step_ms: float) -> float:
    """Throughput of all ranks, with `TOKENS` each."""
    return shape.topology.num_ranks * TOKENS / step_ms * 1e3


def base_ms(model: str, calibration: Calibration) -> float:
    """What of a step is no MoE layer: whatever the paper's Megatron-LM at skew 0 leaves, one number of each model."""
    shape = SHAPES[model]
    uniform = published_traits(shape, UNIFORM_IMBALANCE, 1 - 1 / shape.topology.num_domains, balanced=False)
    layer = phases(shape, uniform, calibration, TOKENS * shape.top_k).layer_ms
    whole = shape.topology.num_ranks * TOKENS / UNIFORM_THROUGHPUT[model]["none"].number
    return whole - calibration.rho * LAYERS[model] * layer
