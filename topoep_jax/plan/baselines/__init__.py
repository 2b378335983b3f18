"""Every rival planner behind the signature of our own; each file states its source, its steps and its departures."""

from topoep_jax.plan.problem import Planner

BASELINES: dict[str, Planner] = {}
"""Name -> planner: NumPy, on the host, deterministic; written to be compared with, not to be fast."""
