"""Time of one plan on one thread, beside the paper's planner, `eplb` in NumPy, and a call that plans nothing.

    python -m tests.bench.plan_bench [--repeats 20] [--effort fast]

Times are medians in milliseconds of whole calls from Python. The floor is what `none` takes: JAX's own cost of a call
and that of writing the plan. The ratios are of one run, so that a busy machine slows both sides down.
"""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cases import SKEWS, Case, named
from topoep_jax import solve_plan
from topoep_jax.plan.baselines import BASELINES
from topoep_jax.plan.topoep import EFFORTS
from topoep_jax.plan.types import Plan

CASES = {"qwen3_30b": 20.0, "r128": 200.0}
"""The most milliseconds that topoep may take at effort fast (issue 3, acceptance 8)."""


def rounds_ms(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians; the calls take turns. The first call of each compiles and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values) * 1e3) for name, values in times.items()}


def native(case: Case, planner: str, effort: str) -> Callable[[jax.Array], Plan]:
    """The C++ planner inside a compiled program."""
    options = {"num_slots": case.num_slots, "planner": planner, "effort": effort, "implementation": "cpu"}
    return jax.jit(lambda omega: solve_plan(omega, case.topology, case.cost, **options))


def demand(case: Case, skew: float) -> np.ndarray:
    """int64 [R, E]; every source prefers the same experts. Independent rows: top-k takes minutes to draw at R = 128."""
    rng = np.random.default_rng(0)
    p = np.exp(rng.normal(0, -skew, case.num_experts))
    return rng.multinomial(case.tokens * case.top_k, p / p.sum(), size=case.topology.num_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--effort", choices=list(EFFORTS), default="fast")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    columns = ("topoep ms", "paper ms", "eplb ms", "floor ms", "/ paper", "/ eplb", "limit ms")
    print(f"{'case':10}{'R':>5}{'E':>5}{'N':>3}{'skew':>6}" + "".join(f"{column:>11}" for column in columns))
    for name, limit in CASES.items():
        case = named(name)
        planners = {planner: native(case, planner, flags.effort) for planner in ("topoep", "topoep_paper", "none")}
        eplb = functools.partial(BASELINES["eplb"], problem=case.problem())
        for skew in SKEWS:
            drawn = demand(case, skew)
            calls = {
                planner: functools.partial(plan, jnp.asarray(drawn, jnp.int32)) for planner, plan in planners.items()
            }
            ms = rounds_ms(calls | {"eplb": functools.partial(eplb, drawn)}, flags.repeats)
            ours, paper, numpy, floor = (ms[which] for which in ("topoep", "topoep_paper", "eplb", "none"))
            values = "".join(
                f"{value:11.2f}" for value in (ours, paper, numpy, floor, ours / paper, ours / numpy, limit)
            )
            print(f"{name:10}{case.topology.num_ranks:5}{case.num_experts:5}{case.num_slots:3}{skew:6}{values}")


if __name__ == "__main__":
    main()
