"""The simulator of a layer and a step: laws of time and bytes, its export, and what may be said of a gain."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from topoep_jax.config import LayerConfig
from topoep_jax.plan import reference
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.types import unpriced
from topoep_jax.shapes import Shape
from topoep_jax.simulate import (
    CALIBRATIONS,
    LayerRates,
    PaperLayer,
    PipelinedLayer,
    Setting,
    Step,
    Timeline,
    chrome_trace,
    compare,
    judge,
    simulate,
    variations,
    work_of,
    work_of_planner,
)
from topoep_jax.simulate.calibration import nodes_per_assignment
from topoep_jax.simulate.compare import Constants
from topoep_jax.simulate.program import STREAMS, Program
from topoep_jax.synthetic import biased_demand
from topoep_jax.topology import Topology

TOPOLOGY = Topology.uniform(2, 4)
SHAPE = Shape(512, 256, 32, 4, TOPOLOGY, tokens=512)
RATES = LayerRates(Hardware.h800(), launch_us=3, plan_us=50)
R = CALIBRATIONS[0]


def layer(**options):
    return LayerConfig(SHAPE.hidden, SHAPE.ffn, SHAPE.num_experts, SHAPE.top_k, TOPOLOGY, chunks=2, **options)


def demand(skew, seed=0):
    return biased_demand(SHAPE, [skew], seed)[skew]


def work(omega, planner="topoep_paper", **options):
    config = layer(**options)
    problem = Problem(TOPOLOGY, config.cost, SHAPE.num_experts, config.num_slots, None, 128, "bottleneck", "fast")
    plan = reference.solve(omega, problem, planner)
    return work_of_planner(config, planner, plan)


def step_ps(works, rates=RATES, step=None, *, overlap=True):
    return simulate(PipelinedLayer(rates), works, step or Step(), overlap=overlap).timeline.step_ps


# Layers


def sums(timeline, phase):
    sent = sum(event.sent_bytes for event in timeline.events() if event.phase == phase)
    received = sum(event.received_bytes for event in timeline.events() if event.phase == phase)
    assert sent == received
    return sent


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("pulls", ["direct", "relayed"])
def test_every_byte_is_moved_once(chunks, pulls):
    own = work(demand(-4), pulls=pulls, transport="xla" if pulls == "direct" else "device")
    own = dataclasses.replace(own, config=dataclasses.replace(own.config, chunks=chunks))
    if chunks == 1:
        own = dataclasses.replace(own, rows=own.rows.sum(0)[None], aligned=own.aligned.sum(0)[None])
    timeline = simulate(PipelinedLayer(RATES), [own], Step()).timeline
    away = own.rows.sum(0) * ~np.eye(8, dtype=bool)
    row, weight, expert = 2 * SHAPE.hidden, 4, 3 * SHAPE.hidden * SHAPE.ffn
    assert own.num_rows == work(demand(-4), "none").num_rows == 8 * SHAPE.tokens * SHAPE.top_k
    assert sums(timeline, "dispatch") == away.sum() * (3 * row + weight)  # twice dispatched, and the output's gradient
    assert sums(timeline, "combine") == away.sum() * (2 * row + weight)
    assert sums(timeline, "pull") == 2 * own.replicas.sum() * 2 * expert  # relayed or not, a holder receives it once
    assert sums(timeline, "push") == own.replicas.sum() * 4 * expert


def test_products_do_the_arithmetic_of_the_layer():
    own = work(demand(-1))
    rows = own.aligned.sum(axis=(0, 2))
    one = 2 * SHAPE.hidden * SHAPE.ffn * 1000 / RATES.hardware.gflops
    for residuals, matrices in (("none", 11), ("rows", 11), ("all", 9)):
        kept = dataclasses.replace(own, config=dataclasses.replace(own.config, residuals=residuals))
        timeline = simulate(PipelinedLayer(RATES), [kept], Step()).timeline
        for rank in range(8):
            shares = timeline.breakdown(rank)
            busy = sum(shares[phase].busy_ps for phase in ("experts forward", "experts backward"))
            assert busy == pytest.approx(matrices * rows[rank] * one, rel=1e-3)


def test_what_is_kept_is_not_sent_again():
    own = work(demand(-1))
    times = [
        step_ps([dataclasses.replace(own, config=dataclasses.replace(own.config, residuals=kept))])
        for kept in ("none", "rows", "all")
    ]
    assert times[0] > times[1] >= times[2]  # what is recomputed may hide under what is sent


def test_slower_machines_take_longer():
    for planner in ("none", "topoep_paper"):
        own = [work(demand(-2), planner)]
        quick = step_ps(own)
        for change in (
            {"inter_fs_per_byte": 25_000},
            {"intra_fs_per_byte": 9_000},
            {"gflops": 300_000},
            {"rank_speed": (500,) * 8},
        ):
            slow = dataclasses.replace(RATES, hardware=dataclasses.replace(RATES.hardware, **change))
            assert step_ps(own, slow) > quick, change
        one_slow = dataclasses.replace(RATES.hardware, rank_speed=(500,) + (1000,) * 7)
        for change in ({"launch_us": 10}, {"plan_us": 100}, {"hardware": one_slow}):
            assert step_ps(own, dataclasses.replace(RATES, **change)) >= quick
        assert step_ps(own, dataclasses.replace(RATES, hot_permille=500)) <= quick


def test_even_and_local_work_is_quickest():
    omega = np.zeros((8, 32), np.int64)
    for rank in range(8):
        omega[rank, 4 * rank : 4 * rank + 4] = SHAPE.tokens
    local = step_ps([work(omega, "none")])
    even = step_ps([work(np.full((8, 32), SHAPE.tokens // 8), "none")])
    neighbours = step_ps([work(np.roll(omega, 1, axis=0), "none")])
    assert local < neighbours
    assert local < even < step_ps([work(demand(-4), "none")])


def test_a_token_that_crosses_once_spares_the_nic():
    own = [work(demand(-4), "none")]
    assert step_ps(own, dataclasses.replace(RATES, once_of=SHAPE.top_k)) < step_ps(own)
    assert nodes_per_assignment(0.75, 4, 8) == pytest.approx(3 * (1 - 0.75**8) / 6)
    assert nodes_per_assignment(0.0, 4, 8) == nodes_per_assignment(0.0, 1, 8) == 1


def test_an_empty_plan_costs_its_planner_and_its_launches():
    plain = work(demand(0), "none")
    empty = dataclasses.replace(plain, balanced=True, config=layer(staging_bytes=2**20))
    events = list(simulate(PipelinedLayer(RATES), [empty], Step()).timeline.events())
    launched = {event.name: event.end_ps - event.begin_ps for event in events if event.phase in ("pull", "push")}
    # A mebibyte holds 32 rows of either matrix of all 16 slots, in f32: that many strips.
    strips = {"pull": 1, "repull": 1, "push of down": SHAPE.ffn // 32, "push of gate_up": SHAPE.hidden // 32}
    assert launched == {name: count * 3_000_000 for name, count in strips.items()}
    # Replicas' gradients keep the mains' last product from running under the last rows on their way home.
    product = max(event.end_ps - event.begin_ps for event in events if event.name == "mains' gate_up")
    paid = step_ps([empty]) - step_ps([plain])
    assert 50_000_000 <= paid <= 50_000_000 + sum(launched.values()) + product
    with pytest.raises(ValueError, match="so it is balanced"):
        work_of(layer(), unpriced(np.array([[4, -1]] + [[-1, -1]] * 7), np.zeros((8, 8, 6), int)), balanced=False)


@pytest.mark.parametrize("skew", [0, -1, -4])
@pytest.mark.parametrize("planner", ["none", "topoep_paper"])
def test_two_chunks_cost_no_more_than_their_overhead(skew, planner):
    """The overhead: further launches, and that the busiest rank of a part need not be that of the whole."""
    two = work(demand(skew), planner)
    one = dataclasses.replace(
        two,
        config=dataclasses.replace(two.config, chunks=1),
        rows=two.rows.sum(0)[None],
        aligned=two.aligned.sum(0)[None],
    )

    def one_after_the_other(own):
        timeline = simulate(PipelinedLayer(RATES), [own], Step()).timeline
        program = Program(8)
        for task in timeline.program.tasks:
            program.together("wait", "wait", 0)
            program.tasks.append(dataclasses.replace(task, after=()))
        return Timeline.of(program, timeline.links, overlap=False).step_ps

    overhead = one_after_the_other(two) - one_after_the_other(one)
    assert overhead >= 0
    assert step_ps([two]) <= step_ps([one], overlap=False) + overhead
    assert step_ps([two]) <= step_ps([two], overlap=False)


def test_steps_add_up():
    own = [work(demand(-2, seed)) for seed in range(2)]
    design = PipelinedLayer(RATES)
    single = [simulate(design, [one], Step()).step_ms for one in own]
    both = simulate(design, own, Step(layers=2, microbatches=3, dense_ms=4.0, optimizer_ms=5.0))
    assert both.step.outside_ms == 17
    assert both.layer_ms == pytest.approx(np.mean(single), rel=0.02)
    shares = both.layer_shares(both.timeline.busiest_rank())
    assert sum(share.exposed_ps for share in shares.values()) / 1e9 == pytest.approx(both.layer_ms, abs=1e-6)
    unlike = [work(demand(skew), "none") for skew in (0, -4)]
    quick, slow = (simulate(design, [one], Step()).step_ms for one in unlike)
    assert slow > 2 * quick
    assert simulate(design, unlike, Step(microbatches=2)).step_ms == pytest.approx(quick + slow, rel=0.02)
    link, rank, ms = both.busiest_link()
    assert link in ("NIC", "NVLink")
    assert 0 <= rank < 8
    assert 0 < ms < both.layer_ms
    for bad in ({"layers": 0}, {"microbatches": 0}, {"dense_ms": -1.0}, {"optimizer_ms": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Step(**bad)
    with pytest.raises(ValueError, match="works is empty"):
        simulate(design, [], Step())
    for bad in ({"launch_us": -1}, {"plan_us": 10**7}, {"hot_permille": 1001}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dataclasses.replace(RATES, **bad)


# Perfetto


@pytest.mark.parametrize("overlap", [True, False])
def test_chrome_trace(overlap):
    step = Step(layers=2, dense_ms=1.0)
    found = [
        chrome_trace(simulate(PipelinedLayer(RATES), [work(demand(-4))], step, overlap=overlap).timeline, "a step")
        for _ in range(2)
    ]
    text = json.dumps(found[0], allow_nan=False)
    assert text == json.dumps(found[1])
    trace = json.loads(text)
    assert trace["otherData"]["title"] == "a step"
    assert "modelled" in trace["otherData"]["kind"]
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    assert set(names.values()) == (set(STREAMS) if overlap else {"the only stream"})
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert processes == {r: f"rank {r} (domain {r // 4})" for r in range(8)}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) + len(meta) == len(trace["traceEvents"])
    by_thread = {}
    for event in complete:
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["dur"] > 0
        assert event["ts"] >= 0
        begin = round(event["ts"] * 1000)
        by_thread.setdefault((event["pid"], event["tid"]), []).append((begin, begin + round(event["dur"] * 1000)))
    assert set(by_thread) == set(names)
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_without_replicas_the_papers_layer_pays_for_its_planner_alone():
    plain = work(demand(0), "none")
    empty = dataclasses.replace(plain, balanced=True)
    design = PaperLayer(R, SHAPE.top_k)
    times = design.phases(empty)
    assert (times.replicas, times.size, times.plan) == (0, 0, R.plan_ms)
    assert design.phases(plain).plan == 0


# Verdicts


@pytest.mark.parametrize(
    ("gain", "others", "answer"),
    [
        (2.9, [5.0], "no difference"),
        (-2.9, [-9.0], "no difference"),
        (5.0, [4.0, 0.1], "faster"),
        (5.0, [4.0, -0.1], "undecided"),
        (30.0, [-1.0], "undecided"),
        (30.0, [12.0], "faster"),
        (-8.0, [-3.0], "slower"),
    ],
)
def test_what_may_be_said(gain, others, answer):
    verdict = judge(gain, others)
    assert verdict.answer == answer
    assert (verdict.low, verdict.high) == (min(gain, *others), max(gain, *others))
    assert f"{gain:+.1f} %" in str(verdict)


@pytest.mark.parametrize(("layers", "num_works"), [(5, 3), (4, 6), (2, 5), (1, 4), (4, 4), (6, 4)])
def test_every_work_counts_alike(layers, num_works):
    """In the paper's layer, all ranks wait for each other, so a step is exactly the sum of its layers."""
    design = PaperLayer(R, SHAPE.top_k)
    works = [work(demand(skew), "none") for skew in np.linspace(0, -4, num_works)]
    single = [simulate(design, [own], Step()).step_ms for own in works]
    assert max(single) > 1.05 * min(single)
    found = Constants(design, Step(layers)).run(works)
    assert found.step_ms == pytest.approx(layers * np.mean(single))
    assert sum(found.weights) == num_works
    assert len(found.each) <= num_works
    shares = found.mean(step.layer_shares(0)["experts forward"].busy_ps for step in found.each)
    rank_0 = [simulate(design, [own], Step()).layer_shares(0)["experts forward"].busy_ps for own in works]
    assert shares == pytest.approx(np.mean(rank_0))


