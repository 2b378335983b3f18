"""One step in several layouts: microbatches in one program, the same in a pipeline, and data groups without balancing.

Losses, gradients, updated parameters and what was measured are equal, to rounding.
"""

import jax
import numpy as np
import pytest

from tests.support.train_runs import SHAPES, settings
from train.optimizer import BIAS_RATE
from train.pipeline import Pipeline, schedule
from train.stages import bounds
from train.state import StepMetrics, TrainState, is_sound
from train.step import build

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS, MICROBATCHES = 2, 3
SETTINGS = {"steps": STEPS, "clip": 0.5, "batch_size": 4 * MICROBATCHES, "seq_len": 48}


def joined(states: tuple[TrainState, ...]) -> dict[str, np.ndarray]:
    """Parameters and moments of all stages under the names of the whole model, layers stacked."""
    found: dict[str, list[np.ndarray]] = {}
    for state in states:
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
            found.setdefault(jax.tree_util.keystr(path), []).append(leaf)
    return {name: np.concatenate(parts) if "layers" in name else parts[0] for name, parts in found.items()}


def assert_alike(got: StepMetrics, want: StepMetrics, *, moe: tuple[str, ...]) -> None:
    for name in ("loss", "balance", "grad_norm"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)
    for name in moe:
        np.testing.assert_allclose(getattr(got.moe, name), getattr(want.moe, name), rtol=1e-6, err_msg=name)


def assert_same_state(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        if name.startswith(".params") and name.endswith("['key']['bias']"):
            continue  # Its gradient is 0 but for rounding, as softmax has it, which Adam's step blows up.
        np.testing.assert_allclose(got[name], leaf, rtol=1e-4, atol=1e-6, err_msg=name)


def batches_for(config) -> np.ndarray:
    """int32 [steps, B, S + 1]."""
    return np.random.default_rng(0).integers(0, 257, (STEPS, config.batch_size, config.seq_len + 1), np.int32)


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "glm4-tiny" else pytest.mark.full) for model in SHAPES]
)
def test_a_pipeline_is_the_whole(model, tmp_path):
    # Qwen3's balance loss is over a microbatch, and so depends on how many there are.
    same = {"shape": f"{SHAPES[model]},num_layers=3", "balance_loss": model != "qwen3-tiny", **SETTINGS}
    config = settings(tmp_path / "run", model, ep=4, microbatches=MICROBATCHES, **same)
    whole, pipeline = build(config), Pipeline(config, np.asarray(jax.devices()[:8]), 2)
    state, states = whole.init(), pipeline.init()
    batches = batches_for(config)
    np.testing.assert_equal(joined(states), joined((state,)))
    loads = []
    for batch in batches:
        state, want = whole.step(state, whole.place(batch))
        states, got = pipeline.step(states, pipeline.place(batch))
        want, got = jax.device_get((want, got))
        assert want.grad_norm > config.clip, "the norm of all stages decides"
        assert (want.balance > 0) == config.balance_loss
        assert_alike(got, want, moe=want.moe._fields)
        assert_same_state(joined(states), joined((state,)))
        loads.append(want.moe.expert_load)

    assert [int(state.step) for state in states] == [STEPS, STEPS]
    if model == "glm4-tiny":
        bias = np.asarray(state.params["layers"]["moe"]["correction_bias"])
        moves = sum(np.sign(load.mean(axis=1, keepdims=True) - load) for load in loads)
        np.testing.assert_allclose(bias, BIAS_RATE * moves, rtol=1e-5)
        assert not [name for name in joined((state,)) if "opt_state" in name and "correction_bias" in name]

    router = states[1].params["layers"]["moe"]["router"]
    states[1].params["layers"]["moe"]["router"] = router.at[0, 0, 0].set(np.nan)
    before = joined(states)
    states, got = pipeline.step(states, pipeline.place(batches[0]))
    assert not is_sound(jax.device_get(got))
    np.testing.assert_equal(joined(states), before, "what goes wrong in one stage leaves all as they were")


@pytest.mark.full
def test_data_groups_without_balancing_are_the_same(tmp_path):
    same = {"shape": f"{SHAPES['glm4-tiny']},num_layers=3", "balance_loss": True, **SETTINGS}
    config = settings(tmp_path / "run", "glm4-tiny", ep=4, microbatches=MICROBATCHES, **same)
    whole = build(config)
    spread = build(settings(tmp_path / "run", "glm4-tiny", planner="none", dp=2, ep=2, fsdp=True, **same))
    state, spread_state = whole.init(), spread.init()
    for batch in batches_for(config):
        state, want = whole.step(state, whole.place(batch))
        spread_state, got = spread.step(spread_state, spread.place(batch))
        want, got = jax.device_get((want, got))
        assert_alike(got, want, moe=("expert_load",))
        assert_same_state(joined((spread_state,)), joined((state,)))
        assert want.moe.replica.max() > 0 == got.moe.replica.max(), "one balances, the other does not"
    table = spread_state.params["embedding"]["table"]
    assert table.sharding.shard_shape(table.shape) == (257, 16 // 4), "fsdp"


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
