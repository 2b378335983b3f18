"""Processes of one run train on the same: what one alone cannot do, or does otherwise, stops all with a reason."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from tests.multiprocess_worker import run_processes
from train.config import TrainConfig
from train.data import DataError, load_tokens
from train.together import load_same_tokens, together


def test_one_process_reads_its_data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text")
    config = TrainConfig(data=(str(path),))
    tokens = load_same_tokens(config)
    digest = tokens.digest.hex()
    np.testing.assert_array_equal(tokens.ids, load_tokens(config.data))
    assert load_same_tokens(dataclasses.replace(config, of_data=digest)).digest.hex() == digest
    path.write_text("some texts")
    with pytest.raises(DataError, match="no longer those that this run began with"):
        load_same_tokens(dataclasses.replace(config, of_data=digest))
    with pytest.raises(DataError, match=r"--data=none\.txt matches no file$"):
        load_same_tokens(dataclasses.replace(config, data=("none.txt",)))


def read_everywhere(folder: str) -> None:
    here = jax.process_index()
    whole, cut = (str(pathlib.Path(folder) / name) for name in ("whole.npy", "cut.npy"))
    shared = TrainConfig(data=(whole,), num_processes=2, coordinator="host:1", run_dir="run")

    def read(**other) -> np.ndarray:
        """Process 1 has other settings."""
        return load_same_tokens(dataclasses.replace(shared, process_id=here, **(other if here == 1 else {}))).ids

    again = pathlib.Path(folder) / "again.npy"
    np.testing.assert_array_equal(read(data=(str(again),), coordinator="127.0.0.1:1"), np.arange(100))
    with pytest.raises(ValueError, match="matches no file" if here else r"matches no file \(process 1\)"):
        read(data=("none.txt",))
    # Also what nobody foresaw.
    with pytest.raises(ZeroDivisionError if here else ValueError, match="by zero"), together():
        assert 1 // (1 - here)
    with pytest.raises(DataError, match="process 1 has other data than process 0: --data must name"):
        read(data=(cut,))
    for other in ({"lr": 0.5}, {"seed": 1}, {"run_dir": "elsewhere"}, {"init_from": "weights"}, {"resume": True}):
        with pytest.raises(ValueError, match="process 1 has other settings than process 0: give all the same flags"):
            read(**other)
    np.testing.assert_array_equal(read(), np.arange(100))
    pathlib.Path(folder, f"done_{here}").touch()


def test_processes_stop_together_and_say_why(tmp_path):
    for name, count in (("whole", 100), ("again", 100), ("cut", 99)):
        np.save(tmp_path / f"{name}.npy", np.arange(count, dtype=np.int32))
    run_processes("tests.train_together_test:read_everywhere", str(tmp_path), devices_per_process=1)
    assert len(list(tmp_path.glob("done_*"))) == 2
