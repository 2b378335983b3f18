"""Dependent steps of the planners on a GPU, and what they might take there: an estimate without a GPU.

`python -m tests.bench.plan_latency_bench` compiles plan_latency.cc, which runs the bodies on the host and counts, for a
block of 512 threads for each entry (the candidates side by side, the paper's plan among them), the steps that wait for
all threads and the accesses to device memory that the busiest thread makes between them. Nothing here was measured on
a GPU. Assumed:

- `CLOCK` cycles a second; `LAUNCH` seconds from a kernel to the next one on its stream, and `KERNELS` kernels: the
  tables, Begin(), the entries, Conclude().
- A step takes `BARRIER` cycles: a barrier, and a reduction in registers where it has one.
- The first access after a step waits for the L2 cache, `L2` cycles; the others find their line in L1.
- Low: the others overlap, `OVERLAPPED` cycles each. High: each waits for the one before, `L1` cycles.
- Arithmetic is free (it is not: a 64-bit division takes about 100 cycles), all blocks run at once, and nobody else uses
  the GPU.
"""

import argparse
import dataclasses
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from topoep_jax import _native
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.topology import Topology

SIZES = ((32, 128, 2), (64, 256, 2), (128, 640, 2))
"""Ranks (8 to a domain), experts, slots."""
SKEW = 2.0
ASSIGNMENTS = 4096 * 8

CLOCK = 1.755e9
LAUNCH = 2e-6
KERNELS = 4
BARRIER = 100
L2 = 270
OVERLAPPED = 5
L1 = 35

THREADS = 512
ROOT = Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True)
class Chain:
    """What happens one after the other."""

    steps: int
    accesses: int

    def __add__(self, other: "Chain") -> "Chain":
        return Chain(self.steps + other.steps, self.accesses + other.accesses)

    def cycles(self, access: int) -> int:
        return self.steps * (BARRIER + L2) + self.accesses * access


def build(folder: Path) -> Path:
    """The counting program; only the compiler knows of the sanitizer whose calls it counts."""
    program = folder / "plan_latency"
    source = Path(__file__).with_name("plan_latency.cc")
    flags = ["-std=c++17", "-O2", "-fsanitize=thread", f"-I{ROOT}"]
    subprocess.run(["g++", *flags, "-c", source, "-o", program.with_suffix(".o")], check=True)
    attributes = ROOT / "xla_ffi/plan/owned_problem.cc"
    subprocess.run(["g++", "-std=c++17", f"-I{ROOT}", program.with_suffix(".o"), attributes, "-o", program], check=True)
    return program


def count(program: Path, planner: str, ranks: int, experts: int, slots: int) -> dict[str, list[Chain]]:
    """The paths of each kernel's blocks, by kind."""
    rng = np.random.default_rng(0)
    p = np.exp(rng.normal(0, SKEW, experts))
    topology = Topology.uniform(ranks // 8, 8)
    cost = CostModel.from_model(2048, 768, Hardware.h800())
    problem = Problem(topology, cost, experts, slots, None, 128, "bottleneck", "fast")
    omega = rng.multinomial(ASSIGNMENTS, p / p.sum(), size=ranks).ravel()
    lists = {"threads": [THREADS], "omega": omega, **_native.attributes(problem, planner)}
    text = "\n".join(" ".join(map(str, [name, len(values), *values])) for name, values in lists.items())
    output = subprocess.run([program], input=text, text=True, capture_output=True, check=True).stdout
    paths = defaultdict(list)
    for line in output.splitlines():
        kind, steps, accesses = line.split()
        paths[kind].append(Chain(int(steps), int(accesses)))
    return paths


def longest(paths: list[Chain]) -> Chain:
    return max(paths, key=lambda path: path.cycles(OVERLAPPED), default=Chain(0, 0))


def main() -> None:
    """Prints a row for each planner and size."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"{'planner':12s}   R    E  steps  longest block  accesses  low us  high us")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for planner in ("topoep", "topoep_paper"):
            for ranks, experts, slots in SIZES:
                paths = count(program, planner, ranks, experts, slots)
                entry = longest(paths["entry"] + paths["paper"])
                path = longest(paths["begin"]) + entry + longest(paths["conclude"])
                which = "paper's plan" if entry in paths["paper"] else "candidate"
                low, high = (1e6 * (KERNELS * LAUNCH + path.cycles(access) / CLOCK) for access in (OVERLAPPED, L1))
                print(
                    f"{planner:12s} {ranks:3d} {experts:4d} {path.steps:6d}  {which:13s}  {path.accesses:8d}"
                    f" {low:7.0f} {high:8.0f}"
                )


if __name__ == "__main__":
    main()
