"""Folders that hold the experts of a layer in one tensor, as `transformers` 5 may write them: the same parameters."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import checkpoint
from models.checkpoint.commands import main
from models.checkpoint.released import Released
from tests.parity.variants import VARIANTS, Variant, tensors_of, write_folder

QWEN3 = next(variant for variant in VARIANTS if variant.name == "qwen3")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gate_up_proj [E, 2 I, H] and down_proj [E, H, I] for each layer, in place of gate, up [I, H] and down [H, I]."""
    experts = {match.groups(): tensors[name] for name in tensors if (match := EXPERT.fullmatch(name))}
    result = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for prefix in {prefix for prefix, _, _ in experts}:
        own = [
            [experts[prefix, str(expert), part] for part in ("gate", "up", "down")]
            for expert in range(sum(p == prefix for p, _, _ in experts) // 3)
        ]
        result[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in own])
        result[f"{prefix}.down_proj"] = np.stack([down for *_, down in own])
    return result


def write(folder: Path, tensors: dict[str, np.ndarray], variant: Variant = QWEN3) -> Path:
    """A folder with every other tensor in each of two files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(variant.config)))
    places = dict(zip(tensors, FILES * len(tensors), strict=False))
    for file in FILES:
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def faults_of(folder: Path) -> list[str]:
    with pytest.raises(checkpoint.CheckpointError) as caught:
        Released(folder)
    return list(caught.value.faults)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_fused_experts_are_the_same_parameters(variant: Variant, tmp_path: Path) -> None:
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors_of(variant).items()}
    one_by_one, together = write(tmp_path / "a", tensors, variant), write(tmp_path / "b", fused(tensors), variant)
    ours, theirs = Released(together), Released(one_by_one)
    for parameter in theirs.parameters:
        assert ours.dtype(parameter) == theirs.dtype(parameter) == ml_dtypes.bfloat16
        pairs = zip(ours.blocks(parameter), theirs.blocks(parameter), strict=True)
        for (index, block), (same, expected) in pairs:
            assert index == same
            assert block.tobytes() == expected.tobytes()


def test_commands_take_fused_experts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "a", QWEN3)
    folder = write(tmp_path / "b", fused(tensors_of(QWEN3)))
    assert main(["inspect", str(folder)]) == 0
    assert f"{len(fused(tensors_of(QWEN3)))} tensors in 2 files" in capsys.readouterr().out
    assert main(["verify", str(folder), str(tmp_path / "a")]) == 0
    assert main(["convert", f"--from={folder}", f"--to={tmp_path / 'c'}", "--format=released"]) == 0
    assert main(["verify", str(tmp_path / "c"), str(tmp_path / "a")]) == 0


def test_what_is_wrong_with_fused_experts_is_said_of_them(tmp_path: Path) -> None:
    whole = fused(tensors_of(QWEN3))
    own = "model.layers.1.mlp.experts.3.down_proj.weight"
    cases: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
        "turned": ({DOWN: whole[DOWN].swapaxes(1, 2).copy()}, f"wrong shape: {DOWN} is [8, 16, 32], the model wants"),
        "flat": ({DOWN: whole[DOWN].reshape(-1, 16)}, f"wrong shape: {DOWN} is [256, 16], the model wants [8, 32, 16]"),
        "fp8": (
            {GATE_UP: whole[GATE_UP].astype(ml_dtypes.float8_e4m3fn)},
            f"wrong dtype: {GATE_UP} is F8_E4M3; of",
        ),
        "integers": ({DOWN: whole[DOWN].astype(np.int64)}, f"wrong dtype: {DOWN} is I64; of all experts in one, F32,"),
        "gone": ({DOWN: None}, f"missing tensor: {DOWN} [8, 32, 16]"),
        "twice": ({own: np.zeros((32, 16), np.float32)}, f"tensor twice: {own}, and in {DOWN}"),
    }
    for name, (changes, expected) in cases.items():
        changed = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        (fault,) = faults_of(write(tmp_path / name, changed))
        assert fault.startswith(expected)
    # A file that is not there is one fault, whatever was in it.
    folder = write(tmp_path / "lost", whole)
    (folder / FILES[1]).unlink()
    assert len(faults_of(folder)) == 1


def test_a_single_file_that_wins_over_others_is_named(tmp_path, capsys, caplog) -> None:
    write_folder(tmp_path, QWEN3)
    save_file(tensors_of(QWEN3), tmp_path / "model.safetensors")
    note = (
        "model.safetensors is read, as transformers would, and not what model.safetensors.index.json names:"
        f" 2 files, as {FILES[0]}"
    )
    assert Released(tmp_path).notes == [note]
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path}: {note}"]
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"note: {note}\n" in capsys.readouterr().out
    # An index of this very file says nothing else.
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert Released(tmp_path).notes == []
