"""Type-checks two users' files as they would: against the wheel that another interpreter has installed.

    python .ci/typed/check.py PYTHON

mypy, of the interpreter that runs this, must find nothing in right.py, and in wrong.py the mistakes that its lines
name, and no others. Without `py.typed` in the wheel it finds neither types nor mistakes.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def found(name: str, python: str, folder: str) -> set[tuple[int, str]]:
    """(line, kind) of everything that mypy says of a file; in a folder where no checkout lends it its sources."""
    shutil.copy(HERE / name, folder)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--config-file=", name]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if said.returncode not in (0, 1):
        raise SystemExit(said.stdout + said.stderr)
    print(said.stdout, end="")
    lines = re.findall(r"^(\S+):(\d+): error: .*\[([\w-]+)\]$", said.stdout, re.MULTILINE)
    return {(int(line) if path == name else 0, kind) for path, line, kind in lines}


def wanted(name: str) -> set[tuple[int, str]]:
    """What the lines of a file say of themselves."""
    lines = (HERE / name).read_text().splitlines()
    named = ((number, re.search(r"# error: ([\w-]+)$", line)) for number, line in enumerate(lines, 1))
    return {(number, match[1]) for number, match in named if match}


def main() -> None:
    python = str(Path(sys.argv[1]).absolute())
    with tempfile.TemporaryDirectory() as folder:
        for name in ("right.py", "wrong.py"):
            if (got := found(name, python, folder)) != wanted(name):
                raise SystemExit(f"{name}: mypy finds {sorted(got)}, and {sorted(wanted(name))} was expected")
    print("types of the wheel: the right file passes, the wrong one is refused line by line")


if __name__ == "__main__":
    main()
