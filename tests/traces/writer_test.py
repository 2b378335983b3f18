"""`TraceWriter`: what may be appended, what is refused, and how a writer ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.multiprocess_worker import run_processes
from topoep_jax import Topology, TraceWriter, open_trace
from topoep_jax.routing import Routed
from topoep_jax.traces import container

SIZES = {"num_experts": 6, "num_ranks": 2}


@pytest.fixture
def fresh(tmp_path):
    """A path at which no file is."""
    return tmp_path / "trace.npz"


def test_a_writer_that_ends_early(fresh):
    TraceWriter(fresh, **SIZES).close()
    assert not fresh.exists()
    with pytest.raises(KeyboardInterrupt), TraceWriter(fresh, **SIZES) as writer:
        writer.append(np.zeros((1, 2, 1), int))
        raise KeyboardInterrupt
    with open_trace(fresh) as trace:
        assert (len(trace), trace.cut_off) == (1, False)
    writer.close()
    with pytest.raises(ValueError, match=r"the writer of .*trace\.npz is closed: append before close"):
        writer.append(np.zeros((1, 2, 1), int))


def test_a_full_disk_harms_nothing_that_was_written(fresh, monkeypatch):
    microbatch = np.zeros((1, 2, 1), int)
    with TraceWriter(fresh, **SIZES) as writer:
        writer.append(microbatch)
        with monkeypatch.context() as patch:
            patch.setattr(container, "write", half_written)
            with pytest.raises(OSError, match="No space left"):
                writer.append(microbatch)
        writer.append(microbatch + 1)
        with monkeypatch.context() as patch:
            patch.setattr(container, "write", half_written)
            with pytest.raises(OSError, match="No space left"):
                writer.append(microbatch)
    with open_trace(fresh) as trace:
        assert not trace.cut_off
        assert [trace.expert_idx(index).max() for index in range(len(trace))] == [0, 1]


def half_written(file, name, array):
    file.write(b"PK\3\4 and no more")
    raise OSError(28, "No space left on device")


def test_what_may_be_appended(fresh):
    tokens = np.random.default_rng(0).integers(-1, 6, (2, 2, 6, 2))  # [layers, batch, length, K]
    layers = [Routed(jnp.asarray(layer, jnp.int32), jnp.zeros((2, 6, 6))) for layer in tokens]
    stacked = Routed(jnp.asarray(tokens, jnp.int32), jnp.zeros((2, 2, 6, 6)))
    for routing in (tokens, tokens.reshape(2, 2, 6, 2), jnp.asarray(tokens, jnp.int16), stacked, layers, list(tokens)):
        fresh.unlink(missing_ok=True)
        with TraceWriter(fresh, **SIZES) as writer:
            writer.append(routing)
            writer.append(routing)
        with open_trace(fresh) as trace:
            assert trace.steps == (0, 1)
            np.testing.assert_array_equal(trace.expert_idx(1), tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 7}, "7 experts on 2 ranks: their number must be a multiple of 2"),
        ({"num_experts": 65536}, "at most 65535"),
        ({"num_experts": 6.0}, "num_experts=6.0 must be an integer of at least 1"),
        ({"num_ranks": 0}, "num_ranks=0 must be an integer of at least 1"),
        ({"num_groups": 0}, "num_groups=0 must be an integer of at least 1"),
        ({"hidden": -1}, "hidden=-1 must be"),
        ({"layers": ()}, r"layers=\(\) must be the ascending numbers"),
        ({"layers": (2, 1)}, r"layers=\(2, 1\) must be the ascending numbers"),
        ({"topology": Topology((0, 0, 1))}, "the topology has 3 ranks, but the trace 2"),
        ({"model": 5}, "model=5 must be a name"),
        ({"path": "trace.npy"}, "trace.npy must end in .npz"),
    ],
    ids=str,
)
def test_writers_that_cannot_be(fresh, arguments, message):
    with pytest.raises(ValueError, match=message):
        TraceWriter(**{"path": fresh, **SIZES, **arguments})
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("routing", "step", "message"),
    [
        (np.zeros((2, 2), int), None, r"shape \(2, 2\), expected \[layers, ..., K\]"),
        (np.zeros((2, 0, 2), int), None, "no axis 0"),
        (np.zeros((2, 2, 2)), None, "dtype float64, but experts are integers"),
        (np.zeros((3, 2, 2), int), None, r"shape \(3, 2, 2\) has 3 layers, not 2"),
        (np.zeros((2, 3, 2), int), None, r"shape \(2, 3, 2\) has 3 tokens for 2 ranks"),
        (np.full((2, 2, 2), 6), None, "names expert 6, but there are 6"),
        (np.zeros((2, 2, 2), int), 4, "step=4 must be at least 5: steps are recorded in order"),
        ([np.zeros((2, 2), int), np.zeros((4, 2), int)], None, "the layers have shapes"),
        ([], None, "give at least one"),
    ],
    ids=str,
)
def test_routing_that_does_not_fit(fresh, routing, step, message):
    with TraceWriter(fresh, **SIZES) as writer:
        writer.append(np.zeros((2, 2, 2), int), step=5)
        with pytest.raises(ValueError, match=message):
            writer.append(routing, step=step)
    with open_trace(fresh) as trace:
        assert trace.steps == (5,)


def test_no_file_is_overwritten(fresh):
    fresh.write_text("mine")
    with pytest.raises(FileExistsError, match=r"trace\.npz"):
        TraceWriter(fresh, **SIZES)
    assert fresh.read_text() == "mine"


def append_everywhere(folder):
    """Runs in each process: an array of which the other holds a part is refused, the gathered one is recorded."""
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("ep",)), PartitionSpec(None, "ep"))
    tokens = np.arange(12).reshape(1, 6, 2) % 6
    shared = jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
    with TraceWriter(f"{folder}/{jax.process_index()}.npz", **SIZES) as writer:
        with pytest.raises(ValueError, match="this process holds only a part of expert_idx: return it replicated"):
            writer.append(shared)
        writer.append(multihost_utils.process_allgather(shared, tiled=True))
        writer.append(jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(shared))


@pytest.mark.full
def test_several_processes(tmp_path):
    run_processes("tests.traces.writer_test:append_everywhere", str(tmp_path), devices_per_process=1)
    for process in range(2):
        with open_trace(tmp_path / f"{process}.npz") as trace:
            for index in range(2):
                np.testing.assert_array_equal(trace.expert_idx(index).ravel(), np.arange(12) % 6)
