"""The constants of calibrations A and C: what a fit with a stated objective finds.

Squares of the logarithms of modelled over printed values: throughputs in units of 2 %, Figure 15's experts and
exchanges in units of 10 %. R's constants come from elsewhere, and the same fit must find some that are near.
"""

import dataclasses

import numpy as np
import pytest

from topoep_jax.simulate.calibration import CALIBRATIONS
from topoep_jax.simulate.fit import FITTED_MODELS, forced_demand, planned_works, points_of_paper
from topoep_jax.simulate.published import LAYERS

FREE = ("gflops", "nvlink_gbs", "phase_ms", "hot_share")
R, A, C = CALIBRATIONS


@pytest.fixture(scope="module")
def uniform():
    return {model: planned_works(model, "topoep_paper", forced_demand(model, range(3), [0.0])[0.0]) for model in LAYERS}


def residuals(calibration, uniform, models):
    found = []
    for point in points_of_paper(calibration, uniform):
        fitted = point.planner in ("none", "topoep_paper") and point.model in models and point.role != "base"
        if point.metric == "throughput" and fitted:
            found.append(np.log(point.modelled / point.paper.number) / 0.02)
        elif point.metric.startswith(("experts", "exchange")):
            found.append(np.log(point.modelled / point.paper.number) / 0.1)
    return np.array(found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("calibration", "free", "models"),
    [
        (A, (*FREE, "plan_ms", "rho"), FITTED_MODELS),
        (C, (*FREE, "size_ms"), tuple(LAYERS)),
    ],
    ids=["A", "C"],
)
def test_constants_are_those_of_the_fit(uniform, calibration, free, models):
    optimize = pytest.importorskip("scipy.optimize")
    start = np.array([getattr(calibration, name) for name in free])

    def at(scale):
        changed = dict(zip(free, (start * scale).tolist(), strict=True))
        return residuals(dataclasses.replace(calibration, **changed), uniform, models)

    best = optimize.least_squares(at, np.full(len(free), 1.1), bounds=(0, 5))
    assert (at(np.ones(len(free))) ** 2).sum() <= 1.01 * (best.fun**2).sum()
    assert best.x == pytest.approx(np.ones(len(free)), abs=0.05)


@pytest.mark.full
def test_the_recommended_constants_are_near_the_same_fits(uniform):
    optimize = pytest.importorskip("scipy.optimize")
    free = (*FREE, "size_ms")
    start = np.array([getattr(R, name) for name in free])

    def at(scale):
        changed = dict(zip(free, (start * scale).tolist(), strict=True))
        return residuals(dataclasses.replace(R, **changed), uniform, FITTED_MODELS)

    best = optimize.least_squares(at, np.ones(len(free)), bounds=(0, 5))
    assert best.x == pytest.approx(np.ones(len(free)), abs=0.25)
