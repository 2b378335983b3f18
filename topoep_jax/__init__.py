"""topoep_jax: topology-aware load balancing for expert-parallel mixture-of-experts layers in JAX.

Per layer and microbatch: routing -> demand -> plan -> transfer | dispatch -> experts -> combine. Start with `MoE`, or
with `moe_layer` inside your own shard_map or pmap, or with `solve_plan` alone to study planners.
"""

import contextlib

from topoep_jax import balance as balance
from topoep_jax import linen as linen
from topoep_jax.config import LayerConfig as LayerConfig
from topoep_jax.dispatch import as_triple as as_triple
from topoep_jax.experts import pack_experts as pack_experts
from topoep_jax.experts import unpack_experts as unpack_experts
from topoep_jax.metrics import MoEMetrics as MoEMetrics
from topoep_jax.metrics import collect_metrics as collect_metrics
from topoep_jax.module import MoE as MoE
from topoep_jax.moe import init_params as init_params
from topoep_jax.moe import moe_layer as moe_layer
from topoep_jax.plan import CostModel as CostModel
from topoep_jax.plan import Hardware as Hardware
from topoep_jax.plan import Plan as Plan
from topoep_jax.plan import Status as Status
from topoep_jax.plan import solve_plan as solve_plan
from topoep_jax.routing import Forced as Forced
from topoep_jax.routing import Routed as Routed
from topoep_jax.topology import Topology as Topology
from topoep_jax.traces import TraceWriter as TraceWriter
from topoep_jax.traces import open_trace as open_trace

# Registers the custom calls, which programs that were exported elsewhere may hold. Where the extension does not load,
# whatever needs it says so.
with contextlib.suppress(ImportError):
    from topoep_jax import _native as _native
