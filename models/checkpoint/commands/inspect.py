"""`inspect`: what a folder holds, told without reading a weight."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import models
from models.checkpoint import trainer
from models.checkpoint.commands import define_common, named_config, named_folder
from models.checkpoint.released import Scan, is_ignored, scan_folder
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import plural


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("folder", str, "the folder", "")
    define_common(values)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    folder = named_folder(values, "folder")
    if trainer.find(folder) is not None:
        source = trainer.Trained(folder, config=named_config(values), read=False)
        yield f"{trainer.find(folder)}: checkpoint of the trainer\n{_model(source.config)}"
        yield from (f"  note: {note}\n" for note in source.notes)
        for parameter in source.parameters:
            yield f"  {parameter.path}: {source.dtype(parameter)} {list(parameter.shape)}\n"
        return
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    # That weights are fp8 is a fact here and no fault.
    scan = scan_folder(folder, config=named_config(values), fp8=True)
    yield f"{folder}: released folder, model type {scan.content.get('model_type')!r}\n"
    if scan.config is not None:
        yield _model(scan.config)
    yield _files(folder, scan)
    yield from (f"note: {note}\n" for note in scan.files.notes)
    yield "no faults\n" if not scan.faults else f"{plural(len(scan.faults), 'fault')}:\n"
    yield from (f"  {fault}\n" for fault in scan.faults)
    if scan.faults:
        raise ValueError(f"{folder} cannot be loaded: see its faults")


def _model(config: Any) -> str:
    model: Any = next(model for kind, model in models.MODEL_TYPES.values() if type(config) is kind)
    total, active = model.num_parameters(config)
    shapes = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    return f"{type(config).__name__}: {total:,} parameters, {active:,} of them for a token\n  {shapes}\n"


def _files(folder: pathlib.Path, scan: Scan) -> str:
    tensors = scan.files.tensors
    size = sum(file.stat().st_size for file in scan.files.files)
    dtypes = collections.Counter(tensor.dtype for tensor in tensors.values())
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(dtypes.items()))
    text = f"{len(tensors):,} tensors in {len(scan.files.files)} files, {size / 1e9:.3f} GB: {kinds or 'none'}\n"
    if scan.config is None:
        return text
    unread = [name for name in tensors if is_ignored(name, scan.config)]
    return text + (f"known and not read: {len(unread)} tensors, as {unread[0]}\n" if unread else "")
