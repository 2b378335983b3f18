"""The `topoep` command line: compares planners, explains one plan, measures a machine.

A command is a module of its name with `define() -> Flags` and `run(values) -> Iterator[str]`, what it prints piece
by piece. Flags live in values of their own, never in absl's global ones: a program may call `main` and have flags too.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from absl.flags import Error

from topoep_jax.cli.flags import Flags

COMMANDS = {
    "plan": "compare planners on synthetic or recorded demand",
    "explain": "show one plan: which experts were copied where, why, and what it gains",
    "trace": "tell how skewed recorded routing is, in which layers, and whether it moves",
    "simulate": "whether balancing pays on a cluster, modelled: step time and throughput of each planner",
    "measure": "write this machine's link and GEMM rates to a file",
}


class Command(Protocol):
    """A module that is a command."""

    def define(self) -> Flags:
        """Its flags."""

    def run(self, values: Flags) -> Iterator[str]:
        """What it prints, piece by piece."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: command and flags, without the program's name; None takes those of this process.

    Returns:
      The exit code: 0, or 2 after one line about what is wrong on standard error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("", "help", "-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if name else 2
    if name not in COMMANDS:
        return _fail("topoep", f"{name!r} is no command: take one of {', '.join(COMMANDS)}")
    return execute(f"topoep {name}", COMMANDS[name], lambda: _command(name), arguments[1:])


def execute(program: str, meaning: str, load: Callable[[], Command], arguments: list[str]) -> int:
    """Runs what is not only a command of `topoep`.

    Args:
      program: how it is called.
      meaning: what it does, in a line.
      load: imports it.
      arguments: flags.

    Returns:
      The exit code, as `main`.
    """
    name = program.removeprefix("python -m ").partition(" ")[0]
    try:
        _run(program, meaning, load(), arguments)
    except BrokenPipeError:
        # Who reads has seen enough. Python would flush, and complain, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError, Error) as error:
        return _fail(name, str(error))
    except KeyboardInterrupt:
        return _fail(name, "interrupted")
    return 0


def _command(name: str) -> Command:
    command: Command = importlib.import_module(f"{__name__}.{name}")
    return command


def _run(program: str, meaning: str, command: Command, arguments: list[str]) -> None:
    values = command.define()
    if {"-h", "--help", "-help"} & set(arguments):
        sys.stdout.write(_help(program, meaning, values))
        return
    rest = values([program, *arguments])[1:]
    if rest:
        raise ValueError(f"{rest[0]!r} is no flag: write --name=value, and quote globs")
    for text in command.run(values):
        sys.stdout.write(text)
        sys.stdout.flush()


def _fail(program: str, reason: str) -> int:
    # Lines stay apart, for a list of many faults reads badly as one.
    text = "\n".join(" ".join(line.split()) for line in reason.strip().splitlines())
    sys.stderr.write(f"{program}: error: {text}\n")
    return 2


def _usage() -> str:
    lines = "".join(f"  {name:<9}{meaning}\n" for name, meaning in COMMANDS.items())
    return f"usage: topoep COMMAND [--flag=value ...]; flags of a command: topoep COMMAND --help\n\n{lines}"


def _help(program: str, meaning: str, values: Flags) -> str:
    lines = [f"usage: {program} [--flag=value ...]: {meaning}", ""]
    for flag_name in values:
        flag = values[flag_name]
        default = "" if flag.default in (None, False) else f" (default: {flag.default_as_str})"
        lines.append(f"  --{flag.name}: {' '.join(flag.help.split())}{default}")
    return "\n".join(lines) + "\n"
