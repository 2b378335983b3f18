"""What a run measures: its summary is that of all records, which nobody holds; what a crash tore blocks nothing."""

import json
import pathlib
import re
import tracemalloc

import numpy as np
import pytest

from topoep_jax import Topology
from topoep_jax.metrics import MoEMetrics
from train import report
from train.log import LOADS, METRICS, Log, make_record, mean_load, read_columns
from train.state import StepMetrics

LAYERS, EXPERTS = 3, 8
MEANS = ("imbalance_before", "imbalance", "inter_domain_before", "inter_domain", "replica")


def measured(step: int, layers: int = LAYERS, experts: int = EXPERTS) -> StepMetrics:
    random = np.random.default_rng(step)
    fields = {name: random.integers(0, 3, layers, np.int32) for name in MoEMetrics._fields}
    fields |= {name: random.random(layers, np.float32) for name in MEANS}
    fields["expert_load"] = random.integers(0, 100, (layers, experts), np.int32)
    loss, balance, norm = random.random(3, np.float32)
    return StepMetrics(loss=loss, balance=balance, grad_norm=norm, moe=MoEMetrics(**fields))


def log_steps(folder: pathlib.Path, first: int, last: int, *, planner: str = "topoep", **sizes: int) -> int:
    """Logs these steps behind those before; returns how many of those were lost."""
    folder.mkdir(exist_ok=True)
    with Log(folder, **{"layers": LAYERS, "experts": EXPERTS, **sizes}, keep=first - 1) as log:
        for step in range(first, last + 1):
            metrics = measured(step, **sizes)
            record = make_record(step, metrics, tokens=100, seconds=step, rerun=step % 3 == 0, planner=planner)
            log.append(record, metrics.moe.expert_load)
        return log.lost


