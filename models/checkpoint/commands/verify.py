"""`verify`: reads every value of a folder, and compares with those of another."""

import pathlib
from collections.abc import Iterator

import numpy as np

from models.checkpoint.api import open_source
from models.checkpoint.commands import define_common, named_config, named_folder
from models.checkpoint.faults import raise_faults
from models.checkpoint.folder import config_faults
from models.checkpoint.parameters import Index, Parameter
from models.checkpoint.source import Source
from topoep_jax.cli.flags import Flags


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("folder", str, "the folder", "")
    values.add("other", str, "one to compare it with", "")
    values.add("tolerance", float, "largest absolute difference that counts as equal; 0: every bit", 0.0, least=0)
    define_common(values)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    folder, config = named_folder(values, "folder"), named_config(values)
    source = open_source(folder, config=config, fp8=values.fp8)
    if not values.other:
        raise_faults(folder, list(_not_finite(source)))
        yield f"{folder}: complete, fits {type(source.config).__name__}, all values are finite\n"
        return
    other = pathlib.Path(values.other)
    another = open_source(other, config=config, fp8=values.fp8)
    faults = config_faults(another.config, source.config)
    raise_faults(f"{folder} and {other}", faults or list(_differences(source, another, values.tolerance)))
    within = f"within {values.tolerance:g}" if values.tolerance else "bit for bit"
    yield f"{folder} and {other}: equal {within}{_dtypes(source, another)}\n"


def _not_finite(source: Source) -> Iterator[str]:
    for parameter in source.parameters:
        for index, block in source.blocks(parameter, dtype=np.float32):
            for name, value in _tensors(parameter, index, block):
                bad = value.size - int(np.isfinite(value).sum())
                if bad:
                    yield f"not finite: {bad} values of {name}"


def _differences(source: Source, another: Source, tolerance: float) -> Iterator[str]:
    for parameter in source.parameters:
        for index, block in source.blocks(parameter, dtype=np.float32):
            ((_, other),) = another.blocks(parameter, [index], np.float32)
            pairs = zip(_tensors(parameter, index, block), _tensors(parameter, index, other), strict=True)
            for (name, ours), (_, theirs) in pairs:
                # As bits, for which NaN is equal to itself and 0 is not to -0. All dtypes widen to f32 exactly.
                differ = ours.view(np.int32) != theirs.view(np.int32)
                if not differ.any():
                    continue
                with np.errstate(invalid="ignore"):
                    gap = np.abs(ours - theirs)[differ].max()
                if tolerance == 0 or not gap <= tolerance:
                    yield f"differs: {name} in {int(differ.sum())} of {ours.size} values, by up to {gap:.3g}"


def _tensors(parameter: Parameter, index: Index, block: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    return zip(parameter.names(index), map(np.ascontiguousarray, parameter.weight.layout(block)), strict=True)


def _dtypes(source: Source, another: Source) -> str:
    pairs = {(source.dtype(p).name, another.dtype(p).name) for p in source.parameters}
    kinds = sorted(f"{ours} here and {theirs} there" for ours, theirs in pairs if ours != theirs)
    return f"; stored as {', '.join(kinds)}" if kinds else ""
