"""How the tensors of a released checkpoint make the parameters of a model: a table that is read in both directions.

A `Weight` says of one parameter which tensors of the checkpoint it is made of, and its layout says where each of them
lies in it, as views of the parameter's memory: assigning to the views imports, reading them exports. Each model file
ends with its table and with what checkpoints hold that the model does not, as regular expressions of whole names:

    def weights(config: Qwen3MoEConfig) -> list[Weight]:
        return decoder(config, grouped_query(config))

    def ignored(config: Qwen3MoEConfig) -> tuple[str, ...]:
        return (ROTARY,)

    >>> import numpy as np
    >>> kernel = np.zeros((2, 6))  # [inputs, 2 * outputs]
    >>> gate, up = side_by_side(kernel)
    >>> gate.shape  # As in the checkpoint: outputs first.
    (3, 2)
    >>> gate[...], up[...] = 1, 2
    >>> kernel[0]
    array([1., 1., 1., 2., 2., 2.])
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

ROTARY = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""For `ignored`: rotary frequencies, which old checkpoints hold and the config says."""

Layout = Callable[[np.ndarray], tuple[np.ndarray, ...]]
"""From one layer's parameter (of experts: one expert's) to a view of it for each tensor, in that tensor's shape."""


class Weight(NamedTuple):
    """One parameter and the tensors it is made of."""

    path: str
    """Of the parameter, as in "layers/attention/query/kernel". Below "layers" and "dense_layers" parameters are stacked
    on a leading axis; the first of "layers" is the checkpoint's layer `config.dense_layers`."""
    names: tuple[str, ...]
    """Of the tensors. {layer} is the number of the layer in the checkpoint, {expert} that of the expert: a name with it
    makes row by row a parameter [num_experts, ...]."""
    layout: Layout
    """Where each of `names` lies in the parameter: `same`, `transposed`, `side_by_side` or `packed_expert(hidden)`."""
    fused: tuple[tuple[str, int], ...] = ()
    """Of experts: tensors [num_experts, ..] that a checkpoint may have in place of `names`, and of how many of them, in
    their order: expert by expert these lie in it one below the other."""
    wide: bool = False
    """Whether an export in a narrower dtype keeps this parameter in its own."""


def same(parameter: np.ndarray) -> tuple[np.ndarray, ...]:
    """The tensor is the parameter: vectors, and the embedding table."""
    return (parameter,)


def transposed(parameter: np.ndarray) -> tuple[np.ndarray, ...]:
    """Kernel [inputs, outputs] from a tensor [outputs, inputs]."""
    return (parameter.T,)


def side_by_side(parameter: np.ndarray) -> tuple[np.ndarray, ...]:
    """Kernel [inputs, 2 * outputs] from two tensors [outputs, inputs], as gate and up of shared experts."""
    first, second = np.split(parameter, 2, axis=1)
    return first.T, second.T


def packed_expert(hidden: int) -> Layout:
    """Row [3 * hidden * ffn] of `topoep_jax.MoE` from gate [ffn, hidden], up [ffn, hidden] and down [hidden, ffn]."""

    def views(parameter: np.ndarray) -> tuple[np.ndarray, ...]:
        gate_up, down = parameter[: 2 * parameter.size // 3], parameter[2 * parameter.size // 3 :]
        return (*side_by_side(gate_up.reshape(hidden, -1)), *transposed(down.reshape(-1, hidden)))

    return views


def projection(path: str, name: str, *, bias: bool = False) -> list[Weight]:
    """A `models.layers.Projection` from a linear map of the checkpoint, names without their last part."""
    kernel = Weight(f"{path}/kernel", (f"{name}.weight",), transposed)
    return [kernel, Weight(f"{path}/bias", (f"{name}.bias",), same)] if bias else [kernel]


def norm(path: str, name: str) -> list[Weight]:
    """A `models.layers.RMSNorm`, names without their last part."""
    return [Weight(f"{path}/scale", (f"{name}.weight",), same)]


class AttentionShapes(Protocol):
    """What `grouped_query` asks of a model's config."""

    @property
    def qk_norm(self) -> bool: ...

    @property
    def qkv_bias(self) -> bool: ...


def grouped_query(config: AttentionShapes) -> Callable[[str, str], list[Weight]]:
    """The attention of `models.attention.GroupedQueryAttention`, for `decoder`."""

    def table(path: str, name: str) -> list[Weight]:
        weights = projection(f"{path}/out", f"{name}.o_proj")
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            weights += projection(f"{path}/{ours}", f"{name}.{theirs}_proj", bias=config.qkv_bias)
        if config.qk_norm:
            weights += norm(f"{path}/query_norm", f"{name}.q_norm") + norm(f"{path}/key_norm", f"{name}.k_norm")
        return weights

    return table


class DecoderShapes(Protocol):
    """What `decoder` asks of a model's config."""

    @property
    def hidden(self) -> int: ...

    @property
    def dense_layers(self) -> int: ...

    @property
    def shared_ffn(self) -> int: ...

    @property
    def tied_embeddings(self) -> bool: ...


def decoder(config: DecoderShapes, attention: Callable[[str, str], Sequence[Weight]]) -> list[Weight]:
    """What all the decoders have in common.

    Args:
      config: the shapes.
      attention: from path and name of an attention block ("layers/attention", "model.layers.{layer}.self_attn") to
        what is in it.

    Returns:
      The whole table, but for additions to the router.
    """
    table = [Weight("embedding/table", ("model.embed_tokens.weight",), same), *norm("norm", "model.norm")]
    if not config.tied_embeddings:
        table += projection("head", "lm_head")
    layer = "model.layers.{layer}"
    if config.dense_layers:
        table += norm("dense_layers/attention_norm", f"{layer}.input_layernorm")
        table += attention("dense_layers/attention", f"{layer}.self_attn")
        table += norm("dense_layers/ffn_norm", f"{layer}.post_attention_layernorm")
        for part in ("gate", "up", "down"):
            table += projection(f"dense_layers/ffn/{part}", f"{layer}.mlp.{part}_proj")
    table += norm("layers/attention_norm", f"{layer}.input_layernorm")
    table += attention("layers/attention", f"{layer}.self_attn")
    table += norm("layers/moe_norm", f"{layer}.post_attention_layernorm")
    table.append(Weight("layers/moe/router", (f"{layer}.mlp.gate.weight",), transposed))
    expert = tuple(f"{layer}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down"))
    fused = (f"{layer}.mlp.experts.gate_up_proj", 2), (f"{layer}.mlp.experts.down_proj", 1)
    table.append(Weight("layers/moe/w", expert, packed_expert(config.hidden), fused))
    if config.shared_ffn:
        gate, up, down = (f"{layer}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down"))
        table.append(Weight("layers/moe/shared_gate_up", (gate, up), side_by_side))
        table.append(Weight("layers/moe/shared_down", (down,), transposed))
    return table
