"""The models against `transformers`: logits, experts, loss and gradients of tiny checkpoints of every kind.

What `transformers` computes lies in tests/parity/golden. Where torch and transformers are installed, or
--transformers-python names an interpreter that has them, it is computed anew, and reads what we export.
"""

import functools
import subprocess
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import MODEL_TYPES, checkpoint
from models.sharding import state_shardings
from tests.parity import variants
from tests.parity.variants import VARIANTS, Variant
from topoep_jax import Hardware

ROOT = variants.GOLDEN.parent.parent.parent
NUM_RANKS = 8


class Run(NamedTuple):
    variant: Variant
    golden: dict[str, np.ndarray]
    valid: np.ndarray  # bool [B, S]
    config: Any
    params: dict
    logits: np.ndarray
    experts: np.ndarray  # int32 [layers, B, S, K], in rising order.
    loss: float
    gradients: dict  # As params.
    metrics: Any


def mesh_of(num_ranks: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:num_ranks]), ("ep",))


def build(variant: Variant, num_ranks: int):
    """The config, and a function that makes the model."""
    config_type, model_type = MODEL_TYPES[variant.config["model_type"]]
    config = config_type.from_hf(variant.config)
    # Links so fast that the planner copies experts of this size; no second pass, which would take longer to compile.
    hardware = Hardware(inter_fs_per_byte=1, intra_fs_per_byte=1, gflops=1)
    options = {"block_rows": 8, "num_slots": min(2, num_ranks - 1), "hardware": hardware, "overflow": "flag"}
    make = functools.partial(model_type, config, mesh=mesh_of(num_ranks), moe_options=options, dtype=jnp.float32)
    return config, lambda: make(rngs=nnx.Rngs(0))


def load(variant: Variant, folder, num_ranks: int):
    """The config, the structure of the model, and its parameters from a checkpoint."""
    config, make = build(variant, num_ranks)
    graph, abstract = nnx.split(nnx.eval_shape(make))
    shardings = state_shardings(nnx.to_pure_dict(abstract), mesh_of(num_ranks))
    return config, graph, checkpoint.load(folder, config, shardings, dtype=jnp.float32)


def loss_of(graph, params, batch, labels):
    output = nnx.merge(graph, params)(**batch, return_routing=True)
    score = jax.nn.log_softmax(output.logits[:, :-1])
    score = jnp.take_along_axis(score, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    follows = labels >= 0
    return -jnp.where(follows, score, 0.0).sum() / follows.sum().astype(jnp.float32), output


def run_of(variant: Variant, folder) -> Run:
    """One step forward and back, the balancer between the ranks."""
    config, graph, params = load(variant, folder, NUM_RANKS)
    batch = variants.batch_of(variant)
    valid, labels = batch["segments"] > 0, variants.next_tokens_of(batch).astype(np.int32)
    if variant.stride == 1:
        del batch["positions"]
    if not variant.packed:
        del batch["segments"]
    batch, labels = jax.device_put((batch, labels), NamedSharding(mesh_of(NUM_RANKS), PartitionSpec("ep")))
    step = jax.jit(jax.value_and_grad(functools.partial(loss_of, graph), has_aux=True))
    (loss, output), gradients = step(params, batch, labels)
    with np.load(variant.golden) as golden:
        return Run(
            variant,
            dict(golden),
            valid,
            config,
            params,
            np.asarray(output.logits),
            np.sort(np.asarray(output.routing.expert_idx), axis=-1),
            float(loss),
            gradients,
            output.metrics,
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of the checkpoints, as their authors would publish them."""
    folder = tmp_path_factory.mktemp("released")
    for variant in VARIANTS:
        variants.write_folder(folder / variant.name, variant)
    return folder


@pytest.fixture(scope="module")
def runs(folders):
    """The run of each variant, made once, whichever order the tests come in."""
    by_name = {variant.name: variant for variant in VARIANTS}
    return functools.cache(lambda name: run_of(by_name[name], folders / name))


PLAIN = ("qwen3", "glm4_air", "deepseek_v2")
"""One of each model; the other variants take as long."""


@pytest.fixture(
    params=[v if v.name in PLAIN else pytest.param(v, marks=pytest.mark.full) for v in VARIANTS],
    ids=lambda variant: variant.name,
)
def run(request, runs):
    return runs(request.param.name)


def test_logits(run):
    np.testing.assert_allclose(run.logits[run.valid], run.golden["logits"][run.valid], rtol=0, atol=1e-4)


def test_experts(run):
    np.testing.assert_array_equal(run.experts[:, run.valid], run.golden["experts"][:, run.valid])
    assert (run.experts[:, ~run.valid] == -1).all()


def test_loss(run):
    np.testing.assert_allclose(run.loss, run.golden["loss"], rtol=1e-3)


def test_gradients(run, tmp_path):
    checkpoint.save(tmp_path / "gradients", run.config, run.gradients)
    ours = variants.read_folder(tmp_path / "gradients")
    names = variants.gradients_of(run.variant)
    assert len(names) > 10
    wrong = {}
    for name in names:
        golden = run.golden[f"grad:{name}"]
        error, size = np.abs(ours[name] - golden).max(), np.abs(golden).max()
        if size == 0 or not error <= 1e-3 * size:
            wrong[name] = f"{error} > 1e-3 of {size}"
    assert not wrong


def test_ranks_took_work_from_each_other(run):
    assert run.metrics.expert_load.shape == (len(run.variant.moe_layers), run.variant.num_experts)
    assert (run.metrics.replica > 0).any()
    assert (run.metrics.passes == 1).all()


def test_an_export_is_what_was_imported_whatever_the_mesh(run, folders, tmp_path):
    checkpoint.save(tmp_path / "eight", run.config, run.params)
    alone = load(run.variant, folders / run.variant.name, 1)[2]
    checkpoint.save(tmp_path / "one", run.config, alone)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "eight").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "eight" / name).read_bytes(), name
    assert_same(variants.read_folder(tmp_path / "one"), variants.tensors_of(run.variant))


def assert_same(tensors: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


def transformers_run(python: str, *arguments: object) -> None:
    """Runs tests/parity/make_golden.py, whose complaints become ours."""
    with tempfile.TemporaryDirectory() as folder:  # torch leaves the folder of its compiler there
        command = ["env", f"TMPDIR={folder}", python, "-m", "tests.parity.make_golden", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_golden_files_are_what_transformers_computes(transformers_python):
    transformers_run(transformers_python, "--check")


def test_transformers_computes_the_same_from_our_exports(transformers_python, folders, tmp_path):
    for variant in VARIANTS:
        config, _, params = load(variant, folders / variant.name, NUM_RANKS)
        checkpoint.save(tmp_path / variant.name, config, params, max_shard_bytes=50_000)
    transformers_run(transformers_python, "--check", "--folders", tmp_path)


def test_what_transformers_saves_is_read(transformers_python, tmp_path):
    transformers_run(transformers_python, "--save", tmp_path / "theirs")
    for variant in VARIANTS:
        config, _, params = load(variant, tmp_path / "theirs" / variant.name, NUM_RANKS)
        checkpoint.save(tmp_path / "ours" / variant.name, config, params)
        assert_same(variants.read_folder(tmp_path / "ours" / variant.name), variants.tensors_of(variant))
