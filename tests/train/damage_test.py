"""Damaged checkpoints: each kind is one sentence that names what is wrong and a way on, which leads on."""

import json
import pathlib
import re
import resource
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest

from models.checkpoint import digests
from models.checkpoint.commands import main
from tests.support.train_runs import settings
from train.checkpoint import CheckpointError, Checkpoints
from train.config import TrainConfig, define, from_flags
from train.state import TrainState
from train.step import Program, build

pytestmark = pytest.mark.usefixtures("standard_promotion")

RESULTS = pathlib.Path(__file__).parent.parent.parent / "results" / "full" / "damage.json"
ONE_RANK = {"ep": 1, "domains": 1, "planner": "none"}


@pytest.fixture(scope="module")
def tell(request):
    """Keeps what is said of each kind, where the marked tests of this file run too."""
    said: dict[str, str] = {}

    def keep(kind: str, message: object, run: pathlib.Path) -> None:
        text = str(message.value) if isinstance(message, pytest.ExceptionInfo) else str(message)
        said[kind] = re.sub(r"[0-9a-f]{32}", "FILE", text.replace(str(run), "RUN"))

    yield keep
    if said.keys() >= DAMAGE.keys() | NOTED.keys():
        RESULTS.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    return settings(tmp_path_factory.mktemp("saved") / "run", **ONE_RANK)


@pytest.fixture(scope="module")
def program(config) -> Program:
    return build(config)


@pytest.fixture(scope="module")
def states(config, program) -> dict[int, TrainState]:
    """Saved as a run saves them, under two steps."""
    state = jax.device_get(program.init())
    run = pathlib.Path(config.run_dir)
    run.mkdir()
    states = {step: shifted(state, step) for step in (2, 4)}
    with Checkpoints(run / "checkpoints") as checkpoints:
        for step in states:
            checkpoints.save(states[step])
    config.save(run / "config.json")
    (run / "checkpoints/config.json").write_text(json.dumps(config.shapes().to_hf()))
    return states


def shifted(state: TrainState, step: int) -> TrainState:
    numbers = jax.tree.map(lambda leaf: np.asarray(leaf + leaf.dtype.type(step)), state._replace(step=np.int32(0)))
    return numbers._replace(step=np.array(step, np.int32))


@pytest.fixture
def run(config, states, tmp_path) -> pathlib.Path:
    return shutil.copytree(config.run_dir, tmp_path / "run")


def largest(item: pathlib.Path) -> pathlib.Path:
    return max((path for path in item.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def overwrite(path: pathlib.Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def zeros(data: bytes) -> bytes:
    middle = len(data) // 2
    assert any(data[middle : middle + 64])
    return data[:middle] + bytes(64) + data[middle + 64 :]


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def in_largest(change: Callable[[bytes], bytes]) -> Callable[[pathlib.Path], None]:
    return lambda item: overwrite(largest(item), change)


def old(item: pathlib.Path, change: Callable[[bytes], bytes] | None = None) -> None:
    """A checkpoint as an older version left it."""
    (item / digests.DIGESTS).unlink()
    if change:
        overwrite(largest(item), change)


def old_without_metadata(item: pathlib.Path) -> None:
    old(item)
    (item / "_METADATA").unlink()


def emptied(item: pathlib.Path) -> None:
    shutil.rmtree(item.parent)
    item.parent.mkdir()


def replaced_by_a_file(item: pathlib.Path) -> None:
    shutil.rmtree(item.parent)
    item.parent.touch()


def of_another_model(item: pathlib.Path) -> None:
    other = settings(item.parents[2] / "other", shape="hidden=32,num_heads=2,ffn=8,top_k=2,num_layers=1", **ONE_RANK)
    shutil.rmtree(item.parent)
    state = build(other).init()
    with Checkpoints(item.parents[1]) as checkpoints:
        checkpoints.save(state._replace(step=state.step + 4))


def unlisted(item: pathlib.Path) -> None:
    """The list of files has lost one."""
    content = json.loads((item / digests.DIGESTS).read_text())
    del content["files"]["_METADATA"]
    (item / digests.DIGESTS).write_text(json.dumps(content))


OLDER = r"\. Go on from the one before it, with --resume --run_dir=\S+ --restore=2$"
OTHER_BYTES = r"is damaged: \S+ holds other bytes than were written" + OLDER
DAMAGE: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "zeros": (in_largest(zeros), OTHER_BYTES),
    "flipped bit": (in_largest(flipped), OTHER_BYTES),
    "truncated": (in_largest(half), r"is damaged: \S+ has \d+ bytes instead of \d+" + OLDER),
    "missing file": (lambda item: largest(item).unlink(), r"is damaged: \S+ is missing" + OLDER),
    "missing _METADATA": (lambda item: (item / "_METADATA").unlink(), "is damaged: _METADATA is missing" + OLDER),
    "file of another run": (
        lambda item: shutil.copy(largest(item.parents[1] / "2/default"), largest(item)),
        r"is damaged: \S+ (has \d+ bytes instead of \d+|holds other bytes than were written)" + OLDER,
    ),
    "empty folder": (emptied, "is damaged: it holds no files" + OLDER),
    "file in place of a folder": (replaced_by_a_file, "is damaged: it holds no files" + OLDER),
    "unreadable digests": (
        lambda item: overwrite(item / digests.DIGESTS, half),
        r"is damaged: digests\.json is unreadable \(.*\)" + OLDER,
    ),
    "missing _METADATA, of an older version": (
        old_without_metadata,
        "is damaged: _METADATA is missing" + OLDER,
    ),
    "truncated, of an older version": (lambda item: old(item, half), r"cannot be read \(.*\)" + OLDER),
    "of another model": (of_another_model, "is of another shape: .* Resume with the --model and --shape of that run"),
}
NOTED: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "missing digests": (old, r"has no digests\.json, as older versions wrote them, so damage would go unnoticed"),
    "extra file": (lambda item: (item / "more").touch(), "also holds more: that is no part of it, and is not read"),
}
IN_CI = ("zeros", "truncated", "missing _METADATA", "empty folder")


def restored(run: pathlib.Path, program: Program, step: int | None = None) -> tuple[TrainState, list[str]]:
    with Checkpoints(run / "checkpoints") as checkpoints:
        return jax.device_get(checkpoints.restore(program, step=step)), checkpoints.notes


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert len(re.findall(r"(?<=[a-z)])\. ", message)) <= 1, "what is wrong, and how to go on"


@pytest.mark.parametrize(
    "kind", [kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.full) for kind in DAMAGE]
)
def test_damage_is_named_with_a_way_on(run, program, states, tell, kind):
    damage, message = DAMAGE[kind]
    damage(run / "checkpoints/4/default")
    with pytest.raises(CheckpointError, match=message) as error:
        restored(run, program)
    assert_one_sentence(str(error.value))
    state, notes = restored(run, program, step=2)
    jax.tree.map(np.testing.assert_array_equal, state, states[2])
    assert not notes
    tell(kind, error, run)


