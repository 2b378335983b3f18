"""One layer's forward pass as two programs for GPUs: the planner inside, and in a host callback; compiled, not run."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from topoep_jax.aot import TARGETS, Program, compile_layer, host_reads, prepare
from topoep_jax.aot.dump import Thunk
from topoep_jax.aot.hlo import Instruction
from topoep_jax.config import LayerConfig
from topoep_jax.shapes import SHAPES
from train.experiments.record import Record
from train.experiments.settings import SLOTS

CALLBACK = "xla_ffi_python_gpu_callback"
"""Target of the call that JAX makes of a host callback on a GPU."""
IMPLEMENTATIONS = {"inside": None, "callback": "reference"}
"""Of the planner, by the way that the plan is made."""
SOURCE = f"compiled here, jax {jax.__version__}"
NONE, ROW = "programs that were compiled", "steps alike in a row"
TO_HOST, FROM_HOST = "copies to the host", "copies from the host"
_GPU = "h200"
# What holds or orders other steps, and is none itself.
_NO_STEP = "CommandBuffer Sequential AsyncStart AsyncDone WaitForStreams"
_EXCHANGE = "RaggedAllToAll"
_COLLECTIVES = ("AllGather", _EXCHANGE)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the executable, or several alike in a row.

    Attributes:
      what: "kernel", "collective" or "plan".
      in_graph: whether it is part of a CUDA graph.
      beside: whether it may run while the plan is made.
    """

    what: str
    in_graph: bool
    beside: bool


def missing() -> str:
    """Why nothing can be compiled for GPUs here; "" where it can."""
    try:
        return prepare()
    except ImportError as error:
        return str(error)


def run(figure: str, model: str, planner: str) -> Iterator[Record]:
    """What both programs do from the router to the first exchange that needs the plan, and what the host does there.

    Where nothing can be compiled for GPUs, one record says why.
    """
    if reason := missing():
        yield Record(figure, model, planner, {"because": reason.splitlines()[0]}, NONE, 0, "", "compiled")
        return
    for way, implementation in IMPLEMENTATIONS.items():
        program = compiled(model, planner, implementation)
        setting: dict[str, str | float] = {"way": way, "from": SOURCE}
        for metric, (value, unit) in counts(program).items():
            yield Record(figure, model, planner, setting, metric, value, unit, "compiled")
        for place, (step, row) in enumerate(itertools.groupby(path(program))):
            alike = setting | {"place": place, **dataclasses.asdict(step)}
            yield Record(figure, model, planner, alike, ROW, len(list(row)), "", "compiled")


def compiled(model: str, planner: str, implementation: str | None) -> Program:
    """The forward pass of a layer of the paper's, on all of its ranks."""
    shape = SHAPES[model]
    domains = [len(shape.topology.ranks_of_domain(domain)) for domain in range(shape.topology.num_domains)]
    target = TARGETS[_GPU]
    config = LayerConfig(
        shape.hidden,
        shape.ffn,
        shape.num_experts,
        shape.top_k,
        shape.topology,
        router=shape.router,
        router_options=shape.router_options,
        num_slots=SLOTS,
        planner=planner,
        planner_implementation=implementation,
        chunks=2,
        overflow="flag",
        hardware=target.hardware,
    )
    mesh = target.mesh(len(domains), domains[0])
    # Without a GPU no Python function gets into a program for one: JAX asks for the GPU's client, which it does not
    # use, and a compiler without devices takes no functions. The call that JAX makes of a function, it takes.
    with mock.patch.object(jax, "pure_callback", as_call):
        return compile_layer(config, mesh, shape.tokens, backward=False).program


def as_call(function: Callable[..., Any], shapes: Any, *args: Any, target: str = CALLBACK, **_: Any) -> Any:
    """`jax.pure_callback`, as JAX lowers it, without the function: the program must not run."""
    del function
    leaves, tree = jax.tree.flatten(shapes)
    results = jax.ffi.ffi_call(target, leaves)(*jax.tree.leaves(args), index=np.uint64(0))
    return jax.tree.unflatten(tree, results)


def counts(program: Program) -> dict[str, tuple[float, str]]:
    """What there is in the program, as (number, unit) by metric.

    No program says how often the host waits: JAX's handler of a callback copies each operand to the host, waits for the
    device, calls Python, copies each result back, and waits again.
    """
    plans, steps = _plan_calls(program), path(program)
    callbacks = [call for call in plans if call.target == CALLBACK]
    shapes = {instruction.name: instruction.shape for instruction in program.module.instructions()}
    sent = [array for call in callbacks for name in call.operands for array in shapes[name]]
    returned = [array for call in callbacks for array in call.shape]
    reads = {read.what for read in host_reads(program)}
    for_plan = reads & {call.name for call in plans}
    return {
        "host callbacks": (len(callbacks), ""),
        TO_HOST: (len(sent), ""),
        FROM_HOST: (len(returned), ""),
        f"bytes of {TO_HOST}": (sum(array.num_bytes for array in sent), "B"),
        f"bytes of {FROM_HOST}": (sum(array.num_bytes for array in returned), "B"),
        "host reads for the plan": (len(for_plan), ""),
        "host reads for other things": (len(reads - for_plan), ""),
        "steps from the demand to the plan": (_between(steps), ""),
        "steps that may run beside the planner": (sum(step.beside for step in steps), ""),
        "planners inside a CUDA graph": (sum(step.in_graph for step in steps if step.what == "plan"), ""),
        "steps of the whole program": (sum(map(_is_step, program.thunks)), ""),
    }


def _between(steps: list[Step]) -> int:
    """Behind the exchange of the demand, up to the plan."""
    names = [step.what for step in steps]
    return names.index("plan") - names.index("collective")


def path(program: Program) -> list[Step]:
    """The steps from the program's first to the first exchange that needs the plan, in order."""
    plans = {call.name for call in _plan_calls(program)}
    steps: list[Step] = []
    beside = False
    for before, thunk in itertools.pairwise([program.thunks[0], *program.thunks]):
        kind = thunk.kind.removeprefix("k")
        is_plan = thunk.name in plans
        # A planner on a stream of its own stands first between the two steps that start and end it.
        beside = (is_plan and before.kind == "kAsyncStart") or (beside and kind != "AsyncDone")
        if _is_step(thunk):
            what = "plan" if is_plan else "collective" if kind in _COLLECTIVES else "kernel"
            steps.append(Step(what, thunk.command_buffer, beside and not is_plan))
        if kind == _EXCHANGE:
            break
    return steps


def _plan_calls(program: Program) -> list[Instruction]:
    return [call for call in program.module.instructions() if call.target in ("topoep_plan", CALLBACK)]


def _is_step(thunk: Thunk) -> bool:
    return thunk.kind.removeprefix("k") not in _NO_STEP.split()
