"""Bad checkpoints: one report with every fault, before a weight is read; and the commands, which report in a line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import models
from models import checkpoint
from models.checkpoint import parameters, released
from models.checkpoint.commands import main
from tests.parity.variants import VARIANTS, shapes_of, tensors_of, write_folder

BY_NAME = {variant.name: variant for variant in VARIANTS}
QWEN3, GLM4 = BY_NAME["qwen3"], BY_NAME["glm4_air"]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ROUTER = "model.layers.1.mlp.gate.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_config(**changes) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(changes))


def edit_index(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda index: edit(index["weight_map"]))


def edit_tensors(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    """Edits the tensors of both files; the index is made to say where they are."""

    def apply(folder: Path) -> None:
        weight_map = {}
        for file in (FIRST, SECOND):
            tensors = load_file(folder / file)
            edit(tensors)
            save_file(tensors, folder / file)
            weight_map |= dict.fromkeys(tensors, file)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def edit_header(edit: Callable[[dict], object], file: str = FIRST) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def edit_bytes(file: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(edit((folder / file).read_bytes())) and None


def replace(name: str, value: np.ndarray | None) -> Callable[[dict], object]:
    return lambda tensors: tensors.update({name: value}) if name in tensors else None


def both(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for edit in edits:
            edit(folder)

    return apply


def several(tensors: dict) -> None:
    """A file with four faults of four kinds."""
    tensors.pop(DOWN, None)
    if ROUTER in tensors:
        tensors[ROUTER] = tensors[ROUTER].T.copy()
        tensors["model.layers.7.mlp.gate.weight"] = tensors[ROUTER]
    if "model.norm.weight" in tensors:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)


NAMES = list(shapes_of(QWEN3))
EMBEDDING = NAMES[0]
CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(DOWN, None)), [f"missing tensor: {DOWN} [32, 16]"]),
    "wrong shape": (
        edit_tensors(replace(ROUTER, np.zeros((8, 31), np.float32))),
        [f"wrong shape: {ROUTER} is [8, 31], the model wants [8, 32]"],
    ),
    "unknown tensor": (
        edit_tensors(lambda t: t.update({"model.vision.weight": np.zeros(3, np.float32)} if DOWN in t else {})),
        ["unknown tensor: model.vision.weight F32 [3]"],
    ),
    "wrong dtype": (
        edit_tensors(replace(ROUTER, np.zeros((8, 32), np.int64))),
        [f"wrong dtype: {ROUTER} is I64, read are F32, BF16, F16, F8_E4M3"],
    ),
    "all of these": (
        edit_tensors(several),
        [
            f"missing tensor: {DOWN} [32, 16]",
            "unknown tensor: model.layers.7.mlp.gate.weight F32 [32, 8]",
            f"wrong shape: {ROUTER} is [32, 8], the model wants [8, 32]",
            "wrong dtype: model.norm.weight is F64, read are F32, BF16, F16, F8_E4M3",
        ],
    ),
    "and a file cut short, and the model of another type": (
        both(edit_tensors(several), edit_bytes(SECOND, lambda data: data[:-10]), edit_config(model_type="llama")),
        [
            "wrong model type: config.json says 'llama', known are qwen3_moe, glm4_moe, deepseek_v2",
            f"truncated file: {SECOND} ends 10 bytes early",
        ],
    ),
    "truncated data": (
        edit_bytes(FIRST, lambda data: data[: len(data) // 2]),
        [r"truncated file: model-00001-of-00002.safetensors ends \d+ bytes early"],
    ),
    "truncated header": (
        edit_bytes(FIRST, lambda data: data[:100]),
        [r"truncated file, or no safetensors: model-00001-of-00002.safetensors has 100 bytes, header of \d+"],
    ),
    "empty file": (
        edit_bytes(FIRST, lambda data: b""),
        ["truncated file, or no safetensors: model-00001-of-00002.safetensors has 0 bytes, header of 0"],
    ),
    "no header": (
        edit_bytes(FIRST, lambda data: data[:8] + b"x" * (len(data) - 8)),
        [r"unreadable file: model-00001-of-00002.safetensors: Expecting value.*"],
    ),
    "a header that is a list": (
        edit_bytes(FIRST, lambda data: struct.pack("<Q", 8) + b"[1, 2]  "),
        [f"unreadable file: {FIRST}: its header is no JSON object"],
    ),
    "a header with a name twice": (
        edit_bytes(FIRST, lambda data: struct.pack("<Q", 16) + b'{"a": 1, "a": 2}'),
        [f"unreadable file: {FIRST}: a name stands in the header twice"],
    ),
    "a file without tensors": (
        edit_bytes(FIRST, lambda data: struct.pack("<Q", 8) + b"{}      "),
        [f"tensor not where the index says: {name} is not in {FIRST}" for name in NAMES[::2]],
    ),
    "an index without tensors": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": {}}') and None,
        [f"missing tensor: {name} {list(shape)}" for name, shape in shapes_of(QWEN3).items()],
    ),
    "bytes too many": (edit_bytes(SECOND, lambda data: data + b"12"), [f"2 bytes too many: {SECOND}"]),
    "a wrong size": (
        edit_header(lambda header: header[EMBEDDING].update(dtype="BF16")),
        [f"wrong size: {EMBEDDING} in {FIRST} has 5120 bytes as BF16 \\[40, 32\\]"],
    ),
    "an overlap": (
        edit_header(lambda header: header[EMBEDDING].update(data_offsets=[4, 5124])),
        [r"gap or overlap: .* in model-00001-of-00002.safetensors begins at byte \d+ of the data, expected \d+"],
    ),
    "an entry that is none": (
        edit_header(lambda header: header.update({EMBEDDING: {"shape": "x"}})),
        [
            f"unreadable entry: {EMBEDDING} in {FIRST}",
            r"gap or overlap: .*",
            f"tensor not where the index says: {EMBEDDING} is not in {FIRST}",
        ],
    ),
    "a file that is not there": (
        lambda folder: (folder / SECOND).unlink(),
        [f"missing file: {SECOND}, which the index names for {len(NAMES) // 2} tensors"],
    ),
    "a file elsewhere": (
        edit_index(lambda index: index.update({EMBEDDING: "../weights.safetensors"})),
        [
            r"missing file: ../weights.safetensors, which the index names for 1 tensors",
        ],
    ),
    "another place than the index says": (
        edit_index(lambda index: index.update({EMBEDDING: SECOND})),
        [f"tensor not where the index says: {EMBEDDING} is not in {SECOND}"],
    ),
    "a tensor that the index does not have": (
        edit_index(lambda index: index.pop(EMBEDDING)),
        [f"tensor not in the index: {EMBEDDING} of {FIRST}"],
    ),
    "a tensor twice": (
        lambda folder: save_file(
            {**load_file(folder / SECOND), EMBEDDING: np.zeros((40, 32), np.float32)}, folder / SECOND
        ),
        [f"tensor twice: {EMBEDDING} in {FIRST} and {SECOND}"],
    ),
    "an index that is none": (
        lambda folder: (folder / INDEX).write_text("[1]") and None,
        [r"unreadable index: model.safetensors.index.json: .*"],
    ),
    "no weights": (
        lambda folder: (folder / INDEX).rename(folder / "pytorch_model.bin") and None,
        [
            "no weights: neither model.safetensors nor model.safetensors.index.json is there; pytorch_model.bin is of"
            " another format, which is not read"
        ],
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        [r"unreadable config: config.json: .*No such file.*"],
    ),
    "a config that is none": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        [r"unreadable config: config.json: Expecting.*"],
    ),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[]") and None,
        ["unreadable config: config.json: it is no JSON object"],
    ),
    "options that no model here has": (
        edit_config(mlp_only_layers=[1], attention_bias=True),
        [r"unsupported config: .*mlp_only_layers=\[1\].*attention_bias=True.*"],
    ),
    "a model type that is none": (
        edit_config(model_type=["qwen3_moe"]),
        [r"wrong model type: config.json says \['qwen3_moe'\], known are qwen3_moe, glm4_moe, deepseek_v2"],
    ),
    "rotary settings that are none": (edit_config(rope_scaling="yarn"), [r"unsupported config: .*"]),
    "quantized by name": (
        edit_config(quantization_config="fp8"),
        [r"unsupported config: quantization fp8; read is fp8 with weight_block_size \[128, 128\]"],
    ),
    "quantized otherwise": (
        edit_config(quantization_config={"quant_method": "awq", "bits": 4}),
        [r"unsupported config: quantization .*awq.*; read is fp8 with weight_block_size \[128, 128\]"],
    ),
    "fp8, unasked": (
        both(
            edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
            edit_tensors(replace(ROUTER, np.zeros((8, 32), ml_dtypes.float8_e4m3fn))),
        ),
        [
            r"fp8 weights: ask for them to be turned into wide ones, with fp8=True \(--fp8\)",
            rf"wrong dtype: {ROUTER} is fp8, see fp8=True \(--fp8\)",
        ],
    ),
    "values of other meaning": (
        edit_config(rope_theta=10000.0, num_experts_per_tok=3),
        ["other config: rope_theta is 10000.0, not 1000000.0", "other config: top_k is 3, not 2"],
    ),
}


def place_for(config) -> object:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("ep",))
    return models.state_shardings(checkpoint.abstract(config), mesh)


def assert_faults(call: Callable[[], object], expected: list[str]) -> None:
    import re

    with pytest.raises(checkpoint.CheckpointError) as caught:
        call()
    faults = caught.value.faults
    missing = [pattern for pattern in expected if not any(re.fullmatch(pattern, fault) for fault in faults)]
    literal = [pattern for pattern in missing if pattern not in faults]
    assert not literal and len(faults) == len(expected), "\n".join(faults)
    assert all(fault in str(caught.value) for fault in faults[:40])


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_gives_all_its_faults(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, QWEN3)
    config = checkpoint.read_config(tmp_path)
    edit, expected = CASES[case]
    edit(tmp_path)
    monkeypatch.setattr(released.Released, "blocks", lambda *_: pytest.fail("a weight was read"))
    assert_faults(lambda: checkpoint.load(tmp_path, config, place_for(config)), expected)


def test_faults_of_fp8_scales(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
            if name in tensors:
                tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
                tensors[name + "_scale_inv"] = np.ones((1, 1), np.float32)
        for expert, scale in ((1, np.ones((1, 2), np.float32)), (2, np.ones((1, 1), ml_dtypes.bfloat16))):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight_scale_inv"
            if name in tensors:
                tensors[name] = scale
        if DOWN in tensors:
            del tensors[DOWN + "_scale_inv"]
        if ROUTER in tensors:
            tensors[ROUTER + "_scale_inv"] = np.ones((1, 1), np.float32)

    write_folder(tmp_path, QWEN3)
    edit_tensors(edit)(tmp_path)
    config = checkpoint.read_config(tmp_path)
    expert = "model.layers.1.mlp.experts.{}.down_proj.weight_scale_inv"
    assert_faults(
        lambda: checkpoint.load(tmp_path, config, place_for(config), fp8=True),
        [
            f"wrong shape: {expert.format(1)} is [1, 2], the model wants [1, 1]",
            f"wrong dtype: {expert.format(2)} is BF16, F32 is read",
            f"missing tensor: {expert.format(3)} [1, 1], the scale of an fp8 weight",
            f"unknown tensor: {ROUTER}_scale_inv F32 [1, 1]",
        ],
    )


def test_another_model_and_other_parameters(tmp_path: Path) -> None:
    write_folder(tmp_path / "qwen3", QWEN3)
    write_folder(tmp_path / "glm4", GLM4)
    qwen3, glm4 = (checkpoint.read_config(tmp_path / name) for name in ("qwen3", "glm4"))
    assert_faults(
        lambda: checkpoint.load(tmp_path / "qwen3", glm4, place_for(glm4)),
        ["wrong model type: Qwen3MoEConfig, not GLM4MoEConfig"],
    )
    assert_faults(lambda: checkpoint.load(tmp_path / "none", glm4, place_for(glm4)), ["no such folder"])
    with pytest.raises(ValueError, match=r"shardings and parameters of GLM4MoEConfig differ in dense_layers/attention"):
        checkpoint.load(tmp_path / "glm4", glm4, place_for(qwen3))
    params = checkpoint.load(tmp_path / "qwen3", qwen3, place_for(qwen3))
    leaves = parameters.flat(params)
    leaves["norm/weight"] = leaves.pop("norm/scale")
    leaves["head/kernel"] = leaves["embedding/table"]
    assert_faults(
        lambda: checkpoint.save(tmp_path / "out", qwen3, parameters.nested(leaves)),
        [
            "missing parameter: norm/scale [32]",
            "unknown parameter: norm/weight [32]",
            "wrong shape: head/kernel is [40, 32], the model has [32, 40]",
        ],
    )
    with pytest.raises(ValueError, match="int is the config of no model: take one of Qwen3MoEConfig"):
        checkpoint.abstract(3)


def test_what_is_known_may_be_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The layer behind GLM's last, rotary frequencies, and the head of a model whose embeddings are tied."""
    for variant, extra in (
        (GLM4, {"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.mlp.experts.0.up_proj.weight": (1, 2)}),
        (QWEN3, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
        (BY_NAME["qwen3_tied"], {"lm_head.weight": (40, 32)}),
    ):
        folder = tmp_path / variant.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(variant.config)))
        known = {name: np.zeros(shape, np.float32) for name, shape in extra.items()}
        save_file(tensors_of(variant) | known, folder / "model.safetensors")
        assert main(["verify", str(folder)]) == 0
        assert main(["inspect", str(folder)]) == 0
        assert f"known and not read: {len(extra)} tensors, as {min(extra)}" in capsys.readouterr().out


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path, QWEN3)
    source = released.Released(tmp_path)
    edit_bytes(SECOND, lambda data: data[: len(data) // 3])(tmp_path)
    with pytest.raises(OSError, match=f"{SECOND} ends at byte .*: it was changed while being read"):
        for parameter in source.parameters:
            list(source.blocks(parameter))


def test_many_faults_are_counted() -> None:
    error = checkpoint.CheckpointError("folder", [f"fault {i}" for i in range(100)])
    assert len(error.faults) == 100
    assert str(error).startswith("folder: 100 faults:\n  - fault 0\n")
    assert str(error).endswith("- fault 39\n  - and 60 more")
