"""Ways to move rows between ranks: lax collectives, and groups of ranks whose kernels reach each other's memory."""

from topoep_jax.transport.agree import first_reason as first_reason
from topoep_jax.transport.agree import meet as meet
from topoep_jax.transport.check import Fault as Fault
from topoep_jax.transport.check import checking as checking
from topoep_jax.transport.check import exchange_faults as exchange_faults
from topoep_jax.transport.check import named as named
from topoep_jax.transport.device import Failure as Failure
from topoep_jax.transport.device import Group as Group
from topoep_jax.transport.device import failure as failure
from topoep_jax.transport.device import group as group
from topoep_jax.transport.device import init as init
from topoep_jax.transport.device import shutdown as shutdown
from topoep_jax.transport.sizes import GroupSizes as GroupSizes
from topoep_jax.transport.sizes import LayerSizes as LayerSizes
from topoep_jax.transport.sizes import group_sizes as group_sizes
from topoep_jax.transport.xla import Segments as Segments
from topoep_jax.transport.xla import exchange as exchange
from topoep_jax.transport.xla_options import XlaOptions as XlaOptions
from topoep_jax.transport.xla_options import xla_options as xla_options
