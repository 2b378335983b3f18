"""Demand with a known imbalance, drawn with NumPy: what planners are compared on."""

import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from topoep_jax.routing import get_router
from topoep_jax.shapes import Shape
from topoep_jax.topology import Topology

Select = Callable[[np.ndarray, int], np.ndarray]
"""Logits f32 [T, E] and K -> the experts of each token, int [T, K]."""


class Workload(Protocol):
    """What the draws depend on; `shapes.Shape` is one."""

    @property
    def topology(self) -> Topology:
        """R ranks and their domains."""

    @property
    def num_experts(self) -> int:
        """E."""

    @property
    def top_k(self) -> int:
        """K, experts per token."""

    @property
    def tokens(self) -> int:
        """Tokens per rank."""


def plain_top_k(logits: np.ndarray, top_k: int) -> np.ndarray:
    """The K largest logits of each token, in no order."""
    return np.argpartition(-logits, top_k, axis=1)[:, :top_k]


def router_of(shape: Shape) -> Select:
    """The selection of the model's own router; a correction bias is zero, as before training."""
    options = dict(shape.router_options)
    if shape.router == "glm4":
        options["correction_bias"] = jnp.zeros(shape.num_experts, jnp.float32)
    router = get_router(shape.router)
    choose = jax.jit(lambda logits: router(logits, shape.top_k, **options).expert_idx)
    return lambda logits, top_k: np.asarray(choose(logits))[:, :top_k]


def biased_demand(
    workload: Workload, skews: Iterable[float], seed: int, microbatch: int = 0, *, select: Select = plain_top_k
) -> dict[float, np.ndarray]:
    """int64 [R, E] for each skew: every token takes the top_k of N(0, 1) logits plus a bias per expert.

    The bias is N(0, |skew|) and shared by all ranks; the token logits are the same for every skew. The distribution is
    that of `routing.forced_logits`; the draws are NumPy's, so that no accelerator is needed to repeat them.

    Args:
      workload: sizes.
      skews: standard deviations of the bias; the sign plays no role within one microbatch.
      seed: of the bias and, with `microbatch`, of the logits.
      microbatch: another one has the same bias and new logits.
      select: which experts a token takes.
    """
    num_ranks = workload.topology.num_ranks
    bias = np.random.default_rng(seed).normal(0, 1, workload.num_experts)
    tokens = np.random.default_rng(1000 + seed * 100 + microbatch)
    demand = {skew: np.zeros((num_ranks, workload.num_experts), np.int64) for skew in skews}
    for rank in range(num_ranks):
        logits = tokens.standard_normal((workload.tokens, workload.num_experts), dtype=np.float32)
        for skew, omega in demand.items():
            score = logits + (bias * abs(skew)).astype(np.float32)
            chosen = select(score, workload.top_k)
            omega[rank] = np.bincount(chosen.ravel(), minlength=workload.num_experts)
    return demand


def demand_of_model(shape: Shape, skews: Iterable[float], seed: int) -> dict[float, np.ndarray]:
    """`biased_demand` whose experts the model's own router selects: what is compared with the paper's figures."""
    return biased_demand(shape, skews, seed, select=_own_selection(shape))


@functools.cache
def _own_selection(shape: Shape) -> Select:
    """The selection without groups, by the largest logits: no program to compile, and no ties of rounded scores."""
    return router_of(shape) if shape.router_options else plain_top_k