def lines_of(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_a_summary_is_that_of_all_records(tmp_path, steps):
    log_steps(tmp_path, 1, steps)
    records, loads = lines_of(tmp_path), [measured(step).moe.expert_load.tolist() for step in range(1, steps + 1)]
    summary = report.summarize(read_columns(tmp_path / METRICS), topology=Topology.uniform(2, 2))
    few, loss = max(1, steps // 20), [record["loss"] for record in records]
    assert json.loads(json.dumps(summary)) == {
        "planner": "topoep",
        "domain_of_rank": [0, 0, 1, 1],
        "steps": steps,
        "first_loss": loss[0],
        "last_loss": loss[-1],
        "mean_of_first_losses": float(np.mean(loss[:few])),
        "mean_of_last_losses": float(np.mean(loss[-few:])),
        "tokens_per_s": float(np.median([record["tokens_per_s"] for record in records])),
        **{name: float(np.mean([record[name] for record in records])) for name in MEANS},
        "share_of_steps_improved": float(np.mean([r["imbalance"] < r["imbalance_before"] for r in records])),
        "overflow_rows": sum(record["overflow_rows"] for record in records),
        "dropped_rows": sum(record["dropped_rows"] for record in records),
        "most_passes": max(record["passes"] for record in records),
        "share_of_steps_overflowing": float(np.mean([record["passes"] > 1 for record in records])),
        "steps_run_again": steps // 3,
    }
    assert np.load(tmp_path / LOADS).tolist() == loads
    np.testing.assert_array_equal(mean_load(tmp_path / LOADS, np.arange(1, steps + 1)), np.mean(loads, axis=0))


def test_a_summary_compares_the_steps_of_one_planner(tmp_path):
    log_steps(tmp_path / "run", 1, 4, planner="topoep")
    log_steps(tmp_path / "run", 5, 10, planner="none")
    whole = read_columns(tmp_path / "run" / METRICS)
    tail = {name: values[4:] for name, values in whole.items()}
    got, want = (report.summarize(columns, topology=Topology.uniform(2, 2)) for columns in (whole, tail))
    ours = ("steps", "first_loss", "mean_of_first_losses")
    assert got == {**want, "steps": 10, "steps_of_planner": 6, **{name: got[name] for name in ours}}
    assert got["first_loss"] == whole["loss"][0]
    assert "Balancing over 6 steps" in report.comparison(got)


@pytest.mark.parametrize("cut", [0, 1, 20, 500, 10_000])
@pytest.mark.parametrize("done", [4, 6])
def test_a_torn_line_or_row_blocks_no_resume(tmp_path, done, cut):
    """A run that was killed in its sixth step goes on from a checkpoint to the eighth, without the end of a file."""
    log_steps(tmp_path / "whole", 1, 8)
    lines, rows = (tmp_path / "whole" / METRICS).read_bytes().splitlines(keepends=True), 4 * LAYERS * EXPERTS
    for name in (METRICS, LOADS):
        folder = tmp_path / name
        log_steps(folder, 1, 6)
        whole = (folder / name).read_bytes()
        torn = whole[: max(len(whole) - cut, 0)]
        (folder / name).write_bytes(torn)
        there = torn.count(b"\n") if name == METRICS else max(len(torn) - (len(whole) - 6 * rows), 0) // rows
        kept = min(there, done)
        for _ in range(2):  # Once more from the same checkpoint: what was lost is no line of a later step.
            assert log_steps(folder, done + 1, 8) == (done - kept if name == METRICS else 0)
        wanted = lines[:kept] + lines[done:] if name == METRICS else lines
        assert (folder / METRICS).read_bytes().splitlines(keepends=True) == wanted
        loads = np.load(tmp_path / "whole" / LOADS)
        if name == LOADS:
            loads[kept:done] = -1
            known = [step for step in range(1, 9) if not kept < step <= done]
            np.testing.assert_array_equal(
                mean_load(folder / LOADS, np.arange(1, 9)), mean_load(folder / LOADS, np.array(known))
            )
        np.testing.assert_array_equal(np.load(folder / LOADS), loads)


def test_files_that_are_gone_or_of_something_else_block_no_resume(tmp_path):
    log_steps(tmp_path / "run", 1, 3)
    (tmp_path / "run" / METRICS).unlink()
    np.save(tmp_path / "run" / LOADS, np.zeros((3, 9, 9), np.int32))
    assert log_steps(tmp_path / "run", 4, 5) == 3
    assert [record["step"] for record in lines_of(tmp_path / "run")] == [4, 5]
    assert mean_load(tmp_path / "run" / LOADS, np.arange(1, 4)) is None
    assert np.load(tmp_path / "run" / LOADS).shape == (5, LAYERS, EXPERTS)
    columns = read_columns(tmp_path / "run" / METRICS)
    summary = report.summarize(columns, topology=Topology.uniform(2, 2))
    assert {path.name for path in report.write_report(tmp_path / "run", columns, summary)} == {
        *("summary.json", "loss.png", "imbalance.png", "expert_load.png")
    }


def test_a_line_that_tells_nothing_is_named_where_others_follow(tmp_path):
    log_steps(tmp_path, 1, 4)
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    for damaged in (b"\n", lines[1][:40] + b"\n", b"[]\n", b"\xff\n", b'{"loss": 1.0}\n'):
        before = b"".join([lines[0], damaged, *lines[2:]])
        (tmp_path / METRICS).write_bytes(before)
        with pytest.raises(
            ValueError, match=re.escape(f"{METRICS}, line 2 is damaged: remove it, and the run goes on")
        ):
            log_steps(tmp_path, 5, 5)
        assert (tmp_path / METRICS).read_bytes() == before
    (tmp_path / METRICS).write_bytes(b"".join([lines[0], *lines[2:]]))
    assert log_steps(tmp_path, 5, 5) == 1
    assert [record["step"] for record in lines_of(tmp_path)] == [1, 3, 4, 5]


def test_a_log_keeps_nothing_in_memory(tmp_path):
    sizes = {"layers": 48, "experts": 128}
    metrics = measured(1, **sizes)

    def peak(steps: int) -> int:
        with Log(tmp_path, **sizes, keep=0) as log:
            tracemalloc.start()
            for step in range(1, steps + 1):
                record = make_record(step, metrics, tokens=1, seconds=1, rerun=False, planner="topoep")
                log.append(record, metrics.moe.expert_load)
            try:
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    few, many = peak(4), peak(60)
    assert many < few + 4 * 48 * 128, "one step's loads"
    assert (tmp_path / LOADS).stat().st_size == 128 + 60 * 4 * 48 * 128
    assert (tmp_path / METRICS).stat().st_size < 60 * 600
