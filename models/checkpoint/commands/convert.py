"""`convert`: from released folders to checkpoints of the trainer and back, block by block."""

from collections.abc import Iterator

import numpy as np

from models.checkpoint import trainer
from models.checkpoint.api import export_dtypes, open_source
from models.checkpoint.commands import define_common, named_config, named_folder
from models.checkpoint.export import MAX_SHARD_BYTES, Export, check_new, new_folder
from models.checkpoint.folder import config_content
from topoep_jax.cli.flags import Flags

_FORMATS = ("released", "trainer")
_DTYPES = ("float32", "bfloat16", "float16")


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("from", str, "folder to read", "")
    values.add("to", str, "folder to write; it must not be there", "")
    values.add("format", str, f"what to write, {' or '.join(_FORMATS)}; default: the other than is read")
    values.add("dtype", str, f"to store, {', '.join(_DTYPES)}; default: as it is, of fp8 bfloat16")
    values.add("max_shard_bytes", int, "of the tensors in one file of a released folder", MAX_SHARD_BYTES, least=1)
    define_common(values)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    folder, to = named_folder(values, "from"), named_folder(values, "to")
    for name, allowed in (("format", _FORMATS), ("dtype", _DTYPES)):
        if values[name].value not in (None, *allowed):
            raise ValueError(f"--{name}={values[name].value} is unknown: take one of {', '.join(allowed)}")
    kind = values.format or ("released" if trainer.find(folder) is not None else "trainer")
    check_new(to)
    source = open_source(folder, config=named_config(values), fp8=values.fp8)
    dtypes = export_dtypes(source, values.dtype and _dtype(values.dtype))
    content = config_content(source.config, dtypes, source.extra)
    with new_folder(to) as files:
        sink: Export | trainer.TrainedFolder
        if kind == "released":
            sink = Export(files, content, source.parameters, dtypes, values.max_shard_bytes)
        else:
            sink = trainer.TrainedFolder(files, content, source.parameters, dtypes)
        for parameter in source.parameters:
            for index, block in source.blocks(parameter):
                sink.put(parameter, index, block)
        sink.finish()
    yield f"{to}: {type(source.config).__name__}, {kind}, {', '.join(sorted({d.name for d in dtypes.values()}))}\n"


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
