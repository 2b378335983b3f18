"""Everything about an MoE layer that is known before any token is seen; static, hashable, checked once."""

import dataclasses
import fractions
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax._integers import is_integer
from topoep_jax.plan.api import IMPLEMENTATIONS
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import PULLS, CostModel
from topoep_jax.plan.reference import DEFAULT_PLANNER, check_planner
from topoep_jax.plan.topoep import EFFORTS
from topoep_jax.routing import Forced, get_router
from topoep_jax.topology import Topology

Overflow = Literal["loop", "flag", "drop"]
Residuals = Literal["none", "rows", "all"]
Gemm = Literal["auto", "pallas", "scan", "ragged_dot"]
Transport = Literal["xla", "device"]

STAGING_BYTES = 64 * 2**20
"""Bound on the buffer in which an owner receives replica gradients before it adds them."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "overflow": get_args(Overflow),
    "residuals": get_args(Residuals),
    "gemm": get_args(Gemm),
    "transport": get_args(Transport),
}


_KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: (is_integer, "an integer"),
    float: (lambda value: _is_real(value) and math.isfinite(value), "a finite number"),
}
"""Of a router's options: what fits, and in words."""

TILE = 16
"""What GPU kernels can multiply has sides that are multiples of this."""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The static description of one expert-parallel MoE layer.

    R = `topology.num_ranks`, Em = E / R mains and N = `num_slots` replica slots per rank, J = Em + N instances.

    Attributes:
      hidden: width H of a token.
      ffn: inner width I of one expert.
      num_experts: E, a multiple of R.
      top_k: K, experts per token.
      topology: domain of each rank.
      router: "qwen3", "glm4" or "deepseek_v2" (see `topoep_jax.routing`).
      router_options: keyword options of the router as a sorted tuple of pairs; a dict is accepted and converted.
      num_slots: N, replica slots per rank, 0..E - E/R.
      planner: see `topoep_jax.solve_plan`; a baseline runs in a host callback.
      effort: "fast", "default" or "full", how long the planner searches. "fast" suits planning at every layer and step,
        where the planner's own time counts; longer searches gain a few percent of a plan's predicted time.
      planner_implementation: as in `topoep_jax.solve_plan`; all make the same plans. "reference", a host callback, runs
        on every backend, slowly, and checks the others; None takes what the default backend runs in the program.
      cap_factor: bound on a rank's rows in units of the mean load A = T x K, from which the receive buffer follows.
      block_rows: alignment of every instance's rows, the tile height of the grouped GEMM. 128 suits GPUs; with few
        tokens take T x K / E or less, or padding outweighs the rows.
      chunks: 1, or 2 to process mains-only rows first (receive rows then are about A / 8 more).
      overflow: what happens to rows beyond the receive buffer. "loop": exact extra passes, whose number the host reads
        on a GPU. "flag": nothing is read; where `metrics.passes` > 1 the result is incomplete and must not be used, but
        the batch run again with "loop". "drop": they are dropped and counted.
      residuals: what the backward pass keeps besides tokens, router weights and the plan. "none": it dispatches again
        and recomputes. "rows": the received rows [C, H]. "all": also the gate and up products [C, 2 I].
      gemm: grouped product of the experts. "pallas": kernels for GPUs, interpreted elsewhere; `hidden`, `ffn` and
        `block_rows` have to be multiples of 16. "scan": a loop over blocks. "auto": kernels on NVIDIA GPUs where the
        sizes allow it, else the loop. "ragged_dot" is slow, and there to test the others.
      staging_bytes: bound on the buffer in which a rank receives gradients of its replicas; 16 rows of a matrix travel
        at least.
      transport: how replicas travel. "xla": lax collectives. "device": kernels that read and write other ranks' memory,
        in the group that `topoep_jax.transport.init` made for the axis; where a machine cannot, its group says so once
        and lax collectives do the same.
      pulls: "direct", or with transport "device" also "relayed", "striped" or "best" of the three: how a parameter
        reaches several ranks, see `CostModel.pulls`.
      shared_ffn: inner width of the shared experts that every token visits; 0 for none.
      hardware: link and compute rates that price a plan.
      forced: forced random routing for load experiments, or None.

    Raises:
      ValueError: a value is out of range; the message holds the value, the reason and the way out.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    topology: Topology
    router: str = "qwen3"
    router_options: tuple[tuple[str, Any], ...] | Mapping[str, Any] = ()
    num_slots: int = 2
    planner: str = DEFAULT_PLANNER
    effort: str = "fast"
    planner_implementation: str | None = None
    cap_factor: float = 1.05
    block_rows: int = 128
    chunks: int = 1
    overflow: Overflow = "loop"
    residuals: Residuals = "none"
    gemm: Gemm = "auto"
    staging_bytes: int = STAGING_BYTES
    transport: Transport = "xla"
    pulls: str = "direct"
    shared_ffn: int = 0
    hardware: Hardware = dataclasses.field(default_factory=Hardware.h800)
    forced: Forced | None = None

    def __post_init__(self) -> None:
        options = self.router_options
        pairs = isinstance(options, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in options)
        _require(
            pairs or isinstance(options, Mapping), f"router_options={options!r} must be a dict, as in {{'scale': 2.5}}"
        )
        object.__setattr__(self, "router_options", tuple(sorted(dict(options).items())))
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
            0 <= self.num_slots <= most,
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
        _require(self.chunks in (1, 2), f"chunks={self.chunks} must be 1 or 2")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            _require(value in allowed, f"{name}={value!r} must be {_either(allowed)}")
        sides = {name: getattr(self, name) for name in ("hidden", "ffn", "block_rows")}
        _require(
            self.gemm != "pallas" or not any(side % TILE for side in sides.values()),
            f"gemm='pallas' needs multiples of {TILE} for {sides}: choose other sizes, or gemm='scan'",
        )
        _require(self.pulls in PULLS, f"pulls={self.pulls!r} is unknown: choose one of {list(PULLS)}")
        _require(
            self.transport == "device" or self.pulls == "direct",
            f"pulls={self.pulls!r} needs transport='device': lax collectives carry replicas straight from mains",
        )
        check_planner(self.planner)
        # Lists, in which also a value without a hash can be looked for.
        efforts, implementations = sorted(EFFORTS), sorted(IMPLEMENTATIONS)
        _require(self.effort in efforts, f"effort={self.effort!r} is unknown: choose one of {efforts}")
        implementation = self.planner_implementation
        _require(
            implementation is None or implementation in implementations,
            f"planner_implementation={implementation!r} is unknown: choose one of {implementations}, or None",
        )

    def _check_types(self) -> None:
        """Integers become Python's, which do not overflow; what is no integer is refused."""
        positive = ("hidden", "ffn", "num_experts", "top_k", "block_rows", "staging_bytes")
        sizes = dict.fromkeys(positive, 1) | {"shared_ffn": 0}
        for name, least in (sizes | {"num_slots": None, "chunks": None}).items():
            value = getattr(self, name)
            _require(
                is_integer(value, least),
                f"{name}={value!r} must be an integer" + ("" if least is None else f" of at least {least}"),
            )
            object.__setattr__(self, name, int(value))
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
        object.__setattr__(self, "router_options", tuple(sorted(options.items())))
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
        """Prices of this layer's rows and experts, as it moves them: each assignment by itself, pulls as it says."""
        return CostModel.from_model(self.hidden, self.ffn, self.hardware, pulls=self.pulls)

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


def _either(names: tuple[str, ...]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
