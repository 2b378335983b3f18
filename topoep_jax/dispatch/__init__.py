"""From a plan to rows on the instances that execute them."""

from topoep_jax.dispatch.api import dispatch as dispatch
from topoep_jax.dispatch.api import send_order as send_order
from topoep_jax.dispatch.layout import Layout as Layout
from topoep_jax.dispatch.layout import Window as Window
from topoep_jax.dispatch.layout import build_layout as build_layout
from topoep_jax.dispatch.layout import extent_of as extent_of
from topoep_jax.dispatch.layout import instance_expert as instance_expert
from topoep_jax.dispatch.layout import window as window
from topoep_jax.dispatch.triple import Triple as Triple
from topoep_jax.dispatch.triple import as_triple as as_triple
