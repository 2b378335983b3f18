"""The command line of the tool: from flags to compiled programs to what is printed about them."""

import contextlib
import dataclasses
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from topoep_jax import transport
from topoep_jax.aot.compiler import compile_program, prepare
from topoep_jax.aot.forecast import SKEWS
from topoep_jax.aot.layer import compile_layer, worst_case
from topoep_jax.aot.report import Report
from topoep_jax.aot.targets import TARGETS, Target
from topoep_jax.aot.timeline import timeline
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.hardware import HARDWARE, add_hardware, hardware_of
from topoep_jax.cli.output import plural
from topoep_jax.config import LayerConfig
from topoep_jax.knobs import Knobs
from topoep_jax.rates import Rates, read
from topoep_jax.shapes import SHAPES, Shape
from topoep_jax.topology import Topology

_DIMENSIONS = ("hidden", "ffn", "num_experts", "top_k")
DEFAULTS = {"chunks": 2, "overflow": "flag"}
"""Of knobs, where they are not those of a layer: programs for GPUs are the subject."""
CHOICES = {"planner": ("none", "topoep_paper", "topoep")}
"""Of knobs, where there are fewer than for a layer: planners that are part of the program."""
KNOBS = [field.name for field in dataclasses.fields(Knobs) if field.name != "planner_implementation"]


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("gpu", str, "kind of GPU to compile for", "h800", choices=tuple(TARGETS))
    values.add("topology", str, "slices x nodes x GPUs per node; a node is a domain", "1x4x8")
    values.add("model", str, f"layer to compile, one of {', '.join(SHAPES)}")
    for name in _DIMENSIONS:
        values.add_knob(name, None, note="unset: the model's")
    values.add("tokens", int, "tokens per GPU and microbatch", 4096, least=1)
    values.add("layers", int, "layers in a scan", 1, least=1)
    values.add("forward", bool, "leave the backward pass out", False)
    values.add("dtype", str, "of tokens and expert parameters", "bfloat16")
    for name in KNOBS:
        values.add_knob(name, DEFAULTS.get(name, getattr(LayerConfig, name)), choices=CHOICES.get(name, ()))
    values.add(
        "program",
        str,
        "package.module:function instead of a layer: called with the mesh (axis ep), it returns a function, jitted or"
        " not, and the tuple of its arguments, arrays as jax.ShapeDtypeStruct with shardings",
    )
    values.add("program_args", str, "with --program: words that its function also gets, in one string", "")
    values.add("compare", bool, "compile the design with worst-case rows, too", False)
    values.add("timeline", bool, "draw the schedule", False)
    add_hardware(values, None)
    values["hardware"].help += "; unset: those of the GPU"
    values.add("rates", str, "file of measured constants, as in docs/forecast.md, which take the place of the assumed")
    values.add("json", bool, "print one JSON object and nothing else", False)
    values.add("dump_to", str, "folder for all that XLA writes down")
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints."""
    # Nothing runs, so a GPU of this machine is left alone.
    jax.config.update("jax_platforms", "cpu")
    target = TARGETS[values.gpu]
    slices, nodes, gpus = _topology(values.topology)
    missing = prepare()
    mesh = target.mesh(nodes, gpus, slices=slices)
    rates = Rates()
    if values.hardware:
        target = dataclasses.replace(target, hardware=hardware_of(values, slices * nodes * gpus))
        rates = rates if values.hardware in HARDWARE else rates.with_products(target.hardware.gflops)
    else:
        values.refuse(("inter_gbps", "intra_gbps"), "completes a measurement, which --hardware names")
    rates = rates.measured(read(values.rates)) if values.rates else rates
    if values.program:
        report, title = _program(values, mesh, target, slices * nodes, rates)
    else:
        report, title = _layer(values, mesh, target, Topology.uniform(slices * nodes, gpus), rates)
    if values.json:
        yield json.dumps(report.json()) + "\n"
        return
    yield f"{title}\ncompiled for {plural(mesh.size, target.kind)} with jax {jax.__version__}; nothing ran"
    yield f" ({target.note})\n\n" if target.note else "\n\n"
    yield from report.text()
    for note in (*transport.xla_options().missing, *_without_library(missing)):
        yield f"note: {note}\n"
    planned = f"plans of synthetic routing; single collectives and the chart are of skew {SKEWS[-1]:g}"
    basis = planned if report.program.layers else "whole buffers on the slowest link, for no MoE layer was traced"
    yield f"times are modelled from the constants of topoep_jax/rates.py, for {basis}; nothing is measured\n"
    if values.timeline:
        yield "\n" + timeline(report.forecast)


def _layer(values: Flags, mesh: Mesh, target: Target, topology: Topology, rates: Rates) -> tuple[Report, str]:
    config = _config(values, topology, target)
    try:
        jnp.dtype(values.dtype)
    except TypeError:
        raise ValueError(f"--dtype={values.dtype} is no dtype: take bfloat16, float16 or float32") from None
    options = {"layers": values.layers, "backward": not values.forward, "dtype": values.dtype}
    with _group(mesh, config):
        own = compile_layer(config, mesh, values.tokens, dump_to=_folder(values.dump_to), **options)
        other = compile_layer(worst_case(config), mesh, values.tokens, **options) if values.compare else None
    report = Report.of(own.program, target, topology.num_domains, own, other, rates=rates)
    title = (
        f"{values.model or 'a layer'}: {plural(config.num_experts, 'expert')}, top {config.top_k}, hidden"
        f" {config.hidden:,}, ffn {config.ffn:,}; {values.tokens:,} tokens per GPU\n"
        f"{plural(values.layers, 'layer')}, {'forward' if values.forward else 'forward and backward'}:"
        f" chunks {config.chunks}, {plural(config.num_slots, 'slot')}, residuals {config.residuals},"
        f" overflow {config.overflow}, gemm {config.gemm}, transport {config.transport}"
    )
    return report, title


def _program(values: Flags, mesh: Mesh, target: Target, num_domains: int, rates: Rates) -> tuple[Report, str]:
    of_program = {
        "program",
        "program_args",
        "topology",
        "gpu",
        "hardware",
        "inter_gbps",
        "intra_gbps",
        "rates",
        "timeline",
        "json",
        "dump_to",
    }
    ignored = [name for name in values if values[name].present and name not in of_program]
    if ignored:
        raise ValueError(f"--{ignored[0]} says what layer to compile, but --program={values.program} is compiled")
    module, _, name = values.program.partition(":")
    if not name:
        raise ValueError(f"--program={values.program} must be package.module:function")
    with _imports_from_here():
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            raise ValueError(f"--program={values.program}: module {module} has no {name}")
        made = function(mesh, *shlex.split(values.program_args))
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple):
            raise ValueError(f"--program={values.program} must return (a function, a tuple of its arguments)")
        step, args = made
        program = compile_program(step, *args, dump_to=_folder(values.dump_to))
    return Report.of(program, target, num_domains, rates=rates), f"{values.program} {values.program_args}".rstrip()


@contextlib.contextmanager
def _imports_from_here() -> Iterator[None]:
    """Modules are found as `python -m` of one would find it."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _config(values: Flags, topology: Topology, target: Target) -> LayerConfig:
    shape = _shape(values)
    return LayerConfig(
        shape.hidden,
        shape.ffn,
        shape.num_experts,
        shape.top_k,
        topology,
        router=shape.router,
        router_options=shape.router_options,
        hardware=target.hardware,
        **{name: getattr(values, name) for name in KNOBS},
    )


