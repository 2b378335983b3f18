"""What messages say of packages that are missing. No index has `topoep_jax`, so nobody can ask one for its extras."""

import shlex


def to_install(*packages: str, extra: str = "") -> str:
    """How to get what is missing, in a clone and where a wheel was installed.

    Args:
      *packages: by their names on an index, with versions where these matter.
      extra: of pyproject.toml, which has them too; "" for one that `make setup` always installs.
    """
    setup = f"make setup EXTRA={extra}" if extra else "make setup"
    return f"in a clone run `{setup}`, elsewhere `pip install {shlex.join(packages)}`"
