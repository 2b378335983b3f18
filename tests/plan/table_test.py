"""No rival with the same slots has a better plan, in the mean over seeds, on any workload and skew.

The default tier takes one seed of one workload; `-m full` takes everything and writes results/full/planners.json.
"""

import pytest

from tests.support.planner_table import REPORT, compared, rivals_ahead
from tests.support.quality import FULL, record


def test_ahead_of_every_rival_on_a_sample():
    table = compared("glm45_air", range(1))
    assert not rivals_ahead("glm45_air", table)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_ahead_of_every_rival(name):
    table = compared(name, FULL[name])
    record(REPORT, name, table)
    assert not rivals_ahead(name, table)
