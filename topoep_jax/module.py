"""`MoE`, the layer as a Flax nnx module on a device mesh (`topoep_jax.linen.MoE` is its linen form)."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from flax import nnx

from topoep_jax.knobs import documented, told
from topoep_jax.moe import Params, init_params
from topoep_jax.on_mesh import CORRECTION_BIAS, OnMesh, Options, Place

P = ParamSpec("P")
Module = TypeVar("Module")
Given = TypeVar("Given")


class CorrectionBias(nnx.Variable):
    """The selection bias of a "glm4" router: moved by a rule of the trainer, never by a gradient."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Arguments(Options):
    """The arguments of `MoE`: the options that it shares with its linen form, and a source of parameters."""

    rngs: nnx.Rngs = dataclasses.field(metadata=told("source of the initial parameters"))


def takes(
    kind: Callable[P, Given],
) -> Callable[[Callable[[Module, Given], None]], Callable[Concatenate[Module, P], None]]:
    """Lets a constructor that takes a `kind` take what makes one instead, with the same names, types and defaults."""

    def decorate(init: Callable[[Module, Given], None]) -> Callable[Concatenate[Module, P], None]:
        def from_arguments(self: Module, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, kind(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(kind)
        signature = signature.replace(parameters=[own, *signature.parameters.values()])
        from_arguments.__signature__ = signature  # type: ignore[attr-defined]
        return from_arguments

    return decorate


@documented(Arguments)
class MoE(OnMesh, nnx.Module):
    """A mixture-of-experts block that balances its ranks anew at every call; drop it in where an MLP was.

    `MoE(hidden, ffn, num_experts, top_k, *, mesh, rngs, ...)`; the rest has to be given by name.

    Raises:
      TypeError: there is no such option.
      ValueError: see `LayerConfig`, and a mesh without `axis` or a topology of another size.
    """

    @takes(Arguments)
    def __init__(self, given: Arguments) -> None:
        place = given.place()
        if not isinstance(given.rngs, nnx.Rngs):
            raise ValueError(
                f"rngs is {type(given.rngs).__name__}, but nnx.Rngs is needed: rngs=nnx.Rngs(0), or nnx.Rngs(key)"
            )
        self.config, self.mesh, self.axis, self.data_axes, self.dtype = place
        for name, value in init_params(given.rngs.params(), place.config, given.param_dtype).items():
            kind = CorrectionBias if name == CORRECTION_BIAS else nnx.Param
            setattr(self, name, kind(value, out_sharding=place.names(name, value.ndim), mesh=place.mesh))

    def _placed(self) -> tuple[Place, Params]:
        params = {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Variable)}
        return Place(self.config, self.mesh, self.axis, self.data_axes, self.dtype), params
