"""Time of one plan inside a compiled program: our planner beside the paper's, a rival, and a call that plans nothing.

    python -m tests.bench.plan_bench [--repeats 20]

Times are medians in microseconds of whole calls from Python, on one thread; the floor (planner "none") is JAX's own
cost of a call. `eplb` is NumPy, the others are C++.
"""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import SKEWS, Case, tagged
from tests.generator import biased_demand
from topoep_jax import solve_plan
from topoep_jax.plan.reference import PLANNERS

COLUMNS = {
    "floor": {"planner": "none"},
    "paper": {"planner": "topoep_paper"},
    "fast": {"planner": "topoep", "effort": "fast"},
    "default": {"planner": "topoep", "effort": "default"},
}


def median_us(call: Callable[[], object], repeats: int) -> float:
    """The first call compiles and is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def times_us(case: Case, drawn: np.ndarray, compiled: dict[str, Callable], repeats: int) -> dict[str, float]:
    omega = jnp.asarray(drawn, jnp.int32)
    us = {
        column: median_us(functools.partial(run, omega), 3 if column == "default" else repeats)
        for column, run in compiled.items()
    }
    us["eplb"] = median_us(lambda: PLANNERS["eplb"](drawn, case.problem()).quota, 3)
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    jax.config.update("jax_platforms", "cpu")
    names = [*COLUMNS, "eplb"]
    heads = "".join(f"{name + ' us':>12}" for name in names)
    print(f"{'case':14}{'R':>5}{'E':>5}{'N':>3}{'skew':>6}{heads}{'fast/paper':>12}{'fast/eplb':>11}")
    for case in tagged("tables"):
        solve = functools.partial(solve_plan, topology=case.topology, cost=case.cost, num_slots=case.num_slots)
        compiled = {column: jax.jit(functools.partial(solve, **options)) for column, options in COLUMNS.items()}
        for skew, drawn in biased_demand(case, SKEWS, seed=0).items():
            us = times_us(case, drawn, compiled, repeats)
            shape = f"{case.name:14}{case.topology.num_ranks:5}{case.num_experts:5}{case.num_slots:3}{skew:6}"
            ratios = f"{us['fast'] / us['paper']:12.1f}{us['fast'] / us['eplb']:11.2f}"
            print(shape + "".join(f"{us[name]:12.0f}" for name in names) + ratios, flush=True)


if __name__ == "__main__":
    main()
