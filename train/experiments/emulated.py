"""One MoE layer on emulated devices under the profiler, in a process of its own: what Figure 15 measures.

python -m train.experiments.emulated OUT.json STEPS
"""

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from topoep_jax import moe, routing
from topoep_jax.config import LayerConfig
from topoep_jax.demand import count_demand
from topoep_jax.topology import Topology
from train.experiments import process, scopes
from train.experiments.record import Record
from train.experiments.settings import SLOTS, Settings

PLANNERS, SKEW = ("none", "topoep_paper", "topoep"), -4.0
MODEL = "emulated layer"
TOKENS = 256
"""Of each rank."""
LAYER = LayerConfig(
    hidden=256,
    ffn=128,
    num_experts=16,
    top_k=2,
    topology=Topology.uniform(2, 4),
    block_rows=32,
    overflow="flag",
    forced=routing.Forced(SKEW),
)
"""Eight ranks in two domains, in f32. A rank's memory stays below 32 MiB: what is larger the C library takes from the
system, and gives back, at every step, and then half of the time is spent on that."""
SHARE = "time in a phase"
_WARMUPS = 5
"""Steps before the profiled ones: memory comes from the system in the first few."""


def measured(settings: Settings) -> list[Record]:
    """Runs this file in a process of its own, whose devices can be emulated, and reads what it found."""
    out = (settings.folder / "profile" / "scopes.json").resolve()
    process.run(__spec__.name, str(out), "20" if settings.full else "5", log=out.with_suffix(".log"))
    return [record for planner, found in json.loads(out.read_text()).items() for record in _records(planner, found)]


def _records(planner: str, found: dict[str, Any]) -> list[Record]:
    setting: dict[str, str | float] = {"run": "emulated", "ranks": LAYER.num_ranks, "skew": SKEW}
    make = functools.partial(Record, "15", MODEL, planner)
    records = [make(setting, SHARE, found["attributed"], "% of the time", "measured")]
    for phase, way, over, ms in found["times"]:
        records.append(make(setting | {"over": over}, f"{phase} {way}", ms, "ms", "measured"))
    return records


def profile(config: LayerConfig, tokens: int, steps: int) -> dict[str, Any]:
    """Profiles the layer, forward and backward, on the first devices of this process.

    Args:
      config: with forced routing; the receive buffer becomes as large as the plan needs.
      tokens: of each rank.
      steps: that are profiled.

    Returns:
      "times": list of (phase, pass, over which ranks, milliseconds), and "attributed": percent.

    Raises:
      ValueError: rows did not fit after all.
    """
    config = _fitting(config, tokens)
    mesh = Mesh(np.array(jax.devices()[: config.num_ranks]), ("ep",))
    layout = {"w": PartitionSpec("ep"), "router": PartitionSpec()}, PartitionSpec("ep")
    layer = jax.shard_map(
        functools.partial(moe.moe_layer, axis_name="ep", config=config),
        mesh=mesh,
        in_specs=layout,
        out_specs=(layout[1], PartitionSpec()),
        check_vma=False,
    )

    def both_passes(params: moe.Params, x: jax.Array, grad: jax.Array) -> tuple[Any, ...]:
        y, transposed, metrics = jax.vjp(layer, params, x, has_aux=True)
        return y, transposed(grad), metrics.passes

    params = moe.init_params(jax.random.key(0), config)
    x, grad = jax.random.normal(jax.random.key(1), (2, config.num_ranks * tokens, config.hidden))
    arguments = jax.tree.map(
        lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), (*layout, layout[1]), (params, x, grad)
    )
    program = jax.jit(both_passes).lower(*arguments).compile()
    text = program.as_text()
    assert text is not None  # Programs for CPUs have one.
    passes = max(int(_run(program, arguments)[-1]) for _ in range(_WARMUPS))
    if passes != 1:
        raise ValueError(f"the plan needs {passes} receive buffers of cap_factor={config.cap_factor}, 1 was expected")
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                _run(program, arguments)
        place_of = scopes.places(text)
        events = scopes.read(Path(folder), f"jit_{both_passes.__name__}", place_of)
    found = scopes.breakdown(events, place_of)
    summary = scopes.summarize(found)
    times = [(*kind, over, milliseconds) for kind, own in summary.items() for over, milliseconds in own.items()]
    return {"times": times, "attributed": scopes.attributed(found)}


def _fitting(config: LayerConfig, tokens: int) -> LayerConfig:
    """The layer with room for the busiest rank of the plan: one pass, as in the paper, whatever the planner."""
    forced, route = config.forced, routing.get_router(config.router)
    assert forced is not None
    logits = jnp.zeros((tokens, config.num_experts), jnp.float32)

    def demand(rank: jax.Array) -> jax.Array:
        drawn = routing.forced_logits(forced, logits, layer=0, step=0, rank=rank)
        return count_demand(route(drawn, config.top_k).expert_idx, config.num_experts)

    omega = jax.jit(jax.vmap(demand))(jnp.arange(config.num_ranks))
    assignments = tokens * config.top_k
    plan = moe.solve_layer_plan(config, np.asarray(omega), assignments)
    needed = int(np.max(plan.rank_load)) / assignments
    return dataclasses.replace(config, cap_factor=max(config.cap_factor, needed))


def _run(program: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(program(*arguments))


def main(out: str, steps: str) -> None:
    """Profiles the layer with each planner."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", LAYER.num_ranks)
    found = {}
    for planner in PLANNERS:
        config = dataclasses.replace(LAYER, planner=planner, num_slots=SLOTS * (planner != "none"))
        found[planner] = profile(config, TOKENS, int(steps))
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
