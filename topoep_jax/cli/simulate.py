"""`topoep simulate`: does balancing pay here, how much, and how sure is that; before anything is installed."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from topoep_jax.cli import fit
from topoep_jax.cli import simulate_text as text
from topoep_jax.cli import study as studies
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.hardware import HARDWARE
from topoep_jax.cli.output import check_writable, plural
from topoep_jax.cli.simulate_text import Answer
from topoep_jax.cli.study import Sample, Study
from topoep_jax.config import LayerConfig
from topoep_jax.plan.evaluate import Evaluation, evaluate
from topoep_jax.plan.hardware import Hardware
from topoep_jax.plan.run import run_planner
from topoep_jax.simulate import LayerRates, Setting, Step, Work, chrome_trace, compare, work_of_planner
from topoep_jax.simulate.calibration import TOKENS
from topoep_jax.simulate.published import LAYERS

FITTED = "h800_fitted"
_SEEDS = 5
_OF_THE_LAYER = (
    *("microbatches", "optimizer_ms", "chunks", "exchange", "residuals", "launch_us", "plan_us", "pulls"),
    *("inter_gbps", "intra_gbps"),
)


def define() -> Flags:
    """Flags of the command."""
    values = studies.define(effort="fast", cap_factor=LayerConfig.cap_factor)  # as a layer plans at every step
    values["hardware"].help += f", for this library's layer; or {FITTED}, the paper's cluster as its figures imply it"
    studies.add_demand(values, "topoep_paper", "topoep", seeds=_SEEDS)
    values["planner"].help += "; they are compared with none"
    values.add_knob("top_k", None, note="with --trace, where file and --model do not say it")
    of_layers = "MoE layers of the model (default: as recorded, or as the paper trains it, else 1)"
    values.add("layers", int, of_layers, least=1)
    values.add("microbatches", int, "microbatches of a step, one after the other", 1, least=1)
    dense = "what else a microbatch takes: attention, norms, loss (default: 0, or as the paper's)"
    values.add("dense_ms", float, dense, least=0)
    values.add("optimizer_ms", float, "once a step (default: 0)", least=0)
    values.add_knob("chunks", 2)
    values.add_knob("exchange", LayerConfig.exchange)
    values.add_knob("residuals", LayerConfig.residuals)
    values.add("launch_us", int, "fixed time of a collective, assumed", LayerRates.launch_us, least=0)
    plan_us = "time of the planner on the GPU, assumed: the paper's"
    values.add("plan_us", int, plan_us, LayerRates.plan_us, least=0)
    values.add("perfetto", str, "write the first step of the last planner to this .json file, for ui.perfetto.dev")
    values.add("json", bool, "print records instead of text", False)
    values.add("fit", bool, "instead: the model of the paper's cluster against the paper, point by point", False)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    if values.fit:
        yield from fit.run(values)
        return
    if values.perfetto is not None:
        check_writable("perfetto", values.perfetto, ".json")
    fitted = values.hardware == FITTED
    study = _study(values, fitted=fitted)
    skews, planners = studies.skews(values.skew), list(dict.fromkeys(["none", *studies.planners(values.planner)]))
    if values.perfetto is not None and len(skews) > 1:
        raise ValueError(f"--skew={','.join(values.skew)} has {len(skews)} values, but --perfetto writes one step")
    seeds = range(values.seeds or study.num_samples or _SEEDS)
    if study.num_samples is not None and len(seeds) > study.num_samples:
        raise ValueError(f"--seeds={len(seeds)}, but {values.trace} has {study.num_samples} samples")
    top_k = _top_k(values, study)
    setting = _setting(values, study, top_k, fitted=fitted)
    knobs = {name: getattr(values, name) for name in ("chunks", "exchange", "residuals")}
    config = dataclasses.replace(study.layer, **knobs)
    study = dataclasses.replace(study, layer=config)
    samples: dict[float | None, list[Sample]] = {}
    for sample in study.samples(skews, seeds):
        samples.setdefault(sample.skew, []).append(sample)
    if not any(sample.omega.any() for drawn in samples.values() for sample in drawn):
        raise ValueError(
            f"--trace={values.trace}: {plural(len(seeds), 'sample')} without a single row, so there is nothing to"
            " simulate: record a step whose tokens are routed to experts"
        )
    answers = [_answer(study, setting, config, top_k, planners, drawn) for drawn in samples.values()]
    if values.perfetto is not None:
        last = answers[-1].outcomes[-1]
        title = f"{answers[-1].title}, planner {last.planner}; {setting.title}"
        trace = chrome_trace(last.steps.each[0].timeline, title)
        with open(values.perfetto, "w") as file:
            json.dump(trace, file)
    if values.json:
        yield json.dumps([record for answer in answers for record in answer.records()], indent=1) + "\n"
        return
    for answer in answers:
        yield text.screen(answer)
    yield text.NOTES
    if values.perfetto is not None:
        yield f"\nwritten to {values.perfetto}\n"


def _study(values: Flags, *, fitted: bool) -> Study:
    """The layer and its demand; the fitted rates are no preset of other commands."""
    if not fitted:
        return studies.from_flags(values)
    for name in _OF_THE_LAYER:
        if values[name].present:
            raise ValueError(f"--{name}={values[name].value} is of this library's layer, not of --hardware={FITTED}")
    values["hardware"].value = "h800"
    study = studies.from_flags(values)
    return dataclasses.replace(study, layer=dataclasses.replace(study.layer, hardware=Hardware.h800_fitted()))


def _top_k(values: Flags, study: Study) -> int:
    if values.trace is None and values.top_k is not None:
        raise ValueError(f"--top_k={values.top_k} needs a --trace; a --model brings its own")
    if study.top_k is None:
        raise ValueError("--top_k, or a --model that has it, is missing: how many of the trace's rows make a token?")
    return study.top_k


def _setting(values: Flags, study: Study, top_k: int, *, fitted: bool) -> Setting:
    layers = values.layers or LAYERS.get(study.name) or study.layers_of_trace or 1
    if not fitted:
        layers = values.layers or study.layers_of_trace or layers
        step = Step(layers, values.microbatches, values.dense_ms or 0.0, values.optimizer_ms or 0.0)
        rates = LayerRates(study.layer.hardware, values.launch_us, values.plan_us)
        return Setting.of_library(rates, step, top_k, _named(values.hardware))
    if values.dense_ms is None and study.name not in LAYERS:
        raise ValueError(f"--dense_ms is missing: the paper has no step of {study.name}, so the rest of it is unknown")
    if values.dense_ms is None and values.trace is None and values.tokens != TOKENS:
        raise ValueError(f"--dense_ms is missing: the rest of the paper's step is known for --tokens={TOKENS} alone")
    return Setting.of_paper(study.name, top_k, layers, values.dense_ms)


def _named(hardware: str) -> str:
    """A preset's name, or a file's with what it says of itself."""
    preset = hardware in HARDWARE
    note = None if preset else json.loads(Path(hardware).read_text(encoding="utf-8-sig")).get("note")
    return f"{hardware} ({note})" if note else hardware


def _answer(
    study: Study,
    setting: Setting,
    config: LayerConfig,
    top_k: int,
    planners: Sequence[str],
    samples: Sequence[Sample],
) -> Answer:
    works: dict[str, list[Work]] = {}
    plans: dict[str, list[Evaluation]] = {}
    for planner in planners:
        for sample in samples:
            draft = run_planner(sample.omega, sample.problem, planner)
            plan = evaluate(draft, sample.omega, sample.problem)
            plans.setdefault(planner, []).append(plan)
            works.setdefault(planner, []).append(work_of_planner(config, planner, plan.plan))
    rows = sum(int(sample.omega.sum()) for sample in samples) / len(samples)
    return Answer(study, setting, samples[0].skew, rows / config.num_ranks / top_k, compare(setting, works), plans)
