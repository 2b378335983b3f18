"""Tokens, of text its bytes, cut into windows, in an order that follows from seed and step: a run resumes exactly.

Data may be larger than memory: they are read once, in blocks, and then lie in a file that is mapped.
"""

import codecs
import glob
import hashlib
import itertools
import json
import mmap
import pathlib
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, BinaryIO, NamedTuple

import grain
import numpy as np

SEPARATOR = 256
"""Token between documents; the tokens below it are the 256 bytes."""
VOCAB = 257
LIBRARY_BYTES = 8_000_000
"""Cap on the default corpus: enough for thousands of steps, read in a moment."""
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
_SUFFIXES = (".txt", ".jsonl", ".npy")
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32's other one begins as UTF-16's.
_BLOCK = 1 << 22
_DIGEST_BYTES = 16


class DataError(ValueError):
    """Training data that cannot be read; the message names the file and, where there is one, the line."""


class Tokens(NamedTuple):
    """Tokens, and what reading them told."""

    ids: np.ndarray
    """Integers [n], mapped."""
    digest: bytes
    """Of their dtype and values."""
    largest: int


def load_tokens(patterns: Sequence[str]) -> np.ndarray:
    """The tokens of `read_tokens`."""
    return read_tokens(patterns).ids


def read_tokens(patterns: Sequence[str]) -> Tokens:
    """Reads documents and joins them with separators, or what a tokenizer made of them.

    A single .npy file is mapped where it is. Anything else is put together in a file without a name, of two bytes for
    each byte of text, in the system's folder for such ($TMPDIR), which is gone with the process.

    Args:
      patterns: globs of .txt files (one document each) and .jsonl files (one document a line, in field "text"), in
        UTF-8; or of .npy files alone, each a vector of token ids, with whatever stands between documents in it. What is
        there under a name is that, also if the name could be read as a glob. Empty: the source files of Python's
        standard library, in sorted order, up to `LIBRARY_BYTES`.

    Returns:
      Tokens, of text uint16, each below `VOCAB`.

    Raises:
      DataError: a pattern that matches nothing, or a folder; a file that is unreadable, empty, malformed or of another
        kind; no room for the tokens.
    """
    paths = _paths(patterns)
    if any(path.suffix == ".npy" for path in paths):
        vectors = [_token_ids(path) for path in paths]
        # Of mixed kinds NumPy would make floats.
        dtype = vectors[0].dtype if len({ids.dtype for ids in vectors}) == 1 else np.dtype(np.int32)
        blocks = itertools.chain.from_iterable(map(_checked, paths, vectors))
        if len(vectors) == 1:
            return Tokens(vectors[0], *_survey(blocks, dtype))
        return _stored((block.astype(dtype, casting="unsafe") for block in blocks), dtype)
    documents = itertools.chain.from_iterable(map(_read, paths)) if patterns else _library_documents()
    return _stored(itertools.chain.from_iterable(map(_bytes_of, documents)), np.dtype(np.uint16))


def _bytes_of(document: Iterable[bytes]) -> Iterator[np.ndarray]:
    for block in document:
        yield np.frombuffer(block, np.uint8).astype(np.uint16)
    yield np.array([SEPARATOR], np.uint16)


def _stored(blocks: Iterable[np.ndarray], dtype: np.dtype) -> Tokens:
    try:
        with tempfile.TemporaryFile(buffering=_BLOCK) as file:
            told = _survey(blocks, dtype, file)
            file.flush()
            return Tokens(np.memmap(file, dtype, mode="r"), *told)
    except OSError as error:
        raise DataError(f"no room for the tokens ({error}): name a folder that has some with TMPDIR=...") from error


def _survey(blocks: Iterable[np.ndarray], dtype: np.dtype, file: IO[bytes] | None = None) -> tuple[bytes, int]:
    """Digest and largest of the tokens, which it writes to `file`, if there is one: all of one pass."""
    digest, largest = hashlib.blake2b(dtype.str.encode(), digest_size=_DIGEST_BYTES), 0
    for block in blocks:
        digest.update(block.data)
        largest = max(largest, int(block.max(initial=0)))
        if file is not None:
            file.write(block.data)
    return digest.digest(), largest


