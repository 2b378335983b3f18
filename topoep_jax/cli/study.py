"""What `plan` and `explain` look at: flags that name a layer and its demand, and the samples they stand for."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from topoep_jax.cli.flags import Flags
from topoep_jax.cli.hardware import HARDWARE, add_hardware, hardware_of
from topoep_jax.cli.output import plural
from topoep_jax.config import LayerConfig
from topoep_jax.knobs import KNOBS
from topoep_jax.plan.cost import OBJECTIVES
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.problem import MAX_ROWS, CostModel, Problem
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.shapes import SHAPES, Shape, recorded_name
from topoep_jax.synthetic import biased_demand, plain_top_k, router_of
from topoep_jax.topology import Topology
from topoep_jax.traces import Trace, TraceInfo, open_trace
from topoep_jax.traces.reader import demand_of

_MAX_SKEW = 1e6
_OF_SYNTHETIC_DEMAND = ("skew", "tokens", "router")
_OF_TRACES = ("domains", "num_experts", "hidden", "ffn")
PLAN_KNOBS = tuple(name for name, knob in KNOBS.items() if knob.plans)
SKEW = "deviation of the bias of each expert, as a comma list; the sign plays no role"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Demand of one layer and microbatch, and what a planner is asked about it.

    Attributes:
      skew: of synthetic demand; None for a trace.
      seed: of synthetic demand; the index of a trace's sample.
      omega: int64 [R, E].
      problem: the question.
    """

    skew: float | None
    seed: int
    omega: np.ndarray
    problem: Problem


