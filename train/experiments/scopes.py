"""Where the time of a profiled layer went: operations of a profile to the layer's scopes, and these to phases."""

import re
import statistics
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from topoep_jax.aot.hlo import COLLECTIVES, Instruction, Module

SCOPES: dict[str, tuple[str, ...]] = {
    "routing": ("route", "demand"),
    "plan": ("plan", "metrics"),
    "pull": ("pull", "repull", "pack"),
    "dispatch": (
        "layout",
        "by_assignment",
        "weights",
        "dispatch_1",
        "dispatch_2",
        "grad_1",
        "grad_2",
        "again_1",
        "again_2",
        "overflow",
    ),
    "experts": ("gmm", "swiglu", "wgrad", "swiglu_backward", "store", "shared_experts"),
    "combine": ("combine_1", "combine_2", "home_1", "home_2", "weight_grads", "overflow_home", "sum_over_experts"),
    "push": ("push", "accumulate"),
}
"""Phases of Figure 15, in the order in which a layer begins them, and the layer's scopes (docs/layer.md) of each."""
PASSES = ("forward", "backward")
WAITING, OTHER = "waiting", "other"
"""For other ranks, in a collective; operations outside of all scopes."""
MEAN, SLOWEST = "mean of the ranks", "slowest rank"

_PHASE_OF = {scope: phase for phase, scopes in SCOPES.items() for scope in scopes}
_SCOPE = re.compile(r"\btopoep_(\w+)")
_STEPS = ("while", "conditional", "call")
"""Operations that a profile shows as long as all that they run, which it shows as well."""


class Place(NamedTuple):
    """Where an operation belongs."""

    phase: str
    """A key of `SCOPES`, or `OTHER`."""
    way: str
    """One of `PASSES`."""
    together: bool
    """Whether it ends on no rank before it began on all."""


class Event(NamedTuple):
    """One run of one operation on one rank."""

    run: int
    """Equal for all operations of one step, on all ranks."""
    rank: int
    operation: str
    begin_ns: float
    ns: float


def places(text: str) -> dict[str, Place]:
    """The places of every operation that does work itself.

    Of nested scopes the innermost counts. An operation without any, as XLA makes them, belongs where the loop or branch
    does that runs it, and copies and fills outside of those where they are first read. What JAX transposed is the
    backward pass, and with it what is computed again there.

    Args:
      text: of the compiled program (`compiled.as_text()`).

    Raises:
      ValueError: a scope `topoep_...` that `SCOPES` does not know.
    """
    module = Module(text)
    callers: dict[str, tuple[Instruction, str]] = {}
    for computation, instructions in module.computations.items():
        for instruction in instructions:
            callers |= dict.fromkeys(instruction.calls, (instruction, computation))
    found = {}
    for computation, instructions in module.computations.items():
        # Instructions stand in the order of the schedule.
        readers: dict[str, Instruction] = {}
        for instruction in instructions:
            readers = dict.fromkeys(instruction.operands, instruction) | readers
        for instruction in instructions:
            if instruction.opcode in _STEPS:
                continue
            phase, way = _phase_and_pass(instruction, computation, callers)
            reader = readers.get(instruction.name)
            while phase == OTHER and reader is not None:
                phase, way = _phase_and_pass(reader, computation, callers)
                reader = readers.get(reader.name)
            found[instruction.name] = Place(phase, way, instruction.opcode in COLLECTIVES)
    return found


def _phase_and_pass(
    instruction: Instruction, computation: str, callers: Mapping[str, tuple[Instruction, str]]
) -> tuple[str, str]:
    """The phase and the pass, by the names that JAX gave an operation and those that run it, from the inside out."""
    names = [instruction.op_name]
    while computation in callers:
        caller, computation = callers[computation]
        names.append(caller.op_name)
    way = PASSES[any("transpose(" in name for name in names)]
    scope = next((scopes[-1] for name in names if (scopes := _SCOPE.findall(name))), None)
    if scope is None:
        return OTHER, way
    if scope not in _PHASE_OF:
        raise ValueError(f"scope topoep_{scope} of {instruction.name} belongs to no phase: add it to SCOPES")
    return _PHASE_OF[scope], way


def read(folder: Path, module: str, operations: Container[str]) -> list[Event]:
    """What the CPU's profiler saw of one program.

    Args:
      folder: that `jax.profiler.trace` wrote.
      module: name of the program, "jit_" and the function's.
      operations: those that are wanted.

    Raises:
      ValueError: there is no such profile, or nothing of the program in it.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"{folder} holds no .xplane.pb: did jax.profiler.trace end there?")
    events = []
    for plane in ProfileData.from_file(str(files[-1])).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name not in operations:
                    continue
                stats = dict(event.stats)
                if stats.get("hlo_module") == module:
                    run, rank = int(stats["run_id"]), int(stats["device_ordinal"])
                    events.append(Event(run, rank, event.name, event.start_ns, event.duration_ns))
    if not events:
        raise ValueError(f"{files[-1]} has no operation of {module}: was the program run while it was traced?")
    return events


Times = Mapping[tuple[str, str], Sequence[float]]
"""(phase, pass) -> nanoseconds of each rank."""


def breakdown(events: Iterable[Event], place_of: Mapping[str, Place]) -> list[Times]:
    """For each step, how long each rank was in each phase.

    A collective takes as long as on the rank that came last; longer times are that much `WAITING`.

    Raises:
      ValueError: ranks ran a collective unequally often: a part of the profile is missing.
    """
    runs: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.begin_ns):
        runs[event.run].append(event)
    ranks = sorted({event.rank for own in runs.values() for event in own})
    return [_of_step(own, ranks, place_of) for own in runs.values()]


def _of_step(events: Sequence[Event], ranks: Sequence[int], place_of: Mapping[str, Place]) -> Times:
    spent: dict[tuple[str, str, int], float] = defaultdict(float)
    joint: dict[str, dict[int, list[float]]] = defaultdict(lambda: {rank: [] for rank in ranks})
    for event in events:
        place = place_of[event.operation]
        if place.together:
            joint[event.operation][event.rank].append(event.ns)
        else:
            spent[place.phase, place.way, event.rank] += event.ns
    for operation, by_rank in joint.items():
        counts = {rank: len(times) for rank, times in by_rank.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"{operation} ran {counts} times by rank: the profile is incomplete, take a shorter one")
        phase, way, _ = place_of[operation]
        for times in zip(*by_rank.values(), strict=True):
            shortest = min(times)
            for rank, ns in zip(ranks, times, strict=True):
                spent[phase, way, rank] += shortest
                spent[WAITING, way, rank] += ns - shortest
    kinds = {(phase, way) for phase, way, _ in spent}
    return {kind: [spent[*kind, rank] for rank in ranks] for kind in kinds}


def summarize(steps: Sequence[Times]) -> dict[tuple[str, str], dict[str, float]]:
    """(phase, pass) -> milliseconds, `MEAN` and `SLOWEST` of the ranks, of each its quickest step.

    Whatever else the machine does makes steps longer, never shorter.
    """
    found = {}
    for kind in sorted({kind for step in steps for kind in step}):
        by_rank = [1e-6 * min(times) for times in zip(*(step[kind] for step in steps), strict=True)]
        found[kind] = {MEAN: statistics.mean(by_rank), SLOWEST: max(by_rank)}
    return found


def attributed(steps: Sequence[Times]) -> float:
    """Percent of the working time of all ranks that is in a phase; waiting is no work."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for (phase, _), times in step.items():
            total[phase] += sum(times)
    work = sum(total.values()) - total[WAITING]
    return 100 * (1 - total[OTHER] / work)
