"""The command line of checkpoints. A command is a module as those of `topoep_jax.cli`: `define()` and `run()`."""

import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from models.checkpoint.api import read_config
from topoep_jax.cli import execute
from topoep_jax.cli.flags import Flags

PROGRAM = "models.checkpoint"
COMMANDS = {
    "inspect": "FOLDER: tell model, parameters, dtypes, files and faults; no weight is read",
    "verify": "FOLDER [OTHER]: is it complete, does it fit, are its values finite, and equal to those of another one",
    "convert": "--from=FOLDER --to=FOLDER: between released folders and checkpoints of the trainer",
}
_POSITIONS = {"inspect": ("folder",), "verify": ("folder", "other"), "convert": ()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; arguments and exit codes as of `topoep_jax.cli.main`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments else ""
    if name in ("", "help", "-h", "--help"):
        lines = "".join(f"  {name:<9}{meaning}\n" for name, meaning in COMMANDS.items())
        sys.stdout.write(
            f"usage: python -m {PROGRAM} COMMAND ...; flags: python -m {PROGRAM} COMMAND --help\n\n{lines}"
        )
        return 0 if name else 2
    if name not in COMMANDS:
        sys.stderr.write(f"{PROGRAM}: error: {name!r} is no command: take one of {', '.join(COMMANDS)}\n")
        return 2
    # The folders stand first, without a flag.
    for position, flag in enumerate(_POSITIONS[name]):
        if position < len(arguments) and not arguments[position].startswith("-"):
            arguments[position] = f"--{flag}={arguments[position]}"
    return execute(
        f"{PROGRAM} {name}", COMMANDS[name], lambda: importlib.import_module(f"{__name__}.{name}"), arguments
    )


def define_common(values: Flags) -> None:
    """The flags of whatever opens a folder."""
    values.add("config", str, "folder whose config.json says the model, where the folder does not")
    values.add("fp8", bool, "read block-scaled fp8 weights: e4m3 with a scale for each 128 x 128 block", False)


def named_folder(values: Flags, name: str) -> pathlib.Path:
    """The folder of a flag that has to be given.

    Raises:
      ValueError: it was not.
    """
    folder = values[name].value
    if not folder:
        raise ValueError(f"which folder? Name it, as --{name}=FOLDER")
    return pathlib.Path(folder)


def named_config(values: Flags) -> Any:
    """The config that --config names, None without it."""
    return read_config(values.config) if values.config else None
