"""`topoep simulate`: does balancing pay here, how much, and how sure is that; before anything is installed."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from topoep_jax.cli import fit
from topoep_jax.cli import simulate_text as text
from topoep_jax.cli import study as studies
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
    *("microbatches", "optimizer_ms", "chunks", "residuals", "launch_us", "plan_us", "pulls"),
    *("inter_gbps", "intra_gbps"),
)


def define() -> flags.FlagValues:
    """Flags of the command."""
    values = studies.define()
    # As a layer plans at every step.
    values.set_default("effort", "fast")
    values.set_default("cap_factor", 1.05)
    values["cap_factor"].help = "bound on a rank's aligned rows, in units of the mean load"
    values["hardware"].help = (
        f"rates: {', '.join(studies.HARDWARE)}, or a file of `topoep measure`, for this library's layer; or {FITTED},"
        " the paper's cluster as its figures imply it"
    )

    def count(name: str, default: int | None, meaning: str, least: int = 1) -> None:
        flags.DEFINE_integer(name, default, meaning, lower_bound=least, flag_values=values)

    def milliseconds(name: str, meaning: str) -> None:
        flags.DEFINE_float(name, None, meaning, lower_bound=0, flag_values=values)

    flags.DEFINE_list(
        "skew", ["-4"], "comma list: deviation of the bias of each expert; the sign plays no role", flag_values=values
    )
    flags.DEFINE_list(
        "planner",
        ["topoep_paper", "topoep"],
        "comma list of planners, as of `topoep plan`; or all. They are compared with none",
        flag_values=values,
    )
    count("seeds", None, f"seeds 0..n-1 (default: {_SEEDS}), of a trace its first n samples (default: all)")
    count("top_k", None, "with --trace: experts per token, where file and --model do not say it")
    count("layers", None, "MoE layers of the model (default: as recorded, or as the paper trains it, else 1)")
    count("microbatches", 1, "microbatches of a step, one after the other")
    milliseconds("dense_ms", "what else a microbatch takes: attention, norms, loss (default: 0, or as the paper's)")
    milliseconds("optimizer_ms", "once a step (default: 0)")
    count("chunks", 2, "chunks of the layer, 1 or 2")
    flags.DEFINE_enum(
        "residuals", "none", ("none", "rows", "all"), "what the layer keeps for its backward pass", flag_values=values
    )
    count("launch_us", LayerRates.launch_us, "fixed time of a collective, assumed", 0)
    count("plan_us", LayerRates.plan_us, "time of the planner on the GPU, assumed: the paper's", 0)
    flags.DEFINE_string(
        "perfetto",
        None,
        "write the first step of the last planner to this .json file, for ui.perfetto.dev",
        flag_values=values,
    )
    flags.DEFINE_bool("json", False, "print records instead of text", flag_values=values)
    flags.DEFINE_bool(
        "fit", False, "instead: the model of the paper's cluster against the paper, point by point", flag_values=values
    )
    return values


def run(values: flags.FlagValues) -> Iterator[str]:
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
    config = _config(values, study)
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


def _study(values: flags.FlagValues, *, fitted: bool) -> Study:
    """The layer and its demand; the fitted rates are no preset of other commands."""
    if not fitted:
        return studies.from_flags(values)
    for name in _OF_THE_LAYER:
        if values[name].present:
            raise ValueError(f"--{name}={values[name].value} is of this library's layer, not of --hardware={FITTED}")
    values["hardware"].value = "h800"
    study = studies.from_flags(values)
    return dataclasses.replace(study, layer=dataclasses.replace(study.layer, hardware=Hardware.h800_fitted()))


def _top_k(values: flags.FlagValues, study: Study) -> int:
    if values.trace is None and values.top_k is not None:
        raise ValueError(f"--top_k={values.top_k} needs a --trace; a --model brings its own")
    if study.top_k is None:
        raise ValueError("--top_k, or a --model that has it, is missing: how many of the trace's rows make a token?")
    return study.top_k


def _setting(values: flags.FlagValues, study: Study, top_k: int, *, fitted: bool) -> Setting:
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
    preset = hardware in studies.HARDWARE
    note = None if preset else json.loads(Path(hardware).read_text(encoding="utf-8-sig")).get("note")
    return f"{hardware} ({note})" if note else hardware


def _config(values: flags.FlagValues, study: Study) -> LayerConfig:
    """The layer as it moves rows and replicas."""
    layer = dataclasses.replace(study.layer, chunks=values.chunks, residuals=values.residuals)
    return layer if study.pulls == "direct" else dataclasses.replace(layer, transport="device", pulls=study.pulls)


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
