"""Processes of one run train on the same: what one alone cannot do, or does otherwise, stops all with a reason."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.multiprocess_worker import run_processes
from topoep_jax import transport
from train import pretrain
from train.config import TrainConfig
from train.data import DataError, load_tokens
from train.mesh import connect, make_mesh
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
    compile_late(pathlib.Path(folder))
    pathlib.Path(folder, f"done_{here}").touch()


def compile_late(folder: pathlib.Path) -> None:
    """Process 1 has more to compile: nobody runs before it has, and whoever waited in vain says for whom."""
    here = jax.process_index()

    def chain(x: jax.Array, length: int = 100 * here + 1) -> jax.Array:
        for _ in range(length):
            x = jnp.sin(x) + 1
        return x

    for name in ("first", "second"):
        step = pretrain._Together(jax.jit(lambda x, y: chain(x + y)), timeout_s=60)
        # The second is compiled by the call, as the step is to which a batch returns that overflowed.
        compiled = step.compile if name == "first" else step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "meet", marked(transport.meet, folder / f"{name}_{here}"))
            compiled(jnp.zeros(8), jnp.ones(8))
        assert (folder / f"{name}_1").exists(), "process 0 did not wait"
    if here == 0:
        with pytest.raises(pretrain.RunStopped, match=r"process 1 did not compile .* 0\.5 s: .* --peer_timeout_s"):
            pretrain._Together(jax.jit(jnp.add), timeout_s=0.5).compile(jnp.zeros(8), jnp.ones(8))
    with together():
        pass  # Until then process 1 stays away.


def marked(meet: Callable[..., None], path: pathlib.Path) -> Callable[..., None]:
    """`meet`, which leaves a file to show when this process came there."""

    def leaves_a_mark(*arguments: object) -> None:
        path.touch()
        meet(*arguments)

    return leaves_a_mark


def test_processes_stop_together_and_say_why(tmp_path):
    for name, count in (("whole", 100), ("again", 100), ("cut", 99)):
        np.save(tmp_path / f"{name}.npy", np.arange(count, dtype=np.int32))
    run_processes("tests.train.together_test:read_everywhere", str(tmp_path), devices_per_process=1)
    assert len(list(tmp_path.glob("done_*"))) == 2


def test_the_time_to_wait_for_a_peer_reaches_the_kernels(monkeypatch):
    given = []

    def init(*arguments, **options):
        given.append(options["timeout_s"])
        return made(*arguments, **options)

    made = transport.init
    monkeypatch.setattr(transport, "init", init)
    config = TrainConfig(transport="device", peer_timeout_s=90)
    try:
        connect(config, make_mesh(config), compile_only=True)
    finally:
        transport.shutdown("ep")
    assert given == [90]
    for wrong in (0, float("nan"), 2e6):
        with pytest.raises(ValueError, match=r"--peer_timeout_s=.* must be positive, and at most 1000000 seconds"):
            TrainConfig(peer_timeout_s=wrong)
