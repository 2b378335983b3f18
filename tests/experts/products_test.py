"""The grouped products: every form makes what NumPy makes of any layout, and GPU kernels copy nothing."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.aot import Compiler
from topoep_jax import LayerConfig, Topology
from topoep_jax.config import TILE
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, WeightGrad, gmm, packed_matrices, swiglu_backward, tiles, wgrad

FORMS = ("scan", "pallas", "ragged_dot")
HIDDEN, FFN, MAINS, SLOTS, BLOCK_ROWS, BLOCKS = 32, 48, 3, 2, 16, 9
GATE_UP, DOWN = packed_matrices(HIDDEN, FFN)
INSTANCES, SIZE, ROWS = MAINS + SLOTS, 3 * HIDDEN * FFN, BLOCKS * BLOCK_ROWS
PIECES = 3
QWEN3 = (2048, 768, 4, 2, 128 * 320)  # hidden, ffn, mains, slots, rows of a receive buffer


def window(block_instance, first_block, filled):
    none = None  # The products need no segments.
    return Window(block_instance.shape[0] * BLOCK_ROWS, none, none, block_instance, first_block, filled)


def layout(rng):
    """Blocks of random instances in their order, idle ones before the slots and at the end, some instances empty, and
    rows in them that leave tails."""
    num_blocks = rng.multinomial(BLOCKS, rng.dirichlet(np.full(INSTANCES + 2, 0.5)))
    idle = num_blocks[INSTANCES]
    num_blocks = num_blocks[:INSTANCES]
    first_block = np.cumsum(num_blocks) - num_blocks
    first_block[MAINS:] += idle
    block_instance = np.full(BLOCKS, INSTANCES)
    for instance, (first, count) in enumerate(zip(first_block, num_blocks, strict=True)):
        block_instance[first : first + count] = instance
    filled = num_blocks * BLOCK_ROWS - rng.integers(0, BLOCK_ROWS, INSTANCES) * (num_blocks > 0)
    return [value.astype(np.int32) for value in (block_instance, first_block, filled)]


def is_filled(where):
    """bool [ROWS]: which rows of the receive buffer somebody sent."""
    _, first_block, filled = where
    row = np.arange(ROWS)[:, None]
    return ((row >= first_block * BLOCK_ROWS) & (row < first_block * BLOCK_ROWS + filled)).any(1)


def operands(rng, where):
    """Parameters, rows, and sums to add to. What nobody may read is no number: rows that no assignment fills, in idle
    blocks and in tails, and parameters of instances without rows, which stand for slots that nobody uses."""
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    rows = {"x": draw(ROWS, HIDDEN), "pre": draw(ROWS, 2 * FFN), "inner": draw(ROWS, FFN), "y": draw(ROWS, HIDDEN)}
    for value in rows.values():
        value[~is_filled(where)] = np.nan
    sums = {"gate_up": draw(MAINS, HIDDEN, 2 * FFN), "down": draw(INSTANCES, FFN, HIDDEN)}
    params = {"mains": draw(MAINS, SIZE), "slots": draw(SLOTS, SIZE)}
    params["mains"][where[2][:MAINS] == 0] = np.nan
    params["slots"][where[2][MAINS:] == 0] = np.nan
    return params | rows | sums


def products(gemm, where, values):
    """All products of a layer, some with mains only, and down's gradients in pieces."""
    win, both = window(*where), Instances(values["mains"], values["slots"])
    mains = Instances(values["mains"], None)
    multiply = functools.partial(gmm, window=win, gemm=gemm)
    add = functools.partial(wgrad, block_rows=BLOCK_ROWS, gemm=gemm)
    gate_up, down = WeightGrad(win, values["x"], values["pre"]), WeightGrad(win, values["inner"], values["y"])
    height = FFN // PIECES

    def piece(index):
        part = jax.lax.dynamic_slice_in_dim(values["down"][:MAINS], index * height, height, 1)
        return add(part, 0, [down], index * height)

    pieces = jax.lax.map(piece, jnp.arange(PIECES, dtype=jnp.int32))
    return {
        "pre": multiply(values["x"], both, matrix=GATE_UP),
        "pre of mains": multiply(values["x"], mains, matrix=GATE_UP),
        "y": multiply(values["inner"], both, matrix=DOWN),
        "x grad": multiply(values["pre"], both, matrix=GATE_UP, transposed=True),
        "inner grad": multiply(values["y"], both, matrix=DOWN, transposed=True),
        "gate_up grad, twice": add(values["gate_up"], 0, [gate_up, gate_up]),
        "down grad of slots": add(values["down"][MAINS:], MAINS, [down]),
        "down grad in pieces": jnp.moveaxis(pieces, 0, 1).reshape(MAINS, FFN, HIDDEN),
    }