def _shape(values: Flags) -> Shape:
    given = {name: getattr(values, name) for name in _DIMENSIONS if getattr(values, name) is not None}
    if values.model is not None:
        if values.model not in SHAPES:
            raise ValueError(f"--model={values.model} is unknown: take one of {', '.join(SHAPES)}")
        return dataclasses.replace(SHAPES[values.model], **given)
    missing = [f"--{name}" for name in _DIMENSIONS if name not in given]
    if missing:
        raise ValueError(f"give --model, or {', '.join(missing)} of a layer of your own")
    return Shape(**given, topology=Topology.uniform(1, 1))


def _topology(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None or "0" in match.groups():
        raise ValueError(f"--topology={text} must be slices x nodes x GPUs per node, as in 1x4x8")
    slices, nodes, gpus = map(int, match.groups())
    return slices, nodes, gpus


@contextlib.contextmanager
def _group(mesh: Mesh, config: LayerConfig) -> Iterator[None]:
    """The transport group that programs with transport="device" are traced with."""
    if config.transport == "xla":
        yield
        return
    transport.init(mesh, "ep", configs=config, compile_only=True)
    try:
        yield
    finally:
        transport.shutdown("ep")


def _folder(path: str | None) -> Path | None:
    if path is None:
        return None
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--dump_to={path} is not empty: what is in it would be taken for the new program's")
    return folder


def _without_library(reason: str) -> list[str]:
    if not reason:
        return []
    return [f"the CUDA library is not at hand, so the planner's call is a stand-in outside of CUDA graphs ({reason})"]
