"""The layer's Pallas kernels for grouped products on the shapes of three models, against products in f32."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tools.gpu_check.runner import Setting
from topoep_jax.dispatch import Window
from topoep_jax.experts import Instances, WeightGrad, gmm, packed_matrices, wgrad

SIDES = {"qwen3-30b-a3b": (2048, 768), "glm-4.5-air": (4096, 1408), "deepseek-v2": (5120, 1536)}
"""Hidden and ffn."""
TINY = {"tiny": (32, 48)}
"""In their place on a dry run, where the kernels are interpreted."""
MAINS, SLOTS = 4, 2
INSTANCES = MAINS + SLOTS
WARMUPS, RUNS = 3, 20

ROUNDING = 2.0**-8
"""Of bfloat16, in which rows are written; sums of weights stay in f32."""
OF_SUMS = 1e-4
"""Of sums of exact products in another order, in units of the largest result; tensor cores round each of them down."""


def products(setting: Setting) -> dict[str, object]:
    """Forward, transposed and gradients of weights in bf16, with idle blocks, tails and an instance without rows."""
    assert setting.dry_run or jax.devices()[0].platform == "gpu", f"JAX does not use the GPU: {jax.devices()}"
    sides, block_rows, blocks = (TINY, 16, 10) if setting.dry_run else (SIDES, 128, 96)
    facts: dict[str, object] = {"form": "interpreted" if setting.dry_run else "compiled", "dtype": "bfloat16"}
    for model, (hidden, ffn) in sides.items():
        facts[model] = _model(hidden, ffn, block_rows, blocks, setting)
    if setting.dry_run:
        facts["lowered for CUDA"] = {model: _lower(*sides) for model, sides in SIDES.items()}
    return facts


def _lower(hidden: int, ffn: int, block_rows: int = 128, blocks: int = 96) -> int:
    """Makes the kernels of a model in Triton's language, which needs no GPU; their number."""

    def every(params: Instances, numbers: list[jax.Array]) -> list[jax.Array]:
        window = Window(blocks * block_rows, None, None, *numbers)
        results = []
        for matrix in packed_matrices(hidden, ffn):
            inputs, grads = (jnp.ones((blocks * block_rows, side), jnp.bfloat16) for side in (matrix.rows, matrix.cols))
            sums = jnp.zeros((INSTANCES, matrix.rows, matrix.cols), jnp.float32)
            results.append(gmm(inputs, params, window, matrix, gemm="pallas"))
            results.append(gmm(grads, params, window, matrix, transposed=True, gemm="pallas"))
            jobs = [WeightGrad(window, inputs, grads)]
            results.append(wgrad(sums, 0, jobs, block_rows=block_rows, gemm="pallas"))
        return results

    params = Instances(*(jax.ShapeDtypeStruct((count, 3 * hidden * ffn), jnp.bfloat16) for count in (MAINS, SLOTS)))
    numbers = [jax.ShapeDtypeStruct((count,), jnp.int32) for count in (blocks, INSTANCES, INSTANCES)]
    text = jax.jit(every).trace(params, numbers).lower(lowering_platforms=("cuda",)).as_text()
    kernels = text.count("custom_call @__gpu$xla.gpu.triton")
    assert kernels == 6, f"{kernels} kernels for hidden={hidden}, ffn={ffn}"
    return kernels


