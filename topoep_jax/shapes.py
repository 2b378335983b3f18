"""Dimensions of the models and clusters that are studied by name, so that no command imports a model's code."""

import dataclasses
from typing import Any

from topoep_jax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Shape:
    """One MoE layer of a model on the cluster it is studied on.

    Attributes:
      hidden: width H of a token.
      ffn: inner width I of one expert.
      num_experts: E.
      top_k: K, experts per token.
      topology: R ranks and their domains.
      router: key of `topoep_jax.routing.ROUTERS`.
      router_options: what that router takes besides logits and K, but no correction bias: it is trained, not published
        as a dimension.
      tokens: tokens per rank and microbatch.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    topology: Topology
    router: str = "qwen3"
    router_options: tuple[tuple[str, Any], ...] = ()
    tokens: int = 4096


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, Topology.uniform(4, 8)),
    "glm-4.5-air": Shape(4096, 1408, 128, 8, Topology.uniform(2, 8), router="glm4"),
    "deepseek-v2": Shape(
        5120,
        1536,
        160,
        6,
        Topology.uniform(2, 8),
        router="deepseek_v2",
        router_options=(("num_groups", 8), ("scale", 16.0), ("topk_group", 3)),
    ),
    "e640": Shape(2048, 768, 640, 8, Topology.uniform(4, 8)),
    "r128": Shape(2048, 768, 640, 8, Topology.uniform(16, 8)),
}
"""Three published models, and Qwen3's experts in two synthetic layers that are wider than any of them."""


def recorded_name(name: str | None, num_experts: int, hidden: int | None, ffn: int | None) -> str | None:
    """What to call the model that a trace was recorded from: the key of `SHAPES` if it is one of these.

    Args:
      name: as recorded: that of the release, of its folder, or of the trainer, in which "-paper" has fewer layers.
      num_experts: E.
      hidden: H, if the trace has it.
      ffn: I, if the trace has it.
    """
    key = (name or "").lower().removesuffix("-paper")
    if key not in SHAPES:
        return name
    shape = SHAPES[key]
    same = num_experts == shape.num_experts and hidden in (None, shape.hidden) and ffn in (None, shape.ffn)
    return key if same else f"{name} with other sizes"
