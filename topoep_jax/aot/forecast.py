"""Predicted rows and times of a layer's steps, from plans of synthetic demand and the rates of `Hardware`.

Nothing here is measured. Links are priced as the planner prices them: the busiest rank's traffic between domains, then
that inside a domain. GEMMs run at the hardware's sustained rate.
"""

import math
import re

import numpy as np

from topoep_jax.aot.hlo import Array
from topoep_jax.aot.schedule import Collective, Gemm
from topoep_jax.config import LayerConfig
from topoep_jax.moe import solve_layer_plan
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.links import busiest_direction, link_ps, moved_ps
from topoep_jax.shapes import Shape
from topoep_jax.simulate.work import Work, work_of_planner
from topoep_jax.synthetic import biased_demand

SKEWS = (0.0, -4.0)
"""Of the demand that `flops_ratio` is computed for: uniform routing, and the worst that is studied."""
_OUT = re.compile(r"(dispatch|again|grad)_([12])$")
_BACK = re.compile(r"(combine|home)_([12])$")


def planned_work(config: LayerConfig, tokens: int, skew: float, seed: int = 0) -> Work:
    """Plans one microbatch of synthetic demand; rows beyond the first pass are left out."""
    workload = Shape(config.hidden, config.ffn, config.num_experts, config.top_k, config.topology, tokens=tokens)
    omega = biased_demand(workload, [skew], seed)[skew].astype(np.int32)
    assignments = tokens * config.top_k
    plan = solve_layer_plan(config, omega, assignments)
    return work_of_planner(config, config.planner, plan, assignments)


def collective_ps(collective: Collective, work: Work) -> int:
    """Predicted picoseconds of one run of a collective: of the plan's rows or replicas, else of its whole buffer."""
    hardware = work.config.hardware
    counts = _counts(collective.phase, work)
    if counts is None:
        return buffer_ps(collective, work.config.num_ranks, work.config.topology.num_domains, hardware)
    sent = collective.operands[0]  # [rows, ...] or [replicas, ...]
    moved = counts * (sent.num_bytes // sent.dims[0])
    return moved_ps(
        moved, work.config.topology, hardware.inter_fs_per_byte, hardware.intra_fs_per_byte, busiest_direction
    )


def buffer_ps(collective: Collective, num_ranks: int, num_domains: int, hardware: Hardware) -> int:
    """Predicted picoseconds if the whole buffer went around all ranks, over the slowest link."""
    rounds = 2 if collective.kind == "all-reduce" else 1
    total = rounds * collective.num_bytes * (num_ranks - 1) // num_ranks
    return link_ps(total, hardware.inter_fs_per_byte if num_domains > 1 else hardware.intra_fs_per_byte)


def gemm_ps(gemm: Gemm, work: Work, pieces: int = 1) -> int:
    """Predicted picoseconds of an expert GEMM on the busiest rank; of a weight gradient, one of its `pieces`."""
    flops = _wgrad_flops(gemm, work) // pieces if gemm.kind == "wgrad" else _gmm_flops(gemm, work)
    return flops * gemm.turns * 1000 // work.config.hardware.gflops


def _counts(phase: str, work: Work) -> np.ndarray | None:
    """int64 [R, R] rows or replicas from rank to rank; None for a phase that the plan does not tell about."""
    if match := _OUT.search(phase):
        return work.rows[min(int(match[2]), len(work.rows)) - 1]
    if match := _BACK.search(phase):
        return work.rows[min(int(match[2]), len(work.rows)) - 1].T
    if phase == "weights":
        return work.rows.sum(0)
    if phase == "weight_grads":
        return work.rows.sum(0).T
    if phase in ("pull", "repull"):
        return work.replicas
    if phase == "push":
        return work.replicas.T
    return None


def _gmm_flops(gemm: Gemm, work: Work) -> int:
    rows, width = gemm.result.dims[0], gemm.result.dims[-1]
    inputs = [a for a in gemm.operands if len(a.dims) == 2 and a.dims[0] == rows and _is_float(a)]
    if inputs:
        return 2 * _busiest_rows(rows, work, slice(None)) * inputs[0].dims[1] * width
    return 2 * math.prod(gemm.result.dims) * _depth(gemm)


def _wgrad_flops(gemm: Gemm, work: Work) -> int:
    """A kernel's operands hold (inputs, gradients) of each job; accumulators have a row for each instance."""
    config = work.config
    num_accumulated = gemm.result.dims[0]
    mains = slice(0, config.num_mains)
    slots = slice(config.num_mains, None)
    # Where a rank has as many slots as mains, take the mains: they have the more rows.
    instances = slots if num_accumulated == config.num_slots != config.num_mains else mains
    pairs = [a for a in gemm.operands if len(a.dims) == 2 and _is_float(a) and a.dims != gemm.result.dims]
    if len(pairs) % 2 or not pairs:
        return 2 * math.prod(gemm.result.dims) * _depth(gemm)
    return sum(
        2 * _busiest_rows(a.dims[0], work, instances) * a.dims[1] * b.dims[1]
        for a, b in zip(pairs[::2], pairs[1::2], strict=True)
    )


def _busiest_rows(buffer_rows: int, work: Work, instances: slice) -> int:
    """Rows that the busiest rank computes of a receive buffer, by the buffer's size."""
    sizes = work.config.window_rows(work.num_assignments)
    if buffer_rows not in sizes:
        return buffer_rows
    return int(work.aligned[sizes.index(buffer_rows), :, instances].sum(-1).max())


def _depth(gemm: Gemm) -> int:
    """The contracted dimension of a plain product, from the sizes of its operands and its result."""
    sizes = [math.prod(a.dims) for a in gemm.operands if _is_float(a)][:2]
    return math.isqrt(math.prod(sizes) // max(math.prod(gemm.result.dims), 1)) if len(sizes) == 2 else 0


def _is_float(array: Array) -> bool:
    return array.dtype.startswith(("bf", "f"))
