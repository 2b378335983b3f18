"""Everything about an MoE layer that is known before any token is seen; static, hashable, checked once."""

import dataclasses
import fractions
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._integers import is_integer
from topoep_jax.knobs import STAGING_BYTES as STAGING_BYTES
from topoep_jax.knobs import Frozen, Layer, change, check, documented
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel
from topoep_jax.plan.reference import check_planner
from topoep_jax.routing import Forced, get_router
from topoep_jax.topology import Topology

_KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: (is_integer, "an integer"),
    float: (lambda value: _is_real(value) and math.isfinite(value), "a finite number"),
}
"""Of a router's options: what fits, and in words."""

TILE = 16
"""What GPU kernels can multiply has sides that are multiples of this."""


@documented()
@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class LayerConfig(Frozen, Layer):
    """The static description of one expert-parallel MoE layer.

    R = `topology.num_ranks`, Em = E / R mains and N = `num_slots` replica slots per rank, J = Em + N instances. What it
    is made of is declared, with its meaning, in `topoep_jax.knobs`.

    Raises:
      TypeError: there is no such option.
      ValueError: a value is out of range; the message holds the value, the reason and the way out.
    """

    topology: Topology = dataclasses.field(kw_only=False)
    chunks: int = change("chunks", 1, unset="")

    def __post_init__(self) -> None:
        options = self.router_options
        pairs = isinstance(options, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in options)
        _require(
            pairs or isinstance(options, Mapping), f"router_options={options!r} must be a dict, as in {{'scale': 2.5}}"
        )
        self.router_options = tuple(sorted(dict(options).items()))
        check_planner(self.planner)
        check(self)
        self._check_types()
        self._check_router()
        ranks, experts = self.num_ranks, self.num_experts
        _require(
            experts % ranks == 0,
            f"num_experts={experts} is not divisible by the {ranks} ranks of the expert-parallel axis: every rank owns"
            " the same number of experts, so choose a divisor of num_experts as axis size",
        )
        _require(self.top_k <= experts, f"top_k={self.top_k} exceeds num_experts={experts}: a token needs K experts")
        most = experts - self.num_mains
        _require(
            self.num_slots <= most,
            f"num_slots={self.num_slots} must be within 0..{most}: a rank has {most} experts that are not its own"
            f"{'' if most else '; on one rank pass num_slots=0, or make a mesh of several devices'}",
        )
        _require(
            _is_real(self.cap_factor) and math.isfinite(self.cap_factor) and self.cap_factor > 0,
            f"cap_factor={self.cap_factor!r} must be a finite positive number: it sizes the receive buffer in units of"
            " the mean load, 1.05 is the default",
        )
        if self.router_options:
            _try_router(self.router, experts, self.top_k, self.router_options)
        sides = {name: getattr(self, name) for name in ("hidden", "ffn", "block_rows")}
        _require(
            self.gemm != "pallas" or not any(side % TILE for side in sides.values()),
            f"gemm='pallas' needs multiples of {TILE} for {sides}: choose other sizes, or gemm='scan'",
        )
        _require(
            self.transport == "device" or self.pulls == "direct",
            f"pulls={self.pulls!r} needs transport='device': lax collectives carry replicas straight from mains",
        )
        self.freeze()

    def _check_types(self) -> None:
        _require(isinstance(self.topology, Topology), f"topology={self.topology!r} must be a Topology")
        _require(isinstance(self.hardware, Hardware), f"hardware={self.hardware!r} must be a Hardware")
        forced = self.forced is None or isinstance(self.forced, Forced)
        _require(forced, f"forced={self.forced!r} must be None or Forced(skew), as in Forced(-2.0)")

    def _check_router(self) -> None:
        options = dict(self.router_options)
        # The selection and the bias are given at every call.
        known = {
            name: parameter
            for name, parameter in inspect.signature(get_router(self.router)).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in ("expert_idx", "correction_bias")
        }
        for name, value in options.items():
            _require(name in known, f"router_options has {name!r}, but router {self.router!r} takes {sorted(known)}")
            kind = known[name].annotation
            fits, wanted = _KINDS[kind]
            _require(fits(value), f"router_options: {name}={value!r} must be {wanted}")
            options[name] = kind(value)
        self.router_options = tuple(sorted(options.items()))
        missing = [name for name, parameter in known.items() if parameter.default is parameter.empty]
        missing = [name for name in missing if name not in options]
        _require(
            not missing,
            f"router {self.router!r} needs {missing} in router_options: take them from the model's configuration",
        )

    @property
    def num_ranks(self) -> int:
        """R, the size of the expert-parallel axis."""
        return self.topology.num_ranks

    @property
    def num_mains(self) -> int:
        """Em = E / R, main experts per rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_instances(self) -> int:
        """J, the instances a rank can execute: its mains, then its slots."""
        return self.num_mains + self.num_slots

    @property
    def expert_size(self) -> int:
        """Elements of one expert's packed parameter: gate and up as [H, 2 I], then down as [I, H]."""
        return 3 * self.hidden * self.ffn

    @property
    def cost(self) -> CostModel:
        """Prices of this layer's rows and experts, as it moves and computes them."""
        return CostModel.from_model(
            self.hidden,
            self.ffn,
            self.hardware,
            instance_ps=self.instance_ps,
            tile_rows=self.tile_rows,
            pulls=self.pulls,
        )

    def cap_rows(self, num_assignments: int) -> int:
        """The bound on a rank's aligned rows for A = `num_assignments` per rank."""
        factor = fractions.Fraction(repr(float(self.cap_factor)))
        # No rank can be asked for more than all assignments, whatever the factor.
        rows = min(math.ceil(factor * num_assignments), self.num_ranks * num_assignments)
        return _round_up(rows, self.block_rows) + self.num_instances * self.block_rows

    def window_rows(self, num_assignments: int) -> tuple[int, ...]:
        """Rows of each chunk's receive buffer; their sum is C = C1 + cap_rows (design, section 5)."""
        cap = self.cap_rows(num_assignments)
        if self.chunks == 1:
            return (cap,)
        return (_round_up(-(-num_assignments // 8), self.block_rows), cap)


@functools.lru_cache
def _try_router(router: str, num_experts: int, top_k: int, options: tuple[tuple[str, Any], ...]) -> None:
    """Raises what the router would at the first call: options that do not fit E, K or each other."""
    # Shapes alone: a configuration may be made before JAX has started its devices.
    arrays = {"logits": jax.ShapeDtypeStruct((1, num_experts), jnp.float32)}
    if router == "glm4":
        arrays["correction_bias"] = jax.ShapeDtypeStruct((num_experts,), jnp.float32)
    jax.eval_shape(lambda arrays: get_router(router)(**arrays, top_k=top_k, **dict(options)), arrays)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
