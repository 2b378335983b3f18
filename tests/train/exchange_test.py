"""Training with tokens that cross domains once, in one process and in two; and what stops it where rows change."""

import dataclasses
import json
import pathlib

import jax
import pytest

from tests.support.multiprocess_worker import run_processes
from tests.support.train_runs import loads_of, metrics_of, settings, text_of
from topoep_jax import transport
from topoep_jax.traces import open_trace
from topoep_jax.transport import xla
from train import pretrain

pytestmark = pytest.mark.usefixtures("standard_promotion")


def config_in(folder: pathlib.Path, exchange: str):
    return settings(folder / exchange, steps=1, exchange=exchange, record_routing=1)


def train_here(folder: str) -> None:
    """One process's part of runs of two."""
    for exchange in ("two_hop", "auto"):
        pretrain.train(config_in(pathlib.Path(folder), exchange))


@pytest.mark.full
def test_two_processes_plan_and_learn_what_one_does(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        text_of(tmp_path / folder)
    run_processes("tests.train.exchange_test:train_here", str(tmp_path / "two"), timeout_s=600)
    train_here(str(tmp_path / "one"))
    for exchange in ("two_hop", "auto"):
        one, two = (tmp_path / folder / exchange for folder in ("one", "two"))
        assert loads_of(one) == loads_of(two)
        for here, there in zip(metrics_of(one), metrics_of(two), strict=True):
            assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
            # Figures of the plans.
            of_plans = [
                name for name in here if name not in ("loss", "grad_norm", "balance_loss", "tokens_per_s", "seconds")
            ]
            assert json.dumps([here[name] for name in of_plans]) == json.dumps([there[name] for name in of_plans])
        with open_trace(one / "routing.npz") as here, open_trace(two / "routing.npz") as there:
            assert (here.omega(0) == there.omega(0)).all()


@pytest.mark.full
def test_a_run_stops_where_rows_change_on_the_way(tmp_path, monkeypatch):
    text_of(tmp_path)
    gathered = xla.gather_rows

    def faulty(rows, *where):
        everyone = gathered(rows, *where)
        return everyone.at[:, 0].set(everyone[:, 1])

    monkeypatch.setattr(xla, "gather_rows", faulty)
    jax.clear_caches()
    with pytest.raises(pretrain.RunStopped, match=r"step 1: layer \d+, .*xla_options\(safe=True\); .*--safe_exchange"):
        pretrain.train(dataclasses.replace(config_in(tmp_path, "two_hop"), check_steps=1))
    jax.clear_caches()
    assert transport.exchange_faults() == []
