"""Experts of a layer that are one tensor, told apart.

So `transformers` 5 has them in memory and, with `save_original_format=False`, in files. What an expert has of such a
tensor lies there in one piece.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from models.checkpoint.folder import Files
from models.checkpoint.parameters import Parameter
from models.checkpoint.safetensors import DTYPES, Tensor


class _Fused(NamedTuple):
    """A tensor that may be there for all experts of a layer."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[str, tuple[int, ...]]]
    """Names and shapes of the tensors that it stands for, in their order in it."""


def apart(files: Files, table: Sequence[Parameter]) -> tuple[Files, list[str]]:
    """The files with a tensor for each matrix of each expert, where it lies, under the name that the model knows.

    Also what is wrong with tensors of all experts; the parts of such a one count as lost.
    """
    found, lost, faults = dict(files.tensors), set(files.lost), []
    for layer in _layers(table):
        here = [fused for fused in layer if fused.name in found or fused.name in lost]
        for fused in layer if here else []:
            names = [name for name, _ in fused.parts]
            tensor = found.pop(fused.name, None)
            twice = [name for name in names if name in found]
            if tensor is None:
                if fused not in here and not twice:
                    faults.append(f"missing tensor: {fused.name} {list(fused.shape)}")
                lost.update(names)
            elif wrong := _faults(fused, tensor, twice):
                faults += wrong
                lost.update(names)
            else:
                start = tensor.start
                for name, shape in fused.parts:
                    found[name] = Tensor(tensor.file, tensor.dtype, shape, start)
                    start += math.prod(shape) * DTYPES[tensor.dtype].itemsize
    return files._replace(tensors=found, lost=lost), faults


def _layers(table: Sequence[Parameter]) -> Iterator[list[_Fused]]:
    """Lists for each layer with experts what may be there in place of their own tensors."""
    for parameter in table:
        if not parameter.weight.fused:
            continue
        layers, experts = parameter.shape[:2]
        shapes = parameter.tensor_shapes()
        for layer in range(layers):
            names = [parameter.names((layer, expert)) for expert in range(experts)]
            number, first = parameter.first_layer + layer, 0
            whole = []
            for name, count in parameter.weight.fused:
                mine = slice(first, first + count)
                first += count
                parts = [part for own in names for part in zip(own[mine], shapes[mine], strict=True)]
                shape = experts, sum(rows for rows, _ in shapes[mine]), shapes[mine][0][1]
                whole.append(_Fused(name.format(layer=number), shape, parts))
            yield whole


def _faults(fused: _Fused, tensor: Tensor, twice: Sequence[str]) -> list[str]:
    faults = [f"tensor twice: {twice[0]}, and in {fused.name}"] if twice else []
    if tensor.shape != fused.shape:
        faults.append(f"wrong shape: {fused.name} is {list(tensor.shape)}, the model wants {list(fused.shape)}")
    if tensor.dtype not in DTYPES or DTYPES[tensor.dtype].itemsize == 1:
        faults.append(f"wrong dtype: {fused.name} is {tensor.dtype}; of all experts in one, F32, BF16 and F16 are read")
    return faults
