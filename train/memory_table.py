"""Memory per GPU of the three models at the paper's depth and layout: `python -m train.memory_table`.

The train step is compiled ahead of time for 32 GPUs; none has to be there, and nothing runs. A line is a program, and a
GPU needs as much as the largest one. Beside a program's own memory (temporaries, arguments and results, less what lies
in the memory of donated arguments) a pipeline stage holds what that program does not take: the optimizer's state, the
summed gradients, and the hidden states of microbatches under way.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax

from topoep_jax import transport
from topoep_jax.aot import TARGETS, Target, compile_program, prepare
from topoep_jax.cli import execute
from topoep_jax.cli.flags import Flags
from train import aot
from train.stages import Stage

MEANING = "compile the train steps of three models for 32 GPUs that need not be there, and print the memory they need"
SEQ_LEN = 4096
MICROBATCHES = 4
"""Of one sequence per rank each."""
NODES, GPUS = 4, 8
STAGES = {"qwen3-30b-a3b-paper": 1, "glm-4.5-air-paper": 2, "deepseek-v2-paper": 2}
"""Of the pipeline; the GPUs of one share the experts."""
GB = 10**9


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes on a GPU while one program runs."""

    model: str
    layout: str
    program: str
    arguments: int
    temp: int
    outputs: int
    aliases: int
    beside: int
    """Arrays that are alive and no argument of the program."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.arguments + self.temp + self.outputs - self.aliases + self.beside


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("model", tuple, "models to compile, in minutes each", list(STAGES), choices=tuple(STAGES))
    values.add("gpu", str, "kind of GPU", "h800", choices=tuple(TARGETS))
    values.add("json", bool, "print one JSON array and nothing else", False)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints."""
    jax.config.update("jax_platforms", "cpu")  # Nothing runs, so a GPU of this machine is left alone.
    prepare()
    target = TARGETS[values.gpu]
    found: list[Line] = []
    if not values.json:
        yield "| model | layout | program | arguments | temporaries | beside | GB per GPU |\n"
        yield "| --- | --- | --- | --: | --: | --: | --: |\n"
    for model in values.model:
        for line in lines(model, target):
            found.append(line)
            if not values.json:
                yield text(line)
    if values.json:
        yield json.dumps([{**dataclasses.asdict(line), "total": line.total} for line in found], indent=1) + "\n"
        return
    for model in values.model:
        most = max((line for line in found if line.model == model), key=lambda line: line.total)
        yield f"{model}: {most.total / GB:.1f} GB per GPU, while {most.program} runs\n"
    for note in transport.xla_options().missing:
        yield f"note: {note}\n"


def text(line: Line) -> str:
    """The line as one of a Markdown table, in GB; results in memory of their own count as temporaries."""
    sizes = (line.arguments, line.temp + line.outputs - line.aliases, line.beside, line.total)
    return f"| {line.model} | {line.layout} | {line.program} | {' | '.join(f'{s / GB:.1f}' for s in sizes)} |\n"


def lines(model: str, target: Target) -> Iterator[Line]:
    """Compiles all programs of a model's step."""
    count = STAGES[model]
    ranks = NODES * GPUS // count
    mesh = target.mesh(NODES // count, GPUS)
    settings = (
        f"--model={model}",
        f"--batch_size={ranks * MICROBATCHES}",
        f"--microbatches={MICROBATCHES}",
        f"--seq_len={SEQ_LEN}",
        "--dtype=bfloat16",
        "--param_dtype=bfloat16",
        "--block_rows=128",
        "--chunks=2",
        "--overflow=flag",
        "--remat=full",
    )
    if count == 1:
        yield _line(model, f"EP {ranks}", "step", *aot.step(mesh, *settings), beside=0)
        return
    for index in range(count):
        stage = aot.stage_of(mesh, index, count, *settings)
        for name, args in stage.arguments().items():
            title = f"stage {index}: {name}"
            yield _line(
                model, f"PP {count} x EP {ranks}", title, getattr(stage, name), args, beside=beside(stage, name)
            )


def beside(stage: Stage, program: str) -> int:
    """Bytes of a device that are alive while a program of the stage runs and are not among its arguments.

    The passes of a step are over before its update. During them there are the optimizer's state, the summed gradients,
    the inputs of the microbatches in flight and of one that arrives early, and as early the gradient of a result.
    """
    state, *_ = stage.arguments()["update"]
    _, grads, x, target, _ = stage.arguments()["backward"]
    if program == "update":
        return 0
    others = size_of(state.opt_state) + stage.in_flight * size_of(x)
    if program == "forward":
        return others + size_of(grads) + 2 * size_of(target)
    return others + size_of(target)


def size_of(tree: Any) -> int:
    """Bytes on one device of arrays given as shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _line(model: str, layout: str, name: str, function: Any, args: tuple[Any, ...], *, beside: int) -> Line:
    memory = compile_program(function, *args).memory
    return Line(model, layout, name, memory.arguments, memory.temp, memory.outputs, memory.aliases, beside)


if __name__ == "__main__":
    sys.exit(execute("python -m train.memory_table", MEANING, lambda: sys.modules[__name__], sys.argv[1:]))
