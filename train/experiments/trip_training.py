"""Training steps whose plans are made inside the program, and the same steps with plans from host callbacks.

python -m train.experiments.trip_training OUT.json STEPS
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from train.config import TrainConfig, emulate_devices
from train.data import batches, load_tokens
from train.experiments import process
from train.experiments.record import Record
from train.experiments.settings import Settings
from train.step import build

STEP, DIFFER = "step of training", "steps whose losses differ"
IMPLEMENTATIONS = {"inside": "cpu", "callback": "reference"}
"""Of the planner, by the way that the plan is made."""
RUN = TrainConfig(model="qwen3-tiny", seq_len=64, ep=4, planner="topoep_paper")
_WARMUPS = 5


def measured(figure: str, settings: Settings) -> Iterator[Record]:
    """Runs this file in a process of its own, whose devices can be emulated, and reads what it found."""
    steps = 200 if settings.full else 30
    out = (settings.folder / "training" / "host_trip.json").resolve()
    process.run(__spec__.name, str(out), str(steps), log=out.with_suffix(".log"))
    found = json.loads(out.read_text())
    for way, ms in found["ms"].items():
        yield Record(figure, RUN.model, RUN.planner, {"way": way}, STEP, ms, "ms", "measured")
    differ = sum(len(set(losses)) > 1 for losses in zip(*found["loss"].values(), strict=True))
    yield Record(figure, RUN.model, RUN.planner, {"steps": steps}, DIFFER, differ, "", "measured")


def configs(config: TrainConfig) -> dict[str, TrainConfig]:
    """The same training, by the way that its plans are made."""
    return {
        way: dataclasses.replace(config, planner_implementation=implementation)
        for way, implementation in IMPLEMENTATIONS.items()
    }


def train(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Takes each step both ways, one after the other, so that whatever else this machine does slows both.

    Returns:
      "ms": median milliseconds by way, without the first steps; "loss": the loss of each step, by way.
    """
    programs = {way: build(own) for way, own in configs(config).items()}
    stream = batches(load_tokens(()), batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed)
    states = {way: program.init() for way, program in programs.items()}
    seconds: dict[str, list[float]] = {way: [] for way in programs}
    losses: dict[str, list[float]] = {way: [] for way in programs}
    for step in range(_WARMUPS + steps):
        for way, program in programs.items():
            batch = program.place(stream[step])
            began = time.perf_counter()
            states[way], metrics = program.step(states[way], batch)
            losses[way].append(float(metrics.loss))
            jax.block_until_ready(states[way])
            seconds[way].append(time.perf_counter() - began)
    times = {way: 1e3 * statistics.median(own[_WARMUPS:]) for way, own in seconds.items()}
    return {"ms": times, "loss": {way: own[_WARMUPS:] for way, own in losses.items()}}


def main(out: str, steps: str) -> None:
    """Trains, and writes what `train` returns."""
    jax.config.update("jax_platforms", "cpu")
    emulate_devices(RUN)
    jax.config.update("jax_enable_compilation_cache", False)  # As the trainer does on emulated devices.
    Path(out).write_text(json.dumps(train(RUN, int(steps))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
