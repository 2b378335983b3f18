"""Reading a folder into the arrays of a program, and writing them as a released folder."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from models.checkpoint import folder as folders
from models.checkpoint import trainer
from models.checkpoint.devices import OnDevices, place
from models.checkpoint.export import MAX_SHARD_BYTES, Export, new_folder
from models.checkpoint.faults import CheckpointError, raise_faults
from models.checkpoint.parameters import Parameter, abstract, flat, nested
from models.checkpoint.released import Released
from models.checkpoint.source import Source


def open_source(
    folder: str | pathlib.Path, *, config: Any = None, fp8: bool = False, share: tuple[int, int] = (0, 1)
) -> Source:
    """A released folder or a checkpoint of the trainer, whichever it is; arguments as of `load` and `Trained`."""
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise CheckpointError(path, ["no such folder"])
    if trainer.find(path) is not None:
        return trainer.Trained(path, config=config, share=share)
    return Released(path, config=config, fp8=fp8)


def read_config(folder: str | pathlib.Path) -> Any:
    """The config of the model of a folder, of whichever kind: one of `models.MODEL_TYPES`.

    Raises:
      CheckpointError: config.json is missing, unreadable, or of no model that is supported.
    """
    path = pathlib.Path(folder)
    _, config, faults = folders.read_config(folders.config_file(path))
    raise_faults(path, faults)
    return config


def load(
    folder: str | pathlib.Path,
    config: Any,
    shardings: Any,
    *,
    dtype: DTypeLike = jnp.float32,
    stage: tuple[int, int] | None = None,
    fp8: bool = False,
) -> Any:
    """Reads the parameters of a model from a folder with safetensors, or a checkpoint of the trainer.

    Everything is checked before anything is read. Each process reads what its devices hold a part of, and holds one
    block of a parameter and its copy beyond what is on the devices: what one layer, or one expert, has of it. Of a
    run's own checkpoint it holds what one device of the run had.

    Args:
      folder: it is read by every process.
      config: of the program's model; the folder has to be of the same.
      shardings: nested dict with a `jax.sharding.Sharding` for each parameter, as `models.state_shardings` makes it.
      dtype: the `param_dtype` of the model: what its parameters have, f32 routers excepted.
      stage: first and last layer of a pipeline's stage, whose parameters alone are read; `shardings` has no others.
      fp8: whether block-scaled fp8 weights are read, see `released.Released`.

    Returns:
      Nested dict of global arrays, as `nnx.to_pure_dict(nnx.state(model))` has it.

    Raises:
      CheckpointError: with all that is wrong with the folder, or finite values would be infinite in `dtype`; on every
        process.
      ValueError: shardings of other parameters.
    """
    path = pathlib.Path(folder)
    wanted, places = flat(abstract(config, dtype=dtype, stage=stage)), flat(shardings)
    if wanted.keys() != places.keys():
        odd = ", ".join(sorted(wanted.keys() ^ places.keys()))
        raise ValueError(f"shardings and parameters of {type(config).__name__} differ in {odd}")
    dense = config.num_layers - config.num_moe_layers
    first = stage[0] if stage else 0
    starts = {"dense_layers": min(first, dense), "layers": max(first - dense, 0)}
    with _everywhere(path):
        source = open_source(path, config=config, fp8=fp8, share=(jax.process_index(), jax.process_count()))
    params = {
        p.path: place(source, p, wanted[p.path], places[p.path], starts.get(p.path.split("/")[0], 0))
        for p in source.parameters
        if p.path in wanted
    }
    with _everywhere(path):
        source.cast.done(path)
    return nested(params)


def save(
    folder: str | pathlib.Path,
    config: Any,
    params: Any,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes parameters as a released folder, which `transformers` loads: config.json and safetensors.

    The bytes depend on config, values and dtypes alone, not on the mesh. In a run of several processes all call it,
    the first one writes, and a parameter that is spread over them travels to it block by block.

    Args:
      folder: must not be there; it appears when it is complete.
      config: of the model.
      params: nested dict of the whole model's global arrays.
      dtype: of the tensors, f32, bf16 or f16; None: as in `params`. Correction biases stay as they are.
      max_shard_bytes: of tensors in one file.

    Raises:
      CheckpointError: the parameters do not fit the config, finite values would be infinite in `dtype`, or the folder
        is there.
      ValueError: a dtype that is not written.
    """
    path = pathlib.Path(folder)
    source = OnDevices(config, params)
    dtypes = export_dtypes(source, dtype)
    content = folders.config_content(config, dtypes, source.extra)
    with _everywhere(path), contextlib.ExitStack() as stack:
        export: Export | None = None
        with _everywhere(path):
            if jax.process_index() == 0:
                files = stack.enter_context(new_folder(path))
                export = Export(files, content, source.parameters, dtypes, max_shard_bytes)
        # A process that cannot write goes on reading, since the others cannot do so alone.
        fault: OSError | None = None
        for parameter in source.parameters:
            for index, block in source.blocks(parameter):
                try:
                    if export is not None and fault is None:
                        export.put(parameter, index, block)
                except OSError as error:
                    fault = error
        if fault is not None:
            raise fault
        if export is not None:
            export.finish()


def export_dtypes(source: Source, dtype: DTypeLike | None) -> dict[str, np.dtype]:
    """The dtypes of the tensors in files, by path of the parameter."""

    def of(parameter: Parameter) -> np.dtype:
        return source.dtype(parameter) if dtype is None or parameter.weight.wide else np.dtype(dtype)

    return {parameter.path: of(parameter) for parameter in source.parameters}


@contextlib.contextmanager
def _everywhere(folder: pathlib.Path) -> Iterator[None]:
    """What fails on one process fails on all, so that none waits for another that has given up."""
    error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(error is not None))
        if failed.any() and error is None:
            where = ", ".join(map(str, np.flatnonzero(failed)))
            error = CheckpointError(folder, [f"see what process {where} reports"])
    if error is not None:
        raise error
