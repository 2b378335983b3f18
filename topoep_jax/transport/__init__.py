"""Ways to move rows between ranks. One so far: lax collectives."""

from topoep_jax.transport.xla import Segments as Segments
from topoep_jax.transport.xla import exchange as exchange