def expected(where, values):
    """`products` in NumPy, instance by instance."""
    values = {name: np.nan_to_num(value.astype(np.float64)) for name, value in values.items()}
    params = np.concatenate([values["mains"], values["slots"], np.zeros((1, SIZE))])
    split = GATE_UP.rows * GATE_UP.cols
    gate_up, down = params[:, :split].reshape(-1, HIDDEN, 2 * FFN), params[:, split:].reshape(-1, FFN, HIDDEN)
    instance = np.repeat(where[0], BLOCK_ROWS)
    member = (instance[:, None] == np.arange(INSTANCES)).astype(np.float64)
    # Of rows in tails nobody reads the products.
    of_tails = (instance < INSTANCES) & ~is_filled(where)
    pre = np.einsum("nh,nhf->nf", values["x"], gate_up[instance])
    gate_up_grad = np.einsum("ne,nh,nf->ehf", member, values["x"], values["pre"])
    down_grad = values["down"] + np.einsum("ne,nf,nh->efh", member, values["inner"], values["y"])
    by_row = {
        "pre": pre,
        "pre of mains": pre * (instance < MAINS)[:, None],
        "y": np.einsum("nf,nfh->nh", values["inner"], down[instance]),
        "x grad": np.einsum("nf,nhf->nh", values["pre"], gate_up[instance]),
        "inner grad": np.einsum("nh,nfh->nf", values["y"], down[instance]),
    }
    return {name: np.where(of_tails[:, None], np.nan, value) for name, value in by_row.items()} | {
        "gate_up grad, twice": values["gate_up"] + 2 * gate_up_grad[:MAINS],
        "down grad of slots": down_grad[MAINS:],
        "down grad in pieces": down_grad[:MAINS],
    }


@pytest.mark.parametrize("gemm", FORMS)
def test_products_of_random_layouts(gemm):
    run = jax.jit(functools.partial(products, gemm))
    for seed in range(6 if gemm == "pallas" else 20):  # interpreted, it takes its time
        rng = np.random.default_rng(seed)
        where = layout(rng)
        values = operands(rng, where)
        got = run(where, values)
        for name, want in expected(where, values).items():
            read = ~np.isnan(want)
            np.testing.assert_allclose(
                got[name][read], want[read], rtol=1e-4, atol=1e-4, err_msg=f"{name}, layout {where}"
            )
        for instance in np.flatnonzero(where[2][:MAINS] == 0):
            np.testing.assert_array_equal(got["gate_up grad, twice"][instance], values["gate_up"][instance])


def test_bf16_rows_are_summed_in_f32():
    rng = np.random.default_rng(0)
    where = [np.array(value, np.int32) for value in ([0] * BLOCKS, [0] + [BLOCKS] * 4, [ROWS] + [0] * 4)]
    values = {name: value.astype(jnp.bfloat16) for name, value in operands(rng, where).items()}
    f32 = {name: np.asarray(value, np.float32) for name, value in values.items()}
    run = jax.jit(lambda where, x, mains: gmm(x, Instances(mains, None), window(*where), GATE_UP, gemm="scan"))
    want = jnp.asarray(expected(where, f32)["pre"], jnp.bfloat16)
    np.testing.assert_array_equal(run(where, values["x"], values["mains"]), want)


