"""Data and settings: every fault names its place, and a batch is a pure function of seed and step."""

import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from train import data
from train.config import TrainConfig, define, from_flags
from train.data import SEPARATOR, VOCAB, DataError, batches, load_tokens, read_tokens


def test_default_text_is_the_standard_library():
    tokens = load_tokens(())
    assert len(tokens) > 1_000_000
    assert tokens.max() == SEPARATOR < VOCAB
    text = bytes(tokens[tokens < SEPARATOR].astype(np.uint8))
    assert b"def " in text
    assert b"import " in text


def test_own_text_is_joined_with_separators(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.jsonl").write_text('{"text": "c"}\n\n{"text": "\\u00e9", "more": 1}\n')
    tokens = load_tokens([str(tmp_path / "*.txt"), str(tmp_path / "*.jsonl")])
    assert tokens.tolist() == [97, 98, SEPARATOR, 99, SEPARATOR, 0xC3, 0xA9, SEPARATOR]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "a.txt: the file is empty"),
        ("a.csv", b"a,b", "a.csv: cannot read .csv"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'\n{"txt": "a"}', "a.jsonl, line 2: needs an object with a string in field 'text'"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1: needs an object"),
        ("a.jsonl", b"[" * 200_000, "a.jsonl, line 1: not JSON"),
        ("a.jsonl", b"\xff", "a.jsonl, line 1: not JSON"),
        ("a.jsonl", b" \n\r\n", "a.jsonl: the file is empty"),
        ("a.txt", b"\xef\xbb\xbf", "a.txt: the file is empty"),
        ("a.txt", "hi".encode("utf-16"), "a.txt: the text is UTF-16 or UTF-32: store it as UTF-8"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-32"), "a.jsonl: the text is UTF-16 or UTF-32: store it as UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)):
        load_tokens([str(tmp_path / name)])


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none-\*.txt matches no file"):
        load_tokens([str(tmp_path / "none-*.txt")])
    (tmp_path / "here").mkdir()
    for name, wanted in (("", "*.txt"), ("a.npy", "*.npy"), ("b.jsonl", "*.jsonl")):
        (tmp_path / "here" / name).exists() or (tmp_path / "here" / name).touch()
        for pattern in ("here", "her[e]", "*"):
            message = f"{tmp_path}/here is a folder: name its files, as in --data='{tmp_path}/here/{wanted}'"
            with pytest.raises(DataError, match=re.escape(message)):
                load_tokens([str(tmp_path / pattern)])
    (tmp_path / "a.txt").mkdir()
    (tmp_path / "a.txt" / "below.txt").touch()
    with pytest.raises(DataError, match=re.escape(f"--data='{tmp_path}/a.txt/*.txt'")):
        load_tokens([f"{tmp_path}/*.txt"])


def test_what_is_there_has_its_name(tmp_path):
    """Also where the name could be read as a glob; behind a folder of such a name globs are globs."""
    folder = tmp_path / "corpus[v1]"
    folder.mkdir()
    (folder / "f.txt").write_bytes(b"q")
    (folder / "g[1]*.txt").write_bytes(b"r")
    (folder / "g1.txt").write_bytes(b"s")
    for pattern, text in (("f.txt", b"q"), ("g[1]*.txt", b"r"), ("*.txt", b"qsr"), ("g[12].txt", b"s")):
        want = [token for letter in text for token in (letter, SEPARATOR)]
        assert load_tokens([str(folder / pattern)]).tolist() == want
        assert load_tokens([f"{tmp_path}/corpus*/{pattern}"]).tolist() == (want if text != b"r" else [115, 256])


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hi"}\r{"text": "\xef\xbb\xbf"}\n')
    assert load_tokens([str(tmp_path / "a.txt")]).tolist() == [104, 105, SEPARATOR]
    # Within text it is a character.
    assert load_tokens([str(tmp_path / "a.jsonl")]).tolist() == [104, 105, SEPARATOR, 0xEF, 0xBB, 0xBF, SEPARATOR]


def test_token_ids_are_taken_as_they_are(tmp_path):
    np.save(tmp_path / "a.npy", np.array([70000, 3, 1], np.int32))
    np.save(tmp_path / "b.npy", np.array([2, 5], np.uint16))
    assert load_tokens([f"{tmp_path}/*.npy"]).tolist() == [70000, 3, 1, 2, 5]
    np.save(tmp_path / "c.npy", np.array([7], np.uint64))
    mixed = load_tokens([f"{tmp_path}/*.npy"])
    assert mixed.tolist() == [70000, 3, 1, 2, 5, 7] and np.issubdtype(mixed.dtype, np.integer)
    assert batches(load_tokens([f"{tmp_path}/a.npy"]), batch_size=1, seq_len=2, seed=0)[0].tolist() == [[70000, 3, 1]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((2, 2), np.int32), "needs a vector of integers"),
        (np.zeros(0, np.int32), "needs a vector of integers"),
        (np.zeros(3), "needs a vector of integers"),
        (np.array([4, -1]), "holds the token -1"),
        (np.array([None]), "not a readable NumPy file"),
    ],
)
def test_bad_token_ids_are_named(tmp_path, ids, message):
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(DataError, match=rf"a\.npy: {message}"):
        load_tokens([f"{tmp_path}/a.npy"])


