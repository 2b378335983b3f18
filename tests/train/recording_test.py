"""`--record_routing` with data axes, microbatches and dense layers; the simple case is in `train_test.py`."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from tests.support.train_runs import loads_of, settings
from topoep_jax import Topology, open_trace
from train import pretrain
from train.step import build

RECORDED = {"record_routing": 1, "ep": 4, "dp": 2, "microbatches": 2, "batch_size": 16, "num_slots": 0}


@pytest.fixture(autouse=True, scope="module")
def one_program():
    """Runs that differ in their folders share it; Optax is not written for strict promotion."""

    @functools.cache
    def build_once(config):
        program = build(config)
        return dataclasses.replace(program, step=jax.jit(program.step, donate_argnums=0))

    def shared(config):
        return build_once(dataclasses.replace(config, run_dir="", data=(), resume=False, record_routing=1))

    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(pretrain, "build", shared)
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("whole") / "run", "glm4-tiny", **RECORDED)
    pretrain.train(config)
    return pathlib.Path(config.run_dir)


@pytest.mark.full
def test_the_trace_is_what_the_metrics_counted(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    with open_trace(run_dir / "routing.npz") as trace:
        # Two microbatches of each of two groups.
        assert trace.steps == tuple(step for step in (1, 2, 3, 4) for _ in range(4))
        info = trace.info
        assert (info.num_experts, info.num_ranks, info.topology) == (8, 4, Topology.uniform(2, 2))
        assert (info.layers, info.model, info.hidden, info.ffn) == ((1, 2), "glm4-tiny", 16, 8)
        omega = np.stack([trace.omega(index) for index in range(16)]).reshape(4, 4, 2, 4, 8)
        assert loads_of(run_dir) == omega.sum(axis=(1, 3)).tolist()
        # Without replicas, the busiest rank of any group and microbatch; the log has means over the layers.
        load = omega.sum(axis=3).reshape(4, 4, 2, 4, 2).sum(axis=4)
        worst = (load.max(axis=3) / load.mean(axis=3)).max(axis=1).mean(axis=1)
        np.testing.assert_allclose([line["imbalance_before"] for line in lines], worst, rtol=1e-6)


@pytest.mark.full
def test_every_second_step(tmp_path):
    pretrain.train(settings(tmp_path / "run", "glm4-tiny", **{**RECORDED, "record_routing": 2}))
    with open_trace(tmp_path / "run" / "routing.npz") as trace:
        assert sorted(set(trace.steps)) == [2, 4]


@pytest.mark.full
def test_nothing_is_returned_that_nobody_asked_for(tmp_path):
    config = settings(tmp_path / "run", "glm4-tiny", **{**RECORDED, "record_routing": 0})
    program = build(config)
    shape = jax.ShapeDtypeStruct((2, 8, config.seq_len + 1), np.int32)
    assert jax.eval_shape(program.step, program.abstract, shape)[1].expert_idx is None


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="--record_routing=-1 must be an integer of at least 0"):
        settings(tmp_path / "run", record_routing=-1)
