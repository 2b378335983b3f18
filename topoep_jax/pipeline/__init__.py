"""The layer on one rank, forward and backward: transfer | dispatch -> experts -> combine, in two overlapped chunks."""

from topoep_jax.pipeline.api import planned_experts as planned_experts
from topoep_jax.pipeline.layer import Inputs as Inputs
