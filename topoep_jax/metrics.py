"""What a layer reports about its plan: computed from demand and plan alone, equal on every rank of the axis."""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from topoep_jax._compat import vary_like
from topoep_jax.plan.types import Plan, Status
from topoep_jax.topology import Topology


class MoEMetrics(NamedTuple):
    """One layer, one microbatch. f32 and int32 scalars, but `expert_load`.

    Attributes:
      imbalance_before: max / mean rank load with every assignment on its main rank; 1 where there is no load.
      imbalance: max / mean rank load of the plan.
      inter_domain_before: Share of assignments whose main rank lies in another domain than their source.
      inter_domain: Share of assignments executed in another domain than their source's.
      replica: Share of assignments executed by replica slots.
      slots_used: Filled slots of all ranks.
      overflow_rows: Assignments of all ranks beyond the first receive buffer.
      dropped_rows: Those among them that were dropped; 0 unless overflow="drop".
      passes: Receive buffers that hold all rows, 1 where the plan fits. With overflow="loop" all were run; with "flag"
        only the first, so that above 1 the layer's result is incomplete; with "drop" this is always 1.
      passes_run: Those of them that were run.
      status: Bits of `topoep_jax.Status`: 1 no rank exceeds the cap; 2 the plan is empty, for there was no gain;
        4 it is predicted to be slower than none; 8 nothing was routed.
      num_experts: E.
      expert_load: int32 [E]: assignments to each expert from all ranks. Of layers with unlike E, as `collect_metrics`
        joins them, with zeros up to the largest E.
    """

    imbalance_before: jax.Array
    imbalance: jax.Array
    inter_domain_before: jax.Array
    inter_domain: jax.Array
    replica: jax.Array
    slots_used: jax.Array
    overflow_rows: jax.Array
    dropped_rows: jax.Array
    passes: jax.Array
    passes_run: jax.Array
    status: jax.Array
    num_experts: jax.Array
    expert_load: jax.Array

    def summary(self) -> str:
        """What the planner did, in one line for people; outside jit, of one layer or of several (`collect_metrics`)."""
        here: MoEMetrics = jax.device_get(self)
        return (
            f"busiest rank {np.mean(here.imbalance_before):.2f} -> {np.mean(here.imbalance):.2f} times the mean,"
            f" leaving their domain {np.mean(here.inter_domain_before):.0%} -> {np.mean(here.inter_domain):.0%},"
            f" {int(np.sum(here.slots_used))} replicas, {here._passes_in_words()}"
        )

    def _passes_in_words(self) -> str:
        """Says how many passes ran and were needed, from NumPy's arrays."""
        short, dropped = np.asarray(self.passes > self.passes_run), int(np.sum(self.dropped_rows))
        if short.any():
            ran, needed = (int(np.max(np.asarray(field)[short])) for field in (self.passes_run, self.passes))
            missing = int(np.sum(np.asarray(self.overflow_rows)[short]))
            return f"{ran} of {needed} passes: {missing} rows are missing, run the batch again with overflow='loop'"
        ran = int(np.max(self.passes_run))
        return f"{ran} pass{'es' if ran > 1 else ''}" + (f", {dropped} rows dropped" if dropped else "")


# So that programs that return them can be stored.
jax.export.register_namedtuple_serialization(MoEMetrics, serialized_name="topoep_jax.MoEMetrics")


