"""What one plan makes the ranks do in one layer and microbatch: rows, blocks and replicas, by receive buffer."""

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from topoep_jax.config import LayerConfig
from topoep_jax.dispatch import measure_extent
from topoep_jax.plan import Plan, pulls


class Buffered(NamedTuple):
    """Rows of a plan, divided among the receive buffers of the layer's chunks."""

    rows: np.ndarray
    """int64 [chunks, R, R] from source to executing rank."""
    aligned: np.ndarray
    """int64 [chunks, R, J] of each instance with its alignment: what is computed."""


def buffered(config: LayerConfig, quota: np.ndarray, num_assignments: int, *, unbounded: bool = False) -> Buffered:
    """Divides quota int [R, R, J] among receive buffers, for A = `num_assignments` of one rank.

    Args:
      config: the layer, whose chunks count.
      quota: of the plan.
      num_assignments: A.
      unbounded: whether the last buffer holds whatever comes; else rows beyond it are left out.
    """
    quota = np.asarray(quota).astype(np.int64)
    extent = measure_extent(config, jnp.asarray(quota, jnp.int32), num_assignments)
    start, aligned = np.asarray(extent.start, np.int64), np.asarray(extent.aligned, np.int64)
    first = start[None] + np.cumsum(quota, 0) - quota
    bounds = np.cumsum([0, *config.window_rows(num_assignments)])
    if unbounded:
        bounds[-1] = np.iinfo(np.int64).max
    clips = list(itertools.pairwise(bounds.tolist()))
    return Buffered(
        np.stack([(np.clip(first + quota, lo, hi) - np.clip(first, lo, hi)).sum(2) for lo, hi in clips]),
        np.stack([np.clip(start + aligned, lo, hi) - np.clip(start, lo, hi) for lo, hi in clips]),
    )


@dataclasses.dataclass(frozen=True)
class Work:
    """One layer and microbatch on all ranks.

    Attributes:
      config: the layer; its chunks, residuals, pulls and staging count.
      rows: int64 [chunks, R, R] from source to executing rank. No buffer is too small: extra passes are not modelled.
      aligned: int64 [chunks, R, J], rows of each instance that are computed, mains first.
      pulled: int64 [R, R] bytes of parameters from rank to rank.
      replicas: int64 [R, R] replicas from main rank to holding rank.
      balanced: whether the layer has a planner and slots, even if this plan has no replica.
    """

    config: LayerConfig
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


def work_of(config: LayerConfig, plan: Plan, *, balanced: bool) -> Work:
    """The work of a plan, also of one with more slots than the layer's.

    Args:
      config: the layer.
      plan: the plan.
      balanced: see `Work`.

    Raises:
      ValueError: replicas without a planner.
    """
    held, executed = np.asarray(plan.slot_expert), np.asarray(plan.quota)
    if not balanced and (held >= 0).any():
        raise ValueError(f"the plan has {(held >= 0).sum()} replicas, so it is balanced: pass balanced=True")
    mean_rows = -(-int(executed.sum(dtype=np.int64)) // config.num_ranks)
    copies = pulls.schedule(held, config.num_mains, config.topology, config.cost)
    return Work(
        config,
        *buffered(config, executed, max(mean_rows, 1), unbounded=True),
        pulls.moved_bytes(copies, config.topology, config.cost),
        pulls.replicas(held, config.num_mains),
        balanced,
    )


def work_of_planner(config: LayerConfig, planner: str, plan: Plan) -> Work:
    """The work of a planner's plan, as `work_of`: balanced unless the planner is "none" or the plan has no slots."""
    return work_of(config, plan, balanced=planner != "none" and plan.slot_expert.shape[1] > 0)
