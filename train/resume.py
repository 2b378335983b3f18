"""What a run may change when it goes on: every setting is in one of five classes.

The run's record keeps those that decide its figures: "history" in `config.json` says since which step which hold.
"""

import dataclasses
import json
import pathlib
from typing import Any

from models.checkpoint.folder import config_faults
from topoep_jax.knobs import KNOBS, Knobs
from train.config import TrainConfig

_KNOBS = [field.name for field in dataclasses.fields(Knobs)]
MODEL = ("model", "shape", "of_weights", "param_dtype")
"""Refused: the state is of another model then. A name or a spelling may change, the shapes may not."""
DATA = ("of_data", "batch_size", "seq_len", "seed")
"""Said and recorded: another order of the data, or other data."""
OPTIMISATION = ("steps", "lr", "warmup", "weight_decay", "clip", "balance_loss", "microbatches", "dtype", "skew")
"""Said and recorded: another path of the parameters."""
BALANCING = ("planner", "ep", "dp", "domains", *(name for name in _KNOBS if KNOBS[name].plans))
"""Said and recorded: other figures of balancing, from the same demand; the parameters differ by rounding."""
FREE = (
    *("data", "init_from", "run_dir", "resume", "restore", "save_every", "record_routing", "remat", "fsdp"),
    *(
        "xla_options",
        "safe_exchange",
        "check_steps",
        "check_every",
        "coordinator",
        "num_processes",
        "process_id",
        "peer_timeout_s",
    ),
    *(name for name in _KNOBS if name not in BALANCING),
)
"""Neither: where and how the same is done. What `data` names is in `of_data`."""
RECORDED = (*DATA, *OPTIMISATION, *BALANCING)


class ResumeError(ValueError):
    """Settings with which a run cannot go on; the message says which."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Settings in the record of a run.

    Attributes:
      after_step: they hold for the steps behind it.
      settings: those of `RECORDED`.
    """

    after_step: int
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Going:
    """How a run goes on.

    Attributes:
      history: its record, with this start.
      said: what is other than before, in one line; None if nothing is.
    """

    history: list[Start]
    said: str | None


def check_model(config: TrainConfig) -> None:
    """Refuses to go on with another model: raises ResumeError."""
    path = pathlib.Path(config.run_dir, "config.json")
    if not config.resume or not path.is_file():
        return
    kept = TrainConfig.kept(path)
    before = dataclasses.replace(config, **{name: kept[name] for name in MODEL if name in kept})
    faults = config_faults(before.shapes(), config.shapes())
    if before.param_dtype not in ("", config.param_dtype):
        faults.append(f"other config: param_dtype is {before.param_dtype}, not {config.param_dtype}")
    if faults:
        raise ResumeError(
            f"{config.run_dir} trains another model ({'; '.join(faults)}): resume without --model, --shape and"
            " --param_dtype, or start a new run in another --run_dir"
        )


def go_on(config: TrainConfig, done: int) -> Going:
    """Compares the settings of a start with those of the run so far.

    Args:
      config: of this start.
      done: steps of the checkpoint; those behind it are forgotten. 0 for a new run.

    Raises:
      ResumeError: the model is another, or the record is damaged.
    """
    now = _recorded(dataclasses.asdict(config))
    path = pathlib.Path(config.run_dir, "config.json")
    if not config.resume or not path.is_file():
        return Going([Start(done, now)], None)
    history = [start for start in read_history(path) if start.after_step < done]
    before = history[-1].settings if history else now
    # Of an old run nobody knows its data.
    changed = {name: old for name, old in before.items() if old != now[name] and (name, old) != ("of_data", "")}
    if changed or not history:
        history.append(Start(done, now))
    return Going(history, _sentence(changed, now, done) if changed else None)


def read_history(path: pathlib.Path) -> list[Start]:
    """The record in a `config.json`; runs of older versions have their settings alone.

    Raises:
      ResumeError: it is damaged.
    """
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    try:
        starts = [Start(int(start["after_step"]), _recorded(start["settings"])) for start in content.get("history", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f'"history" in {path} is damaged ({error!r}): remove it, and the run goes on') from error
    return starts or [Start(0, _recorded(TrainConfig.kept(path)))]


def _recorded(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in RECORDED if name in settings}


def _sentence(changed: dict[str, Any], now: dict[str, Any], done: int) -> str:
    parts = [
        "other data" if name == "of_data" else f"--{name}={now[name]} instead of {value}"
        for name, value in changed.items()
    ]
    means = ["the data come in another order"] if set(changed) & {*DATA} else []
    means += ["training takes another path"] if set(changed) & {*OPTIMISATION} else []
    means += ["figures of balancing are no longer those of before"] if set(changed) & {*BALANCING} else []
    return f"from step {done + 1} on: {', '.join(parts)}; {', and '.join(means)}"
