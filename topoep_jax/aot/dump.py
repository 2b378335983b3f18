"""Reads what XLA's compiler writes to `xla_dump_to`: the executable's steps, its buffers and its options."""

import dataclasses
import re
from pathlib import Path

_THUNK = re.compile(r"^( *)(\d+): (\w+)")
_METADATA = re.compile(r"profile_annotation: \"([^\"]*)\"\n(?:\s+thunk_id: (\d+)\n)?\s+\}\n\s+thunk_kind: \"(\w+)\"")
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(r"^ value: <\d+ ([\w.-]+)(?:\{[\d,]*\})?[^@]*@\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_OPTION = re.compile(r"^\s*(xla_\w+): (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of the executable."""

    kind: str
    name: str
    """Of the HLO instruction it came from; empty where XLA does not say."""
    command_buffer: bool
    """Whether it is part of a CUDA graph."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One value of the program in device memory, which may share its bytes with values that live at other times.

    Attributes:
      instruction: that makes it.
      num_bytes: its size.
      shape: as HLO writes it.
      role: "parameter", "output" or "temporary", of the allocation that it lies in.
      place: number of the allocation, and offset in it.
    """

    instruction: str
    num_bytes: int
    shape: str
    role: str
    place: tuple[int, int]


def read_thunks(folder: Path) -> list[Thunk]:
    """Steps of the last sequence that the compiler wrote, in order, named by its metadata."""
    listings = {path.name.rpartition(".thunk_")[2]: path for path in folder.glob("*.thunk_*.txt")}
    listing = listings.get("sequence_after_thunk_passes.txt", listings["sequence.txt"])
    # Thunks that the passes add have no number, and sequences share number 0.
    names = {
        (int(number or 0), kind): name
        for name, number, kind in _METADATA.findall(listings["metadata.txt"].read_text())
        if kind != "kCommandBuffer"
    }
    thunks: list[Thunk] = []
    parents: list[tuple[int, str]] = []
    for match in filter(None, map(_THUNK.match, listing.read_text().splitlines())):
        indent, number, kind = match.groups()
        parents = [(depth, parent) for depth, parent in parents if depth < len(indent)]
        inside = any(parent == "kCommandBuffer" for _, parent in parents)
        thunks.append(Thunk(kind, names.get((int(number), kind), ""), inside))
        parents.append((len(indent), kind))
    return thunks


def read_buffers(folder: Path) -> list[Buffer]:
    """All values of the buffer assignment, largest first; scalars of reducers, which take no memory, are left out."""
    (assignment,) = folder.glob("*buffer-assignment.txt")
    buffers, role, allocation = [], "", 0
    for line in assignment.read_text().splitlines():
        if match := _ALLOCATION.match(line):
            allocation, about = int(match[1]), match[3]
            role = "parameter" if ", parameter " in about else "output" if "maybe-live-out" in about else "temporary"
            role = "" if "thread-local" in about or "constant" in about else role
        elif role and (match := _VALUE.match(line)):
            buffers.append(Buffer(match[1], int(match[2]), match[4], role, (allocation, int(match[3]))))
    return sorted(buffers, key=lambda buffer: -buffer.num_bytes)


def read_options(folder: Path) -> dict[str, str]:
    """The compiler's options as it took them, from the call and from XLA_FLAGS."""
    (config,) = folder.glob("*.config.pbtxt")
    return {name: value.strip('"') for name, value in _OPTION.findall(config.read_text())}