def _let_go(tokens: np.ndarray) -> None:
    """Pages of a mapped file that were read count as this process's memory until it says that it can do without."""
    base: Any = tokens
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


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
        part = tokens[index * seq_len : index * seq_len + seq_len + 1].astype(np.int32)
        _let_go(tokens)  # The kernel maps up to megabytes around what is read.
        return part

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat().map(window).batch(batch_size)


def _library_documents() -> Iterator[list[bytes]]:
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
            yield [document]
    if budget == LIBRARY_BYTES:
        raise DataError(f"{root} holds no readable .py file: name your own text with --data")


def _paths(patterns: Sequence[str]) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for pattern in patterns:
        path = pathlib.Path(pattern)
        # What is there has that name, whatever else the name could mean: only behind it is a glob.
        there = next((parent for parent in (path, *path.parents) if parent.exists()), pathlib.Path())
        rest = path.relative_to(there)
        paths = sorted(glob.glob(str(pathlib.Path(glob.escape(str(there))) / rest), recursive=True))
        if not paths:
            raise DataError(f"--data={pattern} matches no file")
        found += map(pathlib.Path, paths)
    for path in found:
        if path.is_dir():
            raise DataError(f"{path} is a folder: name its files, as in --data='{_files_of(path)}'")
    return found


def _files_of(folder: pathlib.Path) -> pathlib.Path:
    """A glob of files in a folder: of those that are there, if any."""
    inside = [(depth, suffix) for depth in ("*", "**/*") for suffix in _SUFFIXES]
    return folder / next((d + suffix for d, suffix in inside if any(folder.glob(d + suffix))), "*.txt")


def _token_ids(path: pathlib.Path) -> np.ndarray:
    if path.suffix != ".npy":
        raise DataError(f"{path}: text has no token ids, so it cannot stand beside .npy files: tokenize it, too")
    try:
        ids = np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable NumPy file ({error})") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise DataError(f"{path}: needs a vector of integers, the ids of tokens")
    return ids


def _checked(path: pathlib.Path, ids: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(ids), _BLOCK):
        block = np.ascontiguousarray(ids[start : start + _BLOCK])
        if block.min() < 0:
            raise DataError(f"{path}: holds the token {block.min()}, but ids begin at 0")
        if block.max() >= 2**31:
            raise DataError(f"{path}: holds the token {block.max()}, but ids end below 2^31")
        yield block
        _let_go(ids)


def _read(path: pathlib.Path) -> Iterator[Iterable[bytes]]:
    """The documents of a file, each in one or several blocks."""
    if path.suffix not in (".txt", ".jsonl"):
        kind = path.suffix or "files without a suffix"
        raise DataError(f"{path}: cannot read {kind}, only .txt, .jsonl and .npy")
    try:
        with path.open("rb") as file:
            _skip_mark(path, file)
            yield from [_blocks(path, file)] if path.suffix == ".txt" else _lines(path, file)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _skip_mark(path: pathlib.Path, file: BinaryIO) -> None:
    """A byte order mark says how text is written, and is none of it."""
    start = file.read(4)
    if start.startswith(_WIDE_MARKS):
        raise DataError(f"{path}: the text is UTF-16 or UTF-32: store it as UTF-8")
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)


def _blocks(path: pathlib.Path, file: BinaryIO) -> Iterator[bytes]:
    blank = True
    try:
        while block := file.read(_BLOCK):
            blank = blank and not block.strip()
            yield block
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if blank:
        raise DataError(f"{path}: the file is empty")


def _lines(path: pathlib.Path, file: BinaryIO) -> Iterator[list[bytes]]:
    blank = True
    lines = itertools.chain.from_iterable(map(bytes.splitlines, file))  # Some end in \r alone.
    for number, line in enumerate(lines, start=1):
        if line.strip():
            blank = False
            yield [_parse(line, f"{path}, line {number}")]
    if blank:
        raise DataError(f"{path}: the file is empty")


def _parse(line: bytes, place: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{place}: needs an object with a string in field 'text'")
    return text.encode("utf-8", "surrogatepass")
