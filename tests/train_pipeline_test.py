"""A pipeline of stages equals the one-program step with the same microbatches: loss, gradients, updates, metrics."""

import jax
import numpy as np
import pytest

from tests.train_runs import SHAPES, settings
from train.pipeline import Pipeline, schedule
from train.stages import bounds
from train.state import TrainState
from train.step import build

STEPS, MICROBATCHES = 2, 3
SETTINGS = {
    "steps": STEPS,
    "clip": 0.5,
    "balance_loss": True,
    "batch_size": 4 * MICROBATCHES,
    "microbatches": MICROBATCHES,
    "ep": 4,
}


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def joined(states: tuple[TrainState, ...]) -> dict[str, np.ndarray]:
    """Parameters and moments of all stages under the names of the whole model, layers stacked."""
    found: dict[str, list[np.ndarray]] = {}
    for state in states:
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
            found.setdefault(jax.tree_util.keystr(path), []).append(leaf)
    return {name: np.concatenate(parts) if "layers" in name else parts[0] for name, parts in found.items()}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "glm4_tiny" else pytest.mark.full) for model in SHAPES]
)
def test_two_stages_equal_one_program(model, tmp_path):
    config = settings(tmp_path / "run", model, shape=f"{SHAPES[model]},num_layers=3", **SETTINGS)
    whole, pipeline = build(config), Pipeline(config, np.asarray(jax.devices()[:8]), 2)
    state, states = whole.init(), pipeline.init()
    batches = np.random.default_rng(0).integers(0, 257, (STEPS, config.batch_size, config.seq_len + 1), np.int32)
    np.testing.assert_equal(joined(states), joined((state,)))
    for batch in batches:
        state, want = whole.step(state, whole.place(batch))
        states, got = pipeline.step(states, pipeline.place(batch))
        want, got = jax.device_get((want, got))
        for name, here in got.moe._asdict().items():
            np.testing.assert_allclose(here, getattr(want.moe, name), rtol=1e-6, err_msg=name)
        for name in ("loss", "balance", "grad_norm"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)
        assert got.balance > 0
        assert want.grad_norm > config.clip, "the norm of all stages decides"
        here, there = joined(states), joined((state,))
        assert here.keys() == there.keys()
        for name, leaf in there.items():
            if name.startswith(".params") and name.endswith("['key']['bias']"):
                continue  # Its gradient is 0 but for rounding, as softmax has it, which Adam's step blows up.
            np.testing.assert_allclose(here[name], leaf, rtol=1e-4, atol=1e-6, err_msg=name)
    assert [int(state.step) for state in states] == [STEPS, STEPS]


@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, 3), (2, 1), (2, 5), (4, 2), (4, 9)])
def test_a_schedule_keeps_few_inputs(num_stages, microbatches):
    order = schedule(num_stages, microbatches)
    assert len(order) == len(set(order)) == (2 * num_stages - 1) * microbatches
    place = {turn: number for number, turn in enumerate(order)}
    for stage in range(num_stages):
        for number in range(microbatches):
            backward = place[stage, False, number]
            if stage < num_stages - 1:
                assert place[stage, True, number] < backward
                assert place[stage + 1, False, number] < backward
            if stage:
                assert place[stage - 1, True, number] < place[stage, stage < num_stages - 1, number]
        kept = most = 0
        for turn_stage, is_forward, _ in order:
            if turn_stage == stage:
                kept += 1 if is_forward else -1
                most = max(most, kept)
        assert most <= num_stages - stage


def test_layers_divide_among_stages():
    assert bounds(5, 2) == [(0, 3), (3, 5)]
    assert bounds(4, 2) == [(0, 2), (2, 4)]
    with pytest.raises(ValueError, match="2 layers do not make 3 pipeline stages"):
        bounds(2, 3)
