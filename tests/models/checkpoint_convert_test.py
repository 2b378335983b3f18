"""Between released folders and checkpoints of the trainer, with the commands: no bit is lost, and memory is bounded."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import models
from models import checkpoint
from models.checkpoint import parameters
from models.checkpoint.commands import main
from tests.parity.variants import VARIANTS, tensors_of, write_folder

BY_NAME = {variant.name: variant for variant in VARIANTS}


def places_of(config, ways: int):
    return models.state_shardings(checkpoint.abstract(config), Mesh(np.asarray(jax.devices()[:ways]), ("ep",)))


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def fails(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """What a command that fails says, its lines as one."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("models.checkpoint: error: ") == 1, error
    return error.removeprefix("models.checkpoint: error: ").replace("\n- ", " - ")


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run of the trainer on 8 ranks, as `train.checkpoint` writes them; the second one is right."""
    folder = tmp_path_factory.mktemp("run")
    write_folder(folder / "in", BY_NAME["glm4_air"])
    config = checkpoint.read_config(folder / "in")
    params = checkpoint.load(folder / "in", config, places_of(config, 8))
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(
        folder / "checkpoints", options=options, item_handlers=ocp.StandardCheckpointHandler()
    ) as manager:
        for step, scale in ((9, 2.0), (10, 1.0)):
            state = {f"params/{path}": leaf * scale for path, leaf in parameters.flat(params).items()}
            state |= {"step": jnp.int32(step), "opt_state/0/mu/norm/scale": jnp.zeros(3)}
            manager.save(step, args=ocp.args.StandardSave(state))
    return folder


def test_a_run_becomes_a_released_folder(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, released = run_folder / "checkpoints", run_folder / "in"
    assert "1 fault: - no config.json says which model it is" in fails(
        capsys, "convert", f"--from={folder}", f"--to={tmp_path / 'out'}"
    )
    run("convert", f"--from={folder}", f"--to={tmp_path / 'out'}", f"--config={released}", "--max_shard_bytes=50000")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    np.testing.assert_equal(tensors_in(tmp_path / "out"), tensors_of(BY_NAME["glm4_air"]))
    run("verify", tmp_path / "out", released)
    run("verify", released, folder, f"--config={released}")
    assert "equal bit for bit\n" in capsys.readouterr().out
    assert "differs: model.embed_tokens.weight in 1280 of 1280 values, by up to" in fails(
        capsys, "verify", released, folder / "9", f"--config={released}"
    )
    run("inspect", folder, f"--config={released}")
    assert "layers/moe/w: float32 [2, 8, 1536]" in capsys.readouterr().out
    # As the trainer leaves it: config.json beside the steps says the model.
    shutil.copy(released / "config.json", folder)
    run("verify", released, folder)
    run("verify", released, folder / "10")


def test_a_released_folder_becomes_one_for_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "in", BY_NAME["deepseek_v2"])
    content = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**content, "eos_token_id": 7}))
    run("convert", "--from", tmp_path / "in", "--to", tmp_path / "params", "--dtype=bfloat16")
    assert "params: DeepSeekV2Config, trainer, bfloat16\n" in capsys.readouterr().out
    run("convert", "--from", tmp_path / "params", "--to", tmp_path / "out", "--dtype=float32")
    expected = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors_of(BY_NAME["deepseek_v2"]).items()}
    np.testing.assert_equal(
        tensors_in(tmp_path / "out"), {name: value.astype(np.float32) for name, value in expected.items()}
    )
    run("convert", "--from", tmp_path / "in", "--to", tmp_path / "narrow", "--dtype=bfloat16", "--format=released")
    run("verify", tmp_path / "narrow", tmp_path / "out")
    assert "equal bit for bit; stored as bfloat16 here and float32 there\n" in capsys.readouterr().out
    for folder, dtype in (("params", "bfloat16"), ("out", "float32")):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert (written["eos_token_id"], written["torch_dtype"]) == (7, dtype)
    # The program reads it as any other folder, and Orbax as any other checkpoint.
    config = checkpoint.read_config(tmp_path / "params")
    places = places_of(config, 8)
    params = checkpoint.load(tmp_path / "params", config, places)
    again = checkpoint.load(tmp_path / "out", config, places)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    wanted = {
        f"params/{path}": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in parameters.flat(params).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params" / "default", wanted)
    for path, leaf in parameters.flat(params).items():
        np.testing.assert_array_equal(restored[f"params/{path}"], leaf)
    stage = checkpoint.load(
        tmp_path / "params",
        config,
        {"layers": places["layers"], "norm": places["norm"], "head": places["head"]},
        stage=(2, 3),
    )
    np.testing.assert_array_equal(stage["layers"]["moe"]["w"], params["layers"]["moe"]["w"][1:])


def test_bad_checkpoints_of_the_trainer(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    released = run_folder / "in"
    shutil.copytree(run_folder / "checkpoints" / "10" / "default", tmp_path / "bad")
    metadata = json.loads((tmp_path / "bad" / "_METADATA").read_text())
    tree = metadata["tree_metadata"]

    def rename(old: str, new: str) -> None:
        entry = tree.pop(f"('params/{old}',)")
        entry["key_metadata"][0]["key"] = f"params/{new}"
        tree[f"('params/{new}',)"] = entry

    rename("norm/scale", "moe_norm/scale")
    (tmp_path / "bad" / "_METADATA").write_text(json.dumps(metadata))
    error = fails(capsys, "verify", tmp_path / "bad", f"--config={released}")
    assert "1 fault: - unreadable parameter: moe_norm/scale: " in error
    shutil.copytree(run_folder / "checkpoints" / "10", tmp_path / "other")
    write_folder(tmp_path / "qwen3", BY_NAME["qwen3"])
    error = fails(capsys, "verify", tmp_path / "other", f"--config={tmp_path / 'qwen3'}")
    assert "missing parameter: layers/attention/query_norm/scale [2, 16] - " in error
    assert "unknown parameter: layers/moe/correction_bias [2, 8] - " in error
    shutil.copy(released / "config.json", tmp_path / "other")
    assert "wrong model type: GLM4MoEConfig, not Qwen3MoEConfig" in fails(
        capsys, "verify", tmp_path / "other", f"--config={tmp_path / 'qwen3'}"
    )
    edited = json.loads((released / "config.json").read_text()) | {"vocab_size": 41}
    (tmp_path / "other" / "config.json").write_text(json.dumps(edited))
    error = fails(capsys, "verify", tmp_path / "other")
    assert "2 faults: - wrong shape: embedding/table is [40, 32], the model wants [41, 32] - wrong shape: head" in error
    (tmp_path / "bad" / "_METADATA").write_text("{}")
    assert "unreadable _METADATA: 'tree_metadata'" in fails(capsys, "verify", tmp_path / "bad", f"--config={released}")


def test_verify_reads_every_value(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = tensors_of(BY_NAME["qwen3"])
    name = "model.layers.1.mlp.experts.5.up_proj.weight"

    def write(folder: str, *values: tuple[float, ...]) -> Path:
        write_folder(tmp_path / folder, BY_NAME["qwen3"])
        changed = {key: value.copy() for key, value in tensors.items()}
        for i, value in enumerate(values):
            changed[name].flat[i] = value
        (tmp_path / folder / "model.safetensors.index.json").unlink()
        save_file(changed, tmp_path / folder / "model.safetensors")
        return tmp_path / folder

    zero, minus, far, odd = write("a", 0.0), write("b", -0.0), write("c", 0.25), write("d", np.nan, np.inf)
    run("verify", zero)
    assert "complete, fits Qwen3MoEConfig, all values are finite\n" in capsys.readouterr().out
    assert f"1 fault: - not finite: 2 values of {name}\n" in fails(capsys, "verify", odd)
    run("verify", odd, odd)
    assert f"differs: {name} in 1 of 512 values, by up to 0\n" in fails(capsys, "verify", zero, minus)
    run("verify", zero, minus, "--tolerance=1e-9")
    assert f"differs: {name} in 1 of 512 values, by up to 0.25\n" in fails(
        capsys, "verify", zero, far, "--tolerance=0.2"
    )
    run("verify", zero, far, "--tolerance=0.3")
    assert "by up to nan" in fails(capsys, "verify", zero, odd, "--tolerance=1e9")


def test_commands_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "in", BY_NAME["qwen3"])
    for arguments, reason in (
        (["list"], "'list' is no command: take one of inspect, verify, convert"),
        (["verify"], "which folder? Name it, as --folder=FOLDER"),
        (["convert", f"--from={tmp_path / 'in'}"], "which folder? Name it, as --to=FOLDER"),
        (["convert", tmp_path / "in", tmp_path / "out"], "is no flag: write --name=value"),
        (["convert", f"--from={tmp_path}", "--to=x"], "2 faults: - unreadable config: config.json"),
        (["convert", f"--from={tmp_path / 'in'}", f"--to={tmp_path / 'in'}"], "it is there already"),
        (["convert", f"--from={tmp_path / 'in'}", "--to=x", "--dtype=int8"], "--dtype=int8 is unknown: take one of"),
        (["convert", f"--from={tmp_path / 'in'}", "--to=x", "--format=gguf"], "--format=gguf is unknown: take one of"),
        (["verify", tmp_path / "in", "--tolerance=-1"], "tolerance"),
    ):
        assert reason in fails(capsys, *arguments)
    assert main([]) == 2
    run("--help")
    assert all(name in capsys.readouterr().out.split() for name in ("inspect",))
    run("convert", "--help")
    assert re.search(r"--to: folder to write; it must not be there", capsys.readouterr().out)
    # What is wrong with a folder is what `inspect` is for.
    (tmp_path / "in" / "model-00002-of-00002.safetensors").unlink()
    assert main(["inspect", str(tmp_path / "in")]) == 2
    out, error = capsys.readouterr()
    assert "1 fault:\n  missing file: model-00002-of-00002.safetensors" in out
    assert "cannot be loaded: see its faults" in error


# The peak of this process: that of `getrusage` begins with the process that started it.
CONVERT = """
import pathlib, re, sys
from models.checkpoint.commands import main
for folder in sys.argv[1:]:
    assert main(["convert", "--from", folder, "--to", folder + ".t"]) == 0
    assert main(["convert", "--from", folder + ".t", "--to", folder + ".r"]) == 0
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]))
"""


@pytest.mark.full
def test_conversion_needs_less_memory_than_the_model(tmp_path: Path) -> None:
    shapes = dataclasses.replace(models.Qwen3MoEConfig.tiny(), hidden=256, ffn=256, num_experts=32)
    folders = []
    for layers in (1, 8):
        config = dataclasses.replace(shapes, num_layers=layers)
        params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), checkpoint.abstract(config))
        folders.append(tmp_path / str(layers))
        checkpoint.save(folders[-1], config, params)
    command = ["env", "JAX_PLATFORMS=cpu", sys.executable, "-c", CONVERT, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = (int(line) for line in done.stdout.splitlines() if line.isdecimal())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert size > 200e6
    assert second - first < size / 4
    original, returned = (folders[-1].with_suffix(end) / "model.safetensors" for end in ("", ".r"))
    assert original.read_bytes() == returned.read_bytes()
