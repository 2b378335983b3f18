"""`solve_plan`: checks the question, picks an implementation, and gives the answer the type that JAX expects."""

import functools
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from topoep_jax import _compat
from topoep_jax._integers import is_integer
from topoep_jax.plan import reference
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.cost import OBJECTIVES
from topoep_jax.plan.finish import refuse
from topoep_jax.plan.problem import MAX_INSTANCES, MAX_REPLICAS, MAX_ROWS, CostModel, Problem
from topoep_jax.plan.topoep import EFFORTS
from topoep_jax.plan.types import Plan
from topoep_jax.topology import Topology

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def solve_plan(
    omega: jax.Array | np.ndarray,
    topology: Topology,
    cost: CostModel,
    *,
    num_slots: int,
    cap_rows: int | None = None,
    block_rows: int = 128,
    planner: str = reference.DEFAULT_PLANNER,
    effort: str = "default",
    objective: str = "bottleneck",
    implementation: str | None = None,
) -> Plan:
    """Chooses which experts to replicate, where, and how many assignments each instance executes for each source.

    Every rank that calls this with the same demand gets the same plan, bit for bit, so no plan is ever sent. Works
    eagerly and under jit, scan, vmap, shard_map, pmap and remat; the result varies over the mesh axes of `omega`.

    Args:
      omega: int32 [R, E], assignments from each source rank to each expert; the sum must stay below 2^31.
      topology: the domain of each of the R ranks. Static, as is everything below.
      cost: sizes of the model and rates of the hardware.
      num_slots: N, replica slots per rank, 0..E - E/R.
      cap_rows: bound on the aligned rows of a rank (every active instance rounded up to `block_rows`). "topoep" aims at
        it, before it looks at time; for every planner `status` says whether it is met. None asks for none.
      block_rows: alignment of an instance's rows.
      planner: "topoep" (the best of many candidates by `objective`, never worse than no replicas), "topoep_paper" (the
        paper's two-stage solver), "none" (no replicas), or one of `plan.baselines`, but for "eplb" and "moonep", whose
        answers no layer can run.
      effort: "fast", "default" or "full": how long "topoep" searches.
      objective: what "topoep" minimises and `predicted_ps` means, "bottleneck" (busiest rank of each class of link) or
        "eq8" (the paper's).
      implementation: "cpu" (C++ inside the program), "cuda" (the same on NVIDIA GPUs; its first use may compile kernels
        for a minute, and needs no GPU) or "reference" (NumPy in a host callback). None takes what the default backend
        runs without leaving the program; for a baseline it takes its NumPy, and says so once. "cpu" and "cuda" give one
        program text, which runs on either platform whose handler is registered.

    Returns:
      A `Plan` of int32 arrays. Demand that is only seen when the program runs and then is negative or too large gives a
      plan with status BAD_INPUT | EMPTY and no quota.

    Raises:
      ValueError: a shape, an option or (outside of a trace) the demand is wrong; the message names the value.
      ImportError: the implementation asked for cannot be loaded; the message says what to install.
      ExceptionGroup: no implementation can run; it holds the reason of each.

    Not differentiable: demand is integer, and gradients flow through dispatch and combine alone.

    Example:
      The paper's Figure 9. Rank 0 has 8 rows for expert 4 of the other domain: a copy on rank 0 keeps them at home, and
      a copy on rank 1 takes half of them.

      >>> omega = np.zeros((4, 8), np.int32)
      >>> omega[[0, 0, 0, 1, 1, 2, 3], [0, 1, 4, 2, 3, 5, 6]] = [3, 3, 8, 3, 3, 10, 10]
      >>> cost = CostModel(expert_bytes=16, token_bytes=4, row_ps=200, inter_fs_per_byte=20000, intra_fs_per_byte=5000)
      >>> plan = solve_plan(omega, Topology.uniform(2, 2), cost, num_slots=1)
      >>> plan.slot_expert[:, 0].tolist(), plan.rank_load.tolist()
      ([4, 4, -1, -1], [10, 10, 10, 10])
      >>> solve_plan(omega, Topology.uniform(2, 2), cost, num_slots=1, planner="none").rank_load.tolist()
      [6, 6, 18, 10]
    """
    if not isinstance(topology, Topology) or not isinstance(cost, CostModel):
        raise ValueError(
            f"topology={topology!r} and cost={cost!r} must be a Topology and a CostModel: Topology.uniform(domains,"
            " ranks_per_domain) and CostModel.from_model(hidden, ffn, hardware) make them"
        )
    omega = _checked_omega(omega, topology)
    cost.check_ranks(topology.num_ranks)
    problem = Problem(
        topology=topology,
        cost=cost,
        num_experts=omega.shape[1],
        num_slots=_checked_int(
            "num_slots",
            num_slots,
            0,
            _max_slots(topology.num_ranks, omega.shape[1]),
            "E - E/R and 2^16 / R allow no more",
        ),
        cap_rows=None
        if cap_rows is None
        else _checked_int("cap_rows", cap_rows, 0, _INT64_MAX, "None asks for no cap"),
        block_rows=_checked_int("block_rows", block_rows, 1, _INT32_MAX, "128 is the default"),
        objective=_checked_key("objective", objective, OBJECTIVES),
        effort=_checked_key("effort", effort, EFFORTS),
    )
    _check_instances(problem)
    return solve(omega, problem, planner, implementation)


def solve(omega: jax.Array, problem: Problem, planner: str, implementation: str | None = None) -> Plan:
    """`solve_plan` for those who have a valid `Problem`, and demand in int32."""
    reference.check_planner(planner)
    if implementation is None:
        implementation = _default_implementation(planner)
    run = IMPLEMENTATIONS[_checked_key("implementation", implementation, IMPLEMENTATIONS)]
    return _compat.vary_like(run(omega, problem, planner), omega)