def test_a_file_that_cannot_be_read_to_its_end_is_named(tmp_path):
    class Torn(io.BytesIO):
        def read(self, size=-1):
            return super().read(size) or self.fail()

        def fail(self):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(DataError, match=rf"^a\.txt: {os.strerror(errno.ESTALE)}$"):
        list(data._blocks(pathlib.Path("a.txt"), Torn(b"text")))


def test_data_are_the_same_in_whatever_blocks_they_are_read(tmp_path, monkeypatch):
    text = bytes(range(256)) * 3
    (tmp_path / "a.txt").write_bytes(text)
    np.save(tmp_path / "a.npy", np.array([5, 70000, 3], np.int32))
    np.save(tmp_path / "b.npy", np.array([2, 5], np.uint16))
    sources = [f"{tmp_path}/a.txt"], [f"{tmp_path}/a.npy"], [f"{tmp_path}/*.npy"]
    whole = [read_tokens(source) for source in sources]
    assert whole[0].ids.tolist() == [*text, SEPARATOR]
    assert [tokens.largest for tokens in whole] == [SEPARATOR, 70000, 70000]
    # Of runs before data were read in blocks, which go on.
    assert whole[1].digest.hex() == hashlib.blake2b(b"<i4" + whole[1].ids.tobytes(), digest_size=16).hexdigest()
    monkeypatch.setattr(data, "_BLOCK", 2)
    for source, tokens in zip(sources, whole, strict=True):
        again = read_tokens(source)
        np.testing.assert_array_equal(again.ids, tokens.ids)
        assert again[1:] == tokens[1:]


def test_no_room_for_the_tokens_is_said(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"no room for the tokens .*: name a folder that has some with TMPDIR="):
        load_tokens([str(tmp_path / "a.txt")])


MEMORY = """
import pathlib, re, sys
from train.data import batches, read_tokens

def peak():  # getrusage would count what the parent had.
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) << 10

before = peak()
for path in sys.argv[1:]:
    ids = read_tokens([path]).ids
    stream, count = batches(ids, batch_size=64, seq_len=1024, seed=0), len(ids) // 300_000
    for step in range(count):
        stream[step]
print(peak() - before)
"""


