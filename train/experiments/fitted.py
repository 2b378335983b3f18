"""Plans as steps of the paper's cluster: what Figures 12, 13a and 15 share. Everything here is modelled."""

import functools
from collections.abc import Sequence

from topoep_jax.plan.hardware import Hardware
from topoep_jax.shapes import SHAPES
from topoep_jax.simulate import Outcome, PaperLayer, Setting, Work, compare
from topoep_jax.simulate.calibration import R
from topoep_jax.simulate.compare import HELD_OUT
from topoep_jax.simulate.published import LAYERS
from train.experiments import plans, style


@functools.lru_cache(maxsize=512)
def works(model: str, planner: str, skew: float, seeds: range) -> tuple[Work, ...]:
    """One for each draw, planned with the rates that the paper's figures imply."""
    shape, hardware = SHAPES[model], Hardware.h800_fitted()
    asked = plans.problem(shape, hardware=hardware)
    found = ((plans.scored(shape, skew, seed, planner, asked), seed) for seed in seeds)
    return tuple(plans.work(shape, planner, plan, asked, hardware) for plan, _ in found)


@functools.lru_cache(maxsize=64)
def outcomes(model: str, planners: tuple[str, ...], skew: float, seeds: range) -> Sequence[Outcome]:
    """Steps of the planners, "none" among them, in all calibrations."""
    setting = Setting.of_paper(model, SHAPES[model].top_k, LAYERS[model])
    return compare(setting, {planner: works(model, planner, skew, seeds) for planner in planners})


def layer(model: str) -> PaperLayer:
    """The paper's layer, in the recommended calibration."""
    return PaperLayer(R, SHAPES[model].top_k)


def title(model: str) -> str:
    """The title of a panel, which says whose gains are not to be quoted."""
    return style.MODELS[model] + "\n(held out: not to be quoted)" * (model == HELD_OUT)
