"""Routing that was recorded: written by `TraceWriter`, read by `open_trace`, told by `skew_of` in a few numbers.

A trace file is what NumPy reads as .npz, with a head and one array for each microbatch (`layout.py`), so that it is
written and read one microbatch at a time. Files that users save themselves, with one array, are read too.
"""

from topoep_jax.traces.info import MAX_EXPERTS as MAX_EXPERTS
from topoep_jax.traces.info import TraceInfo as TraceInfo
from topoep_jax.traces.reader import Trace as Trace
from topoep_jax.traces.reader import open_trace as open_trace
from topoep_jax.traces.reader import read_trace as read_trace
from topoep_jax.traces.skew import Skew as Skew
from topoep_jax.traces.skew import skew_of as skew_of
from topoep_jax.traces.writer import TraceWriter as TraceWriter
