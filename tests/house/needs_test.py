"""Messages name what can be installed: in a clone and of an index, which does not have this project."""

import re
import sys
from pathlib import Path

import pytest

from topoep_jax._needs import to_install
from topoep_jax.cli.draw import draw
from topoep_jax.plan.bounds import _scipy

ROOT = Path(__file__).resolve().parent.parent.parent


def test_both_ways_are_named_as_a_shell_takes_them():
    assert to_install("matplotlib", "scipy") == "in a clone run `make setup`, elsewhere `pip install matplotlib scipy`"
    assert to_install("jax[cuda13]", "nvcc>=13", extra="cuda13") == (
        "in a clone run `make setup EXTRA=cuda13`, elsewhere `pip install 'jax[cuda13]' 'nvcc>=13'`"
    )


@pytest.mark.parametrize(
    ("missing", "call"), [("matplotlib", lambda: draw(None, "unused.png")), ("scipy", _scipy)], ids=["png", "bounds"]
)
def test_what_is_missing_is_named(missing, call, monkeypatch):
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"elsewhere `pip install {missing}`"):
        call()


def test_nobody_is_sent_to_an_index_for_this_project():
    for folder in ("topoep_jax", "models", "train", "tools", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".sh"}:
                found = re.search(r"topoep_jax\[|pip install ['\"]?topoep", path.read_text())
                assert found is None, f"{path}: {found}"
