"""The safetensors format: 8 bytes of length, a JSON header of that length, and the tensors' bytes without gaps.

The package `safetensors` would do half of this: its NumPy side (0.8.0) cannot read fp8 (`numpy has no attribute
'float8_e4m3fn'`), stops at the first fault of a file, and writes a file only from arrays that are all in memory at
once. Tensors are read with `pread` rather than through a memory map: a file that is cut short meanwhile is an error and
no SIGBUS, and a process holds what it allocated and no more.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from models.checkpoint import text

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""What is read. Anything else in a file is a fault of the tensor, not of the file."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"F8_E5M2": 1, "F8_E8M0": 1} | {name: dtype.itemsize for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # Of the format.


class Tensor(NamedTuple):
    """One tensor of a file."""

    file: pathlib.Path
    dtype: str
    """As the format names it: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(file: pathlib.Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a file by name, and what is wrong with the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                return {}, [f"truncated file, or no safetensors: {file.name} has {size} bytes, header of {length}"]
            header = text.parse(stream.read(length), pairs=_without_repeats)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise ValueError("its __metadata__ is no JSON object")
    except (OSError, ValueError) as error:
        return {}, [f"unreadable file: {file.name}: {error}"]
    tensors, faults, spans = {}, [], []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = str(entry["dtype"]), _sizes(entry["shape"]), _sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            faults.append(f"unreadable entry: {name} in {file.name}")
            continue
        tensors[name] = Tensor(file, dtype, shape, 8 + length + begin)
        spans.append((begin, end, name))
        if dtype in _SIZES and end - begin != math.prod(shape) * _SIZES[dtype]:
            faults.append(f"wrong size: {name} in {file.name} has {end - begin} bytes as {dtype} {list(shape)}")
    return tensors, faults + _span_faults(file, sorted(spans), size - 8 - length)


def _span_faults(file: pathlib.Path, spans: list[tuple[int, int, str]], size: int) -> list[str]:
    reached = 0
    for begin, end, name in spans:
        if begin != reached or end < begin:
            return [f"gap or overlap: {name} in {file.name} begins at byte {begin} of the data, expected {reached}"]
        reached = end
    if reached > size:
        return [f"truncated file: {file.name} ends {reached - size} bytes early"]
    return [f"{size - reached} bytes too many: {file.name}"] if reached < size else []


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError
    return tuple(values)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) != len(dict(pairs)):
        raise ValueError("a name stands in the header twice")
    return dict(pairs)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What a file of these tensors (dtype and shape by name, in their order) begins with.

    The metadata is what `transformers` asks for; the padding aligns the data to 8 bytes, as the package does.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def read_rows(tensor: Tensor, first: int, last: int) -> np.ndarray:
    """Rows first <= i < last of a tensor along its first axis, in its dtype.

    Raises:
      OSError: the file ends before them: it was changed after its header was read.
    """
    dtype = DTYPES[tensor.dtype]
    result = np.empty((last - first, *tensor.shape[1:]), dtype)
    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    left = result.reshape(-1).view(np.uint8).data
    offset = tensor.start + first * row_bytes
    descriptor = os.open(tensor.file, os.O_RDONLY)
    try:
        while left:
            count = os.preadv(descriptor, [left], offset)
            if count == 0:
                raise OSError(f"{tensor.file} ends at byte {offset}: it was changed while being read")
            left, offset = left[count:], offset + count
    finally:
        os.close(descriptor)
    return result
