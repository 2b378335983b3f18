"""The one list of shapes and skews that tests and benches plan: models as published, and small awkward ones."""

import dataclasses

from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.shapes import SHAPES
from topoep_jax.topology import Topology

SKEWS = (0, -0.5, -1, -2, -4)
"""Standard deviation of the bias of each expert, as a negative number: fixed for the whole run."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
      name: for test ids.
      topology: R ranks and their domains.
      num_experts: E.
      top_k: experts per token.
      hidden: width of a token.
      ffn: width of one expert.
      num_slots: N.
      tokens: tokens per rank and microbatch.
      tags: "tables" (published models; evidence tables), "large" (minutes of work), "laws" (small and awkward).
    """

    name: str
    topology: Topology
    num_experts: int
    top_k: int
    hidden: int
    ffn: int
    num_slots: int = 2
    tokens: int = 4096
    tags: frozenset[str] = frozenset()

    @property
    def cost(self) -> CostModel:
        return CostModel.from_model(self.hidden, self.ffn, Hardware.h800())

    def problem(
        self,
        *,
        cap_rows: int | None = None,
        block_rows: int = 128,
        objective: str = "bottleneck",
        effort: str = "default",
    ) -> Problem:
        sizes = (self.num_experts, self.num_slots)
        return Problem(self.topology, self.cost, *sizes, cap_rows, block_rows, objective, effort)


def _model(name, model, *tags):
    shape = SHAPES[model]
    tags = frozenset({"tables", *tags})
    return Case(name, shape.topology, shape.num_experts, shape.top_k, shape.hidden, shape.ffn, tags=tags)


def _small(name, domain_of_rank, experts, num_slots, ffn=2, tokens=64):
    topology = Topology(domain_of_rank)
    return Case(name, topology, experts, 2, 2, ffn, num_slots, tokens, tags=frozenset({"laws"}))


CASES = [
    _model("qwen3_30b", "qwen3-30b-a3b"),
    _model("glm45_air", "glm-4.5-air"),
    _model("deepseek_v2", "deepseek-v2"),
    _model("e640", "e640", "large"),
    _model("r128", "r128", "large"),
    _small("one_rank", (0,), 4, 0),
    _small("two_ranks", (0, 0), 4, 2),
    _small("two_domains_of_one", (0, 1), 6, 3),
    _small("one_domain", (0, 0, 0, 0), 8, 2),
    _small("every_rank_a_domain", (0, 1, 2), 6, 1),
    _small("two_by_two", (0, 0, 1, 1), 8, 2),
    _small("no_slots", (0, 0, 1, 1), 8, 0),
    _small("all_slots", (0, 0, 1, 1), 8, 6),
    _small("uneven", (0, 0, 0, 1), 8, 2),
    _small("interleaved", (0, 1, 0, 1, 2, 1), 12, 2),
    _small("pulls_are_dear", (0, 0, 1, 1, 2, 2, 3, 3), 16, 2, ffn=40),
    _small("eight_by_one", (0, 0, 0, 0, 0, 0, 0, 0), 8, 1, tokens=37),
]


def tagged(tag: str) -> list[Case]:
    return [case for case in CASES if tag in case.tags]


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
