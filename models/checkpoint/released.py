"""The parameters of a released folder: whether its tensors are those of its model, and their blocks."""

import logging
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.checkpoint import fused
from models.checkpoint.cast import Cast
from models.checkpoint.faults import raise_faults
from models.checkpoint.folder import CONFIG, Files, config_faults, extra_of, read_config, read_files
from models.checkpoint.parameters import Index, Parameter, ignored, parameters, tensors
from models.checkpoint.safetensors import DTYPES, Tensor, read_rows

SCALE = "_scale_inv"  # Appended to the name of an fp8 weight: f32, one number for each block of it.
FP8 = "F8_E4M3"
FP8_BLOCK = 128
_CHUNK_BYTES = 1 << 24  # Read at a time, if it were f32, which fp8 becomes.


class Released:
    """A folder with config.json and safetensors as a `Source`.

    Args:
      folder: its path.
      config: what the program has, if it has one: the folder must be of the same.
      fp8: whether block-scaled fp8 weights are read: e4m3 with an f32 scale for every 128 x 128 block.

    Raises:
      CheckpointError: with all that is wrong with the folder.
    """

    def __init__(self, folder: pathlib.Path, *, config: Any = None, fp8: bool = False) -> None:
        scan = scan_folder(folder, config=config, fp8=fp8)
        raise_faults(folder, scan.faults)
        self.config, self.parameters, self.tensors = scan.config, scan.parameters, scan.tensors
        self.extra, self.cast = extra_of(scan.content), Cast()
        self.notes = scan.files.notes
        for note in self.notes:
            logging.getLogger(__name__).warning("%s: %s", folder, note)

    def dtype(self, parameter: Parameter) -> np.dtype:
        """The widest dtype among its tensors; of fp8, bfloat16."""
        names = {self.tensors[name].dtype for index in parameter.blocks() for name in parameter.names(index)}
        if len(names) == 1 and names <= {"BF16", "F16"}:
            return DTYPES[names.pop()]
        return DTYPES["BF16" if names <= {FP8, "BF16"} else "F32"]

    def blocks(
        self, parameter: Parameter, wanted: Iterable[Index] | None = None, dtype: Any = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """See `Source`. Beyond the block, one chunk of at most 16 MiB is held, of fp8 four."""
        dtype = self.dtype(parameter) if dtype is None else np.dtype(dtype)
        for index in parameter.blocks() if wanted is None else sorted(wanted):
            block = np.empty(parameter.block_shape, dtype)
            for name, view in zip(parameter.names(index), parameter.weight.layout(block), strict=True):
                self._read(name, view)
            yield index, block

    def _read(self, name: str, view: np.ndarray) -> None:
        """Reads one tensor into where its layout puts it."""
        tensor = self.tensors[name]
        step = max(_CHUNK_BYTES // max(4 * math.prod(tensor.shape[1:]), 1), 1)
        if tensor.dtype == FP8:
            step = math.ceil(step / FP8_BLOCK) * FP8_BLOCK
        for first in range(0, tensor.shape[0], step):
            last = min(first + step, tensor.shape[0])
            rows = read_rows(tensor, first, last)
            values = self._scaled(name, rows, first) if tensor.dtype == FP8 else rows
            view[first:last] = self.cast(name, values, view.dtype)

    def _scaled(self, name: str, rows: np.ndarray, first: int) -> np.ndarray:
        """Rows of an fp8 weight, `first` a multiple of 128, times the scale of their blocks: f32."""
        scale = read_rows(self.tensors[name + SCALE], first // FP8_BLOCK, math.ceil((first + len(rows)) / FP8_BLOCK))
        scale = scale.repeat(FP8_BLOCK, axis=1)[:, : rows.shape[1]]
        return rows.astype(np.float32) * scale.repeat(FP8_BLOCK, axis=0)[: len(rows)]


class Scan(NamedTuple):
    """What is known of a folder without reading a weight."""

    content: dict[str, Any]
    """Of config.json."""
    config: Any
    """None if there is no model for it."""
    parameters: tuple[Parameter, ...]
    files: Files
    tensors: dict[str, Tensor]
    """Those of the files, with fused experts told apart: see `fused.apart`."""
    faults: list[str]


def scan_folder(folder: pathlib.Path, *, config: Any = None, fp8: bool = False) -> Scan:
    """Reads config, index and headers, and compares them; arguments as of `Released`."""
    content, found, faults = read_config(folder / CONFIG)
    files = read_files(folder)
    faults += files.faults
    if found is None:
        return Scan(content, None, (), files, files.tensors, faults)
    table = parameters(found)
    if config is not None:
        faults += config_faults(found, config)
    faults += _quantization_faults(content, fp8=fp8)
    if files.tensors or not files.faults:
        single, wrong = fused.apart(files, table)
        faults += wrong + tensor_faults(single, table, found, fp8=fp8)
        return Scan(content, found, table, files, single.tensors, faults)
    return Scan(content, found, table, files, files.tensors, faults)


def _quantization_faults(content: dict[str, Any], *, fp8: bool) -> list[str]:
    quantization = content.get("quantization_config")
    if quantization is None:
        return []
    blocks = [FP8_BLOCK, FP8_BLOCK]
    known = isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
    if not known or quantization.get("weight_block_size") != blocks:
        return [f"unsupported config: quantization {quantization}; read is fp8 with weight_block_size [128, 128]"]
    return [] if fp8 else ["fp8 weights: ask for them to be turned into wide ones, with fp8=True (--fp8)"]


def tensor_faults(files: Files, table: Sequence[Parameter], config: Any, *, fp8: bool) -> list[str]:
    """How the tensors of a folder differ from what the model wants."""
    found = files.tensors
    expected = {name: shape for name, _, _, shape in tensors(table)}
    missing = [name for name in expected if name not in found and name not in files.lost]
    faults = [f"missing tensor: {name} {list(expected[name])}" for name in missing]
    scales = {name + SCALE for name in expected if name in found and found[name].dtype == FP8}
    for name, tensor in found.items():
        if name in expected:
            faults += _fit(name, tensor, expected[name])
            if name + SCALE in scales:
                faults += _scale_faults(name, found) if fp8 else [f"wrong dtype: {name} is fp8, see fp8=True (--fp8)"]
        elif name not in scales and not is_ignored(name, config):
            faults.append(f"unknown tensor: {name} {tensor}")
    return faults


def _fit(name: str, tensor: Tensor, shape: tuple[int, ...]) -> list[str]:
    faults = []
    if tensor.shape != shape:
        faults.append(f"wrong shape: {name} is {list(tensor.shape)}, the model wants {list(shape)}")
    if tensor.dtype not in DTYPES:
        faults.append(f"wrong dtype: {name} is {tensor.dtype}, read are {', '.join(DTYPES)}")
    return faults


def _scale_faults(name: str, found: dict[str, Tensor]) -> list[str]:
    if len(found[name].shape) != 2:
        return [f"wrong dtype: {name} is fp8 with {len(found[name].shape)} axes, only matrices have blocks to scale"]
    wanted = tuple(-(-extent // FP8_BLOCK) for extent in found[name].shape)
    scale = found.get(name + SCALE)
    if scale is None:
        return [f"missing tensor: {name + SCALE} {list(wanted)}, the scale of an fp8 weight"]
    faults = [] if scale.dtype == "F32" else [f"wrong dtype: {name + SCALE} is {scale.dtype}, F32 is read"]
    return faults + ([] if scale.shape == wanted else _fit(name + SCALE, scale, wanted)[:1])


def is_ignored(name: str, config: Any) -> bool:
    """Whether a tensor is known, and known not to be read."""
    return any(re.fullmatch(pattern, name) for pattern in ignored(config))
