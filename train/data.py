"""Tokens, of text its bytes, cut into windows, in an order that follows from seed and step: a run resumes exactly."""

import glob
import itertools
import json
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence

import grain
import numpy as np

SEPARATOR = 256
"""Token between documents; the tokens below it are the 256 bytes."""
VOCAB = 257
LIBRARY_BYTES = 8_000_000
"""Cap on the default corpus: enough for thousands of steps, read in a moment."""
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """Training data that cannot be read; the message names the file and, where there is one, the line."""


def load_tokens(patterns: Sequence[str]) -> np.ndarray:
    """Reads documents and joins them with separators, or what a tokenizer made of them.

    Args:
      patterns: globs of .txt files (one document each) and .jsonl files (one document a line, in field "text"); or of
        .npy files alone, each a vector of token ids, with whatever stands between documents in it. Empty: the source
        files of Python's standard library, in sorted order, up to `LIBRARY_BYTES`.

    Returns:
      Integers [n]; of text uint16, each below `VOCAB`.

    Raises:
      DataError: a pattern that matches nothing; a file that is unreadable, empty, malformed or of another kind.
    """
    paths = _paths(patterns)
    if any(path.suffix == ".npy" for path in paths):
        parts = [_token_ids(path) for path in paths]
        if len(parts) == 1:
            return parts[0]
        # Of mixed kinds NumPy would make floats.
        same = len({part.dtype for part in parts}) == 1
        return np.concatenate(parts, dtype=parts[0].dtype if same else np.int32, casting="unsafe")
    documents = itertools.chain.from_iterable(map(_read, paths)) if patterns else _library_documents()
    parts = []
    for document in documents:
        parts += [np.frombuffer(document, np.uint8).astype(np.uint16), np.array([SEPARATOR], np.uint16)]
    return np.concatenate(parts)


def batches(tokens: np.ndarray, *, batch_size: int, seq_len: int, seed: int) -> grain.MapDataset:
    """An endless, reshuffled sequence of batches: element `step` is the batch of that step.

    Windows of `seq_len` + 1 tokens start every `seq_len` tokens, so each token is predicted once an epoch.

    Returns:
      Elements int32 [batch_size, seq_len + 1].

    Raises:
      DataError: too little text for one window.
    """
    count = (len(tokens) - 1) // seq_len
    if count < 1:
        raise DataError(f"the data hold {len(tokens)} tokens, too few for one window of --seq_len={seq_len}: add text")

    def window(index: int) -> np.ndarray:
        return tokens[index * seq_len : index * seq_len + seq_len + 1].astype(np.int32)

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat().map(window).batch(batch_size)


def _library_documents() -> Iterator[bytes]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    budget = LIBRARY_BYTES
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            document = path.read_bytes()[:budget]
        except OSError:
            continue  # A file of the system that this user may not read is no loss.
        if document:
            budget -= len(document)
            yield document
    if budget == LIBRARY_BYTES:
        raise DataError(f"{root} holds no readable .py file: name your own text with --data")


def _paths(patterns: Sequence[str]) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for pattern in patterns:
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataError(f"--data={pattern} matches no file")
        found += map(pathlib.Path, paths)
    return found


def _token_ids(path: pathlib.Path) -> np.ndarray:
    if path.suffix != ".npy":
        raise DataError(f"{path}: text has no token ids, so it cannot stand beside .npy files: tokenize it, too")
    try:
        ids = np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable NumPy file ({error})") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise DataError(f"{path}: needs a vector of integers, the ids of tokens")
    if ids.min() < 0:
        raise DataError(f"{path}: holds the token {ids.min()}, but ids begin at 0")
    if np.iinfo(ids.dtype).max >= 2**31 and ids.max() >= 2**31:
        raise DataError(f"{path}: holds the token {ids.max()}, but ids end below 2^31")
    return ids


def _read(path: pathlib.Path) -> Iterator[bytes]:
    if path.suffix not in (".txt", ".jsonl"):
        kind = path.suffix or "files without a suffix"
        raise DataError(f"{path}: cannot read {kind}, only .txt, .jsonl and .npy")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not content.strip():
        raise DataError(f"{path}: the file is empty")
    if path.suffix == ".txt":
        yield content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


def _parse(line: bytes, place: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{place}: needs an object with a string in field 'text'")
    return text.encode("utf-8", "surrogatepass")
