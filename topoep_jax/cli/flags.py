"""The flags of a command, in values of their own; those of a layer's knobs come from their table."""

from collections.abc import Iterable
from typing import Any

from absl import flags

from topoep_jax.knobs import KIND, KNOBS, Knob


class Flags(flags.FlagValues):
    """Flags of one command. absl's global ones belong to the program, which may call a command and have flags too."""

    def add(
        self,
        name: str,
        kind: Any,
        meaning: str,
        default: Any = None,
        *,
        choices: tuple[Any, ...] = (),
        least: int | None = None,
    ) -> None:
        """Adds a flag.

        Args:
          name: its name.
          kind: bool, int, float or str; list for a comma list, tuple for a flag that may be given several times.
          meaning: its help.
          default: its value where it is not given.
          choices: all that it may be.
          least: the least number.
        """
        define: Any = {bool: flags.DEFINE_bool, list: flags.DEFINE_list, tuple: flags.DEFINE_multi_string}.get(kind)
        if kind is tuple and choices:
            flags.DEFINE_multi_enum(name, default, list(choices), meaning, flag_values=self)
        elif kind is int:
            flags.DEFINE_integer(name, default, meaning, lower_bound=least, flag_values=self)
            if choices:
                self[name].help += f"; one of {', '.join(map(str, choices))}"
        elif kind is float:
            flags.DEFINE_float(name, default, meaning, lower_bound=least, flag_values=self)
        elif define is not None:
            define(name, default, meaning, flag_values=self)
        elif choices:
            flags.DEFINE_enum(name, default, list(choices), meaning, flag_values=self)
        else:
            flags.DEFINE_string(name, default, meaning, flag_values=self)

    def add_knob(
        self, name: str, default: Any, *, known: Knob | None = None, choices: tuple[Any, ...] = (), note: str = ""
    ) -> None:
        """Adds the flag of a layer's knob (`topoep_jax.knobs`).

        Args:
          name: of the knob.
          default: of this command.
          known: of this command, where it changes the knob.
          choices: of this command, where it takes fewer than a layer.
          note: what the command adds to the meaning; else what None stands for.
        """
        knob = known or KNOBS[name]
        kind = KIND[name] if KIND[name] in (bool, int, float) else str
        if default is None and not note:
            note = f"unset: {knob.unset}"
        meaning = f"{knob.help}; {note}" if note else knob.help
        self.add(name, kind, meaning, default, choices=choices or knob.choices, least=knob.least)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raises ValueError, with this reason, if one of these flags is given."""
        for name in names:
            if name in self and self[name].present:
                raise ValueError(f"--{name}={self[name].value} {reason}")