def test_repeated_works_are_timed_as_new_ones():
    own = [work(demand(skew)) for skew in (0, -4)]
    design, step = PipelinedLayer(RATES), Step(layers=3, microbatches=2, dense_ms=1.0)
    repeated = simulate(design, own, step)
    copies = simulate(design, [dataclasses.replace(own[turn % 2]) for turn in range(6)], step)
    assert list(repeated.timeline.events()) == list(copies.timeline.events())
    assert (repeated.timeline.link_busy_ps() == copies.timeline.link_busy_ps()).all()
    for again, new in zip(repeated.timeline.program.tasks, copies.timeline.program.tasks, strict=True):
        assert (again.name, again.after) == (new.name, new.after)


def test_every_variation_changes_a_layer():
    own = [work(demand(-4))]
    assert (own[0].replicas * TOPOLOGY.crosses_domains()).any()
    rates = dataclasses.replace(RATES, plan_us=400)
    usual = step_ps(own, rates)
    others = variations(rates, SHAPE.top_k).items()
    changed = {name: step_ps(own, varied, overlap=overlap) for name, (varied, overlap) in others}
    assert len(changed) == 9
    assert {name for name, ps in changed.items() if ps < usual} == {
        "links 5/4",
        "GEMMs 5/4",
        "busiest link as in the paper",
        "a token crosses once",
    }
    assert {name for name, ps in changed.items() if ps > usual} == {
        "links 4/5",
        "GEMMs 4/5",
        "launches x 3",
        "planner x 2",
        "nothing overlaps",
    }


