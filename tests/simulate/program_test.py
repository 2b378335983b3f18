"""What every program of the simulator obeys: order, streams, links."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from topoep_jax.plan.links import busiest_direction, moved_ps
from topoep_jax.simulate import Timeline
from topoep_jax.simulate.program import STREAMS, Links, Program
from topoep_jax.topology import Topology

TOPOLOGY = Topology.uniform(2, 4)


@st.composite
def programs(draw):
    """A program of eight ranks, and a way to make one of its tasks longer."""
    seed, length = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 12))
    rng = np.random.default_rng(seed)
    program = Program(8)
    for number in range(length):
        after = np.flatnonzero(rng.random(number) < 0.3).tolist()
        kind = rng.integers(3)
        if kind == 0:
            program.compute(f"{number}", "experts", rng.integers(0, 1000, 8), after)
        elif kind == 1:
            moved = rng.integers(0, 50, (8, 8)) * (rng.random((8, 8)) < rng.random())
            program.exchange(f"{number}", "rows", moved, int(rng.integers(0, 9)), after)
        else:
            program.together(f"{number}", "all", int(rng.integers(0, 100)), after)
    return program


def links(nic=20_000, nvlink=5_000, hot=1000):
    return Links(TOPOLOGY, nic, nvlink, hot)


@settings(max_examples=60)
@given(programs(), st.integers(0, 11), st.sampled_from([0, 460, 1000]))
def test_laws_of_programs(program, chosen, hot):
    two, one = (Timeline.of(program, links(hot=hot), overlap=overlap) for overlap in (True, False))
    for number, task in enumerate(program.tasks):
        for before in task.after:
            assert (two.begin[number] >= two.end[before]).all()
    for timeline, streams in ((two, STREAMS), (one, (None,))):
        for stream in streams:
            own = [number for number, task in enumerate(program.tasks) if stream in (None, task.stream)]
            assert (timeline.begin[own[1:]] >= timeline.end[own[:-1]]).all()
        for rank in range(8):
            shares = timeline.breakdown(rank)
            assert sum(share.exposed_ps for share in shares.values()) == timeline.step_ps
            assert all(0 <= share.exposed_ps <= share.busy_ps for share in shares.values())
    assert (one.end >= two.end).all()
    # Nothing that takes longer makes anything end earlier.
    task = program.tasks[chosen % len(program.tasks)]
    slower = Program(8)
    slower.tasks = [dataclasses.replace(t, ps=t.ps + 7 * (t is task)) for t in program.tasks]
    assert (Timeline.of(slower, links(hot=hot)).end >= two.end).all()
    for changed in (links(nic=30_000, hot=hot), links(nvlink=6_000, hot=hot)):
        assert (Timeline.of(program, changed).end >= two.end).all()


def test_an_exchange_of_all_lasts_as_long_as_the_planner_says():
    moved = np.random.default_rng(0).integers(1, 10**6, (8, 8))
    program = Program(8)
    program.exchange("rows", "rows", moved, 0)
    assert Timeline.of(program, links()).step_ps == moved_ps(moved, TOPOLOGY, 20_000, 5_000, busiest_direction)


def test_ranks_that_exchange_nothing_wait_for_nobody():
    moved = np.zeros((8, 8), np.int64)
    moved[0, 1], moved[2, 2] = 1000, 999
    program = Program(8)
    late = program.compute("late", "experts", np.arange(8) * 10**9)
    program.exchange("rows", "rows", moved, 0, [late])
    timeline = Timeline.of(program, links())
    assert timeline.begin[1].tolist() == [10**9, *(np.arange(1, 8) * 10**9)]
    assert (timeline.end[1] - timeline.begin[1]).tolist() == [5_000] * 2 + [0] * 6


def test_half_of_a_busy_links_excess():
    carried = np.zeros((2, 8, 8), np.int64)
    carried[0, 0, 4:] = 400
    busy = [links(hot=hot).busy_ps(carried)[0] for hot in (0, 500, 1000)]
    assert busy[2].tolist() == [32_000, 0, 0, 0, *[8_000] * 4]
    assert busy[0].tolist() == [8_000] * 8
    assert busy[1].tolist() == [20_000, 4_000, 4_000, 4_000, *[8_000] * 4]


def test_with_one_rank_the_step_is_the_sum_of_its_phases():
    program = Program(1)
    first = program.compute("a", "experts", 5)
    program.together("b", "all", 7)
    program.compute("c", "experts", 11, [first])
    alone = Links(Topology((0,)), 1, 1)
    assert Timeline.of(program, alone, overlap=False).step_ps == 23
    assert Timeline.of(program, alone).step_ps == 16
    assert Timeline.of(program, alone).breakdown(0)["all"] == (7, 0)


def test_repeated_tasks_need_each_other_and_what_they_are_told():
    program = Program(1)
    first = program.compute("a", "experts", 5)
    second = program.together("b", "all", 7, [first])
    program.compute("c", "experts", 11, [second])
    moved = program.repeat(range(1, 3), first)
    assert moved == 2
    assert [(task.name, task.after) for task in program.tasks[3:]] == [("b", (first,)), ("c", (second + moved,))]
