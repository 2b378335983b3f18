"""Where the native extension is missing, the library imports, and all that is NumPy or traced alone works."""

import subprocess
import sys

import pytest

# The import system's own way to hide a module.
HIDDEN = """
import sys
sys.modules["topoep_jax._xla_ffi"] = None
import topoep_jax.plan.reference
import numpy as np
from topoep_jax import CostModel, Hardware, Topology, solve_plan, transport

omega = np.full((4, 8), 500, np.int32)
omega[:, 0] = 4000
problem = omega, Topology.uniform(2, 2), CostModel.from_model(64, 32, Hardware.h800())
plans = [
    solve_plan(*problem, num_slots=1, planner=planner, implementation="reference")
    for planner in ("none", "topoep_paper", "topoep")
]
plans.append(solve_plan(*problem, num_slots=1, planner="llep"))
assert plans[0].rank_load[0] > plans[2].rank_load[0], plans
assert all(plan.rank_load.sum() == omega.sum() for plan in plans), plans
for needs_it in (
    lambda: solve_plan(*problem, num_slots=1, implementation="cpu"),
    lambda: transport.group_sizes([transport.LayerSizes(2, 1, 64)], problem[1]),
):
    try:
        needs_it()
    except ImportError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def hidden():
    return subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=300)


def test_the_library_imports_and_the_reference_plans(hidden):
    assert hidden.returncode == 0, hidden.stderr


def test_what_needs_it_says_how_to_build_it(hidden):
    said = hidden.stdout.splitlines()
    assert len(said) == 2
    assert all("topoep_jax._xla_ffi does not load" in line and "`make setup`" in line for line in said)
