"""Folders that no one would write on purpose: values that a dtype does not hold, names of digits, files of nonsense."""

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models import Qwen3MoEConfig, checkpoint
from models.checkpoint import released, trainer
from models.checkpoint.commands import main
from tests.models.checkpoint_faults_test import (
    BY_NAME,
    EMBEDDING,
    FIRST,
    INDEX,
    QWEN3,
    assert_faults,
    edit_bytes,
    edit_header,
    edit_tensors,
    place_for,
    replace,
)
from tests.parity.variants import write_folder

CONFIG = Qwen3MoEConfig.from_hf(QWEN3.config)
NORM = "model.norm.weight"
DEEP = '{"weight_map": ' + "[" * 100_000
INFINITE = {"shape": [float("inf")]}, {"data_offsets": [0, float("nan")]}
ODD_ENTRIES = (
    *({"shape": shape} for shape in ([39.9, 32], ["40", "32"], [40, True], [-40, -32], "40", None, {"40": 32})),
    *({"data_offsets": offsets} for offsets in (["0", "5120"], [0.0, 5120.0], [0], [0, 5120, 1], "01", [-5120, 0])),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_folder(tmp_path / "in", QWEN3)
    monkeypatch.setattr(released, "read_rows", lambda *_: pytest.fail("a weight was read"))
    return tmp_path / "in"


def test_sizes_are_counts_and_nothing_else(folder: Path) -> None:
    places = place_for(CONFIG)
    whole = (folder / FIRST).read_bytes()
    for change in ODD_ENTRIES:
        edit_header(lambda header, change=change: header[EMBEDDING].update(change))(folder)
        expected = [
            f"unreadable entry: {EMBEDDING} in {FIRST}",
            "gap or overlap: .*",
            f"tensor not where the index says: {EMBEDDING} is not in {FIRST}",
        ]
        assert_faults(lambda: checkpoint.load(folder, CONFIG, places), expected)
        (folder / FIRST).write_bytes(whole)
    for change in INFINITE:
        edit_header(lambda header, change=change: header[EMBEDDING].update(change))(folder)
        expected = [f"unreadable file: {FIRST}: (Infinity|NaN) is not finite"]
        assert_faults(lambda: checkpoint.load(folder, CONFIG, places), expected)
        (folder / FIRST).write_bytes(whole)
    for metadata in (5, None, []):
        edit_header(lambda header, metadata=metadata: header.update(__metadata__=metadata))(folder)
        expected = [f"unreadable file: {FIRST}: its __metadata__ is no JSON object"]
        assert_faults(lambda: checkpoint.load(folder, CONFIG, places), expected)
        (folder / FIRST).write_bytes(whole)


def test_what_nests_too_deep_is_a_fault(folder: Path) -> None:
    edit_bytes(FIRST, lambda _: struct.pack("<Q", len(DEEP)) + DEEP.encode())(folder)
    places = place_for(CONFIG)
    expected = [f"unreadable file: {FIRST}: it nests too deep"]
    assert_faults(lambda: checkpoint.load(folder, CONFIG, places), expected)
    for name, fault in ((INDEX, "index"), ("config.json", "config")):
        expected = [f"unreadable {fault}: {name}: it nests too deep", *expected[: name != INDEX]]
        (folder / name).write_text(DEEP)
        assert_faults(lambda: checkpoint.load(folder, CONFIG, places), expected[:1] if name == INDEX else expected)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_settings_are_finite(folder: Path, number: str) -> None:
    content = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": "here"}
    (folder / "config.json").write_text(json.dumps(content).replace('"here"', number))
    assert_faults(lambda: checkpoint.read_config(folder), [f"unreadable config: config.json: {number} is not finite"])


def test_a_byte_order_mark_is_no_content(folder: Path) -> None:
    for name in (INDEX, "config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert checkpoint.read_config(folder) == CONFIG
    assert released.scan_folder(folder).faults == []
    (folder / "config.json").write_text(json.dumps(QWEN3.config), encoding="utf-16")
    assert_faults(lambda: checkpoint.read_config(folder), ["unreadable config: config.json: 'utf-8' codec .*"])


def test_fp8_is_for_matrices(folder: Path) -> None:
    scales = {NORM + "_scale_inv": np.ones(1, np.float32)}
    vector = np.ones(32, ml_dtypes.float8_e4m3fn)
    edit_tensors(lambda t: t.update({NORM: vector, **scales}) if NORM in t else None)(folder)
    expected = [f"wrong dtype: {NORM} is fp8 with 1 axes, only matrices have blocks to scale"]
    assert_faults(lambda: checkpoint.load(folder, CONFIG, place_for(CONFIG), fp8=True), expected)


def test_no_finite_value_becomes_infinite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "in", QWEN3)
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    large = np.zeros((32, 16), np.float32)
    large[0, :3] = 65504, 7e4, -1e5
    edit_tensors(replace(expert, large))(tmp_path / "in")
    edit_tensors(replace(NORM, np.full(32, 3.4e38, np.float32)))(tmp_path / "in")
    params = checkpoint.load(tmp_path / "in", CONFIG, place_for(CONFIG))
    norm = f"too large for float16: {NORM} has 32 such values, up to 3.4e+38".replace("+", r"\+")
    expected = [norm, f"too large for float16: {expert} has 2 such values, up to 100000"]
    assert_faults(lambda: checkpoint.save(tmp_path / "out", CONFIG, params, dtype=jnp.float16), expected)
    expected = [norm.replace("float16", "bfloat16")]
    assert_faults(lambda: checkpoint.save(tmp_path / "out", CONFIG, params, dtype=jnp.bfloat16), expected)
    for kind, name in (("released", expert), ("trainer", "layers/moe/w")):
        command = ["convert", f"--from={tmp_path / 'in'}", f"--to={tmp_path / 'out'}", "--dtype=float16"]
        assert main([*command, f"--format={kind}"]) == 2
        assert f"too large for float16: {name} has 2 such values, up to 100000" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "nothing is left behind"
    # Nor in what is loaded, of either kind of folder.
    expected = [norm, f"too large for float16: {expert} has 2 such values, up to 100000"]
    assert_faults(lambda: checkpoint.load(tmp_path / "in", CONFIG, place_for(CONFIG), dtype=jnp.float16), expected)
    assert main(["convert", f"--from={tmp_path / 'in'}", f"--to={tmp_path / 'run'}", "--format=trainer"]) == 0
    expected = [fault.replace(NORM, "norm/scale").replace(expert, "layers/moe/w") for fault in expected]
    assert_faults(lambda: checkpoint.load(tmp_path / "run", CONFIG, place_for(CONFIG), dtype=jnp.float16), expected)
    # Nor from bfloat16, whose 16 bits reach further than those of float16.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide["norm"]["scale"] = jnp.full(32, 1e38, jnp.bfloat16)
    # 65504 is rounded up to 65536 there.
    expected = [
        norm.replace(r"3.4e\+38", r"9.96921e\+37"),
        f"too large for float16: {expert} has 3 such values, up to 99840",
    ]
    assert_faults(lambda: checkpoint.save(tmp_path / "out", CONFIG, wide, dtype=jnp.float16), expected)
    # What is infinite stays it.
    params["norm"]["scale"] = jnp.full(32, jnp.inf)
    params["layers"]["moe"]["w"] *= 0
    checkpoint.save(tmp_path / "out", CONFIG, params, dtype=jnp.float16)


def test_a_folder_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", BY_NAME["glm4_air"])
    for folder in (tmp_path / "in" / "2024", tmp_path / "2024"):
        assert main(["convert", f"--from={tmp_path / 'in'}", f"--to={folder}"]) == 0
        assert checkpoint.read_config(folder) == checkpoint.read_config(tmp_path / "in")
        # Its own config counts, whatever lies beside it.
        (tmp_path / "config.json").write_text("{")
        assert main(["verify", str(folder), str(tmp_path / "in")]) == 0
    assert trainer.find(tmp_path / "in") is None, "a released folder stays one, whatever is written into it"
