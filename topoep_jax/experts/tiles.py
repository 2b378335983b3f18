"""Tiles of the GPU kernels: what one program of a grid computes, and how.

The first candidate that fits a problem is its default; `tests/bench/gemm_bench.py` times all of them on the GPU at
hand. What it finds belongs into `MEASURED`, which is empty because no GPU has run it yet: the candidates' order is a
guess from what Triton does well on Hopper.
"""

import math
from typing import NamedTuple

from topoep_jax.config import TILE

ENOUGH = 64
"""Programs that occupy half of a Hopper GPU's 132 multiprocessors: with more of smaller tiles, loads take over."""


class Tile(NamedTuple):
    """A program's part of a result, [rows, cols], and the terms of its sums that it takes at a time. Powers of two."""

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int


GMM = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 128, 8, 3),
    Tile(64, 256, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
)
"""Candidates for `gmm`."""

WGRAD = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 64, 4, 4),
)
"""Candidates for `wgrad`, in order of size."""

MEASURED: dict[tuple[str, int, int, int], Tile] = {}
"""The best tile for bf16 by kernel, rows and columns of its results (of a block, or of a gradient), terms of a sum."""


def gmm_tile(block_rows: int, cols: int, depth: int, itemsize: int) -> Tile:
    """For products of blocks [block_rows, depth] with matrices [depth, cols] of elements of so many bytes."""
    best = MEASURED.get(("gmm", block_rows, cols, depth), GMM[0])
    return fit(best, block_rows, cols, depth, itemsize)


def wgrad_tile(rows: int, cols: int, block_rows: int, num_instances: int, itemsize: int) -> Tile:
    """For gradients [rows, cols] of each instance, made of elements of so many bytes.

    Where large tiles would be too few to occupy a GPU, they are smaller.
    """
    if best := MEASURED.get(("wgrad", rows, cols, block_rows)):
        return fit(best, rows, cols, block_rows, itemsize)
    candidates = [fit(tile, rows, cols, block_rows, itemsize) for tile in WGRAD]
    area = num_instances * rows * cols
    enough = (tile for tile in candidates if area >= ENOUGH * tile.rows * tile.cols)
    return next(enough, candidates[-1])


def fit(tile: Tile, rows: int, cols: int, depth: int, itemsize: int) -> Tile:
    """The largest tile within this one, which is meant for two-byte elements, whose sides divide these lengths."""
    room = max(TILE, tile.depth * 2 // itemsize)
    return tile._replace(rows=math.gcd(tile.rows, rows), cols=math.gcd(tile.cols, cols), depth=math.gcd(room, depth))
