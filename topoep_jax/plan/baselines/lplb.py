"""LPLB: a fixed graph of mirrored experts, and the best flow of rows over its edges by linear programming.

Source: github.com/deepseek-ai/LPLB, read as the copy `LPLB/` of github.com/shizhengLi/deepseek-lplb-learning at
ba2936a: `lplb/planner.py` (slots, hottest experts first), `tests/utils.py` (graphs), README (the program).

Steps:
  1. Slot i of a rank mirrors the i-th hottest expert of one other rank, so an expert has at most two instances and
     each slot is an edge between two ranks. With two slots or more and even domains the graph is the source's torus:
     even slots look to the same place in the next domain (slot 2k: k+1 domains on), odd slots to the next rank of
     their own domain (slot 2k+1: k+1 ranks on). Otherwise it is a ring over all ranks, domain after domain (slot i:
     i+1 ranks on). Slots that would mirror their own rank, or a rank with fewer experts, stay empty.
  2. Minimise the largest rank load over flows 0 <= f <= rows of the mirrored expert.
  3. Every source sends the same share of an expert's rows to its mirror.

Departures:
  - SciPy's HiGHS solves the program exactly; the source runs an interior-point method on one SM of a GPU.
  - Of the flows of least largest load (rounded up) the one that moves fewest rows is taken; the source's lies in the
    middle of them. The edges form a network, so with a whole bound the solver's corner is whole and nothing is
    rounded.
  - Mains stay: the source first reorders the experts over all ranks by EPLB (without copies). Hottest is by this
    batch's load; the source goes by history.
  - Shares are whole rows; what rounding leaves goes from low sources first. The source draws by ratio per token.
  - Floats in the solver: plans are repeatable on one machine only.
"""

import math
from types import ModuleType

import numpy as np

from topoep_jax._needs import to_install
from topoep_jax.plan.baselines.common import draft_of_quota, quota_in_proportion
from topoep_jax.plan.problem import Draft, Problem
from topoep_jax.topology import Topology


def lplb(omega: np.ndarray, problem: Problem) -> Draft:
    """Mirrors each rank's hottest experts on fixed partners and shares their rows by linear programming."""
    load = omega.sum(axis=0)
    num_ranks, mains = problem.topology.num_ranks, problem.mains_per_rank
    hottest = np.argsort(-load.reshape(num_ranks, mains), axis=1, kind="stable") + mains * np.arange(num_ranks)[:, None]
    graph = mirror_graph(problem.topology, min(problem.num_slots, mains))
    mirror, slot = np.nonzero(graph >= 0)
    home = graph[mirror, slot]
    expert = hottest[home, slot]
    moved = np.zeros((problem.num_experts, num_ranks), np.int64)
    moved[expert, mirror] = flows(load.reshape(num_ranks, mains).sum(axis=1), home, mirror, load[expert])
    return draft_of_quota(quota_in_proportion(moved, omega, problem), problem)


def mirror_graph(topology: Topology, num_slots: int) -> np.ndarray:
    """int [R, N]: the rank whose expert a slot mirrors, -1 for none."""
    grid = [topology.ranks_of_domain(d) for d in range(topology.num_domains)]
    even = len({len(ranks) for ranks in grid}) == 1
    ranks = np.array(grid if even and num_slots > 1 and len(grid) > 1 and len(grid[0]) > 1 else [sum(grid, ())])
    is_torus = ranks.shape[0] > 1
    graph = np.full((topology.num_ranks, num_slots), -1)
    for slot in range(num_slots):
        axis, shift = (slot % 2, slot // 2 + 1) if is_torus else (1, slot + 1)
        looks_to = np.roll(ranks, -shift, axis=axis)
        graph[ranks.ravel(), slot] = np.where(looks_to == ranks, -1, looks_to).ravel()
    return graph


def flows(rank_load: np.ndarray, home: np.ndarray, mirror: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 [n]: rows that each edge takes from rank `home[n]` to rank `mirror[n]`, at most `rows[n]`.

    The largest load is the least possible; among such flows few rows move. `rank_load` is int64 [R].
    """
    if not rows.any():
        return np.zeros(rows.size, np.int64)
    bound = math.ceil(least_max_load(rank_load, home, mirror, rows) - 1e-6)
    optimize = _scipy_optimize()
    while True:  # once, unless the solver's tolerance made the least load a hair too small
        limits = np.stack([np.zeros(rows.size), rows], axis=1)
        taken = optimize.linprog(
            np.ones(rows.size), A_ub=_net_inflow(rank_load.size, home, mirror), b_ub=bound - rank_load, bounds=limits
        )
        if taken.status == 0:
            return np.clip(np.rint(taken.x).astype(np.int64), 0, rows)
        bound += 1


def least_max_load(rank_load: np.ndarray, home: np.ndarray, mirror: np.ndarray, rows: np.ndarray) -> float:
    """The least largest rank load over fractional flows, the value of the source's program; arguments as in `flows`."""
    net = np.hstack([_net_inflow(rank_load.size, home, mirror), -np.ones((rank_load.size, 1))])
    limits = [*((0, int(most)) for most in rows), (0, None)]
    solution = _scipy_optimize().linprog(np.eye(rows.size + 1)[-1], A_ub=net, b_ub=-rank_load, bounds=limits)
    return float(solution.fun)


def _net_inflow(num_ranks: int, home: np.ndarray, mirror: np.ndarray) -> np.ndarray:
    """float [R, n]: what one row on each edge adds to each rank's load."""
    net = np.zeros((num_ranks, home.size))
    edge = np.arange(home.size)
    net[mirror, edge] += 1
    net[home, edge] -= 1
    return net


def _scipy_optimize() -> ModuleType:
    try:
        from scipy import optimize
    except ImportError as error:
        raise ImportError(f"planner 'lplb' solves a linear program with SciPy: {to_install('scipy')}") from error
    module: ModuleType = optimize
    return module
