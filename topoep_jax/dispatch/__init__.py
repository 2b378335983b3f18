"""From a plan to rows on the instances that execute them."""

from topoep_jax.dispatch.api import dispatch as dispatch
from topoep_jax.dispatch.api import forward as forward
from topoep_jax.dispatch.api import send_first as send_first
from topoep_jax.dispatch.api import send_order as send_order
from topoep_jax.dispatch.layout import Layout as Layout
from topoep_jax.dispatch.layout import Moves as Moves
from topoep_jax.dispatch.layout import Window as Window
from topoep_jax.dispatch.layout import build_layout as build_layout
from topoep_jax.dispatch.layout import come_home as come_home
from topoep_jax.dispatch.layout import extent_of as extent_of
from topoep_jax.dispatch.layout import instance_expert as instance_expert
from topoep_jax.dispatch.layout import joined as joined
from topoep_jax.dispatch.layout import rows_before as rows_before
from topoep_jax.dispatch.layout import window as window
from topoep_jax.dispatch.rails import Rails as Rails
from topoep_jax.dispatch.rows import add as add
from topoep_jax.dispatch.rows import pick as pick
from topoep_jax.dispatch.triple import Triple as Triple
from topoep_jax.dispatch.triple import as_triple as as_triple
from topoep_jax.dispatch.two_hop import TwoHop as TwoHop
from topoep_jax.dispatch.two_hop import build_two_hop as build_two_hop
from topoep_jax.dispatch.two_hop import gather_places as gather_places
from topoep_jax.dispatch.two_hop import hop as hop
