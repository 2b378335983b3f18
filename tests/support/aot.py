"""What the tests of GPU programs share: a compiler with the real handlers, and short ways to look at a program.

Tests take the fixture `aot` of conftest.py, which skips (or, with --require-cuda, fails) where a package is missing:

    def test_a_layer(aot):
        mesh = aot.mesh(4, 8)
        x = aot.struct((256, 64), jnp.bfloat16, mesh, P("ep"))
        program = aot.compile(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x)
        assert targets(program) == ["topoep_plan"]
"""

from topoep_jax.aot import TARGETS, Program, compile_program, prepare, struct
from topoep_jax.aot.dump import Thunk
from topoep_jax.aot.hlo import Instruction


class Compiler:
    """Ahead-of-time compilation for H200 GPUs with the handlers of the CUDA library registered.

    Raises:
      ImportError: if a package is missing; the message names it.
    """

    def __init__(self) -> None:
        if missing := prepare():
            raise ImportError(missing)

    mesh = staticmethod(TARGETS["h200"].mesh)
    struct = staticmethod(struct)
    compile = staticmethod(compile_program)


def entry(program: Program) -> list[Instruction]:
    """The entry computation, in the order of the schedule."""
    return program.module.computations[program.module.entry]


def targets(program: Program) -> list[str]:
    """Targets of the entry computation's custom calls, in order."""
    return [instruction.target for instruction in entry(program) if instruction.target is not None]


def thunks_of(program: Program, target: str) -> list[Thunk]:
    """Thunks of the custom calls with this target."""
    names = {instruction.name for instruction in program.module.instructions() if instruction.target == target}
    return [thunk for thunk in program.thunks if thunk.name in names]