def _solve_reference(omega: jax.Array, problem: Problem, planner: str) -> Plan:
    def solve(demand: Any) -> Plan:
        return reference.solve(np.asarray(demand), problem, planner)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), refuse(problem))
    return jax.pure_callback(solve, shapes, omega, vmap_method="sequential")


def _load(implementation: str) -> ModuleType:
    """`_native`, with the handlers of the implementation's platform registered."""
    # Imported here so that the reference runs, and the library imports, without the extension.
    from topoep_jax import _native

    if implementation == "cuda":
        from topoep_jax import _cuda

        _cuda.load()
    return _native


def _solve_native(implementation: str, omega: jax.Array, problem: Problem, planner: str) -> Plan:
    if planner in BASELINES:
        raise ValueError(
            f"implementation={implementation!r}, but planner={planner!r} is a baseline in NumPy alone: leave"
            " implementation out, or pass 'reference', to run it in a host callback"
        )
    plan: Plan = _load(implementation).plan(omega, problem, planner)
    return plan


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, Problem, str], Plan]] = {
    "cpu": functools.partial(_solve_native, "cpu"),
    "cuda": functools.partial(_solve_native, "cuda"),
    "reference": _solve_reference,
}

_BACKENDS = {"cpu": "cpu", "cuda": "gpu"}
"""JAX's name of the backend that a native implementation runs on."""


def _default_implementation(planner: str) -> str:
    """The implementation for the default backend; only a baseline may leave the compiled program."""
    if planner in BASELINES:
        _announce_callback(planner)
        return "reference"
    backend = jax.default_backend()
    reasons: list[Exception] = []
    for name, needed in _BACKENDS.items():
        if backend != needed:
            reasons.append(RuntimeError(f"{name}: runs on backend {needed!r}, but the default backend is {backend!r}"))
            continue
        try:
            _load(name)
        except ImportError as error:
            reasons.append(error)
        else:
            return name
    reasons.append(
        RuntimeError("reference: stops the program for a host callback, so it runs only when asked for by name")
    )
    raise ExceptionGroup(
        f"no planner implementation fits the backend {backend!r}; implementation='reference' works everywhere, slowly",
        reasons,
    )


@functools.cache
def _announce_callback(planner: str) -> None:
    logging.warning(
        "planner=%r is a baseline in NumPy: each plan stops the program for a host callback, so do not time steps",
        planner,
    )


def _checked_omega(omega: Any, topology: Topology) -> jax.Array:
    """`omega` as int32 after every check that can be made now."""
    if not isinstance(omega, jax.Array | np.ndarray):
        raise ValueError(f"omega is a {type(omega).__name__}, but an int32 array [ranks, experts] is needed")
    if omega.dtype == object:
        raise ValueError("omega has dtype object, but demand counts assignments: pass integers (int32)")
    dtype = jnp.result_type(omega)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"omega has dtype {dtype}, but demand counts assignments: pass integers (int32)")
    num_ranks = topology.num_ranks
    shape = jnp.shape(omega)
    if len(shape) != 2 or shape[0] != num_ranks:
        raise ValueError(
            f"omega has shape {shape}, but the topology has {num_ranks} ranks: expected [{num_ranks}, num_experts]"
        )
    if shape[1] == 0 or shape[1] % num_ranks:
        raise ValueError(
            f"{shape[1]} experts do not divide evenly over {num_ranks} ranks: use a positive multiple of {num_ranks}"
            " experts, or fewer ranks"
        )
    if _is_readable(omega):
        _check_demand(np.asarray(omega))
    elif not np.can_cast(dtype, np.int32):
        raise ValueError(f"omega has dtype {dtype}, which may not fit int32: count demand in int32")
    return jnp.asarray(omega, jnp.int32)


def _is_readable(values: Any) -> bool:
    """Whether this process can look at the values now."""
    return not isinstance(values, jax.core.Tracer) and getattr(values, "is_fully_addressable", True)


def _check_demand(omega: np.ndarray) -> None:
    if (omega < 0).any():
        rank, expert = np.argwhere(omega < 0)[0]
        raise ValueError(
            f"omega[{rank}, {expert}]={omega[rank, expert]} is negative, but demand counts assignments (a row of -1"
            " marks a rank whose router produced NaN)"
        )
    total = sum(omega.ravel().tolist())
    if total > MAX_ROWS:
        raise ValueError(f"the total demand {total} is not below 2^31={MAX_ROWS + 1}: plan smaller microbatches")


def _check_instances(problem: Problem) -> None:
    """Where instances are priced, no rank may have so many that 64-bit picoseconds could overflow."""
    instances = problem.mains_per_rank + problem.num_slots
    if (problem.cost.instance_ps or problem.cost.tile_rows) and instances > MAX_INSTANCES:
        raise ValueError(
            f"a rank has {instances} instances (E/R + num_slots), above the {MAX_INSTANCES} up to which instance_ps and"
            " tile_rows can be priced: set both to 0, or use more ranks"
        )


def _max_slots(num_ranks: int, num_experts: int) -> int:
    return min(num_experts - num_experts // num_ranks, MAX_REPLICAS // num_ranks)


def _checked_int(name: str, value: Any, low: int, high: int, hint: str) -> int:
    if not is_integer(value, low) or value > high:
        raise ValueError(f"{name}={value!r} must be an integer in {low}..{high}: {hint}")
    return int(value)


def _checked_key(name: str, value: str, known: Collection[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {sorted(known)}")
    return value
