"""Time of one plan inside a compiled program, beside its floor (a call that plans nothing) and the NumPy reference.

    python -m tests.bench.plan_bench [--repeats 20]

Times are medians in microseconds of whole calls from Python, so the floor holds JAX's own cost of a call.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import SKEWS, Case, tagged
from tests.generator import biased_demand
from topoep_jax import solve_plan
from topoep_jax.plan.types import Plan


def median_us(call: Callable[[], object], repeats: int) -> float:
    """The first call compiles and is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def planner_of(case: Case, planner: str, implementation: str) -> Callable[[jax.Array], Plan]:
    def plan(omega: jax.Array) -> Plan:
        return solve_plan(
            omega, case.topology, case.cost, num_slots=case.num_slots, planner=planner, implementation=implementation
        )

    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    jax.config.update("jax_platforms", "cpu")
    print(
        f"{'case':14}{'R':>5}{'E':>5}{'N':>3}{'skew':>6}{'native us':>11}{'floor us':>10}{'NumPy us':>10}{'ratio':>7}"
    )
    for case in tagged("tables"):
        if case.topology.num_ranks > 64:
            continue  # drawing its demand takes minutes
        native = jax.jit(planner_of(case, "topoep_paper", "cpu"))
        floor = jax.jit(planner_of(case, "none", "cpu"))
        reference = planner_of(case, "topoep_paper", "reference")
        for skew, drawn in biased_demand(case, SKEWS, seed=0).items():
            omega = jnp.asarray(drawn, jnp.int32)
            native_us = median_us(lambda native=native, omega=omega: native(omega), repeats)
            floor_us = median_us(lambda floor=floor, omega=omega: floor(omega), repeats)
            numpy_us = median_us(lambda reference=reference, omega=omega: reference(omega), 1)
            shape = f"{case.name:14}{omega.shape[0]:5}{omega.shape[1]:5}{case.num_slots:3}{skew:6}"
            print(f"{shape}{native_us:11.0f}{floor_us:10.0f}{numpy_us:10.0f}{numpy_us / native_us:7.1f}")


if __name__ == "__main__":
    main()
