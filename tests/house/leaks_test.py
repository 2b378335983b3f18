"""The check of conftest.py, that nothing outlives a test: a leak of each kind is planted, and named."""

import os
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).parent.parent.parent

CONFTEST = """
import pytest
from tests.support import leaks

leaks._PATIENCE_S = 0.1
test = pytest.fixture(autouse=True)(leaks.of_a_test)
file = pytest.fixture(autouse=True, scope="module")(leaks.of_a_file)
"""

PLANTED = '''
import logging, os, random, signal, subprocess, sys, tempfile, threading

import email.mime.text
import jax
import matplotlib.pyplot
import numpy as np
import pytest

from topoep_jax import Topology, transport
from topoep_jax.transport import LayerSizes

kept = []


@pytest.fixture(scope="module")
def shared():
    os.environ["LEFT_BY_A_FIXTURE"] = "1"


def test_clean(shared, tmp_path):
    """What a test may do."""
    with open(tmp_path / "file", "w"):
        pass
    circle = [open(tmp_path / "file")]
    circle.append(circle)
    threading.Thread(target=int).start()
    with jax.enable_x64(True), tempfile.TemporaryDirectory():
        pass
    import email.mime.audio


def test_group():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    transport.init(mesh, sizes=LayerSizes(2, 1, 64, "direct"), topology=Topology.uniform(1, 2), compile_only=True)


def test_environment():
    os.environ["LEFT"] = "1"


def test_lost_environment():
    del os.environ["THERE"]


def test_jax():
    jax.config.update("jax_enable_x64", True)


def test_random():
    random.random()


def test_numpy_random():
    np.random.random()


def test_numpy():
    np.seterr(under="warn")


def test_folder(tmp_path):
    os.chdir(tmp_path)


def test_file(tmp_path):
    kept.append(open(tmp_path / "kept", "w"))


def test_open_folder(tmp_path):
    kept.append(os.open(tmp_path, os.O_RDONLY))


def test_temporary():
    kept.append(tempfile.mkdtemp(prefix="left-"))


def test_thread():
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()


def test_child():
    kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))  # ends with this process


def test_signal():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_path():
    sys.path.append("left")


def test_module():
    sys.modules["email.mime.text"] = None


def test_log():
    logging.getLogger("topoep_jax").setLevel("DEBUG")


def test_figure():
    matplotlib.pyplot.figure()


def test_last():
    """After which the file's fixtures end."""


def doctested():
    """
    >>> os.environ["LEFT_BY_A_DOCTEST"] = "1"
    """
'''


WANTED = {
    "planted_test.doctested": "environment variable LEFT_BY_A_DOCTEST: '1' is new",
    "test_group": "transport group ep",
    "test_environment": "environment variable LEFT: '1' is new",
    "test_lost_environment": "environment variable THERE: 'yes' is gone",
    "test_jax": "JAX option jax_enable_x64: False became True",
    "test_random": "random state random: was changed",
    "test_numpy_random": "random state numpy.random: was changed",
    "test_numpy": "NumPy option under: 'ignore' became 'warn'",
    "test_folder": "folder the working directory: ",
    "test_file": "open file ",
    "test_open_folder": "open file ",
    "test_temporary": "temporary file left-",
    "test_thread": "thread <Thread(left, started daemon",
    "test_child": "child process ",
    "test_signal": "signal handler SIGUSR1: ",
    "test_path": "attribute of sys path: ",
    "test_module": "module email.mime.text is gone",
    "test_log": "logger topoep_jax: ",
    "test_figure": "figure 1: ",
    "test_last": "environment variable LEFT_BY_A_FIXTURE: '1' is new",
}


def test_each_kind_of_leak_is_named_after_the_test_that_left_it(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "planted_test.py").write_text(PLANTED)
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary"), "THERE": "yes"}
    report = tmp_path / "report.xml"  # of one form, where what is printed differs with $CI
    command = [sys.executable, "-m", "pytest", "--doctest-modules", f"--basetemp={tmp_path / 'base'}"]
    command += [f"--junit-xml={report}", "planted_test.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = [(case.get("name"), error.text) for case in ElementTree.parse(report).iter("testcase") for error in case]
    assert [name for name, _ in told] == [*WANTED], done.stdout
    for name, text in told:
        lines = re.findall(r"^  (.*)$", text, re.M)
        assert len(lines) == 1 and lines[0].startswith(WANTED[name]), (name, lines)
    assert f"{len(WANTED) + 1} passed, {len(WANTED)} errors" in done.stdout
