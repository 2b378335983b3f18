"""What a run carries from step to step, and what a step measured."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from topoep_jax import MoEMetrics, Status
from topoep_jax.metrics import merge_over


class TrainState(NamedTuple):
    """What a checkpoint holds. All arrays are logical and global; replicas never enter."""

    step: jax.Array
    """int32 []: steps done."""
    params: Any
    """Nested dict of parameters."""
    opt_state: Any
    """Moments in f32, and with parameters in bfloat16 their f32 masters."""


class StepMetrics(NamedTuple):
    """What one step measured, over all its microbatches."""

    loss: jax.Array
    """f32 []: mean cross-entropy in nats per token, before the update."""
    balance: jax.Array
    """f32 []: mean of the auxiliary losses that were added to it, times their coefficients; 0 without any."""
    grad_norm: jax.Array
    """f32 []: global norm of the gradient before clipping."""
    moe: MoEMetrics
    """Each field [num_moe_layers, ...]."""
    expert_idx: Any = None
    """int16 [microbatches, num_moe_layers, B, S, K], what the routers chose; None where it is not recorded."""


class Measured(NamedTuple):
    """What a microbatch measured in a part of the model."""

    loss: jax.Array
    """f32 []: mean cross-entropy; 0 for a part without the head."""
    balance: jax.Array
    """f32 []: auxiliary losses of the part's layers."""
    moe: MoEMetrics
    """Each field [moe layers of the part, ...]."""
    expert_idx: Any = None
    """int16 [moe layers of the part, B, S, K]; None where it is not recorded."""


def merge(measured: Measured) -> Measured:
    """One set of figures for microbatches, stacked on a leading axis: as `merge_over` has it, and means of losses.

    What the routers chose keeps the axis.
    """
    over = "microbatch"
    # An axis with a name, as that of a mesh: what worst, mean and sum are for is said once, by the library.
    moe = jax.vmap(lambda m: merge_over(m, (over,)), axis_name=over, out_axes=None)(measured.moe)
    return Measured(measured.loss.mean(), measured.balance.mean(), moe, measured.expert_idx)


def is_planned(moe: MoEMetrics) -> jax.Array:
    """Whether the demand of every layer was planned, bool []."""
    return jnp.all((moe.status & Status.BAD_INPUT.value) == 0)


def is_sound(metrics: StepMetrics) -> jax.Array:
    """Whether loss and gradient are finite and every layer's demand was planned, bool []."""
    return jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm) & is_planned(metrics.moe)


def overflowed(metrics: StepMetrics) -> jax.Array:
    """Whether a layer had more rows than its receive buffers, bool []; every rank says the same."""
    return jnp.any(metrics.moe.passes > 1)
