"""Text for the examples: the bytes of a module of Python's own library."""

import argparse
import pathlib
from collections.abc import Iterator

import numpy as np

VOCAB = 256


def batches(batch: int, length: int) -> Iterator[np.ndarray]:
    """Endless random windows, int32 [batch, length + 1]; the same ones in every run."""
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(text) - length, size=(batch, 1))
        yield text[starts + np.arange(length + 1)]
