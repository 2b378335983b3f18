"""What `check_exchange` finds: planted faults of every kind, in every phase, by name; and nothing in what is right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from topoep_jax import LayerConfig, Topology, init_params, moe_layer, transport
from topoep_jax.transport import check, xla

KINDS = ("row", "bit", "swapped", "stale")
RANKS, TOKENS, LAYER = 8, 24, 3
CONFIG = LayerConfig(
    16, 8, 16, 3, Topology.uniform(2, 4), block_rows=8, num_slots=2, chunks=2, planner="topoep_paper", overflow="flag",
    cap_factor=1.05, exchange="two_hop", check_exchange=True,
)  # fmt: skip
PHASES = {
    *("weights", "dispatch_1", "pull", "dispatch_2", "dispatch_2_forward", "combine_1", "combine_2_gather"),
    *("combine_2", "combine_rails", "grad_1", "again_1", "repull", "grad_2", "grad_2_forward", "again_2"),
    *("again_2_forward", "push", "home_2_gather", "home_1", "home_2", "weight_grads", "home_rails"),
}


def layer(config, params, x, index=LAYER):
    return moe_layer(params, x, axis_name="ep", config=config, layer=index)[0]


def mapped(function, **options):
    specs = {"w": P("ep"), "router": P()}
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
    return jax.shard_map(function, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"), **options)


def inputs(config=CONFIG, seed=0):
    params = init_params(jax.random.key(seed), config)
    x = jax.random.normal(jax.random.key(seed + 1), (RANKS * TOKENS, config.hidden))
    return params, x, jax.random.normal(jax.random.key(seed + 2), x.shape)


def both_passes(function):
    return jax.jit(lambda params, x, grad: jax.vjp(function, params, x)[1](grad))


def spoil(kind, rows, first, size):
    """What leaves where a fault of this kind strikes: index of `KINDS`; the segment that is hit."""
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    flat, last = bits.reshape(len(bits), -1), first + jnp.maximum(size, 1) - 1
    forms = [
        flat.at[first].set(flat[first] + 2**20),
        flat.at[first, 0].set(flat[first, 0] ^ 1),
        flat.at[first].set(flat[last]).at[last].set(flat[first]),
        flat,
    ]
    spoilt = jax.lax.select_n(kind, *forms)
    return jax.lax.bitcast_convert_type(spoilt, rows.dtype).reshape(rows.shape)


@functools.cache
def with_faults():
    """(compiled function of (params, x, grad, which exchange, kind), phases of the exchanges as they are traced)."""
    names = []

    def run(params, x, grad, struck, kind):
        moved = xla._emulated

        def faulty(rows, into, *segments, **where):
            index, _ = len(names), names.append(check._phase.get())
            first, size = (table[jnp.argmax(segments[1])] for table in segments[:2])
            hit = (struck == index) & (size > 0)
            landed = moved(jnp.where(hit, spoil(kind, rows, first, size), rows), into, *segments, **where)
            return jnp.where((struck == index) & (kind == KINDS.index("stale")), into, landed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, "_emulated", faulty)
            return jax.vjp(mapped(functools.partial(layer, CONFIG), check_vma=False), params, x)[1](grad)

    return jax.jit(run), names


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.full)])
def test_a_planted_fault_is_found_and_named_in_every_phase(stride):
    run, names = with_faults()
    values = inputs()
    jax.block_until_ready(run(*values, -1, 0))
    assert transport.exchange_faults() == []
    assert set(names) == PHASES
    found = {kind: set() for kind in KINDS}
    struck = list(enumerate(names))[::stride]
    phases = {name for _, name in struck}
    for index, name in struck:
        for kind, label in enumerate(KINDS):
            jax.block_until_ready(run(*values, index, kind))
            faults = transport.exchange_faults()
            # What is wrong in one place is said of that place alone, though wrong rows travel on.
            assert {fault.phase for fault in faults} <= {name}
            assert {fault.layer for fault in faults} <= {LAYER}
            assert all(0 <= rank < RANKS for fault in faults for rank in fault[2:])
            found[label] |= {fault.phase for fault in faults}
    assert found["row"] == found["bit"] == phases
    # Where a rank gets one row, or equal ones, they cannot be swapped.
    assert found["swapped"] >= phases - {"pull", "repull", "push"}
    assert found["stale"] == phases


@pytest.mark.parametrize("steps", [5, pytest.param(1000, marks=pytest.mark.full)])
def test_a_clean_run_never_alarms(steps):
    run, values = with_faults()[0], [inputs(seed=seed) for seed in range(5)]
    for step in range(steps):
        jax.block_until_ready(run(*values[step % 5], -1, 0))
    assert transport.exchange_faults() == []


def test_where_it_is_off_nothing_is_left_of_it():
    off = dataclasses.replace(CONFIG, check_exchange=False)
    texts = [
        str(jax.make_jaxpr(both_passes(mapped(functools.partial(layer, config), check_vma=False)))(*inputs()))
        for config in (off, CONFIG)
    ]
    assert ["debug_callback" in text for text in texts] == [False, True]
    # Each exchange of the emulation gathers a table and rows; the check gathers one more.
    assert texts[0].count("all_gather[") < texts[1].count("all_gather[")
    assert dataclasses.replace(off, check_exchange=True) == CONFIG


@pytest.mark.full
@pytest.mark.parametrize("form", ["scan, remat, check_vma", "pmap", "bf16"])
def test_it_works_in_every_form_of_program(form, monkeypatch):
    gathered = xla.gather_rows

    def faulty(rows, *where):
        everyone = gathered(rows, *where)
        return everyone.at[:, 0].set(everyone[:, 1])

    params, x, grad = inputs()
    if form == "pmap":
        run = jax.pmap(functools.partial(layer, CONFIG), axis_name="ep", in_axes=({"w": 0, "router": None}, 0))
        values = {"w": params["w"].reshape(RANKS, 2, -1), "router": params["router"]}, x.reshape(RANKS, TOKENS, -1)
    elif form == "bf16":
        params["w"], x, grad = (value.astype(jnp.bfloat16) for value in (params["w"], x, grad))
        run, values = both_passes(mapped(functools.partial(layer, CONFIG), check_vma=False)), (params, x, grad)
    else:
        own = mapped(functools.partial(layer, CONFIG, index=1), check_vma=True)
        stacked = lambda params, x: jax.lax.scan(lambda x, p: (jax.checkpoint(own)(p, x), None), x, params)[0]  # noqa: E731
        run, values = both_passes(stacked), (jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params), x, grad)
    jax.block_until_ready(run(*values))
    assert transport.exchange_faults() == []
    jax.clear_caches()
    monkeypatch.setattr(xla, "gather_rows", faulty)
    run = jax.pmap(run.__wrapped__, axis_name="ep", in_axes=({"w": 0, "router": None}, 0)) if form == "pmap" else run
    jax.block_until_ready(run(*values))
    faults = transport.exchange_faults()
    assert faults
    assert "xla_options(safe=True)" in str(faults[0])


def test_what_changes_places_changes_the_sum():
    rows = jax.random.normal(jax.random.key(0), (4, 8))
    first, size = jnp.asarray([1]), jnp.asarray([3])
    sums = [int(check._sums(rows[:, columns], first, size)[0]) for columns in (np.arange(8), np.arange(8)[::-1])]
    assert sums[0] != sums[1], "columns"
    assert int(check._sums(rows[jnp.asarray([0, 3, 2, 1])], first, size)[0]) != sums[0], "rows"


def test_a_fault_says_where_it_is_and_what_to_do():
    fault = transport.Fault(3, "grad_2", 1, 6)
    assert str(fault).startswith("layer 3, grad_2: what rank 1 sent is not what rank 6 got;")
    assert str(fault).endswith("xla_options(safe=True)")
