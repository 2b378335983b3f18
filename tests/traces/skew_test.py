"""Recorded demand: two kinds of arrays, any leading axes, and one clear error for everything else."""

import numpy as np
import pytest

from topoep_jax.traces import read_trace

IDX = np.array([[[0, 1], [1, 5]], [[-1, -1], [5, 0]]], np.int32)  # 2 ranks x 2 tokens x 2 experts
OMEGA = np.array([[1, 2, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1]])


def test_omega_and_expert_idx_say_the_same(tmp_path):
    np.save(tmp_path / "a.npy", OMEGA.astype(np.int16))
    np.savez(tmp_path / "b.npz", omega=OMEGA[None, None], other=1)
    np.savez(tmp_path / "c.npz", expert_idx=IDX)
    for name in ("a.npy", "b.npz", "c.npz"):
        demand = read_trace(tmp_path / name, 6)
        assert demand.dtype == np.int64
        assert demand.tolist() == [OMEGA.tolist()]


def test_leading_axes_are_samples(tmp_path):
    np.savez(tmp_path / "t.npz", expert_idx=np.stack([IDX, IDX[::-1], IDX]).reshape(3, 1, 2, 2, 2))
    assert read_trace(str(tmp_path / "t.npz"), 6).tolist() == [OMEGA.tolist(), OMEGA[::-1].tolist(), OMEGA.tolist()]


@pytest.mark.parametrize(
    ("name", "arrays", "num_experts", "message"),
    [
        ("t.txt", {}, None, "a trace is a .npy or .npz file"),
        ("t.npy", {"omega": OMEGA * 1.0}, None, "dtype float64, but a trace holds integers"),
        ("t.npy", {"omega": OMEGA[0]}, None, r"shape \(6,\), expected \[..., R, E\]"),
        ("t.npy", {"omega": OMEGA[:, :0]}, None, "none of them 0"),
        ("t.npy", {"omega": OMEGA}, 8, "has 6 experts, but 8 were asked for"),
        ("t.npy", {"omega": OMEGA - 1}, None, r"omega\[0, 2\]=-1 of sample 0 is negative"),
        ("t.npz", {"expert_idx": IDX}, None, "does not say how many experts"),
        ("t.npz", {"expert_idx": IDX}, 5, "names expert 5, but there are 5"),
        ("t.npz", {"expert_idx": IDX[0]}, 6, r"expected \[..., R, T, K\]"),
        ("t.npz", {"demand": OMEGA}, None, r"holds \['demand'\], expected exactly one"),
        ("t.npz", {"omega": OMEGA, "expert_idx": IDX}, 6, "expected exactly one"),
        ("t.npy", {"omega": np.array([[None]])}, None, "not a readable NumPy file"),
    ],
)
def test_errors(tmp_path, name, arrays, num_experts, message):
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez(path, **arrays)
    elif arrays:
        np.save(path, arrays["omega"])
    with pytest.raises(ValueError, match=message):
        read_trace(path, num_experts)


def test_files_that_are_none(tmp_path):
    with pytest.raises(OSError, match="missing"):
        read_trace(tmp_path / "missing.npy")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "noise.npz").write_bytes(b"noise")
    for name in ("empty.npy", "noise.npz"):
        with pytest.raises(ValueError, match="not a readable NumPy file"):
            read_trace(tmp_path / name)


@pytest.mark.parametrize("value", [np.full((8, 32), 2**62), np.full((8, 32), 2**63 + 5, np.uint64)])
def test_demand_that_would_wrap_is_refused(tmp_path, value):
    np.save(tmp_path / "big.npy", value)
    with pytest.raises(ValueError, match="2\\^31 rows or more"):
        read_trace(tmp_path / "big.npy")


def test_damaged_files_are_named(tmp_path):
    np.savez(tmp_path / "cut.npz", omega=np.ones((4, 8), int))
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "header.npy", np.ones((4, 8), int))
    damaged = bytearray((tmp_path / "header.npy").read_bytes())
    damaged[20:40] = b"(" * 20
    (tmp_path / "header.npy").write_bytes(damaged)
    for name in ("cut.npz", "header.npy"):
        with pytest.raises(ValueError, match=f"{name}: not a readable NumPy file"):
            read_trace(tmp_path / name)


@pytest.mark.parametrize("experts", [10**12, 99_999_999, 9])
def test_experts_are_checked_before_memory_is_taken(tmp_path, experts):
    np.savez(tmp_path / "few.npz", expert_idx=np.zeros((8, 4, 2), int))
    with pytest.raises(ValueError, match="experts on 8 ranks: their number must be a multiple of 8"):
        read_trace(tmp_path / "few.npz", num_experts=experts)
