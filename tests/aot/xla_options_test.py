"""The options of GPU programs: known to the compiler, and XLA's device-initiated ragged_all_to_all follows them."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from topoep_jax import transport

NEW = jax.__version_info__[:2] >= (0, 12)
RANKS = 16


@pytest.mark.skipif(NEW, reason="this JAX has the kernel")
def test_an_old_jax_says_what_it_lacks():
    options = transport.xla_options()
    assert list(options.compiler_options) == [
        "xla_gpu_enable_latency_hiding_scheduler",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
    ]
    (missing,) = options.missing
    assert "has no device-initiated ragged_all_to_all: each call blocks the host" in missing


@pytest.mark.parametrize("safe", [False, True])
def test_xla_knows_the_flags(safe):
    flags = transport.xla_options(safe=safe).flags
    assert exit_status(flags) == 0
    assert exit_status(f"{flags} --xla_gpu_no_such=true") != 0, "XLA refuses flags that it does not know"


def test_safe_options_turn_off_what_faults_are_known_of():
    quick, safe = (transport.xla_options(safe=safe).compiler_options for safe in (False, True))
    assert quick.keys() == safe.keys()
    assert quick["xla_gpu_enable_latency_hiding_scheduler"]
    assert safe.pop("xla_gpu_experimental_parallel_collective_overlap_limit") == 1
    assert not any(safe.values())


def exit_status(flags: str) -> int:
    """The exit status of a program that starts XLA with these flags."""
    program = [sys.executable, "-c", "import jax; jax.numpy.sin(1.0)"]
    return subprocess.run(["env", f"XLA_FLAGS={flags}", "JAX_PLATFORMS=cpu", *program]).returncode


@pytest.mark.skipif(not NEW, reason="needs jax 0.12")
def test_the_options_arrive_in_the_program(aot, tmp_path):
    mesh = aot.mesh(2, RANKS // 2)
    exchange = partial(jax.lax.ragged_all_to_all, axis_name="ep")
    shifted = lambda rows, into, *sizes: exchange(rows + 1, into, *sizes)  # noqa: E731
    rows = aot.struct((RANKS * 128, 64), jnp.bfloat16, mesh, P("ep"))
    sizes = [aot.struct((RANKS * RANKS,), jnp.int32, mesh, P("ep"))] * 4
    lowered = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))).lower(rows, rows, *sizes)

    plain = lowered.compile().as_text()
    options = transport.xla_options().compiler_options
    program = lowered.compile({**options, "xla_dump_to": str(tmp_path)}).as_text()

    assert memory_space_of_rows(plain) is None
    assert not transport.xla_options().missing
    assert memory_space_of_rows(program) is not None, "rows that are sent lie in symmetric memory"
    (config,) = tmp_path.glob("*.config.pbtxt")
    for name, value in options.items():
        assert re.search(rf"\b{name}: {str(value).lower()}\b", config.read_text()), name


def memory_space_of_rows(program: str) -> str | None:
    """The memory space of the exchange's first operand; None for ordinary device memory."""
    operand = re.search(r" ragged-all-to-all\(%([\w.-]+),", program)[1]
    shape = re.search(rf"^\s+%{re.escape(operand)} = (\S+) ", program, re.MULTILINE)[1]
    space = re.search(r"S\((\d+)\)", shape)
    return space and space[1]
