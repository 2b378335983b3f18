"""Digests of the files of a checkpoint: written when it is complete, compared before anything of it is read.

TensorStore has checksums of its index alone: zeros in the place of values would be read as values.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from models.checkpoint import text

DIGESTS = "digests.json"
_THREADS = 8

Entries = Mapping[str, tuple[int, str]]
"""Bytes and SHA-256 of files, by name within the folder."""


class Findings(NamedTuple):
    """What a comparison has found."""

    faults: list[str]
    """What is damaged, each named."""
    notes: list[str]
    """What else somebody should know: nothing is wrong with what is read."""


def names(folder: pathlib.Path) -> list[str]:
    """All files of a folder but the digests, in order."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files if path != folder / DIGESTS)


def make(folder: pathlib.Path, files: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Reads files of a folder."""
    listed = list(files)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(listed, threads.map(lambda name: _of_file(folder / name), listed), strict=True))


def write(folder: pathlib.Path, entries: Entries) -> None:
    """Writes the digests of a folder, whose name tells that it is not complete yet."""
    with (folder / DIGESTS).open("w") as file:
        json.dump({"files": {name: list(entries[name]) for name in sorted(entries)}}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def compare(folder: pathlib.Path, *, share: tuple[int, int] = (0, 1), read: bool = True) -> Findings:
    """Compares the files of a folder with its digests.

    Args:
      folder: of the arrays.
      share: (i, n) reads every n-th file alone, from the i-th on: n processes read all of them together.
      read: false compares names and sizes alone.
    """
    there = names(folder) if folder.is_dir() else []
    if not (folder / DIGESTS).is_file():
        if "_METADATA" not in there:
            return Findings(["_METADATA is missing" if there else "it holds no files"], [])
        return Findings([], [f"has no {DIGESTS}, as older versions wrote them, so damage would go unnoticed"])
    try:
        said = text.parse((folder / DIGESTS).read_text())["files"]
        entries = {name: (int(size), str(digest)) for name, (size, digest) in said.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Findings([f"{DIGESTS} is unreadable ({error})"], [])
    faults = [f"{name} is missing" for name in entries if name not in there]
    whole = []
    for name, (size, _) in entries.items():
        if name in there:
            found = (folder / name).stat().st_size
            if found == size:
                whole.append(name)
            else:
                faults.append(f"{name} has {found} bytes instead of {size}")
    if read:
        mine = whole[share[0] :: share[1]]
        try:
            digests = make(folder, mine)
        except OSError as error:
            return Findings([*faults, f"{error.filename} cannot be read ({error.strerror})"], [])
        faults += [f"{name} holds other bytes than were written" for name in mine if digests[name] != entries[name]]
    extra = ", ".join(name for name in there if name not in entries)
    return Findings(faults, [f"also holds {extra}: that is no part of it, and is not read"] if extra else [])


def _of_file(path: pathlib.Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest
