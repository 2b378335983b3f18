"""The knobs of a layer, declared once: type, default, choices and meaning.

`LayerConfig`, both forms of `MoE` and the settings of the trainer are dataclasses that inherit them, and every command
makes its flags from them. A class or a command with another default says so where it is defined (`change`).
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self, TypeVar, get_args

from topoep_jax._integers import is_integer
from topoep_jax.plan.api import IMPLEMENTATIONS
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import PULLS
from topoep_jax.plan.reference import DEFAULT_PLANNER, PLANNERS, SCORED_ONLY
from topoep_jax.plan.topoep import EFFORTS
from topoep_jax.routing import ROUTERS, Forced
from topoep_jax.topology import Topology

Overflow = Literal["loop", "flag", "drop"]
Exchange = Literal["direct", "two_hop", "auto"]
Residuals = Literal["none", "rows", "all"]
Gemm = Literal["auto", "pallas", "scan", "ragged_dot"]
Transport = Literal["xla", "device"]
RouterOptions = Mapping[str, Any] | tuple[tuple[str, Any], ...]

STAGING_BYTES = 64 * 2**20
"""Bound on the buffer in which an owner receives replica gradients before it adds them."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """What is known of a field beside its type and its default.

    Attributes:
      help: what it means, for docstrings and for `--help`.
      choices: what it may be; empty where that is no short list.
      least: the least integer.
      unset: what None stands for, where it may be None.
      plans: whether a plan, or its predicted time, depends on it, so that `topoep plan` and its like have it.
    """

    help: str
    choices: tuple[Any, ...] = ()
    least: int | None = None
    unset: str = ""
    plans: bool = False

    def fault(self, kind: Any, value: Any) -> str:
        """What is wrong with a value of type `kind`, as the rest of a sentence; nothing where it fits."""
        is_unset = value is None and self.unset
        if self.choices:
            # A list, in which also a value without a hash can be looked for; neither True nor 1.0 is 1.
            fits = value in list(self.choices) and (_without_none(kind) is not int or is_integer(value))
            *others, last = map(repr, self.choices)
            wanted = f"{', '.join(others)} or {last}"
        elif _without_none(kind) is int:
            fits = is_integer(value, self.least)
            wanted = "an integer" + ("" if self.least is None else f" of at least {self.least}")
        elif kind is bool:
            fits, wanted = isinstance(value, bool), "True or False"
        else:
            return ""
        return "" if fits or is_unset else f"must be {wanted}{', or None' * bool(self.unset)}"


def told(meaning: str, **more: Any) -> dict[str, Knob]:
    """The metadata of a field that has a `Knob`; type checkers see a default in everything but `dataclasses.field`."""
    return {"knob": Knob(meaning, **more)}


def knob(default: Any, meaning: str, **more: Any) -> Any:
    """A field with a default and a `Knob`."""
    return dataclasses.field(default=default, metadata=told(meaning, **more))


def change(name: str, default: Any, **changes: Any) -> Any:
    """The field of a class whose default of the knob `name` is another one, or whose `Knob` has `changes`."""
    return dataclasses.field(default=default, metadata={"knob": dataclasses.replace(KNOBS[name], **changes)})


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Knobs:
    """What can be chosen for a layer of any model; each is a flag of the trainer and of `topoep_jax.aot`, too."""

    num_slots: int = knob(2, "replica slots per rank, 0 to E - E/R", least=0, plans=True)
    planner: str = knob(
        DEFAULT_PLANNER,
        "who plans: topoep, topoep_paper, none (no replicas), or a baseline of docs/planners.md in a host callback",
        choices=tuple(name for name in PLANNERS if name not in SCORED_ONLY),
    )
    effort: str = knob(
        "fast",
        "how long the planner topoep searches; fast suits planning at every layer and step, where its own time counts,"
        " and longer searches gain a few percent of a plan's predicted time",
        choices=tuple(EFFORTS),
        plans=True,
    )
    planner_implementation: str | None = knob(
        None,
        "what runs the planner: all make the same plans, and reference (NumPy in a host callback, slow) checks the"
        " others on every backend",
        choices=tuple(IMPLEMENTATIONS),
        unset="what the backend runs inside the program",
    )
    cap_factor: float = knob(
        1.05,
        "bound on a rank's rows in units of the mean load A = T x K, before alignment; the receive buffer follows",
        plans=True,
    )
    block_rows: int = knob(
        128,
        "rows to which every instance is rounded up, the tile height of the grouped GEMM; 128 suits GPUs, and with few"
        " tokens T x K / E or less, or padding outweighs the rows",
        least=1,
        plans=True,
    )
    chunks: int | None = knob(
        None,
        "parts of a layer's rows: with 2, rows of mains alone are exchanged and computed first (receive rows then are"
        " about A / 8 more)",
        choices=(1, 2),
        unset="2 on GPUs, where they overlap, else 1",
    )
    overflow: Overflow = knob(
        "loop",
        "rows beyond the receive buffer: loop (exact extra passes, whose number a GPU's host reads in every layer),"
        " flag (nothing is read; where metrics.passes > 1 the result is incomplete, and the batch has to run again with"
        " loop), drop (they are dropped and counted)",
        choices=get_args(Overflow),
    )
    exchange: Exchange = knob(
        "direct",
        "how rows travel between domains of equal sizes: direct (every assignment by itself), two_hop (a token once to"
        " each domain, whose gateway forwards it), auto (by each plan what is predicted to be quicker); else direct",
        choices=get_args(Exchange),
    )
    check_exchange: bool = knob(
        False,
        "compare sums of the bits of all rows where they leave and where they land, forward and backward; what differs"
        " is in topoep_jax.transport.exchange_faults()",
    )
    residuals: Residuals = knob(
        "none",
        "what the backward pass keeps besides tokens, router weights and the plan: none (it dispatches again and"
        " recomputes), rows (received, [C, H]), all (also the gate and up products, [C, 2 I])",
        choices=get_args(Residuals),
    )
    gemm: Gemm = knob(
        "auto",
        "grouped product of the experts: pallas (kernels for GPUs, interpreted elsewhere; sizes have to be multiples of"
        " 16), scan (a loop over blocks), auto (kernels on NVIDIA GPUs where the sizes allow it, else the loop);"
        " ragged_dot is slow, and there to test the others",
        choices=get_args(Gemm),
    )
    staging_bytes: int = knob(
        STAGING_BYTES,
        "bound on the buffer in which a rank receives gradients of its replicas; 16 rows of a matrix travel at least",
        least=1,
    )
    transport: Transport = knob(
        "xla",
        "how replicas travel: xla (collectives) or device (kernels that read and write other ranks' memory, in the"
        " group of topoep_jax.transport.init; what cannot run them says so once and takes xla)",
        choices=get_args(Transport),
    )
    pulls: str = knob(
        "direct",
        "how parameters reach several ranks: direct, or with transport device also relayed, striped, or best of the"
        " three",
        choices=PULLS,
        plans=True,
    )
    instance_ps: int = knob(
        0,
        "picoseconds that an instance with rows takes at least, however few they are: it reads its parameters",
        least=0,
        plans=True,
    )
    tile_rows: int = knob(
        0, "rows to a multiple of which compute pads those of an instance, in time; 0: none", least=0, plans=True
    )

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuses names that are none, and says which there are."""
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        for name in given:
            if name not in known:
                raise TypeError(f"there is no option {name!r}: take some of {', '.join(known)}")
        return super().__new__(cls)


