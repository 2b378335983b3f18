"""Time of the experts' products: candidates of tiles on a GPU, forms of the loop on a CPU.

    python -m tests.bench.gemm_bench [--shape qwen3-30b-a3b] [--repeats 20]

On a GPU, every candidate of `experts.tiles` makes every product of one rank's layer, with skewed instances that fill
the receive buffer; the star marks what the library takes today. The best belong into `tiles.MEASURED`.

Elsewhere the kernels cannot run as such, and the block scan is timed beside two other simple forms, on eight emulated
devices with the shapes of the trainer's default model: a loop over instances, each with a loop over its blocks, and one
batched product with a copy of the matrix for every block. CPU seconds hardly depend on what else runs.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.bench.layer_bench import timed
from topoep_jax.experts import Instances, Matrix, packed_matrices, pallas, scan, tiles
from topoep_jax.experts.packed import Work
from topoep_jax.shapes import SHAPES
from topoep_jax.transfer import slice_rows

TINY = (128, 64, 4, 2, 1024, 32)
"""Hidden, ffn, mains, slots, assignments per rank and rows of a block, of the trainer's default model on 8 devices."""

SMALL = (64, 32, 2, 1, 128, 32)
"""The same of a problem that kernels can be interpreted on."""

STAGING_BYTES = 64 * 2**20

Form = Callable[..., jax.Array]