def _memory_of(*paths: pathlib.Path) -> int:
    """Bytes that a process needs, more than before, to read each of the files and train on parts of them."""
    done = subprocess.run([sys.executable, "-c", MEMORY, *map(str, paths)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def _large_files(folder: pathlib.Path, size: int) -> list[pathlib.Path]:
    """Text of `size` bytes as .txt and as .jsonl, and as many token ids."""
    block = b"some words of a text " * 50_000
    paths = [folder / f"a{suffix}" for suffix in (".txt", ".jsonl", ".npy")]
    with paths[0].open("wb") as text, paths[1].open("w") as lines:
        for _ in range(-(-size // len(block))):
            text.write(block)
            lines.write((json.dumps({"text": block[:10_000].decode()}) + "\n") * (len(block) // 10_000))
    np.save(paths[2], np.zeros(size, np.int32))
    return paths


def test_data_may_be_larger_than_memory(tmp_path):
    size = 16_000_000
    assert _memory_of(*_large_files(tmp_path, size)) < 2 * size


@pytest.mark.full
def test_200_megabytes_of_text_cost_little_memory(tmp_path):
    for path in _large_files(tmp_path, 200_000_000):
        assert _memory_of(path) < 60_000_000


def test_text_and_token_ids_do_not_mix(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"b\.txt: text has no token ids"):
        load_tokens([f"{tmp_path}/*"])


def test_too_little_text_is_refused():
    with pytest.raises(DataError, match="5 tokens, too few for one window of --seq_len=8"):
        batches(np.arange(5, dtype=np.uint16), batch_size=2, seq_len=8, seed=0)


def test_batches_are_a_pure_function_of_seed_and_step():
    tokens = np.arange(8 * 16 + 1, dtype=np.uint16)
    one, same = (batches(tokens, batch_size=4, seq_len=8, seed=3) for _ in range(2))
    epoch = np.concatenate([one[step] for step in range(4)])
    assert epoch.dtype == np.int32
    assert sorted(epoch[:, 0].tolist()) == list(range(0, 128, 8)), "an epoch visits every window once"
    np.testing.assert_array_equal(epoch[:, 1:], epoch[:, :-1] + 1)
    np.testing.assert_array_equal(one[1000], same[1000])
    assert (one[0] != one[4]).any(), "epochs differ"
    assert (one[0] != batches(tokens, batch_size=4, seq_len=8, seed=4)[0]).any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "--steps=0 must be an integer of at least 1"),
        ({"lr": float("nan")}, "--lr=nan must be a finite positive number"),
        ({"clip": -1.0}, "--clip=-1.0 must be a finite positive number"),
        ({"weight_decay": -0.1}, "--weight_decay=-0.1 must not be negative"),
        ({"batch_size": 9}, "--batch_size=9 is not a multiple of --ep=8"),
        ({"domains": 3}, "--ep=8 is not a multiple of --domains=3"),
        ({"dtype": "float16"}, "--dtype=float16 must be 'bfloat16' or 'float32'"),
        ({"model": "huge"}, "--model=huge is unknown: take one of qwen3-tiny"),
        ({"overflow": "drop"}, "--overflow=drop must be 'loop' or 'flag'"),
        ({"cap_factor": 0.0}, "--cap_factor=0.0 must be a finite positive number"),
        ({"seed": -1}, "--seed=-1 must be an integer of at least 0"),
        ({"num_processes": 2}, "--num_processes=2 needs --coordinator"),
        ({"process_id": 1}, "--process_id=1 must be 0 to 0 with --num_processes=1"),
        ({"process_id": -1}, "--process_id=-1 must be 0 to 0 with --num_processes=1"),
    ],
)
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**wrong)


def test_shape_changes_the_model():
    assert TrainConfig(shape="ffn=96,num_layers=2").shapes().ffn == 96
    for wrong in ("ffn", "ffn=x", "width=3", "rope_theta=3"):
        with pytest.raises(ValueError, match=f"--shape has '{wrong}': write name=integer"):
            TrainConfig(shape=wrong).shapes()


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """A function from a command line to a TrainConfig, with fresh flags, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*line):
        values = define()
        values([sys.argv[0], *line])
        return from_flags(values)

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--coordinator=a:1 --process_id=3", "--num_processes missing: a run of several processes needs all of"),
        ("--process_id=0", "--coordinator and --num_processes missing"),
        ("--num_processes=2", "--coordinator and --process_id missing"),
        ("--num_processes=2 --coordinator=a:1 --run_dir=r", "--process_id missing"),
        (
            "--num_processes=2 --coordinator=a:1 --process_id=1",
            "--run_dir missing: the 2 processes of a run need the same",
        ),
        ("--num_processes=2 --coordinator=a:1 --process_id=2 --run_dir=r", "--process_id=2 must be 0 to 1 with"),
    ],
)
def test_a_process_does_not_train_alone_for_want_of_a_flag(parse, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(*line.split())


def test_processes_are_those_of_each_start(parse, tmp_path):
    several = ("--num_processes=2", "--coordinator=a:1", "--process_id=0", f"--run_dir={tmp_path / 'run'}")
    config = parse(*several)
    (tmp_path / "run").mkdir()
    config.save(tmp_path / "run" / "config.json")
    alone = parse("--resume", f"--run_dir={tmp_path / 'run'}")
    assert (alone.num_processes, alone.coordinator, alone.process_id) == (1, "", 0)
    assert parse("--resume", *several) == dataclasses.replace(config, resume=True)
    assert parse("--num_processes=1", "--coordinator=a:1", "--process_id=0").num_processes == 1, "a job of one task"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"[]", b'{"steps": 5, "lr', b"{}", b"[" * 200_000),
        *(b'{"data": [], "foo": 1}', b'{"data": [], "steps": "5"}', b'{"data": [], "of_weights": {}}'),
    ],
)
def test_damaged_settings_are_named(parse, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"run/config\.json is damaged, or of another version, so"):
        parse("--resume", f"--run_dir={tmp_path / 'run'}")


def test_other_data_are_said_to_be_meant_with_a_flag(parse, tmp_path):
    (tmp_path / "run").mkdir()
    TrainConfig(of_data="12ab", run_dir="run").save(tmp_path / "run" / "config.json")
    assert parse("--resume", "--run_dir=run").of_data == "12ab"
    assert parse("--resume", "--run_dir=run", "--data=b.txt").of_data == ""


def test_runs_are_numbered_and_resumed_with_their_settings(parse, tmp_path):
    config = parse("--steps=7", "--data=a.txt", "--data=b.txt", "--skew=-2")
    assert config == TrainConfig(steps=7, data=("a.txt", "b.txt"), skew=-2.0, run_dir="runs/0001")
    folder = tmp_path / "runs/0001"
    folder.mkdir(parents=True)
    config.save(folder / "config.json")
    text = (folder / "config.json").read_text()
    assert json.loads(text)["steps"] == 7
    (folder / "config.json").write_text(text, encoding="utf-8-sig")  # as some editors leave it
    assert parse().run_dir == "runs/0002"
    (folder / "checkpoints/5").mkdir(parents=True)
    (tmp_path / "runs/0002/checkpoints").mkdir(parents=True)  # stopped before its first checkpoint
    resumed = parse("--resume", "--ep=4")
    assert resumed == TrainConfig(**{**vars(config), "resume": True, "ep": 4})
    with pytest.raises(ValueError, match="--run_dir=runs/0001 already holds a run: add --resume"):
        parse("--run_dir=runs/0001")
    with pytest.raises(ValueError, match=r"--resume: runs/9/config.json does not exist"):
        parse("--resume", "--run_dir=runs/9")
