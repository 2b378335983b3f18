"""Checkpoints of the trainer, as a `Source`, and folders of the same form with parameters alone, for its `--init_from`.

They are Orbax's: arrays by name, "params/layers/moe/w", in TensorStore. Orbax saves and restores whole arrays, and the
experts of all layers are one array, nearly all of the model. So the arrays themselves are read and written through
TensorStore, one piece at a time; Orbax writes the rest of the folder, around placeholders that are then replaced.
"""

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import digests, text
from models.checkpoint.cast import Cast
from models.checkpoint.faults import CheckpointError, raise_faults
from models.checkpoint.folder import CONFIG, config_faults, config_file, extra_of, is_released, read_config, write_json
from models.checkpoint.parameters import Index, Parameter, parameters

ITEM = "default"  # What Orbax's CheckpointManager calls the only item of a step.
_PREFIX = "params/"
MASTERS = "opt_state/masters/"
"""Where parameters are rounded, what they are rounded from: all of the trained ones, in f32."""
_METADATA = "_METADATA"
_FLOATS = ("float32", "bfloat16", "float16")


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder of the arrays in `folder`: a step, its item, or a folder of steps, of which the last; None if none."""
    if not folder.is_dir():
        return None
    if is_released(folder):  # What else is in it may be a conversion.
        return None
    for path in (folder, folder / ITEM):
        if _is_one(path):
            return path
    steps = [folder / str(step) / ITEM for step in sorted(steps_in(folder))]
    # The last one, also where it is damaged: nobody gets an older one without a word.
    return steps[-1] if any(map(_is_one, steps)) else None


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in the folder of a run."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isdecimal() and name == str(int(name))]


def verify(folder: pathlib.Path, *, share: tuple[int, int] = (0, 1), read: bool = True) -> list[str]:
    """Raises CheckpointError if files of a checkpoint are damaged; what else there is to say about it.

    Args:
      folder: as of `find`, which finds something.
      share: of the files to read, see `digests.compare`.
      read: false looks at names and sizes alone.
    """
    arrays = find(folder)
    assert arrays is not None
    found = digests.compare(arrays, share=share, read=read)
    step = arrays.parent
    older = [before for before in steps_in(step.parent) if step.name.isdecimal() and before < int(step.name)]
    hint = f", {step.parent / str(max(older))} is the one before it" if older else ""
    raise_faults(f"{arrays} is damaged{hint}" if found.faults else folder, found.faults)
    return found.notes


def _is_one(path: pathlib.Path) -> bool:
    return (path / _METADATA).is_file() or (path / digests.DIGESTS).is_file()


class Trained:
    """Parameters of a checkpoint of the trainer as a `Source`.

    Of a run with parameters in bfloat16 it reads the f32 masters in their place.

    Args:
      folder: of a run's checkpoints, of one of them, or one written by `TrainedFolder`.
      config: of the model; None: as config.json says, in the folder or, for one of several steps, beside it.
      share: of its files, whose digests this process compares: see `verify`.
      read: false compares names and sizes of files alone, for those who read no weight.

    Raises:
      CheckpointError: all that is damaged, missing, unknown, or of other shape or dtype.
    """

    def __init__(
        self, folder: pathlib.Path, *, config: Any = None, share: tuple[int, int] = (0, 1), read: bool = True
    ) -> None:
        arrays = find(folder)
        if arrays is None:
            raise CheckpointError(folder, ["no checkpoint of the trainer is in it"])
        self.notes = [f"{arrays} {note}" for note in verify(folder, share=share, read=read)]
        faults: list[str] = []
        content: dict[str, Any] = {}
        if config_file(folder).is_file():
            content, found, faults = read_config(config_file(folder))
            if found is not None and config is not None:
                faults = config_faults(found, config)
            config = config if found is None else found
        elif config is None:
            faults = [f"no {CONFIG} says which model it is: name a folder that has one (--config)"]
        raise_faults(folder, faults)
        self.config, self.parameters = config, parameters(config)
        self.extra, self.cast = extra_of(content), Cast()
        self._arrays, faults = _open(arrays)
        raise_faults(folder, faults or self._faults())

    def _faults(self) -> list[str]:
        wanted = {parameter.path: parameter.shape for parameter in self.parameters}
        missing = [path for path in wanted if path not in self._arrays]
        faults = [f"missing parameter: {path} {list(wanted[path])}" for path in missing]
        for path, array in self._arrays.items():
            if path not in wanted:
                faults.append(f"unknown parameter: {path} {list(array.shape)}")
            elif tuple(array.shape) != wanted[path]:
                faults.append(f"wrong shape: {path} is {list(array.shape)}, the model wants {list(wanted[path])}")
            if array.dtype.name not in _FLOATS:
                faults.append(f"wrong dtype: {path} is {array.dtype.name}, read are {', '.join(_FLOATS)}")
        return faults

    def dtype(self, parameter: Parameter) -> np.dtype:
        """The dtype of the array."""
        return np.dtype(self._arrays[parameter.path].dtype.numpy_dtype)

    def blocks(
        self, parameter: Parameter, wanted: Iterable[Index] | None = None, dtype: Any = None
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """See `Source`. One piece is held at a time, as it was written: what a device of the run had of an array."""
        array = self._arrays[parameter.path]
        stacked = parameter.stacked
        left = set(parameter.blocks() if wanted is None else wanted)
        extents = array.chunk_layout.read_chunk.shape[:stacked]
        grids = [range(0, size, extent) for size, extent in zip(parameter.shape, extents, strict=False)]
        for corner in itertools.product(*grids):
            box = [
                range(begin, min(begin + extent, size))
                for begin, extent, size in zip(corner, extents, parameter.shape, strict=False)
            ]
            inside = sorted(left.intersection(itertools.product(*box)))
            if inside:
                piece = array[tuple(slice(side.start, side.stop) for side in box)].read().result()
                for index in inside:
                    block = piece[tuple(i - begin for i, begin in zip(index, corner, strict=True))]
                    yield index, np.array(block if dtype is None else self.cast(parameter.path, block, dtype))


def _open(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """The masters, and other parameters, by path, and what cannot be opened."""
    import tensorstore

    try:
        metadata = text.parse((folder / _METADATA).read_text())
        keys = [
            "/".join(str(part["key"]) for part in entry["key_metadata"]) for entry in metadata["tree_metadata"].values()
        ]
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"unreadable {_METADATA}: {error}"]
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    arrays, faults = {}, []
    wanted = {key.removeprefix(prefix): key for prefix in (_PREFIX, MASTERS) for key in keys if key.startswith(prefix)}
    for path, key in wanted.items():
        spec = {"driver": driver, "kvstore": _store(folder, key)}
        try:
            arrays[path] = tensorstore.open(spec, open=True, context=context).result()
        except ValueError as error:
            faults.append(f"unreadable parameter: {path}: {str(error).splitlines()[0]}")
    return arrays, faults


def _store(folder: pathlib.Path, key: str) -> dict[str, Any]:
    files = {"driver": "file", "path": f"{folder.absolute()}/"}
    if (folder / "manifest.ocdbt").is_file():
        return {"driver": "ocdbt", "base": files, "path": f"{key}/"}
    return {**files, "path": f"{folder.absolute()}/{key}/"}


class TrainedFolder:
    """Writes config.json and a checkpoint of parameters alone, block by block; the folder is empty before.

    Each block is one chunk of its array, so the host holds one, and reading a rank's experts later reads no others.
    """

    def __init__(
        self, folder: pathlib.Path, content: dict[str, Any], table: Sequence[Parameter], dtypes: dict[str, np.dtype]
    ) -> None:
        import orbax.checkpoint as ocp
        import tensorstore

        write_json(folder / CONFIG, content)
        arrays = folder.absolute() / ITEM
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(arrays, {_PREFIX + p.path: np.zeros(1, dtypes[p.path]) for p in table})
        # Or each write would wait for the disk, which the whole folder does once, in the end.
        context = tensorstore.Context({"file_io_sync": False})
        self._folder = arrays
        self._arrays = {}
        self._cast = Cast()
        self._left = {(p.path, index) for p in table for index in p.blocks()}
        for parameter in table:
            dtype = dtypes[parameter.path]
            spec = {
                "driver": "zarr",
                "kvstore": _store(arrays, _PREFIX + parameter.path),
                "metadata": {
                    "shape": parameter.shape,
                    "chunks": (1,) * parameter.stacked + parameter.block_shape,
                    "dtype": "bfloat16" if dtype == ml_dtypes.bfloat16 else dtype.str,
                    "compressor": {"id": "zstd", "level": 1},
                },
                # Orbax looks whether all chunks are there.
                "store_data_equal_to_fill_value": True,
            }
            opened = tensorstore.open(spec, create=True, delete_existing=True, context=context)
            self._arrays[parameter.path] = opened.result()

    def put(self, parameter: Parameter, index: Index, block: np.ndarray) -> None:
        """Writes one block, each once, in any order."""
        array = self._arrays[parameter.path]
        values = self._cast(parameter.path, block, array.dtype.numpy_dtype)
        array[index].write(values).result()
        self._left.remove((parameter.path, index))

    def finish(self) -> None:
        """Makes sure that everything was written, as it was: raises CheckpointError where values did not fit.

        Writes the digests.
        """
        self._cast.done()
        if self._left:
            raise ValueError(f"{len(self._left)} blocks were not written, {min(self._left)} among them")
        digests.write(self._folder, digests.make(self._folder, digests.names(self._folder)))