@dataclasses.dataclass(frozen=True)
class Study:
    """A layer and where its demand comes from.

    Attributes:
      name: of the model or the trace.
      workload: what a rank sends, in words.
      layer: the layer; it knows costs and caps.
      capped: whether a cap was asked for.
      objective: key of `OBJECTIVES`.
      samples_of_trace: name of each sample of a trace; None where seeds have no end.
      draw: (skews, seed) -> demand of each skew.
      top_k: experts per token, if known.
      layers_of_trace: MoE layers that a TraceWriter recorded, else None.
    """

    name: str
    workload: str
    layer: LayerConfig
    capped: bool
    objective: str
    samples_of_trace: Sequence[str] | None
    draw: Callable[[Sequence[float | None], int], Mapping[float | None, np.ndarray]]
    top_k: int | None
    layers_of_trace: int | None = None

    def samples(self, skews: Sequence[float], seeds: Sequence[int]) -> Iterator[Sample]:
        """Every skew of every seed, seed by seed; a trace has no skews."""
        for seed in seeds:
            for skew, omega in self.draw(skews, seed).items():
                yield Sample(skew, seed, omega, self._problem(omega))

    @property
    def num_samples(self) -> int | None:
        """The number of samples of a trace; None where seeds have no end."""
        return None if self.samples_of_trace is None else len(self.samples_of_trace)

    def _problem(self, omega: np.ndarray) -> Problem:
        layer = self.layer
        mean_rows = -(-int(omega.sum()) // layer.num_ranks)
        return Problem(
            topology=layer.topology,
            cost=layer.cost,
            num_experts=layer.num_experts,
            num_slots=layer.num_slots,
            cap_rows=layer.cap_rows(mean_rows) if self.capped else None,
            block_rows=layer.block_rows,
            objective=self.objective,
            effort=layer.effort,
        )

    def describe(self) -> str:
        """One line for readers of reports."""
        layer = self.layer
        ranks, domains = layer.num_ranks, layer.topology.num_domains
        return (
            f"{plural(layer.num_experts, 'expert')} on {plural(ranks, 'rank')} in {plural(domains, 'domain')},"
            f" {plural(layer.num_slots, 'slot')} per rank; {self.workload}"
            + f"; {layer.pulls} pulls" * (layer.pulls != "direct")
            + f"; effort {layer.effort}" * (layer.effort != "default")
            + f", cap_factor {layer.cap_factor:g}" * self.capped
        )


def define(*, effort: str = "default", cap_factor: float | None = None) -> Flags:
    """The flags that every study has, with the defaults of knobs that are not those of a layer."""
    values = Flags()
    of_trace = "with --trace, where file and --model do not say it"
    values.add("model", str, f"layer to plan for, one of {', '.join(SHAPES)}")
    values.add(
        "trace",
        str,
        "file of recorded routing: a TraceWriter's (--record_routing of the trainer); or .npy with omega [..., R, E],"
        " or .npz with omega or expert_idx [..., R, T, K]",
    )
    values.add("domains", int, "with --trace: equal domains of neighbouring ranks, else as the file says", least=1)
    for size in ("num_experts", "hidden", "ffn"):
        values.add_knob(size, None, note=of_trace)
    values.add("tokens", int, "tokens per rank of synthetic demand", 4096, least=1)
    how = "how synthetic logits select experts: plain top-k, or as the model's own router"
    values.add("router", str, how, "topk", choices=("topk", "model"))
    changed: dict[str, Any] = {"effort": effort, "cap_factor": cap_factor}
    for name in PLAN_KNOBS:
        note = "unset: no bound" if name == "cap_factor" and cap_factor is None else ""
        values.add_knob(name, changed.get(name, getattr(LayerConfig, name)), note=note)
    what = "what the planners minimise, if they have a choice"
    values.add("objective", str, what, "bottleneck", choices=tuple(sorted(OBJECTIVES)))
    add_hardware(values, "h800")
    return values


def add_demand(values: Flags, *planners: str, seeds: int) -> None:
    """The flags of a study of several planners, skews and seeds."""
    values.add("skew", list, SKEW, ["-4"])
    values.add("planner", list, f"comma list of {', '.join(PLANNERS)}; or all", list(planners))
    of_seeds = f"seeds 0..n-1 (default: {seeds}), of a trace its first n samples (default: all)"
    values.add("seeds", int, of_seeds, least=1)


def from_flags(values: Flags) -> Study:
    """The study of parsed flags.

    Raises:
      ValueError: a value that is unknown, missing, out of range or does not fit the others. OSError: no such file.
    """
    shape = None if values.model is None else SHAPES[known("model", values.model, SHAPES)]
    if values.trace is not None:
        values.refuse(_OF_SYNTHETIC_DEMAND, "belongs to synthetic demand, not to a --trace")
        return _of_trace(values, shape)
    values.refuse(_OF_TRACES, "needs a --trace; a --model brings its own")
    if shape is None:
        raise ValueError(
            f"--model or --trace is missing: write --model={next(iter(SHAPES))}, or one of {', '.join(SHAPES)}"
        )
    shape = dataclasses.replace(shape, tokens=values.tokens)
    if shape.topology.num_ranks * shape.tokens * shape.top_k > MAX_ROWS:
        raise ValueError(
            f"--tokens={values.tokens} makes 2^31 rows or more on {shape.topology.num_ranks} ranks: take fewer"
        )
    select = router_of(shape) if values.router == "model" else plain_top_k

    def draw(skews: Sequence[float | None], seed: int) -> Mapping[float | None, np.ndarray]:
        demand = biased_demand(shape, [skew or 0.0 for skew in skews], seed, select=select)
        return dict(demand.items())

    workload = f"{plural(shape.tokens, 'token')} x {plural(shape.top_k, 'expert')} per rank"
    return _study(values, values.model, workload, shape, None, draw, shape.top_k)


def _of_trace(values: Flags, shape: Shape | None) -> Study:
    file = pathlib.Path(values.trace)
    if not file.is_file():
        raise ValueError(f"--trace={values.trace}: there is no such file")
    with open_trace(file, values.num_experts or (shape.num_experts if shape else None)) as trace:
        info, steps, cut_off, recorded = trace.info, trace.steps, trace.cut_off, trace.recorded
        demand, top_ks = _demand_of(trace)
    totals = [int(omega.sum()) for omega in demand]
    if max(totals) > MAX_ROWS:
        raise ValueError(f"--trace={values.trace} has a sample of {max(totals)} rows, not below 2^31: split it")
    topology = _topology_of_trace(values, info, shape)
    recorded_as = recorded_name(info.model, info.num_experts, info.hidden, info.ffn)
    if recorded_as in SHAPES and values.model not in (None, recorded_as):
        raise ValueError(f"--model={values.model}, but {values.trace} has model={info.model}")
    hidden = _size(values, "hidden", {info.hidden} - {None}, shape)
    ffn = _size(values, "ffn", {info.ffn} - {None}, shape)
    top_k = _size(values, "top_k", top_ks, shape)
    if "top_k" in values and len(top_ks) > 1:
        raise ValueError(f"{file} has microbatches of several top_k={_list(top_ks)}: simulate each kind by itself")
    if hidden is None or ffn is None:
        raise ValueError("--hidden and --ffn, or a --model that has them, are missing: rows and experts have a size")
    traced = Shape(hidden, ffn, info.num_experts, top_k or 1, topology)

    def draw(skews: Sequence[float | None], seed: int) -> Mapping[float | None, np.ndarray]:
        return {None: demand[seed]}

    samples = [f"sample {sample}" for sample in range(len(demand))]
    if len(info.layers) > 1:
        places = [f"step {step}, layer {layer}" for step in steps for layer in info.layers]
        samples = [f"{sample} ({place})" for sample, place in zip(samples, places, strict=True)]
    workload = f"{sum(totals) / len(totals) / info.num_ranks:,.0f} rows per rank, from {file.name}"
    workload += f", cut off after {plural(len(steps), 'microbatch', 'microbatches')}" * cut_off
    name = values.model or recorded_as or file.name
    study = _study(values, name, workload, traced, samples, draw, top_k)
    return dataclasses.replace(study, layers_of_trace=len(info.layers) if recorded else None)


def _demand_of(trace: Trace) -> tuple[np.ndarray, set[int]]:
    """int64 [samples, R, E], and every K of its tokens; none where the file holds demand alone."""
    demand, top_ks = [], set()
    for microbatch in range(len(trace)):
        if trace.holds_demand:
            demand.append(trace.omega(microbatch))
        else:
            expert_idx = trace.expert_idx(microbatch)
            demand.append(demand_of(expert_idx, trace.info.num_experts))
            top_ks.add(expert_idx.shape[-1])
    return np.concatenate(demand), top_ks


def _size(values: Flags, name: str, in_file: Set[int | None], shape: Shape | None) -> int | None:
    """What the file says, which flags may only repeat; else the flag's, else the model's."""
    flag: int | None = values[name].value if name in values else None
    asked = [(f"--{name}={flag}", flag)] if flag is not None else []
    if shape is not None:
        asked.append((f"--model={values.model} with {name}={getattr(shape, name)}", getattr(shape, name)))
    for what, value in asked:
        if in_file and in_file != {value}:
            raise ValueError(f"{what}, but {values.trace} has {name}={_list(in_file)}")
    if len(in_file) == 1:
        return next(iter(in_file))
    return asked[0][1] if asked else None


def _list(numbers: Set[int | None]) -> str:
    return ", ".join(map(str, sorted(filter(None, numbers))))


def _topology_of_trace(values: Flags, info: TraceInfo, shape: Shape | None) -> Topology:
    """Domains as --domains asks for them; else as recorded; else those of a model with as many ranks.

    Raises:
      ValueError: there is none, or such a model contradicts what was recorded.
    """
    ranks = info.num_ranks
    if values.domains is not None:  # The same routing may be studied on other nodes.
        if ranks % values.domains:
            raise ValueError(f"--domains={values.domains} does not divide the {ranks} ranks of {values.trace}")
        return Topology.uniform(values.domains, ranks // values.domains)
    of_model = shape.topology if shape is not None and shape.topology.num_ranks == ranks else None
    topology = info.topology or of_model
    if topology is None:
        raise ValueError(f"--domains is missing: {values.trace} has {ranks} ranks, in how many domains?")
    if of_model not in (None, topology):
        raise ValueError(
            f"--model={values.model} puts the {ranks} ranks in domains {of_model.domain_of_rank}, but {values.trace}"
            f" has {topology.domain_of_rank}: say with --domains in how many"
        )
    return topology


def _study(
    values: Flags,
    name: str,
    workload: str,
    shape: Shape,
    samples_of_trace: Sequence[str] | None,
    draw: Callable[[Sequence[float | None], int], Mapping[float | None, np.ndarray]],
    top_k: int | None,
) -> Study:
    hardware = hardware_of(values, shape.topology.num_ranks)
    _check_rates(values.hardware, hardware, shape)
    knobs = {name: getattr(values, name) for name in PLAN_KNOBS}
    capped = knobs["cap_factor"] is not None
    layer = LayerConfig(
        hidden=shape.hidden,
        ffn=shape.ffn,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        topology=shape.topology,
        transport="xla" if values.pulls == "direct" else "device",
        hardware=hardware,
        **(knobs if capped else knobs | {"cap_factor": 1.0}),
    )
    return Study(name, workload, layer, capped, values.objective, samples_of_trace, draw, top_k)


def _check_rates(name: str, hardware: Hardware, shape: Shape) -> None:
    """Raises ValueError that names the measurement, if its rates are what makes times overflow."""
    try:
        CostModel.from_model(shape.hidden, shape.ffn, hardware)
    except ValueError as error:
        slow = {"token_bytes": "link", "expert_bytes": "link", "row_ps": "GEMM"}.get(str(error).partition("=")[0])
        if name in HARDWARE or slow is None:
            raise
        raise ValueError(f"--hardware={name}: the measured {slow} is too slow for this model: {error}") from error


def skews(text: Sequence[str]) -> list[float]:
    """Numbers of a comma list."""
    numbers = []
    for part in text:
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not abs(number) <= _MAX_SKEW:
            raise ValueError(f"--skew has {part!r}: write numbers within +-{_MAX_SKEW:g}, as in --skew=-4,-2")
        numbers.append(number)
    if not numbers:
        raise ValueError("--skew is empty: write numbers, as in --skew=-4,-2")
    return list(dict.fromkeys(numbers))


def known(flag: str, value: str, names: Mapping[str, object]) -> str:
    """`value`, if it is one of `names`."""
    if value not in names:
        raise ValueError(f"--{flag}={value} is unknown: take one of {', '.join(names)}")
    return value


def planners(names: Sequence[str]) -> list[str]:
    """Planners of a comma list; "all" is every one."""
    if not names:
        raise ValueError(f"--planner is empty: write all, or a list of {', '.join(PLANNERS)}")
    chosen = list(PLANNERS) if "all" in names else [known("planner", name, PLANNERS) for name in names]
    return list(dict.fromkeys(chosen))
