"""What a run may change when it goes on: every setting is classified; what matters is refused, or said and recorded."""

import dataclasses
import json
import pathlib

import pytest

from tests.support.train_runs import settings
from train import resume
from train.config import TrainConfig
from train.resume import ResumeError, Start, check_model, go_on

CLASSES = {name: getattr(resume, name) for name in ("MODEL", "DATA", "OPTIMISATION", "BALANCING", "FREE")}


@pytest.fixture
def begun(tmp_path) -> TrainConfig:
    """A run that has begun, as far as its settings go, and is to go on."""
    config = settings(tmp_path / "run", of_data="ab", param_dtype="float32")
    (tmp_path / "run").mkdir()
    config.save(tmp_path / "run/config.json", go_on(config, 0).history)
    return dataclasses.replace(config, resume=True)


def kept_on(config: TrainConfig, done: int) -> resume.Going:
    """Goes on, and keeps the record as a run does."""
    going = go_on(config, done)
    config.save(path_of(config), going.history)
    return going


def path_of(config: TrainConfig) -> pathlib.Path:
    return pathlib.Path(config.run_dir, "config.json")


def test_every_setting_is_in_one_class():
    classified = [name for names in CLASSES.values() for name in names]
    assert sorted(classified) == sorted(field.name for field in dataclasses.fields(TrainConfig)), (
        "say in train/resume.py what a resumed run may do with a new setting"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "top_k=4"}, r"\(other config: top_k is 2, not 4\): resume without --model, --shape and"),
        ({"model": "glm4-tiny", "shape": ""}, "wrong model type: Qwen3MoEConfig, not GLM4MoEConfig"),
        ({"param_dtype": "bfloat16"}, "other config: param_dtype is float32, not bfloat16"),
    ],
)
def test_another_model_is_refused(begun, changes, message):
    shape = f"{begun.shape},{changes['shape']}" if changes.get("shape") else changes.get("shape", begun.shape)
    with pytest.raises(ResumeError, match=f"run trains another model .*{message}"):
        check_model(dataclasses.replace(begun, **{**changes, "shape": shape}))


def test_the_same_model_under_another_name_goes_on(begun):
    check_model(begun)
    check_model(dataclasses.replace(begun, model="weights", of_weights=begun.shapes(), shape=""))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 16}, "from step 5 on: --batch_size=16 instead of 8; the data come in another order"),
        ({"seed": 1}, "from step 5 on: --seed=1 instead of 0; the data come in another order"),
        ({"of_data": "cd"}, "from step 5 on: other data; the data come in another order"),
        ({"lr": 0.01}, "from step 5 on: --lr=0.01 instead of 0.001; training takes another path"),
        (
            {"planner": "none", "clip": 2.0},
            "from step 5 on: --clip=2.0 instead of 1.0, --planner=none instead of topoep;"
            " training takes another path, and figures of balancing are no longer those of before",
        ),
    ],
)
def test_what_matters_is_said_and_recorded(begun, changes, said):
    config = dataclasses.replace(begun, **changes)
    going = kept_on(config, 4)
    assert going.said == said
    first, second = going.history
    assert (first.after_step, second.after_step) == (0, 4)
    assert {name: second.settings[name] for name in changes} == changes
    kept = json.loads(path_of(config).read_text())["history"]
    assert [Start(**start) for start in kept] == going.history
    # The same again is no change, and a way back is one.
    assert kept_on(config, 6) == resume.Going(going.history, None)
    assert [start.after_step for start in kept_on(begun, 8).history] == [0, 4, 8]


def test_the_rest_is_free(begun):
    others = {"save_every": 7, "remat": "full", "residuals": "all", "chunks": 1, "record_routing": 2, "fsdp": True}
    assert others.keys() <= {*resume.FREE}
    going = kept_on(dataclasses.replace(begun, **others), 4)
    assert (going.said, len(going.history)) == (None, 1)


def test_an_older_checkpoint_takes_its_record_along(begun):
    faster = dataclasses.replace(begun, lr=0.01)
    kept_on(faster, 4)
    # Step 4 was done with the settings of the first start, and step 5 with those of the second.
    said = "from step 5 on: --lr=0.01 instead of 0.001; training takes another path"
    assert kept_on(dataclasses.replace(faster, restore=4), 4).said == said
    assert go_on(faster, 5).said is None
    assert go_on(begun, 2) == resume.Going(go_on(begun, 1).history, None)


def test_runs_of_older_versions_have_no_record(begun):
    content = json.loads(path_of(begun).read_text())
    del content["history"], content["of_data"]
    path_of(begun).write_text(json.dumps(content))
    going = go_on(dataclasses.replace(begun, lr=0.01), 4)
    assert going.said == "from step 5 on: --lr=0.01 instead of 0.001; training takes another path"
    assert going.history[0].settings["lr"] == 0.001
    path_of(begun).write_text(json.dumps({**content, "history": [1]}))
    with pytest.raises(ResumeError, match=r'"history" in .*config.json is damaged .*: remove it, and the run goes on'):
        go_on(begun, 4)
