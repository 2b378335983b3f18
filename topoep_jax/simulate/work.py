"""What one plan makes the ranks do in one layer and microbatch: rows, blocks and replicas, by receive buffer."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import Rails, extent_of, rows_before
from topoep_jax.dispatch.two_hop import is_direct
from topoep_jax.plan import Plan, pulls


@dataclasses.dataclass(frozen=True)
class Work:
    """One layer and microbatch on all ranks.

    Attributes:
      config: the layer; its chunks, residuals, pulls and staging count.
      num_assignments: A of one rank, after which the receive buffers are sized.
      rows: int64 [chunks, R, R] from source to executing rank, by receive buffer. Extra passes are not modelled.
      aligned: int64 [chunks, R, J], rows of each instance that are computed, mains first.
      pulled: int64 [R, R] bytes of parameters from rank to rank.
      replicas: int64 [R, R] replicas from main rank to holding rank.
      balanced: whether the layer has a planner and slots, even if this plan has no replica.
    """

    config: LayerConfig
    num_assignments: int
    rows: np.ndarray
    aligned: np.ndarray
    pulled: np.ndarray
    replicas: np.ndarray
    balanced: bool

    @property
    def load(self) -> np.ndarray:
        """int64 [R], rows that each rank executes."""
        return self.rows.sum(axis=(0, 1))

    @property
    def num_rows(self) -> int:
        """The rows of all ranks."""
        return int(self.rows.sum())

    @property
    def hops(self) -> bool:
        """Whether the layer's program has two launches, even if this plan needs one."""
        return self.config.exchange != "direct" and Rails.of(self.config.topology) is not None

    @functools.cached_property
    def tokens(self) -> np.ndarray | None:
        """int64 [R, R] tokens from each source to its gateways; None where rows travel as they are.

        They are expected as if a token's experts were independent.
        """
        rails, rows = Rails.of(self.config.topology), self.rows.sum(0)
        if not self.hops or rails is None:
            return None
        tokens, top_k = self.num_assignments // self.config.top_k, self.config.top_k
        if bool(is_direct(self.config, rails, jnp.asarray(rows[:, :, None], jnp.int32), tokens, top_k)):
            return None
        visiting = np.zeros_like(rows)
        for domain, gateways in enumerate(rails.members):
            asked = rows[:, rails.members[domain]].sum(1) / self.num_assignments
            sent = np.ceil(tokens * (1 - (1 - np.minimum(asked, 1)) ** top_k)).astype(np.int64)
            visiting[np.arange(len(rows)), gateways[rails.local]] = np.where(rails.domain == domain, 0, sent)
        return visiting

    def launches(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [R, R] rows and tokens that a chunk moves in the first launch, and rows that gateways forward."""
        rows = self.rows[chunk]
        if self.tokens is None:
            return rows, np.zeros_like(rows)
        rails, crosses = Rails.of(self.config.topology), self.config.topology.crosses_domains()
        assert rails is not None
        forwarded = np.zeros_like(rows)
        ranks = np.arange(len(rows))
        gateway = rails.members[rails.domain[None], rails.local[:, None]]
        np.add.at(forwarded, (gateway, np.broadcast_to(ranks, gateway.shape)), rows * crosses)
        return rows * ~crosses + (self.tokens if chunk == len(self.rows) - 1 else 0), forwarded

    @property
    def flops_ratio(self) -> float:
        """Rows that the grid of the GEMMs computes over rows that there are, of all ranks."""
        return float(self.aligned.sum() / max(self.rows.sum(), 1))


def work_of(config: LayerConfig, plan: Plan, *, balanced: bool, num_assignments: int | None = None) -> Work:
    """The work of a plan, also of one with more slots than the layer's.

    Args:
      config: the layer.
      plan: the plan.
      balanced: see `Work`.
      num_assignments: A of one rank: rows beyond the receive buffers of the first pass are left out. None takes the
        plan's mean load, and a last buffer that holds whatever comes.

    Raises:
      ValueError: replicas without a planner.
    """
    held, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota).astype(np.int64)
    if not balanced and (held >= 0).any():
        raise ValueError(f"the plan has {(held >= 0).sum()} replicas, so it is balanced: pass balanced=True")
    copies = pulls.schedule(held, config.num_mains, config.topology, config.cost)
    unbounded = num_assignments is None
    if num_assignments is None:
        num_assignments = max(-(-int(quota.sum()) // config.num_ranks), 1)
    return Work(
        config,
        num_assignments,
        *_buffered(config, quota, num_assignments, unbounded=unbounded),
        pulls.moved_bytes(copies, config.topology, config.cost),
        pulls.replicas(held, config.num_mains),
        balanced,
    )


def work_of_planner(config: LayerConfig, planner: str, plan: Plan, num_assignments: int | None = None) -> Work:
    """The work of a planner's plan, as `work_of`: balanced unless the planner is "none" or the plan has no slots."""
    balanced = planner != "none" and plan.slot_expert.shape[1] > 0
    if planner == "none":  # whose gateways have more room
        config = dataclasses.replace(config, planner=planner)
    return work_of(config, plan, balanced=balanced, num_assignments=num_assignments)


def _buffered(
    config: LayerConfig, quota: np.ndarray, num_assignments: int, *, unbounded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """`rows` and `aligned` of `Work`, for quota int64 [R, R, J]; an unbounded last buffer holds whatever comes."""
    quota32 = jnp.asarray(quota, jnp.int32)
    extent = extent_of(config, quota32, num_assignments)
    *ahead_rows, last_rows = config.window_rows(num_assignments)
    before, ahead = np.asarray(rows_before(quota32, config.topology), np.int64), np.asarray(extent.ahead, np.int64)
    start, aligned = np.asarray(extent.start, np.int64), np.asarray(extent.aligned, np.int64)
    taken = np.clip(ahead[None] - before, 0, quota)
    end = np.iinfo(np.int64).max if unbounded else sum(ahead_rows) + last_rows
    first = start[None] + before + taken - ahead[None]
    rest = np.clip(first + quota - taken, 0, end) - np.clip(first, 0, end)
    computed = np.clip(start + aligned, 0, end) - np.clip(start, 0, end)
    if not ahead_rows:
        return rest.sum(2)[None], computed[None]
    return np.stack([taken.sum(2), rest.sum(2)]), np.stack([ahead, computed])
