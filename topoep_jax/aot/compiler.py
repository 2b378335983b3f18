"""Compiles programs for GPUs on a machine without one."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from topoep_jax import transport
from topoep_jax._needs import to_install
from topoep_jax.aot.dump import Buffer, Thunk, read_buffers, read_options, read_thunks
from topoep_jax.aot.hlo import Module
from topoep_jax.config import LayerConfig
from topoep_jax.moe import noting_layers

PLUGINS = ("xla_cuda13", "xla_cuda12")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, of all memory spaces."""

    temp: int
    arguments: int
    outputs: int
    aliases: int
    """Of the outputs, what lies in the memory of arguments that were donated."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and what the compiler said about it.

    Attributes:
      module: its optimized HLO.
      memory: of one device.
      thunks: steps of the executable, in order.
      buffers: its values in device memory, largest first.
      options: of the compiler, as it took them.
      num_devices: it runs on.
      layers: configuration and T of each MoE layer that was traced for it, in order.
    """

    module: Module
    memory: Memory
    thunks: list[Thunk]
    buffers: list[Buffer]
    options: dict[str, str]
    num_devices: int
    layers: tuple[tuple[LayerConfig, int], ...] = ()


@functools.cache
def prepare() -> str:
    """Makes sure that programs for GPUs compile, and says what stands in for the CUDA library ("" where it is there).

    Compiling asks for every FFI handler by name, and calls none: where nvcc or the library is missing, handlers of the
    CPU stand in. The plan then is a call outside of any CUDA graph.

    Raises:
      ImportError: JAX's CUDA plugin is missing or of another version; the message says what to install.
    """
    plugins = [name for name in PLUGINS if _installed(name)]
    packages = f"jax[cuda13-local]=={jax.__version__}", "nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-nccl-cu13"
    wanted = to_install(*packages, extra="cuda-aot")
    if not plugins:
        raise ImportError(f"JAX has no CUDA plugin, whose compiler this needs, though no GPU: {wanted}")
    package = f"jax-{plugins[0].removeprefix('xla_')}-plugin"
    if (version := importlib.metadata.version(package)) != jax.__version__:
        raise ImportError(f"{package} is {version} and jax {jax.__version__}: {wanted}")
    from topoep_jax import _cuda

    try:
        _cuda.load()
    except ImportError as error:
        return _stand_in(str(error))
    return ""


def _stand_in(reason: str) -> str:
    from topoep_jax import _cuda, _xla_ffi

    handler, *_ = _xla_ffi.registrations().values()
    for name in _cuda.TARGETS:
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return reason


def _installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(f"jax_plugins.{plugin}") is not None
    except ModuleNotFoundError:
        return False


def struct(shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    """An argument of `compile_program`: shape and dtype of the whole array, replicated where `spec` is left out."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))


def compile_program(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, dump_to: Path | None = None
) -> Program:
    """Compiles a function for arguments that are pytrees of `struct`, on a mesh of `Target.mesh`.

    Args:
      function: jitted, or not yet.
      *args: its arguments.
      options: of XLA, beside those of `transport.xla_options`.
      dump_to: folder for all that the compiler writes down; None for one that is deleted.

    Raises:
      ValueError: no arguments, or arguments that are on no GPUs.
    """
    prepare()
    _check(args)
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    every = {**transport.xla_options().compiler_options, **(options or {})}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if dump_to is None else dump_to
        with noting_layers() as layers:
            lowered = jitted.lower(*args)
        compiled = lowered.compile({**every, "xla_dump_to": str(folder)})
        stats = compiled.memory_analysis()
        return Program(
            Module(compiled.as_text()),
            Memory(
                stats.temp_size_in_bytes,
                stats.argument_size_in_bytes,
                stats.output_size_in_bytes,
                stats.alias_size_in_bytes,
            ),
            read_thunks(folder),
            read_buffers(folder),
            read_options(folder),
            len(jax.tree.leaves(args)[0].sharding.device_set),
            tuple(layers),
        )


def _check(args: tuple[Any, ...]) -> None:
    """The devices to compile for come from the arguments, and from nowhere else."""
    for leaf in jax.tree.leaves(args) or [None]:
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is None or mesh.devices.flat[0].platform != "gpu":
            raise ValueError(
                f"{leaf} is no argument that lies on the mesh: every argument must be a jax.ShapeDtypeStruct with"
                " sharding=NamedSharding(mesh, spec), and there must be one"
            )
