"""What linen's users rely on: parameters that must be given, boxes, and transformations of the layer itself."""

import dataclasses
import inspect

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import topoep_jax
from tests.moe_test import error
from tests.support.moe_forms import OPTIONS, SIZES
from topoep_jax.linen import MoE

MESH = Mesh(np.array(jax.devices()[:8]), ("ep",))
X = jax.random.normal(jax.random.key(1), (8, 4, SIZES["hidden"])).at[..., 0].set(2.0)
KEY = jax.random.key(0)


def make_moe(kind=MoE, **options):
    return kind(**SIZES, mesh=MESH, **(OPTIONS | options))


def without(tree, path):
    first, *rest = path
    if not rest:
        return {name: value for name, value in tree.items() if name != first}
    return {**tree, first: without(tree[first], rest)}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return make_moe(router="glm4", shared_ffn=8)(nn.Dense(SIZES["hidden"])(x))[0]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("params/Dense_0", flax.errors.ScopeParamNotFoundError),
        ("params/MoE_0", flax.errors.ScopeParamNotFoundError),
        *((f"params/MoE_0/{name}", flax.errors.ScopeParamNotFoundError) for name in ("router", "w", "shared_down")),
        ("correction_bias", flax.errors.ScopeCollectionNotFound),
        ("correction_bias/MoE_0", flax.errors.ScopeCollectionNotFound),
    ],
)
def test_weights_that_were_not_given_are_missed(path, kind):
    variables = jax.eval_shape(Block().init, KEY, X)
    jax.eval_shape(Block().apply, variables, X)
    with pytest.raises(kind):
        jax.eval_shape(Block().apply, without(variables, path.split("/")), X)


def test_another_shape_of_a_parameter_is_named():
    variables = jax.eval_shape(make_moe().init, KEY, X)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        jax.eval_shape(MoE(**(SIZES | {"ffn": 16}), mesh=MESH, **OPTIONS).apply, variables, X)


def test_a_bias_that_no_gradient_trains_is_no_parameter():
    variables = jax.eval_shape(make_moe(router="glm4").init, KEY, X)
    assert set(variables) == {"params", "correction_bias"}
    assert set(variables["params"]) == {"w", "router"}
    assert variables["correction_bias"]["correction_bias"].names == (None,)


def test_policies_share_one_set_of_parameters():
    trees = [jax.eval_shape(make_moe(overflow=policy).init, KEY, X) for policy in ("loop", "flag", "drop")]
    assert trees[0] == trees[1] == trees[2]


def test_both_forms_have_the_same_options():
    own = {field.name: field for field in dataclasses.fields(MoE) if field.name not in ("name", "parent")}
    other = inspect.signature(topoep_jax.MoE.__init__).parameters
    other = {name: value for name, value in other.items() if name not in ("self", "rngs")}
    empty = inspect.Parameter.empty
    for name, field in own.items():
        default = empty if field.default is dataclasses.MISSING else field.default
        assert (default, field.type) == (other[name].default, other[name].annotation)
        assert field.kw_only == (other[name].kind is inspect.Parameter.KEYWORD_ONLY)
    assert own.keys() == other.keys()


STACKED = {
    "variable_axes": {"params": 0},
    "split_rngs": {"params": True},
    "metadata_params": {nn.PARTITION_NAME: None},
}


def stacked_layers():
    """A scan of two layers under remat, its parameters, and these of each layer."""
    scanned = make_moe(nn.scan(nn.remat(MoE), length=2, **STACKED))
    places = nn.get_sharding(jax.eval_shape(scanned.init, KEY, X), MESH)
    assert places["params"]["w"].spec == P(None, "ep", None)
    variables = jax.jit(scanned.init, out_shardings=places)(KEY, X)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], nn.unbox(variables)) for i in range(2)]
    assert (layers[0]["params"]["w"] != layers[1]["params"]["w"]).any()
    return scanned, variables, layers


def test_scan_remat_and_vmap_of_the_layer_itself():
    scanned, variables, layers = stacked_layers()
    mapped = make_moe(nn.vmap(MoE, **STACKED))
    y, metrics = jax.jit(scanned.apply)(variables, X)
    first, first_metrics = make_moe().apply(layers[0], X)
    last, last_metrics = make_moe().apply(layers[1], first)
    assert error(y, last) <= 1e-6
    loads = jnp.stack([first_metrics.expert_load, last_metrics.expert_load])
    np.testing.assert_array_equal(metrics.expert_load, loads)
    y, metrics = jax.jit(mapped.apply)(variables, jnp.stack([X, first]))
    assert error(y, jnp.stack([first, last])) <= 1e-6
    np.testing.assert_array_equal(metrics.expert_load, loads)


@pytest.mark.full
def test_gradients_of_scan_and_vmap_of_the_layer_itself():
    scanned, variables, layers = stacked_layers()
    mapped = make_moe(nn.vmap(MoE, **STACKED))
    tokens = jnp.stack([X, X[::-1]])

    def scan_by_hand(layers):
        return (make_moe().apply(layers[1], make_moe().apply(layers[0], X)[0])[0] ** 2).sum()

    def map_by_hand(layers):
        return sum((make_moe().apply(layer, x)[0] ** 2).sum() for layer, x in zip(layers, tokens, strict=True))

    for lifted, by_hand, x in ((scanned, scan_by_hand, X), (mapped, map_by_hand, tokens)):
        got = jax.jit(jax.grad(lambda variables: (lifted.apply(variables, x)[0] ** 2).sum()))(variables)  # noqa: B023
        want = jax.grad(by_hand)(layers)
        for name in ("w", "router"):
            stack = jnp.stack([layer["params"][name] for layer in want])
            assert error(got["params"][name].value, stack) <= 1e-5


def test_routing_is_returned_by_a_layer_that_is_not_transformed_alone():
    remat = make_moe(nn.remat(MoE))
    with pytest.raises(ValueError, match=r"return_routing=.* must be True or False"):
        jax.eval_shape(lambda key: remat.init(key, X, return_routing=True), KEY)