def collect_metrics(tree: Any) -> MoEMetrics:
    """The metrics of all layers: each field [num_layers, ...], in the order of the tree's leaves.

    Layers may have different numbers of experts E. Then `expert_load` has zeros from each layer's own E, which
    `num_experts` [num_layers] holds, up to the largest.

    Args:
      tree: any pytree that holds them: a list that the model returned, or what its blocks sowed, as
        `nnx.pop(model, nnx.Intermediate)` and linen's `intermediates` give it (both sort names as text).

    Raises:
      ValueError: there are none, or some are of one layer and some stacked already.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, MoEMetrics))
    layers = [leaf for leaf in leaves if isinstance(leaf, MoEMetrics)]
    if not layers:
        raise ValueError(
            f"no MoEMetrics in {jax.tree.structure(tree)}: return the second result of every MoE, or sow it"
        )
    stacked = [jnp.shape(layer.num_experts) for layer in layers]
    if len(set(stacked)) > 1:
        raise ValueError(
            f"some MoEMetrics are of one layer and some of several, stacked as {stacked}: collect layers that were"
            " scanned or mapped apart from the others"
        )
    most = max(layer.expert_load.shape[-1] for layer in layers)

    def widened(layer: MoEMetrics) -> MoEMetrics:
        load = layer.expert_load
        missing = [(0, 0)] * (load.ndim - 1) + [(0, most - load.shape[-1])]
        return layer._replace(expert_load=jnp.pad(load, missing))

    return jax.tree.map(lambda *fields: jnp.stack(fields), *map(widened, layers))


def metrics_of(
    omega: jax.Array,
    plan: Plan,
    topology: Topology,
    *,
    passes: jax.Array,
    passes_run: jax.Array,
    overflow_rows: jax.Array,
    dropped_rows: jax.Array,
) -> MoEMetrics:
    """Metrics of a plan for demand omega, int32 [R, E]; the last four as in `MoEMetrics`."""
    num_ranks, num_experts = omega.shape
    # A planner that refuses its input gives no quota, so that the shares below are of nothing.
    demand = jnp.maximum(omega, 0)
    to_main = demand.reshape(num_ranks, num_ranks, num_experts // num_ranks).sum(2, dtype=jnp.int32)
    slot_expert, quota = jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota)
    rows = quota.sum(2, dtype=jnp.int32)
    crosses = jnp.asarray(topology.crosses_domains())
    total = demand.sum(dtype=jnp.int32)
    num_mains = num_experts // num_ranks
    return MoEMetrics(
        imbalance_before=_imbalance(to_main.sum(0, dtype=jnp.int32)),
        imbalance=_imbalance(jnp.asarray(plan.rank_load)),
        inter_domain_before=_share(jnp.where(crosses, to_main, 0), total),
        inter_domain=_share(jnp.where(crosses, rows, 0), total),
        replica=_share(quota[:, :, num_mains:], total),
        slots_used=(slot_expert >= 0).sum(dtype=jnp.int32),
        overflow_rows=overflow_rows,
        dropped_rows=dropped_rows,
        passes=passes,
        passes_run=passes_run,
        status=jnp.asarray(plan.status),
        num_experts=vary_like(jnp.full((), num_experts, jnp.int32), omega),
        expert_load=demand.sum(0, dtype=jnp.int32),
    )


def merge_over(metrics: MoEMetrics, axes: tuple[str, ...]) -> MoEMetrics:
    """One set of metrics for groups that plan on their own: worst imbalance, mean shares, summed counts."""
    if not axes:
        return metrics
    # In one order, not that of sets, which differs from process to process: all must run the same program.
    worst = ("imbalance_before", "imbalance", "passes", "passes_run", "num_experts")
    mean = ("inter_domain_before", "inter_domain", "replica")
    summed = ("slots_used", "overflow_rows", "dropped_rows", "expert_load")
    merged = {name: lax.pmax(getattr(metrics, name), axes) for name in worst}
    merged |= {name: lax.pmean(getattr(metrics, name), axes) for name in mean}
    merged |= {name: lax.psum(getattr(metrics, name), axes) for name in summed}
    return MoEMetrics(**merged, status=_merge_status(metrics.status, axes))


def _merge_status(status: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """CAP_MET and EMPTY hold where they hold in every group, the others where they hold in any."""
    everywhere = Status.CAP_MET | Status.EMPTY
    bits = [status & bit.value for bit in Status]
    agreed = [
        lax.pmin(b, axes) if bit in everywhere else lax.pmax(b, axes) for bit, b in zip(Status, bits, strict=True)
    ]
    return functools.reduce(jnp.bitwise_or, agreed)


def _imbalance(rank_load: jax.Array) -> jax.Array:
    load = rank_load.astype(jnp.float32)
    mean = load.mean()
    return jnp.where(mean > 0, load.max() / jnp.where(mean > 0, mean, 1.0), 1.0)


def _share(rows: jax.Array, total: jax.Array) -> jax.Array:
    part = rows.sum(dtype=jnp.int32).astype(jnp.float32)
    return part / jnp.maximum(total, 1).astype(jnp.float32)
