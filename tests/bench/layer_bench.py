"""One training step of the trainer's default model in two chunks, beside the same step in one, on emulated devices.

    python -m tests.bench.layer_bench [--steps 20]

The two take turns, each step from the same state and tokens, so that a busy machine slows both down; times are medians.
CPU seconds are those of the whole process: they hardly depend on what else runs. What is compared is the emulation, in
which nothing overlaps: two chunks pay for their exchanges, and cannot gain by them what they do on GPUs.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from train.config import TrainConfig, emulate_devices

LIMIT = 1.3
"""The most that two chunks may take in units of one (issue 5, acceptance 7)."""

COMPILE_LIMIT_S = 40.0
"""The most seconds that compiling may take: the acceptance's limit for a layer, here for a model with its optimizer."""


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the wall and on the CPUs that a call takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


class Step:
    """The training step with a number of chunks, compiled."""

    def __init__(self, chunks: int) -> None:
        from train.step import build

        config = TrainConfig(chunks=chunks)
        self.program = build(config)
        self.state = self.program.init()
        shape = (config.batch_size, config.seq_len + 1)
        self.tokens = self.program.place(np.random.default_rng(0).integers(0, 256, shape, np.int32))
        lowered = self.program.step.lower(self.state, self.tokens)
        began = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - began

    def run(self) -> tuple[float, float]:
        def step() -> Any:
            self.state, metrics = self.compiled(self.state, self.tokens)
            return metrics

        return timed(step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    emulate_devices(TrainConfig())
    steps = {chunks: Step(chunks) for chunks in (1, 2)}
    times = np.array([[step.run() for step in steps.values()] for _ in range(flags.steps + 1)])[1:]
    wall, cpu = np.moveaxis(np.median(times, axis=0), 1, 0)
    print(f"{'chunks':>6}{'compile s':>11}{'step s':>9}{'CPU s':>9}")
    for i, (chunks, step) in enumerate(steps.items()):
        print(f"{chunks:6}{step.compile_s:11.1f}{wall[i]:9.3f}{cpu[i]:9.3f}")
    ratio = float(np.median(times[:, 1, 0] / times[:, 0, 0]))
    print(f"two chunks take {ratio:.2f}x of one ({cpu[1] / cpu[0]:.2f}x in CPU seconds); the limit is {LIMIT}x")
    slowest = max(step.compile_s for step in steps.values())
    print(f"compiling takes at most {slowest:.1f} s; the limit is {COMPILE_LIMIT_S:.0f} s")
    return int(ratio > LIMIT or slowest > COMPILE_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
