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
from typing import Any, get_args

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh

from topoep_jax import knobs as layers
from topoep_jax import transport
from topoep_jax.aot.compiler import compile_program, prepare
from topoep_jax.aot.forecast import SKEWS
from topoep_jax.aot.layer import compile_layer, worst_case
from topoep_jax.aot.report import Report
from topoep_jax.aot.targets import TARGETS, Target
from topoep_jax.aot.timeline import timeline
from topoep_jax.cli.output import plural
from topoep_jax.config import LayerConfig
from topoep_jax.plan.reference import DEFAULT_PLANNER
from topoep_jax.plan.topoep import EFFORTS
from topoep_jax.shapes import SHAPES, Shape
from topoep_jax.topology import Topology

_DIMENSIONS = {
    "hidden": "width of a token",
    "ffn": "inner width of an expert",
    "num_experts": "experts",
    "top_k": "experts per token",
}
_COMPILED_PLANNERS = ("none", "topoep_paper", "topoep")


def define() -> flags.FlagValues:
    """Flags of the command."""
    values = flags.FlagValues()

    def text(name: str, default: str | None, meaning: str) -> None:
        flags.DEFINE_string(name, default, meaning, flag_values=values)

    def count(name: str, default: int | None, meaning: str, least: int = 1) -> None:
        flags.DEFINE_integer(name, default, meaning, lower_bound=least, flag_values=values)

    def choice(name: str, default: str, of: Any, meaning: str) -> None:
        flags.DEFINE_enum(name, default, list(of), meaning, flag_values=values)

    def switch(name: str, meaning: str) -> None:
        flags.DEFINE_bool(name, False, meaning, flag_values=values)

    choice("gpu", "h200", TARGETS, "kind of GPU")
    text("topology", "1x4x8", "slices x nodes x GPUs per node; a node is a domain")
    text("model", None, f"layer to compile, one of {', '.join(SHAPES)}")
    for name, meaning in _DIMENSIONS.items():
        count(name, None, f"{meaning} (default: the model's)")
    count("tokens", 4096, "tokens per GPU and microbatch")
    count("layers", 1, "layers in a scan")
    switch("forward", "leave the backward pass out")
    text("dtype", "bfloat16", "of tokens and expert parameters")
    count("chunks", 2, "1, or 2 for the pipeline")
    count("num_slots", LayerConfig.num_slots, "replica slots per GPU", 0)
    count("block_rows", LayerConfig.block_rows, "alignment of the rows of an expert")
    flags.DEFINE_float("cap_factor", LayerConfig.cap_factor, "receive buffer, in mean loads", 0, flag_values=values)
    choice("overflow", "flag", get_args(layers.Overflow), "what happens to rows beyond the receive buffer")
    choice("residuals", LayerConfig.residuals, get_args(layers.Residuals), "what the backward pass keeps")
    choice("gemm", LayerConfig.gemm, get_args(layers.Gemm), "grouped product of the experts")
    count("staging_bytes", LayerConfig.staging_bytes, "bound on the buffer of replica gradients")
    choice("planner", DEFAULT_PLANNER, _COMPILED_PLANNERS, "planner inside the program")
    choice("effort", LayerConfig.effort, EFFORTS, "of the planner")
    choice("transport", LayerConfig.transport, get_args(layers.Transport), "how replicas travel")
    text(
        "program",
        None,
        "package.module:function instead of a layer: called with the mesh (axis ep), it returns a function, jitted or"
        " not, and the tuple of its arguments, arrays as jax.ShapeDtypeStruct with shardings",
    )
    text("program_args", "", "with --program: words that its function also gets, in one string")
    switch("compare", "compile the design with worst-case rows, too")
    switch("timeline", "draw the schedule")
    switch("json", "print one JSON object and nothing else")
    text("dump_to", None, "folder for all that XLA writes down")
    return values


def run(values: flags.FlagValues) -> Iterator[str]:
    """What the command prints."""
    # Nothing runs, so a GPU of this machine is left alone.
    jax.config.update("jax_platforms", "cpu")
    target = TARGETS[values.gpu]
    slices, nodes, gpus = _topology(values.topology)
    missing = prepare()
    mesh = target.mesh(nodes, gpus, slices=slices)
    if values.program:
        report, title = _program(values, mesh, target, slices * nodes)
    else:
        report, title = _layer(values, mesh, target, Topology.uniform(slices * nodes, gpus))
    if values.json:
        yield json.dumps(report.json()) + "\n"
        return
    yield f"{title}\ncompiled for {plural(mesh.size, target.kind)} with jax {jax.__version__}; nothing ran"
    yield f" ({target.note})\n\n" if target.note else "\n\n"
    yield from report.text()
    for note in (*transport.xla_options().missing, *_without_library(missing)):
        yield f"note: {note}\n"
    basis = f"the plan of synthetic routing, skew {SKEWS[-1]}" if report.works else "whole buffers on the slowest link"
    yield f"times are predicted from rates, for {basis}; nothing is measured\n"
    if values.timeline:
        yield "\n" + timeline(report)


def _layer(values: flags.FlagValues, mesh: Mesh, target: Target, topology: Topology) -> tuple[Report, str]:
    config = _config(values, topology, target)
    try:
        jnp.dtype(values.dtype)
    except TypeError:
        raise ValueError(f"--dtype={values.dtype} is no dtype: take bfloat16, float16 or float32") from None
    options = {"layers": values.layers, "backward": not values.forward, "dtype": values.dtype}
    with _group(mesh, config):
        own = compile_layer(config, mesh, values.tokens, dump_to=_folder(values.dump_to), **options)
        other = compile_layer(worst_case(config), mesh, values.tokens, **options) if values.compare else None
    report = Report.of(own.program, target.hardware, topology.num_domains, own, other)
    title = (
        f"{values.model or 'a layer'}: {plural(config.num_experts, 'expert')}, top {config.top_k}, hidden"
        f" {config.hidden:,}, ffn {config.ffn:,}; {values.tokens:,} tokens per GPU\n"
        f"{plural(values.layers, 'layer')}, {'forward' if values.forward else 'forward and backward'}:"
        f" chunks {config.chunks}, {plural(config.num_slots, 'slot')}, residuals {config.residuals},"
        f" overflow {config.overflow}, gemm {config.gemm}, transport {config.transport}"
    )
    return report, title


def _program(values: flags.FlagValues, mesh: Mesh, target: Target, num_domains: int) -> tuple[Report, str]:
    of_program = {"program", "program_args", "topology", "gpu", "timeline", "json", "dump_to"}
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
    return Report.of(program, target.hardware, num_domains), f"{values.program} {values.program_args}".rstrip()


@contextlib.contextmanager
def _imports_from_here() -> Iterator[None]:
    """Modules are found as `python -m` of one would find it."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _config(values: flags.FlagValues, topology: Topology, target: Target) -> LayerConfig:
    shape = _shape(values)
    knobs = ("chunks", "num_slots", "block_rows", "cap_factor", "overflow", "residuals", "gemm", "staging_bytes")
    return LayerConfig(
        shape.hidden,
        shape.ffn,
        shape.num_experts,
        shape.top_k,
        topology,
        router=shape.router,
        router_options=shape.router_options,
        hardware=target.hardware,
        planner=values.planner,
        effort=values.effort,
        transport=values.transport,
        **{name: getattr(values, name) for name in knobs},
    )


def _shape(values: flags.FlagValues) -> Shape:
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
