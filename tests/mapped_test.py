"""The function inside JAX's own maps: pmap, and shard_map with types checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.module_test import tokens
from tests.moe_test import NODES, Scenario, assert_equals_dense, layer, run_on_mesh, with_gradients
from tests.moe_test import Program as LayerProgram
from tests.support.dense import dense_layer
from topoep_jax import init_params, moe_layer

MESH = Mesh(np.array(jax.devices()[:8]), ("ep",))


@pytest.mark.parametrize("exchange", ["direct", "two_hop"])
def test_pmap_gives_the_same_rows_as_shard_map(exchange):
    config = layer(NODES, 16, 3, 2, exchange=exchange)
    params = init_params(jax.random.key(0), config)
    x = tokens(8, 9)
    y, metrics = jax.pmap(
        lambda w, router, x: moe_layer({"w": w, "router": router}, x, axis_name="ep", config=config),
        axis_name="ep",
        in_axes=(0, None, 0),
        devices=jax.devices()[:8],
    )(np.asarray(params["w"]).reshape(8, 2, -1), np.asarray(params["router"]), np.asarray(x))
    whole = jax.jit(lambda p, x: run_on_mesh(config, p, x, jnp.ones((72,), bool)))
    want, want_metrics, _ = whole(params, x.reshape(72, -1))
    np.testing.assert_array_equal(np.asarray(y).reshape(72, -1), want)
    jax.tree.map(np.testing.assert_array_equal, metrics, want_metrics)


@pytest.mark.parametrize("exchange", ["direct", "two_hop"])
def test_types_are_checked_under_check_vma(exchange):
    config = layer(NODES, 16, 3, 2, exchange=exchange)
    params, x = init_params(jax.random.key(0), config), tokens(72)
    checked = with_gradients(lambda p, x, mask: run_on_mesh(config, p, x, mask, check_vma=True))
    dense = with_gradients(lambda p, x, chosen: (dense_layer(p, x, config, chosen),))
    assert_equals_dense(LayerProgram("checked", config, 9), checked, dense, Scenario("skewed", skew=1.5))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(
            jax.shard_map(
                lambda p, x: moe_layer(p, x, axis_name="ep", config=config)[1].slots_used,
                mesh=MESH,
                in_specs=({"w": P("ep"), "router": P()}, P("ep")),
                out_specs=P(),
                check_vma=True,
            )
        ).trace(params, x)
