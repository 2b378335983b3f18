"""The forward pass, as the paper's Figure 7: dispatch and pull, experts in two chunks, combine.

| collective         | under                                                          |
| ---                | ---                                                            |
| dispatch 1         | nothing: the first rows, mains' and of the own domain          |
| pull               | gate and up of chunk 1, which needs mains only                 |
| dispatch 2         | down of chunk 1                                                |
| dispatch 2 forward | nothing (where gateways forward)                               |
| combine 1          | all of chunk 2                                                 |
| combine 2          | nothing: the last rows, by way of gateways where there are any |

Router weights travel once for both chunks, a few bytes per row.
"""

from typing import NamedTuple

import jax

from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, swiglu
from topoep_jax.pipeline.layer import Home, Inputs, Layer
from topoep_jax.pipeline.order import phase, stage
from topoep_jax.pipeline.replicas import pull_slots


class Kept(NamedTuple):
    """What the backward pass need not make again, as far as the layer's `residuals` go. Chunk 1, chunk 2."""

    scale: jax.Array
    """f32 [C] router weight of each received row."""
    rows: tuple[jax.Array | None, jax.Array | None]
    """[C1, H] and [C2, H] received rows."""
    pre: tuple[jax.Array | None, jax.Array | None]
    """[C1, 2 I] and [C2, 2 I] products with gate and up."""


def run_forward(layer: Layer, inputs: Inputs) -> tuple[jax.Array, Kept]:
    """[T, H] results, and what is kept for the backward pass."""
    gate_up, down = layer.matrices
    tokens = layer.by_assignment(inputs.x)
    weights = inputs.weight.reshape(-1)[layer.order]
    params = inputs.params.astype(inputs.x.dtype)
    scale = layer.dispatch("weights", weights, layer.whole)
    kept_scale, rows_1, pre_1, results = scale, None, None, Home()

    def pull(mains: jax.Array) -> jax.Array | None:
        with phase("pull"):
            return pull_slots(layer.config, layer.axis_name, mains, inputs.slot_expert, inputs.x).slots

    if layer.first is None:
        slots = pull(params)
        rows_2 = layer.forward("dispatch_2", layer.send("dispatch_2", tokens, layer.last), layer.last)
        pre_2 = layer.gmm(rows_2, Instances(params, slots), layer.last, gate_up)
    else:
        split = layer.first.num_rows
        rows_1 = layer.send("dispatch_1", tokens, layer.first)

        rows, scale, tokens, params = stage("pull", rows_1, scale, tokens, params)
        slots = pull(params)
        pre_1 = layer.gmm(rows, Instances(params, None), layer.first, gate_up)

        pre, scale, slots, tokens, params = stage("dispatch_2", pre_1, scale, slots, tokens, params)
        received = layer.send("dispatch_2", tokens, layer.last)
        out = layer.gmm(swiglu(pre, scale[:split]), Instances(params, None), layer.first, down)
        scale = scale[split:]

        if layer.two is not None:
            received, out = stage("dispatch_2_forward", received, out)
        rows_2 = layer.forward("dispatch_2", received, layer.last)

        results = layer.bring("combine_1", out, results, layer.first)
        pre_2 = layer.gmm(rows_2, Instances(params, slots), layer.last, gate_up)
    held = Instances(params, slots)
    out = layer.gmm(swiglu(pre_2, scale), held, layer.last, down)

    results = layer.gather("combine_2", out, results, layer.last)
    results = layer.bring("combine_2", out, results, layer.last)

    def serve(win: Window, results: Home) -> Home:
        rows = layer.forward("overflow", layer.send("overflow", tokens, win), win)
        scale = layer.dispatch("weights", weights, win)
        inner = swiglu(layer.gmm(rows, held, win, gate_up), scale)
        out = layer.gmm(inner, held, win, down)
        return layer.bring("overflow_home", out, layer.gather("overflow_home", out, results, win), win)

    results = layer.overflow_passes(serve, results)
    y = layer.sum_home("combine_rails", layer.sum_gathered(results))
    keep = layer.config.residuals
    nothing = (None, None)
    return y, Kept(
        kept_scale, (rows_1, rows_2) if keep != "none" else nothing, (pre_1, pre_2) if keep == "all" else nothing
    )
