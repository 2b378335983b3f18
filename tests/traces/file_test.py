"""The file of a trace: what was appended is read, by NumPy alone too, however the file ended, and damage is noticed."""

import io
import json
import zipfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from topoep_jax import Topology, TraceWriter, open_trace
from topoep_jax.traces import container, layout, read_trace

SIZES = {"num_experts": 6, "num_ranks": 2}


@st.composite
def traces(draw):
    """Arguments of a writer, and what to append: (step, integers [layers, G x R x T, K])."""
    num_ranks, num_groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = num_ranks * draw(st.sampled_from([1, 3, 63, 64, 85, 300]))
    num_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    arguments = {
        "num_experts": num_experts,
        "num_ranks": num_ranks,
        "num_groups": num_groups,
        "layers": draw(st.none() | st.just(tuple(range(3, 3 + num_layers)))),
        "topology": draw(st.none() | st.just(Topology.uniform(1, num_ranks))),
        "model": draw(st.none() | st.text(max_size=5)),
        "hidden": draw(st.none() | st.integers(1, 10**6)),
        "ffn": draw(st.none() | st.integers(1, 10**6)),
    }
    dtype = draw(st.sampled_from([np.int16, np.int32, np.int64]))
    steps = sorted(draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=3)))
    microbatches = []
    for step in steps:
        shape = num_layers, num_groups * num_ranks * draw(st.integers(1, 5)), top_k
        microbatches.append((step, rng.integers(-1, num_experts, shape).astype(dtype)))
    return arguments, microbatches


def write(path, arguments, microbatches, **more):
    with TraceWriter(path, **arguments, **more) as writer:
        for step, expert_idx in microbatches:
            writer.append(expert_idx, step=step)


