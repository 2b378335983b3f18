"""The trainer's programs for GPUs, compiled ahead of time: a stage of a pipeline, and the memory of three models."""

import json
import pathlib

import jax
import pytest

from tests.support.aot import Compiler
from topoep_jax.aot import TARGETS, compile_program
from train.aot import stage, stage_of
from train.memory_table import GB, STAGES, beside, lines, size_of, text

RESULTS = pathlib.Path(__file__).parent.parent.parent / "results/full"
FLAGS = (
    *("--model=glm4-tiny", "--shape=num_layers=3", "--batch_size=4", "--microbatches=2", "--seq_len=64"),
    *("--param_dtype=bfloat16", "--block_rows=32", "--remat=full"),
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_stage_compiles_for_gpus(request: pytest.FixtureRequest, aot: Compiler) -> None:
    if not request.config.getoption("--require-cuda"):
        pytest.skip("takes a minute to compile: make test-cuda")
    function, args = stage(aot.mesh(1, 2), "backward", "0/2", *FLAGS)
    program = compile_program(function, *args)
    params, grads, *_ = args
    assert program.memory.arguments >= size_of((params, grads))
    assert program.memory.aliases >= size_of(grads), "gradients are added up in place"
    assert any(instruction.kernel == "topoep_wgrad" for instruction in program.module.instructions())


def test_what_a_stage_holds_is_counted(aot: Compiler) -> None:
    first, last = (stage_of(aot.mesh(1, 2), index, 2, *FLAGS) for index in range(2))
    assert first.arguments().keys() == {"forward", "backward", "update"}
    assert last.arguments().keys() == {"backward", "update"}
    hidden = 1 * 64 * 128 * 2
    tokens = 1 * 64 * 4
    for one, input_bytes, target_bytes in ((first, tokens, hidden), (last, hidden, tokens)):
        params, grads, *_ = one.arguments()["backward"]
        state = one.arguments()["update"][0]
        # Masters and two moments, in f32, of what has a gradient.
        assert abs(size_of(state.opt_state) - 3 * size_of(grads)) < 100
        assert beside(one, "update") == 0
        assert beside(one, "backward") == size_of(state.opt_state) + one.in_flight * input_bytes + target_bytes
        everything = size_of(state) + size_of(grads) + (one.in_flight + 1) * input_bytes + 2 * target_bytes
        assert beside(one, "forward") == everything - size_of(params) - input_bytes - size_of(state.step)
    with pytest.raises(ValueError, match="stage 1/2 has no program 'forward': take one of backward, update"):
        stage(aot.mesh(1, 2), "forward", "1/2", *FLAGS)
    with pytest.raises(ValueError, match="'2/2' is no stage: write 0/2 for the first of two"):
        stage(aot.mesh(1, 2), "update", "2/2", *FLAGS)


@pytest.mark.full
@pytest.mark.parametrize("model", STAGES)
def test_the_paper_s_layouts_fit(aot: Compiler, model: str) -> None:
    found = list(lines(model, TARGETS["h800"]))
    print("".join(map(text, found)))
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = [{"program": line.program, "layout": line.layout, "bytes": line.total} for line in found]
    (RESULTS / f"memory_{model}.json").write_text(json.dumps(rows, indent=1) + "\n")
    assert max(line.total for line in found) < 80 * GB