class Problem:
    """One rank's operands. Instances have random numbers of rows, as under skewed routing with replicas."""

    def __init__(self, hidden: int, ffn: int, mains: int, slots: int, rows: int, block_rows: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        count = mains + slots
        self.matrices = dict(zip(("gate_up", "down"), packed_matrices(hidden, ffn), strict=True))
        self.block_rows = block_rows
        filled = rng.multinomial(rows, rng.dirichlet(np.full(count, 4.0)))
        blocks = -(-filled // block_rows)
        num_blocks = -(-rows * 21 // 20 // block_rows) + count
        instance = np.append(np.repeat(np.arange(count), blocks), np.full(num_blocks - blocks.sum(), count))
        where = (instance, np.cumsum(blocks) - blocks, filled)
        self.where = [np.asarray(value, np.int32) for value in where]

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

        size = 3 * hidden * ffn
        self.params = Instances(draw(mains, size), draw(slots, size))
        self.rows = {width: draw(num_blocks * block_rows, width) for width in (hidden, 2 * ffn, ffn)}

    def flops(self, matrix: Matrix, mains: int | None = None) -> int:
        """Counts the flops of the blocks that are not idle, or of those of the first instances."""
        blocks = -(-self.where[2][:mains] // self.block_rows)
        return 2 * int(blocks.sum()) * self.block_rows * matrix.rows * matrix.cols


def gmm_candidates(problem: Problem, interpret: bool) -> Iterator[tuple[str, int, tiles.Tile, bool, Callable]]:
    """(product, its operations, tile, whether it is the default, the call) for all products and candidates."""
    for name, matrix in problem.matrices.items():
        for transposed in (False, True):
            depth, cols = (matrix.cols, matrix.rows) if transposed else (matrix.rows, matrix.cols)
            size = problem.block_rows, cols, depth
            static = {"matrix": matrix, "transposed": transposed, "interpret": interpret}
            operands = jax.device_put((problem.rows[depth], problem.params, problem.where[0]))
            for tile in dict.fromkeys(tiles.fit(tile, *size, 2) for tile in tiles.GMM):
                run = jax.jit(functools.partial(pallas.gmm, tile=tile, **static))
                title = f"gmm {name}{'^T' if transposed else ''}"
                default = tile == tiles.gmm_tile(*size, 2)
                yield title, problem.flops(matrix), tile, default, functools.partial(run, *operands)


def wgrad_candidates(
    problem: Problem, num_staged: int, interpret: bool
) -> Iterator[tuple[str, int, tiles.Tile, bool, Callable]]:
    """The same for gradients of the mains: of whole matrices, and of the strips that go with replicas' gradients."""
    mains = problem.params.mains.shape[0]
    for name, matrix in problem.matrices.items():
        works = (jax.device_put(Work(problem.rows[matrix.rows], problem.rows[matrix.cols], *problem.where)),)
        for height in (matrix.rows, slice_rows(num_staged, matrix.rows, matrix.cols, STAGING_BYTES)):
            size = height, matrix.cols, problem.block_rows
            static = {"first_instance": 0, "block_rows": problem.block_rows, "interpret": interpret}
            for tile in dict.fromkeys(tiles.fit(tile, *size, 2) for tile in tiles.WGRAD):
                run = jax.jit(functools.partial(pallas.wgrad, tile=tile, **static), donate_argnums=0)
                held = [jnp.zeros((mains, height, matrix.cols), jnp.float32)]

                def call(run: Form = run, held: list = held, works: tuple = works) -> jax.Array:
                    held[0] = run(held[0], works, jnp.zeros((), jnp.int32))
                    return held[0]

                default = tile == tiles.wgrad_tile(*size, mains, 2)
                flops = problem.flops(matrix, mains) * height // matrix.rows
                yield f"wgrad {name}, {height} rows", flops, tile, default, call


def time_candidates(shape_name: str, repeats: int) -> None:
    shape = SHAPES[shape_name]
    ranks, slots = shape.topology.num_ranks, 2
    mains = shape.num_experts // ranks
    problem = Problem(shape.hidden, shape.ffn, mains, slots, shape.tokens * shape.top_k, 128)
    print(f"{shape_name} on {jax.devices()[0].device_kind}; * is today's default")
    for title, flops, tile, default, call in [
        *gmm_candidates(problem, interpret=False),
        *wgrad_candidates(problem, ranks * slots, interpret=False),
    ]:
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            print(f"{title:28}  {tuple(tile)!s:26} {str(error).splitlines()[0][:60]}")
            continue
        seconds = timed(lambda call=call: [call() for _ in range(repeats)][-1])[0] / repeats
        mark = "*" if default else " "
        print(f"{title:28}{mark} {tuple(tile)!s:26}{seconds * 1e6:10.0f} us{flops / seconds / 1e12:8.0f} TFLOP/s")


def interpret_candidates() -> None:
    """The same calls on any platform, so that a GPU's time is not spent on finding mistakes in this file."""
    problem = Problem(*SMALL)
    calls = [*gmm_candidates(problem, interpret=True), *wgrad_candidates(problem, 3, interpret=True)]
    for title, _, tile, _, call in calls:
        assert np.isfinite(np.asarray(call(), np.float32)).all(), (title, tile)
    print(f"{len(calls)} kernels with candidates of tiles ran, interpreted")


def by_instance(
    rows: jax.Array, params: Instances, where: list[jax.Array], *, matrix: Matrix, transposed: bool
) -> jax.Array:
    """A loop over instances, of which each takes its matrix once, around a loop over its blocks."""
    block_rows = rows.shape[0] // where[0].shape[0]
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    out = jnp.zeros((rows.shape[0], matrix.rows if transposed else matrix.cols), jnp.uint16)
    begin = 0
    for weights in params:

        def instance(held: jax.Array, out: jax.Array, weights: jax.Array = weights, begin: int = begin) -> jax.Array:
            taken = lax.dynamic_slice(weights, (held, matrix.offset), (1, matrix.rows * matrix.cols))
            right = taken.reshape(matrix.rows, matrix.cols).astype(jnp.float32)

            def block(index: jax.Array, out: jax.Array) -> jax.Array:
                left = lax.dynamic_slice_in_dim(rows, index * block_rows, block_rows).astype(jnp.float32)
                product = lax.dot_general(left, right, contract).astype(rows.dtype)
                bits = lax.bitcast_convert_type(product, jnp.uint16)
                return lax.dynamic_update_slice_in_dim(out, bits, index * block_rows, 0)

            first, count = where[1][begin + held], where[2][begin + held]
            return lax.fori_loop(first, first + count, block, out)

        out = lax.fori_loop(0, weights.shape[0], instance, out)
        begin += weights.shape[0]
    return lax.bitcast_convert_type(out, rows.dtype)


def batched(
    rows: jax.Array, params: Instances, where: list[jax.Array], *, matrix: Matrix, transposed: bool
) -> jax.Array:
    """One product over all blocks, idle ones included, each with a copy of its matrix."""
    weights = jnp.concatenate(params)[:, matrix.offset : matrix.offset + matrix.rows * matrix.cols]
    weights = weights.reshape(-1, matrix.rows, matrix.cols)[jnp.minimum(where[0], params.num_instances - 1)]
    blocks = rows.reshape(where[0].shape[0], -1, rows.shape[1])
    product = jnp.einsum("brk,bck->brc" if transposed else "brk,bkc->brc", blocks, weights)
    busy = (where[0] < params.num_instances)[:, None, None]
    return jnp.where(busy, product, jnp.zeros((), product.dtype)).reshape(rows.shape[0], -1)


def scanned(rows: jax.Array, params: Instances, where: list[jax.Array], **static: Any) -> jax.Array:
    return scan.gmm(rows, params, where[0], **static)


def time_forms(repeats: int) -> None:
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Auto,))
    problems = [Problem(*TINY, seed=seed) for seed in range(8)]
    matrices = problems[0].matrices
    operands = jax.tree.map(lambda *values: np.stack(values), *[(p.rows, p.params, p.where) for p in problems])
    operands = jax.device_put(operands, jax.NamedSharding(mesh, P("ep")))

    def on_rank(form: Form, operands: Any) -> list[jax.Array]:
        rows, params, where = jax.tree.map(lambda value: value[0], operands)
        products = [
            form(rows[m.cols if transposed else m.rows], params, where, matrix=m, transposed=transposed)
            for m in matrices.values()
            for transposed in (False, True)
        ]
        return [product[None] for product in products]

    calls, times = {}, {}
    print(f"the layer's four kinds of products on 8 emulated devices, {TINY}")
    for form in (scanned, by_instance, batched):
        run = functools.partial(on_rank, form)
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        calls[form.__name__] = functools.partial(jax.jit(mapped), operands)
        compile_s = timed(calls[form.__name__])[0]
        times[form.__name__] = []
        print(f"{form.__name__:12}first call {compile_s:5.1f} s")
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(timed(call))
    for name, values in times.items():
        wall, cpu = np.median(np.array(values), axis=0) * 1e3
        print(f"{name:12}{wall:8.1f} ms on the wall{cpu:8.1f} ms of CPUs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--repeats", type=int, default=20)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if jax.default_backend() == "gpu":
        time_candidates(flags.shape, flags.repeats)
    else:
        interpret_candidates()
        time_forms(flags.repeats)


if __name__ == "__main__":
    main()
