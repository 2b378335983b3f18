"""Replica parameters out, replica gradients home."""

from topoep_jax.transfer.api import pull as pull
from topoep_jax.transfer.api import push as push
