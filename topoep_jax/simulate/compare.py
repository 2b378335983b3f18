"""Planners side by side under one set of constants, and how the differences change under others."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from topoep_jax.simulate.calibration import CALIBRATIONS, TOKENS, R, base_ms
from topoep_jax.simulate.paper import PaperLayer
from topoep_jax.simulate.pipeline import LayerRates, PipelinedLayer
from topoep_jax.simulate.published import LAYERS
from topoep_jax.simulate.step import Design, Simulation, Step, simulate
from topoep_jax.simulate.timeline import Share
from topoep_jax.simulate.verdict import Verdict, gain_percent, judge, variations
from topoep_jax.simulate.work import Work

HELD_OUT = "deepseek-v2"
"""The model whose gains the paper's calibration misses by 15 percentage points: none of them is to be quoted."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a step is timed with."""

    design: Design
    step: Step
    overlap: bool = True

    def run(self, works: Sequence[Work]) -> "Steps":
        """Steps in which every work counts alike.

        Each step has works of its own as long as they fill one. The rest are too few and begin again within a step:
        which of them come once more than others depends on the first, so as many take turns as it needs.
        """
        size = self.step.layers * self.step.microbatches
        steps, weights = [], []
        for first in range(0, len(works), size):
            group = works[first : first + size]
            stride = math.gcd(size, len(group))
            for begin in range(0, len(group), stride):
                turned = [*group[begin:], *group[:begin]]
                steps.append(simulate(self.design, turned, self.step, overlap=self.overlap))
                weights.append(stride)
        return Steps(steps, weights)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Simulated steps of one planner.

    Attributes:
      each: the steps.
      weights: how many works each stands for, so that in a weighted mean all works count alike.
    """

    each: Sequence[Simulation]
    weights: Sequence[int]

    def mean(self, values: Iterable[float]) -> float:
        """The mean of one value of each step."""
        return statistics.fmean(values, self.weights)

    @property
    def step_ms(self) -> float:
        """A whole step."""
        return self.mean(step.step_ms for step in self.each)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The constants of a comparison, and those that it is repeated with.

    Attributes:
      title: what they are, in words.
      constants: the recommended ones.
      others: by name.
      quotable: whether the model may be asked for a gain at all.
    """

    title: str
    constants: Constants
    others: Mapping[str, Constants]
    quotable: bool = True

    @classmethod
    def of_library(cls, rates: LayerRates, step: Step, top_k: int, name: str) -> "Setting":
        """This library's layer at a user's rates, which `name` tells of; varied one by one."""
        return cls(
            f"this library's layer at the rates of {name}; assumed: {rates.launch_us} us a collective,"
            f" {rates.plan_us} us a plan",
            Constants(PipelinedLayer(rates), step),
            {
                other: Constants(PipelinedLayer(changed), step, overlap)
                for other, (changed, overlap) in variations(rates, top_k).items()
            },
        )

    @classmethod
    def of_paper(cls, model: str, top_k: int, layers: int, dense_ms: float | None = None) -> "Setting":
        """The paper's cluster, in each of its calibrations.

        Args:
          model: key of `SHAPES`, or any name where `dense_ms` is given.
          top_k: experts per token.
          layers: MoE layers.
          dense_ms: of a step outside of them; None takes what the paper's Megatron-LM leaves of this model.

        Raises:
          ValueError: the paper did not train this model, and `dense_ms` is None.
        """
        if dense_ms is None and model not in LAYERS:
            raise ValueError(
                f"the paper has no step of {model}, so what is no MoE layer of it is unknown: give dense_ms, or one of"
                f" {', '.join(LAYERS)}"
            )
        constants = {
            calibration.name: Constants(
                PaperLayer(calibration, top_k),
                Step(layers, dense_ms=base_ms(model, calibration) if dense_ms is None else dense_ms),
            )
            for calibration in CALIBRATIONS
        }
        recommended = constants.pop(R.name)
        return cls(
            f"the paper's cluster (32 H800), fitted to its figures with {TOKENS:,} tokens; calibration {R.name}",
            recommended,
            {f"calibration {name}": other for name, other in constants.items()},
            quotable=model != HELD_OUT,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One planner in a comparison; times are means over its works.

    Attributes:
      planner: its name.
      steps: of its works.
      verdict: on its throughput against no balancing.
      gains: percent of throughput, by name of other constants.
    """

    planner: str
    steps: Steps
    verdict: Verdict
    gains: Mapping[str, float]

    @property
    def layer_ms(self) -> float:
        """One layer and microbatch, forward and backward."""
        return self.steps.mean(step.layer_ms for step in self.steps.each)

    @property
    def step_ms(self) -> float:
        """A whole step."""
        return self.steps.step_ms

    def tokens_per_second(self, tokens: float) -> float:
        """Throughput of all ranks, each with so many tokens in a microbatch."""
        ranks, step = self.steps.each[0].timeline.program.num_ranks, self.steps.each[0].step
        return 1e3 * ranks * tokens * step.microbatches / max(self.step_ms, 1e-9)

    def layer_shares(self) -> dict[str, Share]:
        """What a layer was spent on, on the busiest rank of each step."""
        each = [step.layer_shares(step.timeline.busiest_rank()) for step in self.steps.each]
        return {
            phase: Share(*(round(self.steps.mean(ps)) for ps in zip(*(shares[phase] for shares in each), strict=True)))
            for phase in each[0]
        }


def compare(setting: Setting, works: Mapping[str, Sequence[Work]]) -> list[Outcome]:
    """Times every planner's works; `works` has those of "none" too, all of the same demand."""
    steps = {planner: setting.constants.run(own) for planner, own in works.items()}
    step_ms = {
        name: {planner: constants.run(own).step_ms for planner, own in works.items()}
        for name, constants in setting.others.items()
    }
    outcomes = []
    for planner, own in steps.items():
        gains = {name: gain_percent(each["none"], each[planner]) for name, each in step_ms.items()}
        verdict = judge(gain_percent(steps["none"].step_ms, own.step_ms), list(gains.values()))
        outcomes.append(Outcome(planner, own, verdict, gains))
    return outcomes
