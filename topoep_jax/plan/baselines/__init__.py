"""Every rival planner behind the signature of our own; each file states its source, its steps and its departures."""

from topoep_jax.plan.baselines.echo import echo
from topoep_jax.plan.baselines.eplb import eplb
from topoep_jax.plan.baselines.eplb_fixed_main import eplb_fixed_main
from topoep_jax.plan.baselines.fastermoe import fastermoe
from topoep_jax.plan.baselines.flexmoe import flexmoe
from topoep_jax.plan.baselines.llep import llep
from topoep_jax.plan.baselines.lplb import lplb
from topoep_jax.plan.baselines.metro import metro
from topoep_jax.plan.baselines.moonep import moonep
from topoep_jax.plan.baselines.placemoe import placemoe
from topoep_jax.plan.baselines.taot import taot
from topoep_jax.plan.baselines.ultraep import ultraep
from topoep_jax.plan.problem import Planner

BASELINES: dict[str, Planner] = {
    "eplb": eplb,
    "eplb_fixed_main": eplb_fixed_main,
    "fastermoe": fastermoe,
    "flexmoe": flexmoe,
    "ultraep": ultraep,
    "moonep": moonep,
    "llep": llep,
    "lplb": lplb,
    "echo": echo,
    "taot": taot,
    "placemoe": placemoe,
    "metro": metro,
}
"""Name -> planner: NumPy, on the host, deterministic; written to be compared with, not to be fast."""
