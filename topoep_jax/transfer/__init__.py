"""Replica parameters out, replica gradients home."""

from topoep_jax.transfer.api import Receive as Receive
from topoep_jax.transfer.api import pull as pull
from topoep_jax.transfer.api import push as push
from topoep_jax.transfer.api import push_slices as push_slices
from topoep_jax.transfer.api import slice_rows as slice_rows
from topoep_jax.transfer.device import device_pull as device_pull
from topoep_jax.transfer.device import device_push as device_push
