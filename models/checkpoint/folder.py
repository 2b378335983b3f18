"""The files of a released folder: config.json, the index, and the headers of its safetensors files."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

import models
from models.checkpoint import text
from models.checkpoint.safetensors import Tensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


class Files(NamedTuple):
    """The tensors of a folder, before a model is asked whether they fit."""

    tensors: dict[str, Tensor]
    files: list[pathlib.Path]
    lost: set[str]
    """Tensors that the index names and that are not where it says: `faults` has them, or the file that they are in."""
    faults: list[str]
    notes: list[str]
    """What somebody should know who meant other files."""


def is_released(folder: pathlib.Path) -> bool:
    """Whether it looks like a released folder."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def read_files(folder: pathlib.Path) -> Files:
    """Reads the index, if there is one, and the headers of all files."""
    index: dict[str, str] | None = None
    faults: list[str] = []
    names = [SINGLE]
    # As transformers does it, the single file wins.
    if not (folder / SINGLE).is_file():
        if not (folder / INDEX).is_file():
            other = sorted(path.name for path in folder.glob("*.bin"))
            hint = f"; {other[0]} is of another format, which is not read" if other else ""
            return Files({}, [], set(), [f"no weights: neither {SINGLE} nor {INDEX} is there{hint}"], [])
        index, faults = _read_index(folder / INDEX)
        names = sorted(set(index.values()))
    found: dict[str, Tensor] = {}
    readable: dict[str, dict[str, Tensor]] = {}
    files = []
    for name in names:
        path = folder / name
        if pathlib.PurePath(name).name != name or not path.is_file():
            faults.append(f"missing file: {name}, which the index names for {_count(index or {}, name)} tensors")
            continue
        files.append(path)
        held, wrong = read_header(path)
        faults += wrong
        if held or not wrong:
            readable[name] = held
        faults += [f"tensor twice: {key} in {found[key].file.name} and {name}" for key in held if key in found]
        found |= held
    if index is None:
        return Files(found, files, set(), faults, _ousted(folder))
    lost = {key: file for key, file in index.items() if key not in readable.get(file, {})}
    faults += [f"tensor not where the index says: {key} is not in {f}" for key, f in lost.items() if f in readable]
    faults += [f"tensor not in the index: {key} of {t.file.name}" for key, t in found.items() if key not in index]
    return Files(found, files, set(lost), faults, [])


def _ousted(folder: pathlib.Path) -> list[str]:
    """Tells of files that an index names and the single file wins over."""
    index, _ = _read_index(folder / INDEX) if (folder / INDEX).is_file() else ({}, [])
    others = set(index.values()) - {SINGLE}
    if not others:
        return []
    names = min(others) if len(others) == 1 else f"{len(others)} files, as {min(others)}"
    return [f"{SINGLE} is read, as transformers would, and not what {INDEX} names: {names}"]


def _read_index(path: pathlib.Path) -> tuple[dict[str, str], list[str]]:
    try:
        index = text.read(path)["weight_map"]
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ValueError("weight_map does not map names of tensors to names of files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, [f"unreadable index: {path.name}: {error}"]
    return index, []


def _count(index: dict[str, str], file: str) -> int:
    return sum(name == file for name in index.values())


def config_file(folder: pathlib.Path) -> pathlib.Path:
    """The config.json of a folder: in it or, as a run has it for its steps, beside a folder named by a number."""
    here, beside = folder / CONFIG, folder.absolute().parent / CONFIG
    return beside if folder.name.isdecimal() and not here.is_file() and beside.is_file() else here


def read_config(path: pathlib.Path) -> tuple[dict[str, Any], Any, list[str]]:
    """The content of a config.json, the model's config made of it (None if that cannot be), and what is wrong."""
    try:
        content = text.read(path)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        return {}, None, [f"unreadable config: {path.name}: {error}"]
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in models.MODEL_TYPES:
        known = ", ".join(models.MODEL_TYPES)
        return content, None, [f"wrong model type: {path.name} says {kind!r}, known are {known}"]
    try:
        model_config: Any = models.MODEL_TYPES[kind][0]
        return content, model_config.from_hf(content), []
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return content, None, [f"unsupported config: {error}"]


def extra_of(content: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the tokenizer, which no model here needs: it goes on into what is converted."""
    return {name: content[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in content}


def config_content(config: Any, dtypes: dict[str, np.dtype], extra: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model whose parameters have these dtypes, by path."""
    return {**config.to_hf(), **extra, "torch_dtype": dtypes["embedding/table"].name}


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file for people to read too."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def config_faults(config: Any, wanted: Any) -> list[str]:
    """How the config of a folder differs from the one that it should be of, in what parameters or results depend on."""
    if type(config) is not type(wanted):
        return [f"wrong model type: {type(config).__name__}, not {type(wanted).__name__}"]
    ours, theirs = vars(wanted), vars(config)
    telling = ours.keys() - {"max_positions"} - (set() if wanted.dense_layers else {"dense_ffn"})
    return [
        f"other config: {name} is {theirs[name]}, not {value}"
        for name, value in ours.items()
        if name in telling and theirs[name] != value
    ]
