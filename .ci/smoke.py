"""Tries an installed wheel: what it holds, the native planner on a tiny demand, a layer on four emulated devices."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import topoep_jax
from topoep_jax import MoE, Topology
from topoep_jax.plan.api import solve_plan
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel


def package() -> None:
    """One extension, without what only tests load; sources of the CUDA library, without those that count or emulate."""
    folder = Path(topoep_jax.__file__).parent
    assert [path.name.split(".")[0] for path in folder.rglob("*.so")] == ["_xla_ffi"]
    assert importlib.util.find_spec("_topoep_tests") is None
    sources = [path for path in (folder / "xla_ffi").rglob("*") if path.is_file()]
    assert sources and not [path for path in sources if '#include "tests/' in path.read_text()]


def solve() -> None:
    """Four ranks in two domains, expert 0 is hot: the native plan equals the reference and serves every assignment."""
    omega = np.full((4, 8), 16, np.int32)
    omega[:, 0] = 2000
    topology = Topology.uniform(2, 2)
    cost = CostModel.from_model(64, 32, Hardware.h800())
    plans = [
        solve_plan(omega, topology, cost, num_slots=1, implementation=implementation)
        for implementation in ("cpu", "reference")
    ]
    for name, native, reference in zip(plans[0]._fields, *plans, strict=True):
        np.testing.assert_array_equal(native, reference, err_msg=name)
    assert int(np.asarray(plans[0].rank_load).sum()) == omega.sum()
    assert int(np.asarray(plans[0].slot_expert).max()) >= 0, "a hot expert was not replicated"


def layer() -> None:
    """One layer on a mesh of four devices: finite output of the input's shape, and replicas that balance."""
    mesh = jax.make_mesh((4,), ("ep",))
    # A receive buffer below the mean load asks for the flattest plan there is.
    tight = {"cap_factor": 0.5, "block_rows": 4}
    moe = MoE(64, 32, 8, 2, mesh=mesh, topology=Topology.uniform(2, 2), **tight, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 32, 64), jnp.float32)
    y, metrics = nnx.jit(lambda module, inputs: module(inputs))(moe, x)
    assert y.shape == x.shape and bool(jnp.isfinite(y).all())
    assert int(np.asarray(metrics.expert_load).sum()) == 4 * 32 * 2
    assert metrics.imbalance < metrics.imbalance_before and metrics.replica > 0
    print(f"imbalance {float(metrics.imbalance_before):.3f} -> {float(metrics.imbalance):.3f}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    package()
    solve()
    layer()
    print(f"smoke test passed: {topoep_jax.__file__}, jax {jax.__version__}")
