"""`measure` on emulated devices, where rates mean nothing, and what `Hardware.from_measurement` makes of its file."""

import json
from pathlib import Path

import jax
import pytest

from tests.support.multiprocess_worker import run_processes
from topoep_jax import measure as measuring
from topoep_jax.measure import measure
from topoep_jax.plan import Hardware
from topoep_jax.topology import Topology

SMALL = {"message_bytes": 4096, "gemm_size": 8, "repeats": 2}


def test_two_domains_give_every_rate(tmp_path):
    path = tmp_path / "rates.json"
    found = measure(path, topology=Topology.uniform(4, 8), **SMALL)
    assert found == json.loads(path.read_text())
    assert found["platform"] == "cpu"
    assert "emulated devices share cores" in found["note"]
    assert (found["num_devices"], found["num_domains"]) == (32, 4)
    hardware = Hardware.from_measurement(path)
    assert hardware == Hardware(found["inter_fs_per_byte"], found["intra_fs_per_byte"], found["gflops"])
    assert min(hardware.inter_fs_per_byte, hardware.intra_fs_per_byte, hardware.gflops) >= 1


def test_one_domain_has_no_rate_across(tmp_path):
    path = tmp_path / "rates.json"
    found = measure(path, **SMALL)  # one process: one domain
    assert found["inter_fs_per_byte"] is None
    assert "inter_fs_per_byte was not measured" in found["note"]
    with pytest.raises(
        ValueError, match=r"inter_fs_per_byte not .*num_devices 32, num_domains 1.* give --inter_gbps=\.\., "
    ):
        Hardware.from_measurement(path)
    assert Hardware.from_measurement(path, inter_gbps=400).inter_fs_per_byte == 20_000


@pytest.mark.parametrize(
    ("domains", "across", "inside"),
    [
        ((0, 0, 1, 1), [(0, 2), (2, 0), (1, 3), (3, 1)], [(0, 1), (1, 0), (2, 3), (3, 2)]),
        ((0, 0, 0), [], [(0, 1), (1, 2), (2, 0)]),
        ((0, 1, 2), [(0, 1), (1, 2), (2, 0)], []),
        ((0, 1, 0), [(0, 1), (1, 0)], [(0, 2), (2, 0)]),  # rank 2 has no counterpart
        ((0,), [], []),
    ],
)
def test_who_sends_to_whom(domains, across, inside):
    assert measuring._rings(Topology(domains), across=True) == across
    assert measuring._rings(Topology(domains), across=False) == inside


GOOD = {
    "version": 1, "num_devices": 2, "num_domains": 2,
    "inter_fs_per_byte": 20_000, "intra_fs_per_byte": None, "gflops": 400_000, "rank_speed": [1000, 800],
}  # fmt: skip


def test_speeds_and_given_rates(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(GOOD))
    assert Hardware.from_measurement(path, intra_gbps=1600) == Hardware(20_000, 5_000, 400_000, (1000, 800))
    assert Hardware.from_measurement(path, intra_gbps=1600, inter_gbps=200).inter_fs_per_byte == 40_000


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{", {}, "cannot be read as a measurement"),
        ("[" * 200_000, {}, "cannot be read as a measurement"),
        (json.dumps(GOOD | {"version": True}), {}, "has version True, expected 1"),
        ("[]", {}, "has version None, expected 1: measure again"),
        (json.dumps(GOOD | {"version": 2}), {}, "has version 2, expected 1"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "gflops"}), {}, r"lacks \['gflops'\]"),
        (json.dumps(GOOD), {}, r"intra_fs_per_byte not measured, .* give --intra_gbps=\.\., in"),
        (json.dumps(GOOD | {"inter_fs_per_byte": None}), {}, r"give --inter_gbps=\.\. --intra_gbps=\.\., in"),
        (json.dumps(GOOD), {"intra_gbps": 0}, "intra_gbps=0 must be an integer of at least 1"),
        (json.dumps(GOOD), {"intra_gbps": 1.5}, "intra_gbps=1.5"),
        (json.dumps(GOOD | {"gflops": -3}), {"intra_gbps": 1}, "gflops=-3"),
        (json.dumps(GOOD | {"rank_speed": [0]}), {"intra_gbps": 1}, r"rank_speed\[0\]=0"),
    ],
)
def test_bad_files_are_named(tmp_path, text, options, message):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Hardware.from_measurement(path, **options)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json cannot be read .* write it with `topoep measure`"):
        Hardware.from_measurement(tmp_path / "none.json")


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="the topology has 2 ranks, but there are 32 devices"):
        measure(tmp_path / "x", topology=Topology((0, 1)))
    with pytest.raises(ValueError, match="repeats=0"):
        measure(tmp_path / "x", repeats=0)


def measure_in_process(folder: str) -> None:
    found = measure(Path(folder) / "rates.json", **SMALL)
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(found))


def test_processes_are_domains_and_agree(tmp_path):
    run_processes("tests.measure_test:measure_in_process", str(tmp_path))
    found = [json.loads((tmp_path / name).read_text()) for name in ("rates.json", "0.json", "1.json")]
    assert found[0] == found[1] == found[2]
    assert found[0]["domain_of_rank"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert Hardware.from_measurement(tmp_path / "rates.json").rank_speed is None