def test_the_kernel_of_swiglu_differentiates_like_jax():
    rng = np.random.default_rng(0)
    gate_up, weight, grad = (rng.normal(size=s).astype(np.float32) for s in ((ROWS, 2 * FFN), (ROWS,), (ROWS, FFN)))
    run = lambda gemm: jax.jit(functools.partial(swiglu_backward, block_rows=BLOCK_ROWS, gemm=gemm))  # noqa: E731
    for got, want in zip(run("pallas")(gate_up, weight, grad), run("scan")(gate_up, weight, grad), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_types_hold_under_check_vma():
    """Kernels for GPUs, which are traced on every platform, have results that vary as their operands do."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    where = layout(np.random.default_rng(0))
    values = operands(np.random.default_rng(0), where)
    both = jax.tree.map(lambda value: np.stack([value, value]), (where, values))

    def on_rank(where, values):
        one = jax.tree.map(lambda value: value[0], (where, values))
        return jax.tree.map(lambda value: value[None], products("auto", *one))

    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=True)
    assert jax.eval_shape(mapped, *both)["pre"].shape == (2, ROWS, 2 * FFN)


def test_pallas_says_what_it_cannot_multiply():
    where = [jnp.zeros(size, jnp.int32) for size in (1, INSTANCES, INSTANCES)]
    params = Instances(jnp.zeros((MAINS, SIZE)), None)
    with pytest.raises(ValueError, match=r"block_rows=8 .* gemm='scan'"):
        gmm(jnp.zeros((8, HIDDEN)), params, dataclasses.replace(window(*where), num_rows=8), GATE_UP, gemm="pallas")
    with pytest.raises(ValueError, match=r"multiples of 16 .*'ffn': 8"):
        LayerConfig(hidden=16, ffn=8, num_experts=2, top_k=1, topology=Topology((0,)), num_slots=0, gemm="pallas")


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_divide_what_they_are_for(itemsize):
    rng = np.random.default_rng(itemsize)
    for _ in range(1000):
        rows, cols, depth = (16 * int(value) for value in rng.integers(1, 400, 3))
        for tile in (
            tiles.gmm_tile(rows, cols, depth, itemsize),
            tiles.wgrad_tile(rows, cols, depth, int(rng.integers(1, 9)), itemsize),
        ):
            for side, length in ((tile.rows, rows), (tile.cols, cols), (tile.depth, depth)):
                assert length % side == 0
                assert side >= TILE
                assert side & (side - 1) == 0
            shared = (tile.rows + tile.cols) * tile.depth * itemsize * tile.num_stages
            assert shared <= 227 * 1024, tile


def test_gpu_kernels_copy_nothing(aot: Compiler):
    """Parameters and sums are read and written where they lie, and JAX has nothing to say about Triton."""
    hidden, ffn, num_mains, num_slots, num_rows = QWEN3
    gate_up, down = packed_matrices(hidden, ffn)

    def run(sums, index, params, rows, where):
        win = window(*where)
        multiply = functools.partial(gmm, params=params, window=win, gemm="auto")
        jobs = [WeightGrad(win, rows["x"], rows["pre"])] * 2
        return (
            wgrad(sums, 0, jobs, index, block_rows=128, gemm="auto"),
            multiply(rows["x"], matrix=gate_up),
            multiply(rows["inner"], matrix=down),
            multiply(rows["pre"], matrix=gate_up, transposed=True),
            multiply(rows["x"], matrix=down, transposed=True),
        )

    mesh = aot.mesh(1, 1)
    struct = functools.partial(aot.struct, mesh=mesh)
    size = 3 * hidden * ffn
    args = (
        struct((num_mains, hidden // 4, 2 * ffn), jnp.float32),
        struct((), jnp.int32),
        Instances(struct((num_mains, size), jnp.bfloat16), struct((num_slots, size), jnp.bfloat16)),
        {
            name: struct((num_rows, width), jnp.bfloat16)
            for name, width in (("x", hidden), ("pre", 2 * ffn), ("inner", ffn))
        },
        [struct((length,), jnp.int32) for length in (num_rows // 128, num_mains + num_slots, num_mains + num_slots)],
    )
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = aot.compile(jax.jit(mapped, donate_argnums=0), *args)
    assert {i.opcode for i in program.module.instructions()} <= {"parameter", "bitcast", "custom-call", "tuple"}
    assert program.memory.temp == 0
    assert program.memory.aliases == num_mains * hidden // 4 * 2 * ffn * 4
    kinds = [thunk.kind for thunk in program.thunks]
    assert kinds.count("kCustomKernel") == 5
    assert set(kinds) <= {"kCustomKernel", "kCommandBuffer"}
