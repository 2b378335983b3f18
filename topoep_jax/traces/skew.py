"""How skewed recorded routing is, where, and whether it moves: the quantities of the paper's Figure 2, and more."""

import dataclasses
from typing import Any

import numpy as np

from topoep_jax.traces.info import TraceInfo
from topoep_jax.traces.reader import Trace


@dataclasses.dataclass(frozen=True)
class Skew:
    """Skew of M microbatches of S steps in L layers; masked where one has no rows in a layer.

    Whether the busiest change is told from step to step: several microbatches or groups of one step are parts of one
    batch, beside each other rather than one after the other, so their loads are added up first. Where each step is one
    microbatch, that is the paper's turnover between adjacent microbatches.

    Attributes:
      info: of the trace.
      steps: the S that were recorded, ascending.
      top: how many experts count as the busiest.
      share: f64 [L, E], each expert's share of the layer's assignments, over all microbatches.
      rows: int64 [M, L], assignments.
      imbalance: f64 [M, L], load of the busiest expert over the mean load of an expert.
      busiest: f64 [M, L], share of the assignments that go to the `top` busiest experts.
      effective: f64 [M, L], so many experts under equal loads have the same entropy: from 1 to E.
      rank_imbalance: f64 [M, L], load of the busiest rank over the mean, each expert on its main rank.
      turnover: f64 [S - 1, L], share of the `top` busiest experts that are not among them in the next recorded step.
      drift: f64 [L], the same from the first step to the last.
    """

    info: TraceInfo
    steps: tuple[int, ...]
    top: int
    share: np.ma.MaskedArray
    rows: np.ndarray
    imbalance: np.ma.MaskedArray
    busiest: np.ma.MaskedArray
    effective: np.ma.MaskedArray
    rank_imbalance: np.ma.MaskedArray
    turnover: np.ma.MaskedArray
    drift: np.ma.MaskedArray


def skew_of(trace: Trace, *, top: int | None = None) -> Skew:
    """Reads a trace, one microbatch at a time.

    Args:
      trace: an open trace.
      top: experts that count as the busiest, below E; None: the paper's 8, but at most half of the experts. Of equal
        loads, the lower expert is the busier.

    Raises:
      ValueError: `top` out of range, a trace of padding alone, or a damaged file.
    """
    info = trace.info
    num_layers, num_experts = len(info.layers), info.num_experts
    top = max(1, min(8, num_experts // 2)) if top is None else top
    if not 1 <= top < max(num_experts, 2):
        raise ValueError(f"top={top} must lie in 1..{max(num_experts - 1, 1)}, below the number of experts")
    total = np.zeros((num_layers, num_experts), np.int64)
    rows, figures = [], []
    of_step: dict[int, np.ndarray] = {}
    for microbatch, step in enumerate(trace.steps):
        omega = trace.omega(microbatch)
        load = omega.sum(axis=1)
        total += load
        of_step[step] = of_step.get(step, 0) + load
        rows.append(load.sum(axis=1))
        figures.append(_figures(load, info.num_ranks, top))
    known = np.stack(rows).astype(bool)
    if not known.any():
        raise ValueError("nothing was routed: every token of the trace is padding")
    busy = np.stack([_busiest_of(load, top) for load in of_step.values()])
    moved = np.stack([load.any(axis=1) for load in of_step.values()])
    imbalance, busiest, effective, rank_imbalance = np.moveaxis(np.array(figures), 1, 0)
    return Skew(
        info=info,
        steps=tuple(of_step),
        top=top,
        share=_masked(total / np.maximum(total.sum(axis=1, keepdims=True), 1), known.any(axis=0, keepdims=True).T),
        rows=np.array(rows),
        imbalance=_masked(imbalance, known),
        busiest=_masked(busiest, known),
        effective=_masked(effective, known),
        rank_imbalance=_masked(rank_imbalance, known),
        turnover=_masked(_turnover(busy[:-1], busy[1:], top), moved[:-1] & moved[1:]),
        drift=_masked(_turnover(busy[0], busy[-1], top), moved[0] & moved[-1]),
    )


def _figures(load: np.ndarray, num_ranks: int, top: int) -> np.ndarray:
    """f64 [4, L] of loads [L, E]; anything where there are none."""
    num_layers, num_experts = load.shape
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    ranks = share.reshape(num_layers, num_ranks, num_experts // num_ranks).sum(axis=2)
    return np.stack(
        [
            share.max(axis=1) * num_experts,
            np.sort(share, axis=1)[:, -top:].sum(axis=1),
            np.exp(entropy),
            ranks.max(axis=1) * num_ranks,
        ]
    )


def _busiest_of(load: np.ndarray, top: int) -> np.ndarray:
    """bool [L, E]: whether an expert is among the busiest."""
    busiest = np.zeros(load.shape, bool)
    np.put_along_axis(busiest, np.argsort(-load, axis=1, kind="stable")[:, :top], True, axis=1)
    return busiest


def _turnover(before: np.ndarray, after: np.ndarray, top: int) -> np.ndarray:
    """f64 [...] of bool [..., E]."""
    left: np.ndarray = (before & ~after).sum(axis=-1) / top
    return left


def _masked(values: np.ndarray, known: Any) -> np.ma.MaskedArray:
    return np.ma.array(values, mask=np.broadcast_to(~known, values.shape))