def parts_of(arguments, microbatches):
    """(step, integers [layers, R, T, K]) of each group."""
    ranks, groups = arguments["num_ranks"], arguments.get("num_groups", 1)
    for step, expert_idx in microbatches:
        for part in np.split(expert_idx, groups, axis=1):
            yield step, part.reshape(part.shape[0], ranks, -1, part.shape[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def fresh(folder):
    """A path at which no file is."""
    path = folder / "trace.npz"
    path.unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def sample(folder):
    """Bytes of a trace of three microbatches, and these."""
    rng = np.random.default_rng(0)
    microbatches = [(step, rng.integers(-1, 6, (2, 8, 2))) for step in (0, 1, 4)]
    write(folder / "sample.npz", SIZES, microbatches)
    return (folder / "sample.npz").read_bytes(), list(parts_of(SIZES, microbatches))


@hypothesis.settings(max_examples=60)
@hypothesis.given(traces())
def test_what_was_appended_is_read(folder, trace):
    arguments, microbatches = trace
    path = folder / "trace.npz"
    path.unlink(missing_ok=True)
    write(path, arguments, microbatches)
    parts = list(parts_of(arguments, microbatches))
    with open_trace(path) as read:
        assert not read.cut_off
        assert read.steps == tuple(step for step, _ in parts)
        kept = ("num_experts", "num_ranks", "num_groups", "topology", "model", "hidden", "ffn")
        assert {name: getattr(read.info, name) for name in kept} == {name: arguments[name] for name in kept}
        num_layers = microbatches[0][1].shape[0]
        assert read.info.layers == (arguments["layers"] or tuple(range(num_layers)))
        for index, (_, part) in enumerate(parts):
            found = read.expert_idx(index)
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, part)
            omega = (part[..., None] == np.arange(arguments["num_experts"])).sum(axis=(2, 3))
            np.testing.assert_array_equal(read.omega(index), omega)
        by_step = {step: [e for s, e in microbatches if s == step] for step, _ in microbatches}
        for step, arrays in by_step.items():
            np.testing.assert_array_equal(read.replay(step), np.concatenate(arrays, axis=1))
    assert read_trace(path).shape == (len(parts) * num_layers, arguments["num_ranks"], arguments["num_experts"])


@pytest.mark.parametrize(("num_experts", "dtype", "padding"), [(255, np.uint8, 255), (256, np.uint16, 65535)])
def test_numpy_alone_reads_it(fresh, num_experts, dtype, padding):
    idx = np.array([[[[0, -1], [num_experts - 1, 2]]]])
    write(fresh, {"num_experts": num_experts, "num_ranks": 1, "model": "mine"}, [(7, idx), (7, idx), (12, idx)])
    with np.load(fresh) as arrays:
        assert arrays.files == [
            "topoep_trace",
            *(f"expert_idx/{name}" for name in ("00000007/0", "00000007/1", "00000012/0")),
        ]
        assert json.loads(str(arrays["topoep_trace"])) == {
            "format": "topoep_jax routing trace",
            "version": 1,
            "num_experts": num_experts,
            "num_ranks": 1,
            "layers": [0],
            "domain_of_rank": None,
            "model": "mine",
            "hidden": None,
            "ffn": None,
            "num_groups": 1,
        }
        stored = arrays["expert_idx/00000012/0"]
        assert stored.dtype == dtype
        assert stored.tolist() == [[[[0, padding], [num_experts - 1, 2]]]]


def test_other_programs_may_pack_it_anew(sample, fresh):
    raw, parts = sample
    with np.load(io.BytesIO(raw)) as arrays:
        np.savez(fresh, note=np.arange(3), **dict(reversed(list(arrays.items()))))
    with open_trace(fresh) as trace:
        assert trace.steps == (0, 1, 4)
        np.testing.assert_array_equal(trace.expert_idx(2), parts[2][1])


def test_a_file_may_be_cut_off_anywhere(sample, fresh):
    raw, parts = sample
    ends = [container.end_of(io.BytesIO(raw), info) for info in container.walk(io.BytesIO(raw))]
    for length in range(len(raw)):
        fresh.write_bytes(raw[:length])
        whole = sum(end <= length for end in ends) - 1
        if whole < 1:
            with pytest.raises(ValueError, match=r"trace\.npz: (it holds no microbatch that is whole|not a readable)"):
                open_trace(fresh)
            continue
        with open_trace(fresh) as trace:
            assert trace.cut_off
            assert len(trace) == whole
            assert all(np.array_equal(trace.expert_idx(index), parts[index][1]) for index in range(whole))


def test_no_byte_may_change(sample, fresh):
    """A changed byte is noticed, or changes nothing that is read."""
    raw, parts = sample
    rng = np.random.default_rng(1)
    noticed = 0
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << rng.integers(8)
        fresh.write_bytes(damaged)
        try:
            with open_trace(fresh) as trace:
                for index in range(len(trace)):
                    np.testing.assert_array_equal(trace.expert_idx(index), parts[index][1])
                    assert trace.steps[index] == parts[index][0]
                assert len(trace) == len(parts)
        except ValueError as error:
            assert "trace.npz" in str(error)
            noticed += 1
    assert noticed > len(raw) / 3


@hypothesis.settings(max_examples=40)
@hypothesis.given(traces(), st.data())
def test_interrupted_and_resumed_equals_uninterrupted_byte_for_byte(folder, trace, data):
    arguments, microbatches = trace
    path = folder / "trace.npz"
    path.unlink(missing_ok=True)
    write(path, arguments, microbatches)
    whole = path.read_bytes()
    after = data.draw(st.sampled_from([-1, *(step for step, _ in microbatches)]))
    infos = container.walk(io.BytesIO(whole))[1:]
    kept = [info for info in infos if layout.microbatch_of(info.filename)[0] <= after]
    end = container.end_of(io.BytesIO(whole), kept[-1]) if kept else 0
    path.write_bytes(whole[: data.draw(st.integers(end, len(whole)))])
    write(path, arguments, [part for part in microbatches if part[0] > after], resume_after=after)
    assert path.read_bytes() == whole


def test_resuming(sample, fresh):
    write(fresh, SIZES, [(3, np.zeros((2, 2, 2), int))], resume_after=2)  # There is nothing to go on with.
    with open_trace(fresh) as trace:
        assert trace.steps == (3,)
    before = fresh.read_bytes()
    for changes, message in (
        ({"num_experts": 8}, "num_experts=6, but this is 8"),
        ({"hidden": 5}, "hidden=None, but this is 5"),
        ({"num_groups": 2}, "num_groups=1, but this is 2"),
        ({"layers": (0, 2)}, r"layers=\(0, 1\), but this is \(0, 2\)"),
    ):
        with pytest.raises(ValueError, match=rf"trace\.npz cannot be continued: it was recorded with {message}"):
            TraceWriter(fresh, **{**SIZES, **changes}, resume_after=3)
    assert fresh.read_bytes() == before
    np.savez(fresh, omega=np.ones((2, 6), int))
    with pytest.raises(ValueError, match="cannot be continued: the entry at byte 0 was not written by a TraceWriter"):
        TraceWriter(fresh, **SIZES, resume_after=3)


def test_files_beyond_4_gib_and_65535_entries(fresh):
    """Both need the 64-bit form of the directory, which zipfile and NumPy read."""
    with fresh.open("w+b") as file:
        infos = [container.write(file, f"small{index}", np.arange(index)) for index in range(3)]
        file.seek(5 * 2**30)  # A hole, which takes no space.
        infos.append(container.write(file, "far", np.arange(7)))
        container.finish(file, infos)
        assert [info.filename for info in container.find(file)[0]] == [
            "small0.npy",
            "small1.npy",
            "small2.npy",
            "far.npy",
        ]
    with np.load(fresh) as arrays:
        assert arrays["far"].tolist() == list(range(7))
    many = io.BytesIO()
    info = container.write(many, "again", np.arange(3))
    container.finish(many, [info] * 70_000)
    assert len(zipfile.ZipFile(many).infolist()) == 70_000


def test_files_without_num_groups_go_on(fresh):
    """The first files of version 1 do not tell it."""
    with fresh.open("w+b") as file:
        infos = [container.write(file, layout.HEAD, np.array(json.dumps(HEAD)))]
        infos.append(container.write(file, layout.name_of(3, 0), ZEROS))
        container.finish(file, infos)
    write(fresh, {**SIZES, "num_groups": 2}, [(4, np.zeros((1, 4, 1), int))], resume_after=3)
    with open_trace(fresh) as trace:
        assert (trace.steps, trace.info.num_groups) == ((3, 4, 4), None)


HEAD = {"format": "topoep_jax routing trace", "version": 1, **SIZES, "layers": [0]}
HEAD |= {"domain_of_rank": None, "model": None, "hidden": None, "ffn": None}
ZEROS = np.zeros((1, 2, 3, 1), np.uint8)


@pytest.mark.parametrize(
    ("head", "entries", "message"),
    [
        ({"version": 2}, {}, "it has version 2 of the format, but this topoep_jax reads up to 1: take a later one"),
        ({"version": "1"}, {}, "version='1' is none"),
        ({"format": "spam"}, {}, "not that of a topoep_jax routing trace"),
        ({"layers": 3}, {}, "layers=3 must be a list"),
        ({"layers": [0.5]}, {}, "must be the ascending numbers"),
        ({"domain_of_rank": [0, 2]}, {}, "renumber the domains"),
        ({"domain_of_rank": [0]}, {}, "the topology has 1 ranks, but the trace 2"),
        ({"num_groups": 0}, {}, "num_groups=0 must be an integer"),
        ({"num_experts": None}, {}, "num_experts=None must be an integer"),
        ({}, {}, "it holds no microbatch"),
        ({}, {"expert_idx/first": ZEROS}, "'expert_idx/first.npy' is no microbatch"),
        ({}, {"expert_idx/3/0": ZEROS.astype(np.int64)}, r"step 3: it is int64\[1, 2, 3, 1\], not uint8"),
        ({}, {"expert_idx/3/0": ZEROS[0]}, r"step 3: it is uint8\[2, 3, 1\], not uint8 or uint16 \[1, 2, T, K\]"),
        ({}, {"expert_idx/3/0": ZEROS + 6}, "step 3: it names expert 6, but there are 6"),
    ],
    ids=str,
)
def test_foreign_files(fresh, head, entries, message):
    np.savez(fresh, topoep_trace=np.array(json.dumps({**HEAD, **head})), **entries)
    with pytest.raises(ValueError, match=rf"trace\.npz.*{message}"):
        read_trace(fresh)


@pytest.mark.parametrize(
    "head", [np.arange(3), np.array("no JSON"), np.array("[1]"), np.array(json.dumps({**HEAD})[:-9])]
)
def test_heads_that_are_none(fresh, head):
    np.savez(fresh, topoep_trace=head)
    with pytest.raises(ValueError, match=r"trace\.npz: "):
        open_trace(fresh)


def test_members_that_later_minor_changes_add_are_left_alone(fresh):
    np.savez(fresh, **{"topoep_trace": json.dumps({**HEAD, "note": 1}), "expert_idx/0/0": ZEROS})
    assert read_trace(fresh).sum() == 6


def test_steps_that_are_not_there(sample, fresh):
    fresh.write_bytes(sample[0])
    with open_trace(fresh) as trace, pytest.raises(ValueError, match=r"step 2 is not recorded: there are 3 of 0\.\.4"):
        trace.replay(2)


def test_omega_alone_cannot_be_replayed(tmp_path):
    np.save(tmp_path / "omega.npy", np.ones((2, 6), int))
    with open_trace(tmp_path / "omega.npy") as trace, pytest.raises(ValueError, match="does not tell the experts"):
        trace.replay(0)