@pytest.mark.full
@pytest.mark.parametrize("kind", NOTED)
def test_what_is_no_damage_is_told(run, program, states, tell, kind):
    change, message = NOTED[kind]
    change(run / "checkpoints/4/default")
    state, notes = restored(run, program)
    jax.tree.map(np.testing.assert_array_equal, state, states[4])
    (note,) = notes
    assert re.search(message, note)
    tell(kind, note, run)


def test_without_a_sound_checkpoint(run, program, tell):
    for step in (2, 4):
        in_largest(half)(run / f"checkpoints/{step}/default")
    message = "is damaged: .* There is none before it that is whole: start anew in another --run_dir$"
    for step in (None, 2):
        with pytest.raises(CheckpointError, match=message) as error:
            restored(run, program, step)
        assert_one_sentence(str(error.value))
    with pytest.raises(CheckpointError, match=r"of step 3: take --restore=2 or --restore=4$"):
        restored(run, program, 3)
    tell("both checkpoints", error, run)


def test_later_checkpoints_are_set_aside(run, program, states):
    with Checkpoints(run / "checkpoints") as checkpoints:
        for number in ("", "1"):
            checkpoints.set_aside(2)
            assert checkpoints.latest() == 2
            aside = run / f"checkpoints/4.aside{number}"
            assert checkpoints.notes.pop() == f"the checkpoint of step 4 is now {aside}; remove it some day"
            assert (aside / "default" / digests.DIGESTS).is_file()
            checkpoints.save(states[4])
    jax.tree.map(np.testing.assert_array_equal, restored(run, program)[0], states[4])


@pytest.mark.full
def test_without_room(run, program, states, tell):
    """A real limit, which TensorStore meets in its own code."""
    later = states[4]._replace(step=np.array(6, np.int32))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(run / "checkpoints") as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"step 6 cannot be saved in .*: make room there") as error:
                checkpoints.save(later)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(error.value).endswith("start again with --resume, which goes on from step 4")
        assert_one_sentence(str(error.value))
        assert checkpoints.latest() == 4
        checkpoints.save(later)
        assert checkpoints.latest() == 6
    tell("no room", error, run)


def test_where_nothing_can_be_written(run, program, tell):
    """As in a folder that is only to be read, but also for root."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    with Checkpoints(run / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointError, match=r"nothing can be saved in .* or it writable") as error:
            checkpoints.prepare()
        assert str(error.value).endswith("a new run: none was saved")
        assert_one_sentence(str(error.value))
        with pytest.raises(CheckpointError, match="is no folder: move it away, and start anew"):
            checkpoints.restore(program)
    tell("read-only", error, run)


def test_settings_that_cannot_be_read(run, tell):
    overwrite(run / "config.json", half)
    values = define()
    values(["train", "--resume", f"--run_dir={run}"])
    with pytest.raises(ValueError, match=r"config.json is damaged.* --init_from=.*/checkpoints$") as error:
        from_flags(values)
    tell("unreadable config.json", error, run)


def test_the_commands_compare_digests_too(run, tmp_path, capsys):
    folder = run / "checkpoints"
    assert main(["verify", str(folder)]) == 0
    assert main(["convert", f"--from={folder}", f"--to={tmp_path / 'params'}", "--format=trainer"]) == 0
    in_largest(zeros)(folder / "4/default")
    capsys.readouterr()
    for command in (["verify", str(folder)], ["convert", f"--from={folder}", f"--to={tmp_path / 'out'}"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert f"{folder}/4/default is damaged, {folder}/2 is the one before it" in told
        assert "holds other bytes than were written" in told
    assert main(["verify", str(folder / "2")]) == 0
    # No weight is read by this one, so it sees files and sizes alone.
    assert main(["inspect", str(folder)]) == 0
    (folder / "4/default/_METADATA").unlink()
    assert main(["inspect", str(folder)]) == 2
    assert "_METADATA is missing" in capsys.readouterr().err
    in_largest(flipped)(tmp_path / "params/default")
    assert main(["verify", str(tmp_path / "params")]) == 2
    assert "holds other bytes than were written" in capsys.readouterr().err
