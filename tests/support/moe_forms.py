"""The layer in both Flax forms, as a function of its parameters, so that one list of tests serves both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import topoep_jax
from topoep_jax import LayerConfig, Topology, init_params

SIZES = {"hidden": 16, "ffn": 8, "num_experts": 16, "top_k": 3}
OPTIONS = {"topology": Topology.uniform(2, 4), "block_rows": 8, "num_slots": 2, "planner": "topoep_paper"}
BIAS = "correction_bias"


@dataclasses.dataclass(frozen=True)
class Made:
    """A layer with the same parameters in both forms.

    Called outside of jit they run one compiled program: it is the module's own, and the same to the bit.
    """

    config: LayerConfig
    params: dict[str, jax.Array]
    apply: Callable[..., Any]
    """(params, x, ..) to what the layer returns."""

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.params, x, *args, **kwargs)


def make_nnx(mesh: Mesh, **options: Any) -> Made:
    moe = topoep_jax.MoE(**SIZES, mesh=mesh, rngs=nnx.Rngs(0), **(OPTIONS | options))
    graph, state = nnx.split(moe)
    return Made(
        moe.config,
        nnx.to_pure_dict(state),
        lambda params, x, *args, **kwargs: nnx.merge(graph, params)(x, *args, **kwargs),
    )


def make_linen(mesh: Mesh, **options: Any) -> Made:
    moe = topoep_jax.linen.MoE(**SIZES, mesh=mesh, **(OPTIONS | options))
    x = jax.ShapeDtypeStruct((mesh.size, SIZES["hidden"]), jax.numpy.float32)
    places = nn.get_sharding(jax.eval_shape(moe.init, jax.random.key(0), x), mesh)
    places = {name: place for collection in places.values() for name, place in collection.items()}
    params = init_params(nnx.Rngs(0).params(), moe.config)

    def apply(params: dict[str, jax.Array], x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        bias = {BIAS: {BIAS: params[BIAS]}} if BIAS in params else {}
        trained = {name: value for name, value in params.items() if name != BIAS}
        return moe.apply({"params": trained, **bias}, x, *args, **kwargs)

    return Made(moe.config, {name: jax.device_put(params[name], places[name]) for name in params}, apply)


FORMS = {"nnx": make_nnx, "linen": make_linen}
