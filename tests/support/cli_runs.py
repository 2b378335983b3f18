"""What the tests of the command `topoep` share: a command that goes well, and one that does not."""

import json

from topoep_jax import cli


def run(capsys, *arguments):
    """Standard output of a command that goes well."""
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def records(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json"))


def error(capsys, *arguments):
    """The one line about a command that goes wrong."""
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("topoep: error: ")
    assert err.count("\n") == 1
    return err
