"""Planner `topoep` in NumPy: a search over cheap candidates that are scored exactly."""

from topoep_jax.plan.topoep.depth import dependent_steps as dependent_steps
from topoep_jax.plan.topoep.depth import dependent_steps_of_paper as dependent_steps_of_paper
from topoep_jax.plan.topoep.effort import EFFORTS as EFFORTS
from topoep_jax.plan.topoep.effort import Candidate as Candidate
from topoep_jax.plan.topoep.effort import Effort as Effort
from topoep_jax.plan.topoep.effort import Kind as Kind
from topoep_jax.plan.topoep.effort import candidates as candidates
from topoep_jax.plan.topoep.search import topoep as topoep
