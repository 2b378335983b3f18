"""`topoep measure` writes what `topoep plan --hardware` reads."""

import json

import pytest

from tests.cli.plan_test import QWEN, error, records, run
from topoep_jax.cli import measure as command
from topoep_jax.plan import Hardware
from topoep_jax.plan.hardware import MEASUREMENT_VERSION

RATES = {"inter_fs_per_byte": 20_000, "intra_fs_per_byte": 5_000, "gflops": 400_000}
FILE = {"version": MEASUREMENT_VERSION, "rank_speed": None, "num_devices": 32, "num_domains": 4, **RATES}


def test_measure(capsys, tmp_path):
    path = tmp_path / "here.json"
    out = run(capsys, "measure", f"--out={path}", "--domains=4", "--repeats=1")
    assert "32 x cpu, 4 domains" in out
    assert "not measured" not in out
    found = json.loads(path.read_text())
    rate = f"{found['gflops']} GFLOP/s" if found["gflops"] < 1000 else f"{found['gflops'] / 1e3:.1f} TFLOP/s"
    assert f" {rate}\n" in out
    assert f"{1e6 / found['inter_fs_per_byte']:.1f} GB/s" in out
    assert f"topoep plan --model=.. --hardware={path}\n" in out
    assert Hardware.from_measurement(path).gflops == found["gflops"]


def test_what_was_not_measured_is_asked_for(capsys, monkeypatch, tmp_path):
    found = FILE | {"inter_fs_per_byte": None, "intra_fs_per_byte": None, "gflops": 999, "device_kind": "x", "note": ""}
    monkeypatch.setattr(command, "measure", lambda *args, **options: found)
    path = tmp_path / "alone.json"
    out = run(capsys, "measure", f"--out={path}")
    assert "give what it lacks" in out
    assert out.endswith(f"topoep plan --model=.. --hardware={path} --inter_gbps=.. --intra_gbps=..\n")
    assert " 999 GFLOP/s" in out
    path.write_text(json.dumps(found))
    assert "give --inter_gbps=.. --intra_gbps=.., in Gb/s" in error(capsys, *QWEN, f"--hardware={path}")


@pytest.mark.parametrize(
    ("slow", "rates"), [("link", {"inter_fs_per_byte": 10**9}), ("GEMM", {"gflops": 1})], ids=["link", "gemm"]
)
def test_a_measurement_too_slow_for_the_model(capsys, tmp_path, slow, rates):
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(FILE | rates))
    message = error(capsys, "plan", "--model=deepseek-v2", "--tokens=64", f"--hardware={path}")
    assert f"--hardware={path}: the measured {slow} is too slow for this model: " in message


def layer_ms(capsys, path, *arguments, model="qwen3-30b-a3b", **changes):
    """Predicted time of even routing without replicas, with the rates of a file."""
    path.write_text(json.dumps(FILE | changes))
    arguments = (f"--model={model}", "--planner=none", "--tokens=64", "--skew=0", *arguments)
    return records(capsys, "plan", *arguments, f"--hardware={path}")[0]["objective_ms"]


def test_rates_of_a_file(capsys, tmp_path):
    path = tmp_path / "there.json"
    preset = records(capsys, *QWEN, "--planner=none", "--tokens=64", "--skew=0")[0]["objective_ms"]
    assert layer_ms(capsys, path) == preset
    assert layer_ms(capsys, path, gflops=200_000) > preset


def test_one_node_has_no_rate_between_domains(capsys, tmp_path):
    path = tmp_path / "node.json"
    assert layer_ms(capsys, path, "--inter_gbps=400", inter_fs_per_byte=None) == layer_ms(capsys, path)
    path.write_text(json.dumps(FILE | {"inter_fs_per_byte": None}))
    assert "inter_gbps" in error(capsys, *QWEN, f"--hardware={path}")


def test_speeds_count_where_there_are_as_many_ranks(capsys, tmp_path):
    path = tmp_path / "slow.json"
    slow = [100] * 32
    assert layer_ms(capsys, path, rank_speed=slow) > layer_ms(capsys, path)
    glm = "glm-4.5-air"  # on 16 ranks
    assert layer_ms(capsys, path, rank_speed=slow, model=glm) == layer_ms(capsys, path, model=glm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--domains=3",), "--domains=3 does not divide the 32 devices"),
        (("--out=nowhere/a.json",), "--out=nowhere/a.json: there is no folder nowhere"),
        (("--out=a.txt",), "--out=a.txt must end in .json"),
        (("--process_id=1",), "--coordinator and --num_processes missing"),
        (("--repeats=0",), "--repeats=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_flags(capsys, arguments, message):
    assert message in error(capsys, "measure", *arguments)


def test_a_file_that_is_no_measurement(capsys, tmp_path):
    path = tmp_path / "no.json"
    path.write_text("{}")
    assert "has version None" in error(capsys, *QWEN, f"--hardware={path}")
    for name, value in (("num_devices", "x"), ("num_domains", 0)):
        path.write_text(json.dumps({**FILE, name: value}))
        assert f"has {name}={value!r}, which must be an integer" in error(capsys, *QWEN, f"--hardware={path}")
