"""Weights in and out: every bit comes back, whatever the mesh; a process reads what it needs and holds little."""

import dataclasses
import errno
import json
import os
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import models
from models import checkpoint
from models.checkpoint import parameters, released
from models.checkpoint.export import new_folder
from tests.parity.variants import VARIANTS, Variant, shapes_of, tensors_of, write_folder
from tests.support.multiprocess_worker import run_processes

BY_NAME = {variant.name: variant for variant in VARIANTS}
BF16 = ml_dtypes.bfloat16


def mesh_of(ways: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:ways]), ("ep",))


def load(folder: Path, ways: int = 1, *, dtype=jnp.float32, stage=None, fsdp=(), **options):
    config = checkpoint.read_config(folder)
    places = models.state_shardings(checkpoint.abstract(config, stage=stage), mesh_of(ways), fsdp=fsdp)
    return config, checkpoint.load(folder, config, places, dtype=dtype, stage=stage, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a)


def write_single(folder: Path, variant: Variant, tensors: dict[str, np.ndarray], **changes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**variant.config, **changes}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_what_comes_in_goes_out(variant: Variant, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", variant, num_files=3)
    config, params = load(tmp_path / "in")
    checkpoint.save(tmp_path / "out", config, params, max_shard_bytes=60_000)
    assert equal(tensors_in(tmp_path / "out"), tensors_of(variant))
    assert checkpoint.read_config(tmp_path / "out") == config
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * np.prod(shape) for shape in shapes_of(variant).values())
    for file in files:
        with safe_open(tmp_path / "out" / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file for name in opened.offset_keys())
            assert sum(opened.get_tensor(name).nbytes for name in opened.offset_keys()) <= 60_000
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_each_tensor_lies_where_the_model_looks_for_it(tmp_path: Path) -> None:
    variant = BY_NAME["glm4_air"]
    write_folder(tmp_path / "in", variant)
    tensors = tensors_of(variant)
    _, params = load(tmp_path / "in")
    moe, hidden = params["layers"]["moe"], variant.config["hidden_size"]
    for layer, number in enumerate(variant.moe_layers):
        name = f"model.layers.{number}"
        np.testing.assert_array_equal(
            params["layers"]["attention"]["query"]["kernel"][layer], tensors[f"{name}.self_attn.q_proj.weight"].T
        )
        np.testing.assert_array_equal(moe["router"][layer], tensors[f"{name}.mlp.gate.weight"].T)
        for expert in range(variant.num_experts):
            gate, up, down = (
                tensors[f"{name}.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            packed = np.concatenate([np.hstack([gate.T, up.T]).ravel(), down.T.ravel()])
            np.testing.assert_array_equal(moe["w"][layer, expert], packed)
        shared = [tensors[f"{name}.mlp.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")]
        np.testing.assert_array_equal(moe["shared_gate_up"][layer], np.hstack([shared[0].T, shared[1].T]))
        np.testing.assert_array_equal(moe["shared_down"][layer], shared[2].T)
    assert moe["w"].shape == (2, 8, 3 * hidden * variant.config["moe_intermediate_size"])


def test_an_export_does_not_depend_on_the_mesh(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", BY_NAME["glm4_air"])
    for name, ways, fsdp in (("one", 1, ()), ("ep", 8, ()), ("fsdp", 2, ("ep",))):
        config, params = load(tmp_path / "in", ways, fsdp=fsdp)
        assert params["layers"]["moe"]["w"].addressable_shards[0].data.shape[1] == 8 // ways
        assert params["embedding"]["table"].is_fully_replicated == (not fsdp)
        checkpoint.save(tmp_path / name, config, params, max_shard_bytes=100_000)
    assert contents(tmp_path / "one") == contents(tmp_path / "ep") == contents(tmp_path / "fsdp")


def test_dtypes(tmp_path: Path) -> None:
    variant = BY_NAME["glm4_air"]
    write_folder(tmp_path / "in", variant)
    config, params = load(tmp_path / "in", dtype=jnp.bfloat16)
    for path, leaf in parameters.flat(params).items():
        assert leaf.dtype == (jnp.float32 if path.endswith(("router", "correction_bias")) else jnp.bfloat16), path
    checkpoint.save(tmp_path / "out", config, load(tmp_path / "in")[1], dtype=jnp.bfloat16)
    expected = {
        name: value if name.endswith("correction_bias") else value.astype(BF16)
        for name, value in tensors_of(variant).items()
    }
    assert equal(tensors_in(tmp_path / "out"), expected)
    # Half precision and mixtures are read as they are.
    mixed = {name: value.astype((np.float16, BF16)[i % 2]) for i, (name, value) in enumerate(expected.items())}
    half = load(write_single(tmp_path / "half", variant, mixed))[1]
    np.testing.assert_array_equal(half["norm"]["scale"], mixed["model.norm.weight"].astype(np.float32))
    np.testing.assert_array_equal(half["head"]["kernel"], mixed["lm_head.weight"].astype(np.float32).T)
    with pytest.raises(ValueError, match="int32 cannot be written: take float32"):
        checkpoint.save(tmp_path / "no", config, params, dtype=jnp.int32)


def test_fp8_blocks_are_scaled_back(tmp_path: Path) -> None:
    # Extents beyond a block, and no multiple of one.
    variant = dataclasses.replace(
        BY_NAME["qwen3"], config={**BY_NAME["qwen3"].config, "hidden_size": 160, "vocab_size": 300, "head_dim": 40}
    )
    tensors, wide = {}, {}
    random = np.random.default_rng(0)
    for name, value in tensors_of(variant).items():
        tensors[name] = wide[name] = value
        if "_proj" in name:
            scale = random.uniform(0.5, 2, [-(-extent // 128) for extent in value.shape]).astype(np.float32)
            tensors[name] = (8 * value).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            wide[name] = tensors[name].astype(np.float32)
            for i, j in np.ndindex(scale.shape):
                wide[name][128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = write_single(tmp_path / "fp8", variant, tensors, quantization_config=quantization)
    config, params = load(folder, fp8=True)
    checkpoint.save(tmp_path / "wide", config, params)
    assert equal(tensors_in(tmp_path / "wide"), wide)
    # Rows come in chunks of whole blocks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(released, "_CHUNK_BYTES", 1)
        assert equal(parameters.flat(load(folder, fp8=True)[1]), parameters.flat(params))
    with pytest.raises(checkpoint.CheckpointError) as caught:
        load(folder)
    assert "ask for them to be turned into wide ones" in caught.value.faults[0]
    assert len(caught.value.faults) == 1 + sum("_scale_inv" in name for name in tensors)


@pytest.mark.parametrize("stage", [(0, 2), (2, 3)])
def test_a_stage_reads_its_own_layers(stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "in", BY_NAME["glm4_air"])
    _, whole = load(tmp_path / "in")
    read = spy(monkeypatch)
    _, part = load(tmp_path / "in", stage=stage)
    layers = {int(name.split(".")[2]) for name in read if ".layers." in name}
    assert layers == set(range(*stage))
    assert ("model.embed_tokens.weight" in read, "lm_head.weight" in read) == (stage[0] == 0, stage[1] == 3)
    first = max(stage[0] - 1, 0)
    jax.tree.map(
        lambda mine, all_layers: np.testing.assert_array_equal(mine, all_layers[first : stage[1] - 1]),
        part["layers"],
        whole["layers"],
    )


def spy(patch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read from here on."""
    read: list[str] = []
    original = released.Released._read
    patch.setattr(released.Released, "_read", lambda self, name, view: (read.append(name), original(self, name, view)))
    return read


def test_processes_read_their_experts_and_write_one_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", BY_NAME["qwen3"])
    run_processes("tests.models.checkpoint_test:on_each_process", str(tmp_path), devices_per_process=2)
    config, params = load(tmp_path / "in")
    checkpoint.save(tmp_path / "alone", config, params)
    for name in ("ep", "fsdp", "away"):
        assert contents(tmp_path / name) == contents(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "away", "ep", "fsdp", "in"]


def on_each_process(folder: str) -> None:
    path = Path(folder)
    read = spy(pytest.MonkeyPatch())
    for name, fsdp in (("ep", ()), ("fsdp", ("ep",))):
        read.clear()
        config, params = load(path / "in", 4, fsdp=fsdp)
        experts = {int(tensor.split(".")[5]) for tensor in read if ".experts." in tensor}
        assert experts == set(range(4 * jax.process_index(), 4 * jax.process_index() + 4))
        assert len(read) == len(set(read))
        checkpoint.save(path / name, config, params)
    # A stage of a pipeline that another process runs.
    read.clear()
    mesh = Mesh(np.asarray(jax.devices()[2:]), ("ep",))
    places = models.state_shardings(checkpoint.abstract(config), mesh)
    params = checkpoint.load(path / "in", config, places)
    assert bool(read) == (jax.process_index() == 1)
    checkpoint.save(path / "away", config, params)
    # One process alone finds its target in the way, or a fault: all of them say so.
    with pytest.raises(checkpoint.CheckpointError, match="there already" if jax.process_index() == 0 else "process 0"):
        checkpoint.save(path / "ep", config, params)
    alone = path / "in" if jax.process_index() == 0 else path / "nowhere"
    with pytest.raises(checkpoint.CheckpointError, match="no such folder" if jax.process_index() else "process 1"):
        checkpoint.load(alone, config, jax.tree.map(lambda leaf: leaf.sharding, params))


@pytest.mark.full
def test_memory_beyond_the_result_is_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(models.Qwen3MoEConfig.tiny(), hidden=256, ffn=128, num_experts=32, vocab=4000)
    table = parameters.parameters(config)
    total = sum(4 * int(np.prod(parameter.shape)) for parameter in table)
    block = max(4 * int(np.prod(parameter.block_shape)) for parameter in table)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), checkpoint.abstract(config))
    monkeypatch.setattr(released, "_CHUNK_BYTES", 1 << 16)

    def peak(call) -> int:
        call()  # Compiles.
        tracemalloc.start()  # NumPy reports what it allocates; arrays of JAX are not seen: they are the result.
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    folders = iter((tmp_path / "first", tmp_path / "second"))
    assert total > 60e6
    assert peak(lambda: checkpoint.save(next(folders), config, zeros)) < 2 * block + 2e6 < 11e6
    assert peak(lambda: load(tmp_path / "first")) < 2 * block + 2e6


def test_a_folder_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "in", BY_NAME["qwen3"])
    config, params = load(tmp_path / "in")
    written = []

    def full_disk(descriptor, data, offset):
        written.append(len(data))
        if len(written) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(descriptor, [data[: 1 + len(data) // 2]], offset)  # Short writes go on.

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path / "out", config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as partial:
        (partial / "config.json").touch()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(OSError, match="Input/output error"):
            checkpoint.save(tmp_path / "out", config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    checkpoint.save(tmp_path / "deep" / "er" / "out", config, params)
    with pytest.raises(checkpoint.CheckpointError, match="it is there already"):
        checkpoint.save(tmp_path / "deep" / "er" / "out", config, params)
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be at least 1"):
        checkpoint.save(tmp_path / "out", config, params, max_shard_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "in"]


def test_tensors_of_the_released_model() -> None:
    """48 layers, each with 3 tensors for each of 128 experts and 9 others; 30,532,122,624 parameters in bf16."""
    tensors = list(parameters.tensors(parameters.parameters(models.Qwen3MoEConfig.qwen3_30b_a3b())))
    assert len({name for name, *_ in tensors}) == len(tensors) == 48 * (3 * 128 + 9) + 3
    assert sum(2 * int(np.prod(shape)) for *_, shape in tensors) == 2 * 30_532_122_624