@pytest.mark.parametrize("slots", [0, 2])
def test_a_layer_without_slots_is_not_balanced(slots):
    omega, config = demand(0), layer(num_slots=slots)
    problem = Problem(TOPOLOGY, config.cost, SHAPE.num_experts, slots, None, 128, "bottleneck", "fast")
    for planner in ("none", "topoep_paper"):
        plan = reference.solve(omega, problem, planner)
        own = work_of_planner(config, planner, plan)
        assert own.balanced == (planner != "none" and slots > 0)


def test_compare():
    works = {planner: [work(demand(-4, seed), planner) for seed in range(3)] for planner in ("none", "topoep_paper")}
    setting = Setting.of_library(RATES, Step(layers=2), SHAPE.top_k, "a machine")
    plain, other = compare(setting, works)
    assert plain.verdict.answer == "no difference"
    assert set(other.gains) == set(setting.others)
    assert other.verdict.gain == pytest.approx(100 * (plain.step_ms / other.step_ms - 1))
    assert sum(share.exposed_ps for share in other.layer_shares().values()) / 1e9 == pytest.approx(other.layer_ms)
    assert plain.tokens_per_second(512) == pytest.approx(8 * 512 / plain.step_ms * 1e3)
    with pytest.raises(ValueError, match="dense_ms"):
        Setting.of_paper("another", 8, 5)
    assert not Setting.of_paper("deepseek-v2", 6, 4).quotable
