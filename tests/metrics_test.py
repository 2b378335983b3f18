"""Metrics against their definitions, one assignment at a time, and merged over data-parallel groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.plans import random_demand, random_plan
from topoep_jax import Plan, Status, Topology, collect_metrics
from topoep_jax.metrics import merge_over, metrics_of

TOPOLOGY = Topology((0, 1, 1, 0, 2, 0))
NUM_EXPERTS, NUM_SLOTS = 12, 2


def make_case(seed):
    rng = np.random.default_rng(seed)
    omega = random_demand(rng, TOPOLOGY.num_ranks, NUM_EXPERTS, 50)
    slot_expert, quota = random_plan(rng, omega, NUM_SLOTS)
    return omega, Plan(slot_expert, quota, quota.sum((0, 2)), np.zeros(2, np.int32), np.int32(Status.CAP_MET))


def of_case(omega, plan):
    zero = jnp.zeros((), jnp.int32)
    return metrics_of(
        jnp.asarray(omega), plan, TOPOLOGY, passes=zero + 1, passes_run=zero + 1, overflow_rows=zero, dropped_rows=zero
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_share_is_what_its_name_says(seed):
    omega, plan = make_case(seed)
    metrics = of_case(omega, plan)
    domain, mains, total = TOPOLOGY.domain_of_rank, NUM_EXPERTS // TOPOLOGY.num_ranks, omega.sum()
    load, left_before, left, by_replica = np.zeros(6), 0, 0, 0
    for source in range(6):
        for expert in range(NUM_EXPERTS):
            load[expert // mains] += omega[source, expert]
            left_before += omega[source, expert] * (domain[source] != domain[expert // mains])
        for rank in range(6):
            rows = plan.quota[source, rank]
            left += rows.sum() * (domain[source] != domain[rank])
            by_replica += rows[mains:].sum()
    assert metrics.imbalance_before == pytest.approx(load.max() / load.mean())
    assert metrics.imbalance == pytest.approx(plan.rank_load.max() / plan.rank_load.mean())
    assert metrics.inter_domain_before == pytest.approx(left_before / total)
    assert metrics.inter_domain == pytest.approx(left / total)
    assert metrics.replica == pytest.approx(by_replica / total)
    assert metrics.slots_used == (plan.slot_expert >= 0).sum()
    np.testing.assert_array_equal(metrics.expert_load, omega.sum(0))


def test_groups_merge_to_the_worst_imbalance_mean_shares_and_summed_counts():
    first, second = (of_case(*make_case(seed)) for seed in (0, 1))
    second = second._replace(status=jnp.int32(Status.EMPTY | Status.OVER_EMPTY_COST))
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def merge(metrics):
        return merge_over(jax.tree.map(lambda v: v[0], metrics), ("data",))

    merged = jax.jit(jax.shard_map(merge, mesh=mesh, in_specs=P("data"), out_specs=P()))(both)
    assert merged.imbalance == max(first.imbalance, second.imbalance)
    assert merged.inter_domain == pytest.approx((first.inter_domain + second.inter_domain) / 2)
    assert merged.slots_used == first.slots_used + second.slots_used
    np.testing.assert_array_equal(merged.expert_load, first.expert_load + second.expert_load)
    assert merged.status == Status.OVER_EMPTY_COST, "neither CAP_MET nor EMPTY holds in both"


def test_layers_are_collected_from_any_tree_and_told_in_one_line():
    first, second = (of_case(*make_case(seed)) for seed in range(2))
    second = second._replace(passes=jnp.int32(3), passes_run=jnp.int32(3))
    stacked = collect_metrics({"blocks": [{"moe": (first,), "other": jnp.ones(3)}, {"moe": (second,)}]})
    for name in stacked._fields:
        want = np.stack([getattr(first, name), getattr(second, name)])
        np.testing.assert_array_equal(getattr(stacked, name), want, err_msg=name)
    before, slots = np.mean(stacked.imbalance_before), np.sum(stacked.slots_used)
    assert stacked.summary().startswith(f"busiest rank {before:.2f} -> ")
    assert stacked.summary().endswith(f" {slots} replicas, 3 passes")
    assert first.summary().endswith(", 1 pass")
    with pytest.raises(ValueError, match=r"no MoEMetrics in PyTreeDef.*: return the second result of every MoE"):
        collect_metrics({"loss": jnp.ones(())})


def test_rows_that_are_missing_are_told():
    """With "flag" only the first pass runs, with "drop" there is one: neither may read as if all rows were served."""
    of_layer = of_case(*make_case(0))
    short = of_layer._replace(passes=jnp.int32(3), overflow_rows=jnp.int32(7))
    assert short.summary().endswith(", 1 of 3 passes: 7 rows are missing, run the batch again with overflow='loop'")
    assert short._replace(passes_run=jnp.int32(3)).summary().endswith(" 3 passes")
    dropped = of_layer._replace(overflow_rows=jnp.int32(7), dropped_rows=jnp.int32(7))
    assert dropped.summary().endswith(", 1 pass, 7 rows dropped")
    beside = of_layer._replace(passes=jnp.int32(2), passes_run=jnp.int32(2), overflow_rows=jnp.int32(5))
    assert ", 1 of 3 passes: 7 rows are missing" in collect_metrics([beside, short]).summary()


def test_layers_may_have_unlike_numbers_of_experts():
    small, large = of_case(*make_case(0)), of_case(*make_case(1))
    small = small._replace(num_experts=jnp.int32(5), expert_load=small.expert_load[:5])
    stacked = collect_metrics([small, large])
    assert stacked.num_experts.tolist() == [5, NUM_EXPERTS]
    np.testing.assert_array_equal(stacked.expert_load, [[*small.expert_load, *[0] * 7], large.expert_load])
    np.testing.assert_array_equal(stacked.imbalance, [small.imbalance, large.imbalance])
    np.testing.assert_array_equal(collect_metrics([collect_metrics([small])]).expert_load, [small.expert_load[None]])
    with pytest.raises(ValueError, match=r"stacked as \[\(\), \(2,\)\]: collect layers that were scanned"):
        collect_metrics([small, stacked])
