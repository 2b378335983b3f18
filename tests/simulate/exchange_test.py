"""Two hops in the simulator: the bytes that the layer's segments have, by link, and what they cost."""

import dataclasses

import numpy as np
import pytest

from tests.cli.simulate_test import SMALL
from tests.support.cli_runs import records
from topoep_jax.config import LayerConfig
from topoep_jax.moe import solve_layer_plan
from topoep_jax.plan import Hardware
from topoep_jax.shapes import Shape
from topoep_jax.simulate import LayerRates, PipelinedLayer, Step, simulate, work_of_planner
from topoep_jax.synthetic import biased_demand
from topoep_jax.topology import Topology

SHAPE = Shape(512, 256, 32, 4, Topology.uniform(4, 2), tokens=512)


def work(skew, exchange, planner="topoep"):
    config = LayerConfig(
        *(512, 256, 32, 4, SHAPE.topology), chunks=2, exchange=exchange, planner=planner, cap_factor=8.0
    )
    omega = biased_demand(SHAPE, [skew], 0)[skew].astype(np.int32)
    return work_of_planner(config, planner, solve_layer_plan(config, omega, 512 * 4), 512 * 4)


def simulated(own):
    return simulate(PipelinedLayer(LayerRates(Hardware.h800())), [own], Step())


@pytest.mark.parametrize(("skew", "planner"), [(0.0, "none"), (0.0, "topoep"), (-2.0, "topoep")])
def test_every_row_reaches_its_instance_once_and_tokens_are_fewer_than_rows(skew, planner):
    own = work(skew, "two_hop", planner)
    assert own.tokens is not None
    crosses = SHAPE.topology.crosses_domains()
    launches = [own.launches(chunk) for chunk in range(2)]
    delivered = sum((first - (own.tokens if chunk == 1 else 0)) for chunk, (first, _) in enumerate(launches))
    forwarded = sum(second for _, second in launches)
    np.testing.assert_array_equal((delivered + forwarded).sum(0), own.rows.sum((0, 1)))
    assert not (forwarded * crosses).any()
    assert not ((own.tokens > 0) & ~crosses).any()
    crossing = (own.rows.sum(0) * crosses).sum(1)
    assert (own.tokens.sum(1) <= crossing + len(crossing)).all()
    # A token visits a domain at most once.
    assert own.tokens.max() <= SHAPE.tokens
    direct, two = (simulated(w).busiest_bytes() for w in (work(skew, "direct", planner), own))
    assert two[0] < direct[0]
    assert two[1] > direct[1]


def test_a_plan_that_is_direct_moves_what_a_direct_layer_moves_and_pays_for_its_launches():
    """All rows go to one rank here, whose domain's gateways would hold more than they can."""
    own, direct = (work(0.0, exchange) for exchange in ("auto", "direct"))
    hot = np.zeros_like(own.rows)
    hot[-1, :, 0] = own.rows.sum((0, 2))
    own, direct = (dataclasses.replace(w, rows=hot) for w in (own, direct))
    assert own.tokens is None
    assert own.hops
    assert not direct.hops
    assert simulated(own).busiest_bytes() == simulated(direct).busiest_bytes()
    assert simulated(own).layer_ms >= simulated(direct).layer_ms
    uneven = dataclasses.replace(own.config, topology=Topology((0, 0, 0, 1, 1, 1, 1, 1)))
    assert not dataclasses.replace(own, config=uneven).hops


def test_the_command_names_the_exchange_and_its_bytes(capsys):
    plain = records(capsys, *SMALL, "--skew=0")
    hopped = records(capsys, *SMALL, "--skew=0", "--exchange=two_hop")
    for before, after in zip(plain, hopped, strict=True):
        assert (before["exchange"], after["exchange"]) == ("direct", "two_hop")
        assert after["nic_bytes"] < before["nic_bytes"]
        assert after["nvlink_bytes"] > before["nvlink_bytes"]
