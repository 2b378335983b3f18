"""The planner for GPUs as far as a machine without one can tell: one program text for both platforms, the choice of an
implementation, and what the program holds ready. tests/aot/plan_test.py compiles with the real handler.
"""

import functools
import re
import subprocess
import sys

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tests.plan.transforms_test import COST, TOPOLOGY, assert_plan, demand, expected
from topoep_jax import _cuda
from topoep_jax.plan import api, solve_plan

solve = functools.partial(solve_plan, topology=TOPOLOGY, cost=COST, num_slots=2, planner="topoep_paper")


@pytest.fixture
def loads(monkeypatch):
    """Pretends that the CUDA library is there; lists the calls that asked for it."""
    calls = []
    monkeypatch.setattr(_cuda, "load", lambda: calls.append("load"))
    return calls


def text(platform, **options):
    """The StableHLO that `solve` gives on a platform."""
    function = jax.jit(functools.partial(solve, **options))
    checks = [jax.export.DisabledSafetyCheck.custom_call("topoep_plan")]
    exported = jax.export.export(function, platforms=[platform], disabled_checks=checks)(demand())
    return re.search(r"stablehlo.custom_call @topoep_plan.*", exported.mlir_module())[0]


def test_one_text_serves_both_platforms(loads):
    assert text("cuda", implementation="cuda") == text("cpu", implementation="cuda")
    assert text("cuda", implementation="cuda") == text("cuda", implementation="cpu")
    assert loads == ["load"] * 3


def test_a_program_for_gpus_also_runs_here(loads):
    assert_plan(jax.jit(functools.partial(solve, implementation="cuda"))(demand()), expected())
    assert loads == ["load"]


def test_a_gpu_takes_cuda(loads, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert api._default_implementation("topoep") == "cuda"
    assert api._default_implementation("llep") == "reference"
    assert loads == ["load"]


def refuse():
    raise ImportError("topoep_jax's CUDA library: no nvcc: install some")


def test_without_a_compiler_every_reason_is_told(monkeypatch):
    monkeypatch.setattr(_cuda, "load", refuse)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ExceptionGroup, match="no planner implementation fits the backend 'gpu'") as failure:
        solve(demand())
    reasons = [str(reason) for reason in failure.value.exceptions]
    assert [re.split(r"[:']", reason)[0] for reason in reasons] == ["cpu", "topoep_jax", "reference"]
    assert "no nvcc" in reasons[1]
    with pytest.raises(ImportError, match="no nvcc"):
        solve(demand(), implementation="cuda")


def test_baselines_have_no_kernels(loads):
    with pytest.raises(ValueError, match="implementation='cuda', but planner='llep' is a baseline in NumPy alone"):
        solve(demand(), planner="llep", implementation="cuda")


def equations(jaxpr):
    """Those of programs inside of it, too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from equations(inner.jaxpr)


def working_memory(**options):
    """What a plan for 32 ranks and 128 experts holds ready."""
    omega = jax.ShapeDtypeStruct((32, 128), jnp.int32)
    topology = type(TOPOLOGY).uniform(4, 8)
    jaxpr = jax.make_jaxpr(lambda o: solve_plan(o, topology, COST, num_slots=2, **options))(omega)
    [call] = [equation for equation in equations(jaxpr.jaxpr) if equation.primitive.name == "ffi_call"]
    return call.outvars[-1].aval


@pytest.mark.parametrize(
    ("planner", "effort", "most"), [("none", "fast", 1), ("topoep", "fast", 5), ("topoep", "full", 30)]
)
def test_working_memory_is_a_result_and_bounded(planner, effort, most):
    """XLA places it; megabytes at 32 ranks and 128 experts. Where all entries do not fit, fewer run side by side."""
    workspace = working_memory(planner=planner, effort=effort)
    assert workspace.dtype == np.uint8
    assert 0 < workspace.size <= most << 20


EAGER_BATCH = """
import functools, resource
import jax, jax.numpy as jnp
from topoep_jax import CostModel, Topology, solve_plan

cost = CostModel(expert_bytes=16, token_bytes=4, row_ps=200, inter_fs_per_byte=20000, intra_fs_per_byte=5000)
solve = functools.partial(solve_plan, topology=Topology.uniform(4, 8), cost=cost, num_slots=2, effort="fast")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
omega = jnp.ones((64, 32, 128), jnp.int32)
jax.block_until_ready(jax.vmap(solve)(omega[:2]))
before = peak()
jax.block_until_ready(jax.vmap(solve)(omega))
print(peak() - before)
"""


def test_an_eager_batch_keeps_no_working_memory():
    command = [sys.executable, "-c", EAGER_BATCH]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    stacked = 64 * working_memory(effort="fast").size
    assert stacked > 100 << 20, "else this shows nothing"
    assert int(told) < stacked // 2
