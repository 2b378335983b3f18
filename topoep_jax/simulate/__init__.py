"""A training step in time, from plans and rates: what balancing would bring, modelled before anything is installed.

Nothing here is measured. Two designs are timed by the same machine of two streams per rank: this library's layer
(`pipeline`), with rates that a user can measure, and the paper's (`paper`), with constants that were fitted to the
paper's figures and fit no other cluster.
"""

from topoep_jax.simulate.calibration import CALIBRATIONS as CALIBRATIONS
from topoep_jax.simulate.calibration import Calibration as Calibration
from topoep_jax.simulate.calibration import base_ms as base_ms
from topoep_jax.simulate.compare import Outcome as Outcome
from topoep_jax.simulate.compare import Setting as Setting
from topoep_jax.simulate.compare import compare as compare
from topoep_jax.simulate.paper import PaperLayer as PaperLayer
from topoep_jax.simulate.perfetto import chrome_trace as chrome_trace
from topoep_jax.simulate.pipeline import LayerRates as LayerRates
from topoep_jax.simulate.pipeline import PipelinedLayer as PipelinedLayer
from topoep_jax.simulate.step import Simulation as Simulation
from topoep_jax.simulate.step import Step as Step
from topoep_jax.simulate.step import simulate as simulate
from topoep_jax.simulate.timeline import Event as Event
from topoep_jax.simulate.timeline import Timeline as Timeline
from topoep_jax.simulate.verdict import Verdict as Verdict
from topoep_jax.simulate.verdict import gain_percent as gain_percent
from topoep_jax.simulate.verdict import judge as judge
from topoep_jax.simulate.verdict import variations as variations
from topoep_jax.simulate.work import Work as Work
from topoep_jax.simulate.work import work_of as work_of
from topoep_jax.simulate.work import work_of_planner as work_of_planner
