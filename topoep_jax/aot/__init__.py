"""Programs for GPUs, compiled ahead of time on any machine: what they need, and in which order they do what.

`python -m topoep_jax.aot` is the tool; the functions are what it is made of, for tests and for tools of yours:

    mesh = TARGETS["h200"].mesh(4, 8)
    layer = compile_layer(config, mesh, tokens=4096)
    [c.phase for c in collectives(layer.program) if not c.overlapped]
"""

from topoep_jax.aot.compiler import Memory as Memory
from topoep_jax.aot.compiler import Program as Program
from topoep_jax.aot.compiler import compile_program as compile_program
from topoep_jax.aot.compiler import prepare as prepare
from topoep_jax.aot.compiler import struct as struct
from topoep_jax.aot.host import HostRead as HostRead
from topoep_jax.aot.host import host_reads as host_reads
from topoep_jax.aot.layer import LayerProgram as LayerProgram
from topoep_jax.aot.layer import compile_layer as compile_layer
from topoep_jax.aot.layer import worst_case as worst_case
from topoep_jax.aot.report import Report as Report
from topoep_jax.aot.schedule import Collective as Collective
from topoep_jax.aot.schedule import collectives as collectives
from topoep_jax.aot.targets import TARGETS as TARGETS
from topoep_jax.aot.targets import Target as Target
from topoep_jax.aot.timeline import timeline as timeline
