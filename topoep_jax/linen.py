"""`MoE`, the layer as a Flax linen module on a device mesh."""

from collections.abc import Callable

import jax
from flax import linen as nn

from topoep_jax.config import LayerConfig
from topoep_jax.knobs import documented
from topoep_jax.moe import Initializer, Params, initializers
from topoep_jax.on_mesh import CORRECTION_BIAS, OnMesh, Options, Place


@documented()
class MoE(Options, OnMesh, nn.Module):
    """`topoep_jax.MoE` as a linen module: `init(key, x)`, then `apply(variables, x, mask, replay)`.

    Its fields are the arguments of `topoep_jax.MoE` but `rngs`, which linen's `params` stream replaces. The policy
    `overflow` does not change parameters: modules of two policies share one set.

    Parameters are boxed as `nn.Partitioned`, so that `nn.get_sharding(jax.eval_shape(init, ...), mesh)` says where each
    belongs. The "glm4" router's bias, which no gradient trains, is not in "params": it has the collection
    "correction_bias" for itself.

    `nn.remat(MoE)`, `nn.scan(MoE, ..)` with tokens as the carry, and `nn.vmap(MoE, ..)` over tokens, parameters or both
    compute what the layer does, call by call. The last two stack boxed parameters, so they need `metadata_params=
    {nn.PARTITION_NAME: None}`, or there the mesh axis over which the stack is spread.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.place()  # Raises where the module is made.

    @property
    def config(self) -> LayerConfig:
        """The layer without its mesh."""
        return self.place().config

    def setup(self) -> None:
        """Finds or draws the parameters."""
        place = self.place()
        draws = {name: _boxed(place, name, draw) for name, draw in initializers(place.config, self.param_dtype).items()}
        bias = draws.pop(CORRECTION_BIAS, None)
        self.trained = {name: self.param(name, draw) for name, draw in draws.items()}
        self.bias = None if bias is None else self.variable(CORRECTION_BIAS, CORRECTION_BIAS, bias, None)

    __call__ = OnMesh.__call__

    def _placed(self) -> tuple[Place, Params]:
        bias = {} if self.bias is None else {CORRECTION_BIAS: self.bias.value}
        return self.place(), {**self.trained, **bias}


def _boxed(place: Place, name: str, draw: Initializer) -> Callable[[jax.Array], nn.Partitioned[jax.Array]]:
    """`draw`, whose result says over which mesh axes it is spread."""

    def boxed(key: jax.Array) -> nn.Partitioned[jax.Array]:
        value = draw(key)
        return nn.Partitioned(value, place.names(name, value.ndim))

    return boxed
