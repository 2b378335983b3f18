"""Planning: which experts get temporary replicas on which ranks, and who executes how many assignments."""

from topoep_jax.plan.api import solve_plan as solve_plan
from topoep_jax.plan.cost import picoseconds as picoseconds
from topoep_jax.plan.hardware import Hardware as Hardware
from topoep_jax.plan.problem import CostModel as CostModel
from topoep_jax.plan.types import Plan as Plan
from topoep_jax.plan.types import Status as Status