def _model(hidden: int, ffn: int, block_rows: int, blocks: int, setting: Setting) -> dict[str, object]:
    rng = np.random.default_rng(0)
    num_blocks = _share(blocks)
    first_block = np.cumsum(num_blocks) - num_blocks
    first_block[MAINS:] += 1  # an idle block lies before the slots, and one at the end
    block_instance = np.full(blocks, INSTANCES, np.int32)
    for instance, (first, count) in enumerate(zip(first_block, num_blocks, strict=True)):
        block_instance[first : first + count] = instance
    filled = num_blocks * block_rows - np.where(num_blocks > 0, 5, 0)
    numbers = [jnp.asarray(value, jnp.int32) for value in (block_instance, first_block, filled)]
    window = Window(blocks * block_rows, None, None, *numbers)  # products need no segments
    draw = partial(_draw, rng)
    params = Instances(*(draw(count, 3 * hidden * ffn) for count in (MAINS, SLOTS)))
    own = np.zeros((blocks * block_rows, 1), bool)
    for first, count in zip(first_block * block_rows, filled, strict=True):
        own[first : first + count] = True
    facts: dict[str, object] = {"hidden": hidden, "ffn": ffn, "rows": blocks * block_rows}
    for name, matrix in zip(("gate_up", "down"), packed_matrices(hidden, ffn), strict=True):
        rows = {False: draw(blocks * block_rows, matrix.rows), True: draw(blocks * block_rows, matrix.cols)}
        flops = 2 * int(filled.sum()) * matrix.rows * matrix.cols
        for transposed, label in ((False, name), (True, f"{name} transposed")):

            def multiply(rows: jax.Array, params: Instances, gemm: str, matrix=matrix, transposed=transposed):  # noqa: ANN001, ANN202
                return gmm(rows, params, window, matrix, transposed=transposed, gemm=gemm)

            got, times = _timed(jax.jit(partial(multiply, gemm="pallas")), (rows[transposed], params), setting)
            want = _reference(rows[transposed], params, block_instance, block_rows, matrix, transposed)
            if setting.plant == "gemms":
                got = got.at[0, 0].add(1)
            facts[label] = {**_error(label, np.where(own, got, 0), np.where(own, want, 0), ROUNDING), **times(flops)}
            idle = np.repeat(block_instance == INSTANCES, block_rows)
            assert not np.asarray(got, np.float32)[idle].any(), f"{label}: rows of idle blocks are not zero"

        def add(inputs: jax.Array, grads: jax.Array, matrix=matrix):  # noqa: ANN001, ANN202
            sums = jnp.zeros((INSTANCES, matrix.rows, matrix.cols), jnp.float32)
            return wgrad(sums, 0, [WeightGrad(window, inputs, grads)], block_rows=block_rows, gemm="pallas")

        got, times = _timed(jax.jit(add), (rows[False], rows[True]), setting)
        want = _sums(rows[False], rows[True], first_block * block_rows, filled)
        label = f"{name} gradient"
        facts[label] = {**_error(label, np.asarray(got), want, 0), **times(flops)}
    return facts


def _share(blocks: int) -> np.ndarray:
    """Blocks of each instance: one has half of all, one has none, two blocks are idle."""
    share = np.full(INSTANCES, (blocks - 2 - blocks // 2) // (INSTANCES - 2))
    share[0], share[2] = blocks // 2, 0
    return share


def _draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


@partial(jax.jit, static_argnames="transposed")
def _dot(left: jax.Array, right: jax.Array, transposed: bool = False) -> jax.Array:
    """The product in f32, without a shortcut: GPUs would round to TF32."""
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.matmul(left, right.T if transposed else right, precision=jax.lax.Precision.HIGHEST)


def _reference(rows, params, block_instance, block_rows, matrix, transposed):  # noqa: ANN001, ANN202
    """Block by block; what belongs to no instance is zero."""
    packed = [weights for part in params for weights in part]
    out = np.zeros((rows.shape[0], matrix.rows if transposed else matrix.cols), np.float32)
    for block, instance in enumerate(block_instance):
        if instance < INSTANCES:
            weights = packed[instance][matrix.offset : matrix.offset + matrix.rows * matrix.cols]
            at = slice(block * block_rows, (block + 1) * block_rows)
            out[at] = _dot(rows[at], weights.reshape(matrix.rows, matrix.cols), transposed)
    return out


def _sums(inputs, grads, first, filled):  # noqa: ANN001, ANN202
    parts = [slice(begin, begin + count) for begin, count in zip(first, filled, strict=True)]
    return np.stack([_dot(inputs[part].T, grads[part]) for part in parts])


def _error(label: str, got: np.ndarray, want: np.ndarray, rounding: float) -> dict[str, object]:
    """How far apart results are, in units of the largest; fails beyond what rounding explains."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    largest = float(np.abs(want).max())
    apart = np.abs(got - want)
    beyond = ~(apart <= rounding * np.abs(want) + OF_SUMS * largest)  # a NaN is beyond, too
    assert not beyond.any(), f"{label}: {int(beyond.sum())} of {want.size} results are wrong, by up to {apart.max()}"
    return {"max_error": float(apart.max()) / largest}


def _timed(
    run: Callable[..., jax.Array], arguments: tuple[object, ...], setting: Setting
) -> tuple[jax.Array, Callable[[int], dict[str, object]]]:
    """The result, and from a number of operations what a call takes on a GPU; the time of an interpreter is none."""
    result = jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(0 if setting.dry_run else WARMUPS + RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - start)

    def times(flops: int) -> dict[str, object]:
        if not seconds:
            return {}
        median = statistics.median(seconds[WARMUPS:])
        return {"median_us": 1e6 * median, "min_us": 1e6 * min(seconds[WARMUPS:]), "tflops": flops / median / 1e12}

    return result, times