@dataclasses.dataclass(eq=False, repr=False)
class Layer(Knobs):
    """What describes a layer beside the knobs: its sizes, its router, its place."""

    hidden: int = dataclasses.field(metadata=told("width H of a token", least=1))
    ffn: int = dataclasses.field(metadata=told("inner width I of one expert", least=1))
    num_experts: int = dataclasses.field(metadata=told("E, the experts: a multiple of the ranks", least=1))
    top_k: int = dataclasses.field(metadata=told("K, experts per token", least=1))
    _: dataclasses.KW_ONLY
    topology: Topology | None = knob(None, "domain of each rank", unset="read from the mesh's devices")
    router: str = knob("qwen3", "see topoep_jax.routing", choices=tuple(ROUTERS))
    router_options: RouterOptions = knob((), "keyword options of the router, as a dict or as pairs")
    shared_ffn: int = knob(0, "inner width of the shared experts that every token visits; 0: there are none", least=0)
    hardware: Hardware = knob(Hardware.h800(), "link and compute rates that price a plan; by default an H800 node's")
    forced: Forced | None = knob(None, "forced random routing for load experiments", unset="the router's own choice")


class Frozen:
    """A dataclass that stays as it was made; `frozen=True` would not let it inherit from those that linen needs."""

    __slots__ = ("_made",)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_made", False):
            raise dataclasses.FrozenInstanceError(f"{name} cannot be set: dataclasses.replace makes another one")
        object.__setattr__(self, name, value)

    def freeze(self) -> None:
        """From here on no field can be set."""
        self._made = True


def fields_of(cls: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, Knob]]:
    """Each field of a dataclass that has a `Knob`, or inherits one that it narrows: itself, its type, the knob."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        found = field.metadata.get("knob") or KNOBS.get(field.name)
        if found is not None:
            yield field, hints[field.name], found


def check(instance: Any, flag: str = "") -> None:
    """Integers become Python's, which do not overflow; what does not fit its `Knob` is refused.

    Args:
      instance: of a dataclass with knobs.
      flag: what stands before a name in messages.

    Raises:
      ValueError: a value does not fit; the message holds the value and what would.
    """
    for field, kind, known in fields_of(type(instance)):
        value = getattr(instance, field.name)
        fault = known.fault(kind, value)
        if fault:
            raise ValueError(f"{flag}{field.name}={value if flag else repr(value)} {fault}")
        if _without_none(kind) is int and value is not None:
            setattr(instance, field.name, int(value))


Class = TypeVar("Class", bound=type)


def documented(options: Any = None) -> Callable[[Class], Class]:
    """Adds to the docstring of a class what each of its options means.

    Args:
      options: a dataclass that has them, if the class itself is none.
    """

    def decorate(cls: Class) -> Class:
        lines = ["", "", "Options:"]
        for field, _, known in sorted(fields_of(options or cls), key=lambda found: bool(found[0].kw_only)):
            required = field.default is field.default_factory is dataclasses.MISSING
            values = f"; one of {', '.join(map(repr, known.choices))}" if known.choices else ""
            default = known.unset if field.default is None else "" if required else f"{field.default!r}"
            lines.append(f"  {field.name}: {known.help}{values}{f'; default: {default}' if default else ''}.")
        cls.__doc__ = inspect.cleandoc(cls.__doc__ or "") + "\n".join(lines)
        return cls

    return decorate


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(part for part in get_args(kind) if part is not types.NoneType)
    return kind


KNOBS = {field.name: field.metadata["knob"] for field in dataclasses.fields(Layer)}
"""The `Knob` of each, by name."""
KIND = {name: _without_none(kind) for name, kind in typing.get_type_hints(Layer).items() if name in KNOBS}
"""The type of each, without None."""
