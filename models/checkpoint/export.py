"""Writes a released folder: config.json and safetensors as `transformers` reads them.

Names, shapes and so the place of every byte are known before the first weight is: tensors are written in whatever order
they come, one at a time, and the bytes depend on nothing else.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.checkpoint.cast import Cast
from models.checkpoint.faults import CheckpointError
from models.checkpoint.folder import CONFIG, INDEX, SINGLE, write_json
from models.checkpoint.parameters import Index, Parameter, tensors
from models.checkpoint.safetensors import DTYPES, NAMES, header_bytes

MAX_SHARD_BYTES = 5_000_000_000  # As the released folders have them.
_WRITTEN = ("F32", "BF16", "F16")


class _Place(NamedTuple):
    file: str
    start: int
    dtype: np.dtype


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that is complete or not there: written beside its place under another name, and moved there at the end.

    Yields the folder to write to.

    Raises:
      CheckpointError: something is there already.
    """
    check_new(folder)
    folder = folder.absolute()
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)  # Of a process that died and had the same number.
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        check_new(folder)
        partial.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new(folder: pathlib.Path) -> None:
    """Raises `CheckpointError` if there is something under this name."""
    if folder.exists():
        raise CheckpointError(folder, ["it is there already: name a folder that is not, nothing is overwritten"])


def sync(path: pathlib.Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Export:
    """The files of one model, laid out at once and filled block by block.

    Args:
      folder: an empty one.
      content: of config.json.
      table: its parameters.
      dtypes: of each of them in the files, by path.
      max_shard_bytes: of tensors in one file; a larger tensor has a file of its own.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        content: dict[str, Any],
        table: Sequence[Parameter],
        dtypes: dict[str, np.dtype],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
        odd = {dtype.name for dtype in dtypes.values() if NAMES.get(dtype) not in _WRITTEN}
        if odd:
            raise ValueError(f"dtype {', '.join(sorted(odd))} cannot be written: take float32, bfloat16 or float16")
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._left: set[str] = set()
        self._cast = Cast()
        shards = _split(table, dtypes, max_shard_bytes)
        index: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            total += self._begin(name, shard)
            index |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            metadata = {"total_size": total}
            write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(index.items()))})
        write_json(folder / CONFIG, content)

    def _begin(self, file: str, shard: dict[str, tuple[str, tuple[int, ...]]]) -> int:
        """Writes a header and makes room for the rest; returns the bytes of the tensors."""
        header = header_bytes(shard)
        start = len(header)
        for name, (dtype, shape) in shard.items():
            self._places[name] = _Place(file, start, DTYPES[dtype])
            start += int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        self._left |= set(shard)
        (self._folder / file).write_bytes(header)
        os.truncate(self._folder / file, start)
        return start - len(header)

    def put(self, parameter: Parameter, index: Index, block: np.ndarray) -> None:
        """Writes the tensors of one block, each once, in any order of blocks."""
        for name, view in zip(parameter.names(index), parameter.weight.layout(block), strict=True):
            place = self._places[name]
            values = self._cast(name, view, place.dtype)
            _write(self._folder / place.file, values.reshape(-1).view(np.uint8).data, place.start)
            self._left.remove(name)

    def finish(self) -> None:
        """Makes sure that everything was written, as it was: raises CheckpointError where values did not fit."""
        self._cast.done()
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were not written, {min(self._left)} among them")


def _split(
    table: Sequence[Parameter], dtypes: dict[str, np.dtype], max_bytes: int
) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Deals the tensors out to files in their order: name to dtype and shape, for each file."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, parameter, _, shape in tensors(table):
        dtype = dtypes[parameter.path]
        tensor_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + tensor_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = NAMES[dtype], shape
        size += tensor_bytes
    return shards


def _write(file: pathlib.Path, data: memoryview, offset: int) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count
    finally:
        os.close(descriptor)
