"""Data and settings: every fault names its place, and a batch is a pure function of seed and step."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from absl import flags

from train.config import TrainConfig, define_flags, from_flags
from train.data import SEPARATOR, VOCAB, DataError, batches, load_tokens


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
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)):
        load_tokens([str(tmp_path / name)])


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none-\*.txt matches no file"):
        load_tokens([str(tmp_path / "none-*.txt")])
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"folder\.txt: Is a directory"):
        load_tokens([str(tmp_path / "folder.txt")])


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
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"lr": float("nan")}, "--lr=nan must be a finite positive number"),
        ({"clip": -1.0}, "--clip=-1.0 must be a finite positive number"),
        ({"weight_decay": -0.1}, "--weight_decay=-0.1 and --warmup=20 must not be negative"),
        ({"batch_size": 9}, "--batch_size=9 is not a multiple of --ep=8"),
        ({"domains": 3}, "--ep=8 is not a multiple of --domains=3"),
        ({"dtype": "float16"}, "--dtype=float16 is unknown: take one of bfloat16, float32"),
        ({"model": "huge"}, "--model=huge is unknown: take one of qwen3-tiny"),
        ({"overflow": "drop"}, "--overflow=drop is unknown: take one of loop, flag"),
        ({"cap_factor": 0.0}, "--cap_factor=0.0 must be a finite positive number"),
        ({"seed": -1}, "--seed=-1 must be 0 to 2^31 - 1"),
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
        values = flags.FlagValues()
        define_flags(values)
        values([sys.argv[0], *line])
        return from_flags(values)

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--coordinator=a:1 --process_id=3", "--coordinator belongs to a run of several processes: say of how many"),
        ("--process_id=0", "--process_id belongs to a run of several processes"),
        ("--num_processes=2", "--coordinator and --process_id and --run_dir missing"),
        ("--num_processes=2 --coordinator=a:1 --run_dir=r", "--process_id missing"),
        ("--num_processes=2 --coordinator=a:1 --process_id=1", "--run_dir missing"),
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
    assert json.loads((folder / "config.json").read_text())["steps"] == 7
    assert parse().run_dir == "runs/0002"
    (folder / "checkpoints/5").mkdir(parents=True)
    (tmp_path / "runs/0002/checkpoints").mkdir(parents=True)  # stopped before its first checkpoint
    resumed = parse("--resume", "--ep=4")
    assert resumed == TrainConfig(**{**vars(config), "resume": True, "ep": 4})
    with pytest.raises(ValueError, match="--run_dir=runs/0001 already holds a run: add --resume"):
        parse("--run_dir=runs/0001")
    with pytest.raises(ValueError, match=r"--resume: runs/9/config.json does not exist"):
        parse("--resume", "--run_dir=runs/9")
