"""A pipeline of stages equals the one-program step with the same microbatches: loss, gradients, updates, metrics."""

import jax
import numpy as np
import pytest

from train.config import TrainConfig
from train.pipeline import Pipeline, schedule
from train.stages import bounds
from train.state import TrainState
from train.step import build

TINY = "hidden=16,num_heads=2,ffn=8,num_experts=8,top_k=2,num_layers=3"
SHAPES = {
    "qwen3_tiny": f"{TINY},num_kv_heads=1,head_dim=8",
    "glm4_tiny": f"{TINY},num_kv_heads=1,head_dim=8,rotary_dim=4,dense_ffn=16,shared_ffn=8",
    "deepseek_v2_tiny": f"{TINY},dense_ffn=16,shared_ffn=8,q_lora=8,kv_lora=8,nope_dim=8,rope_dim=4,v_dim=8",
}
STEPS, MICROBATCHES = 2, 3


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def settings(model: str) -> TrainConfig:
    return TrainConfig(
        model=model,
        shape=SHAPES[model],
        dtype="float32",
        param_dtype="float32",
        balance_loss=True,
        steps=STEPS,
        warmup=1,
        clip=0.5,
        batch_size=4 * MICROBATCHES,
        microbatches=MICROBATCHES,
        seq_len=16,
        block_rows=8,
        ep=4,
        domains=2,
    )


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
def test_two_stages_equal_one_program(model):
    config = settings(model)
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
