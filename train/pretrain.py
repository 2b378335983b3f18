"""Trains a mixture-of-experts model on real text: `.venv/bin/python -m train.pretrain`, with `--help` for its settings.

Parse, build, loop. Without arguments it reads Python's own library and trains on 8 emulated devices, seen as two
domains of four ranks.
"""

from train import supervise

if __name__ == "__main__":
    supervise.under_a_parent("train.pretrain")  # before the imports, of which a parent needs none

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from tqdm import tqdm

from models.checkpoint import load
from models.checkpoint.folder import write_json
from topoep_jax import Status, transport
from topoep_jax.cli import execute
from topoep_jax.cli.flags import Flags
from train import report, resume
from train.checkpoint import Checkpoints
from train.config import TrainConfig, emulate_devices, from_flags
from train.config import define as define
from train.data import VOCAB, batches
from train.interrupt import Interrupt
from train.lock import sole_writer
from train.log import LOADS, METRICS, Log, make_record, read_columns
from train.mesh import is_cpu, make_topology
from train.part import param_dtype
from train.recording import Recorder
from train.state import StepMetrics, TrainState, is_sound, overflowed
from train.step import Program, build, first_checks
from train.together import lead_finds, load_same_tokens, meet, together

OnStep = Callable[[dict[str, Any]], None]
Step = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]


class RunStopped(RuntimeError):
    """The run cannot go on; the message says why, and where its last good state is."""


MEANING = "train a mixture-of-experts model on text, balanced anew in every layer of every step"


def run(values: Flags) -> Iterator[str]:
    """Trains as the flags say; the run tells how it goes by itself.

    Raises:
      ValueError: settings that do not fit, or a run that was stopped.
    """
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)  # The checkpoint library tells each of its steps.
    config = from_flags(values)
    emulate_devices(config)
    interrupt = Interrupt()
    interrupt.watch()  # for good: what comes behind the run, such as leaving the other processes, belongs to it
    try:
        _run_until(interrupt, config, None)
    except RunStopped as error:
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        raise ValueError("interrupted; checkpoints that were saved before are unharmed") from None
    yield from ()


def train(config: TrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Runs until `config.steps` steps are done or the user interrupts, and reports.

    Args:
      config: settings; `run_dir` must be set.
      on_step: called with each line of `metrics.jsonl`.

    Returns:
      The summary, as in `summary.json`.

    Raises:
      ValueError: settings, data or a checkpoint that do not fit. RunStopped: a step went wrong.
    """
    with Interrupt() as interrupt:
        return _run_until(interrupt, config, on_step)


def _run_until(interrupt: Interrupt, config: TrainConfig, on_step: OnStep | None) -> dict[str, Any]:
    if config.num_processes > 1:
        meet(config, _resume_command(config))
        interrupt.watch()  # JAX has put a handler of its own in its place.
    tokens, vocab = load_same_tokens(config), config.shapes().vocab
    if tokens.largest >= vocab:
        raise ValueError(
            f"the data hold token {tokens.largest}, but the model has vocab={vocab}; bytes of text need {VOCAB}"
        )
    with contextlib.ExitStack() as stack:
        with together():
            if _is_lead():
                stack.enter_context(sole_writer(pathlib.Path(config.run_dir), "--run_dir"))
        return _train(dataclasses.replace(config, of_data=tokens.digest.hex()), tokens.ids, interrupt, on_step)


def _train(config: TrainConfig, tokens: np.ndarray, interrupt: Interrupt, on_step: OnStep | None) -> dict[str, Any]:
    run_dir = pathlib.Path(config.run_dir)
    program = build(config)
    # What follows from this machine and shapes the state: a resumed run may be on another.
    config = dataclasses.replace(config, param_dtype=param_dtype(config, program.mesh).name)
    if is_cpu(program.mesh):
        # A program that JAX's persistent cache returns may deadlock in its collectives there (seen on jax 0.10.2).
        jax.config.update("jax_enable_compilation_cache", False)
    stream = batches(tokens, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed)
    # Before there is a folder: weights that do not fit leave none behind.
    first = None if config.resume else first_state(config, program)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        step = None if config.restore < 0 else config.restore
        with together():
            resume.check_model(config)  # First, since it names settings: what is another model fits no checkpoint.
        state = checkpoints.restore(program, step=step) if first is None else first
        done = int(state.step)
        # Without a summary it was killed behind its last checkpoint, and only has to report.
        reported = lead_finds((run_dir / report.SUMMARY).exists())
        if done > config.steps or (done == config.steps and reported):
            raise ValueError(f"{run_dir} has done {done} of --steps={config.steps}: ask for more with --steps")
        checkpoints.prepare()
        with together():
            # These may refuse to go on with what is there: before the settings of an earlier start are replaced.
            going = resume.go_on(config, done)
            recorder = Recorder(config, program, done=done)
            log = _open_log(config, done) if _is_lead() else None
        checkpoints.set_aside(done)
        if _is_lead():
            (run_dir / report.SUMMARY).unlink(missing_ok=True)  # Of a run that was shorter.
            config.save(run_dir / "config.json", going.history)
            # So that `models.checkpoint` knows the model of the arrays.
            write_json(run_dir / "checkpoints" / "config.json", config.shapes().to_hf())
        _say(_headline(config, program, len(tokens)))
        for note in checkpoints.notes:
            _say(note)
        if going.said:
            _say(going.said)
        _loop(config, program, state, stream, checkpoints, recorder, log, interrupt, on_step)
    return _finish(config, program) if _is_lead() else {}


def _open_log(config: TrainConfig, done: int) -> Log:
    shapes = config.shapes()
    log = Log(pathlib.Path(config.run_dir), layers=shapes.num_moe_layers, experts=shapes.num_experts, keep=done)
    if log.lost:
        _say(f"{config.run_dir}/{METRICS} has lost {log.lost} of the {done} steps before; the run goes on without them")
    return log


def first_state(config: TrainConfig, program: Program) -> TrainState:
    """The state before the first step of a new run: of `config.init_from`, or random."""
    if not config.init_from:
        return program.init()
    return program.start(load(config.init_from, config.shapes(), program.shardings.params, dtype=jnp.float32))


def _loop(
    config: TrainConfig,
    program: Program,
    state: TrainState,
    stream: grain.MapDataset,
    checkpoints: Checkpoints,
    recorder: Recorder,
    log: Log | None,
    interrupt: Interrupt,
    on_step: OnStep | None,
) -> None:
    done = int(state.step)
    batch_tokens = config.batch_size * config.seq_len
    began = time.perf_counter()
    begun, first_checked = done, first_checks(config, program.mesh)
    step: Step | None = None
    exact_step = program.exact_step and _Together(program.exact_step, config.peer_timeout_s)
    checked_step = program.checked_step and _Together(program.checked_step, config.peer_timeout_s)
    if done < config.steps and not interrupt.asked():
        _say("compiling: about a minute on a laptop")
        # Compiled ahead, so that the first step's tokens per second mean something.
        step = _Together(program.step, config.peer_timeout_s)
        step.compile(state, program.place(stream[done]))
        _say(f"compiled in {time.perf_counter() - began:.0f} s")
    logged = log or contextlib.nullcontext()
    with _Progress(config.steps, done) as progress, recorder, logged:
        while step is not None and done < config.steps and not interrupt.asked():
            batch = program.place(stream[done])
            began = time.perf_counter()
            asked = done - begun < first_checked or (config.check_every and (done + 1) % config.check_every == 0)
            taken = checked_step if checked_step and asked else step
            try:
                state, metrics, rerun = _run(taken, exact_step, state, batch, recorder.wants(done + 1))
            except jax.errors.JaxRuntimeError as error:
                if (lost := transport.failure()) is None:
                    raise
                raise RunStopped(f"step {done + 1}: {lost}. Look for the end of that rank's log") from error
            if taken is checked_step or config.check_exchange:
                _stop_at_faults(done + 1)
            if not is_sound(metrics):
                # Not saved: what makes a step unsound is most often the update before it.
                raise RunStopped(_diagnosis(done + 1, metrics, config, checkpoints.latest()))
            done += 1
            seconds = time.perf_counter() - began
            record = make_record(
                done, metrics, tokens=batch_tokens, seconds=seconds, rerun=rerun, planner=config.planner
            )
            if log is not None:
                log.append(record, np.asarray(metrics.moe.expert_load))
            recorder.record(done, metrics)
            progress.show(record)
            if done % config.save_every == 0:
                checkpoints.save(state)
            if on_step:
                on_step(record)
    checkpoints.save(state)
    if done < config.steps:
        _say(f"Stopped after step {done}, which is saved. Go on with: {_resume_command(config)}")


def _stop_at_faults(step: int) -> None:
    """Stops the run, on all processes, if the exchanges of this step have lost or changed a row on any of them."""
    faults = transport.exchange_faults()
    if (found := transport.first_reason(str(faults[0]) if faults else None)) is None:
        return
    raise RunStopped(f"step {step}: {found}; here that is --safe_exchange. The step is not saved")


def _run(
    step: Step, exact_step: Step | None, state: TrainState, batch: jax.Array, recorded: bool
) -> tuple[TrainState, StepMetrics, bool]:
    """One optimizer step, its metrics as NumPy arrays, and whether the batch had to run again."""
    state, metrics = step(state, batch)
    metrics = _fetch(metrics, recorded)
    if exact_step is None or not overflowed(metrics):
        return state, metrics, False
    _say_once("a batch overflowed a receive buffer and runs again, with extra passes: that step is compiled first")
    # The state is still what it was. All processes come here together, since each holds the same metrics.
    state, metrics = exact_step(state, batch)
    return state, _fetch(metrics, recorded), True


class _Together:
    """A step that all processes compile before any of them runs it: kernels would wait in vain for who still does."""

    def __init__(self, step: jax.stages.Wrapped, timeout_s: float) -> None:
        self._step, self._timeout_s = step, timeout_s
        self._compiled: jax.stages.Compiled | None = None

    def compile(self, state: TrainState, batch: jax.Array) -> jax.stages.Compiled:
        """Collective. Raises RunStopped if a process takes too long."""
        compiled = self._step.lower(state, batch).compile()
        try:
            transport.meet("compile its step", self._timeout_s)
        except TimeoutError as error:
            raise RunStopped(f"{error}, or give it longer with --peer_timeout_s") from error
        self._compiled = compiled
        return compiled

    def __call__(self, state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        compiled = self._compiled or self.compile(state, batch)
        result: tuple[TrainState, StepMetrics] = compiled(state, batch)
        return result


def _fetch(metrics: StepMetrics, recorded: bool) -> StepMetrics:
    """NumPy copies; what the routers chose is the largest part, and is left where it is if nobody wants it."""
    fetched: StepMetrics = jax.device_get(metrics if recorded else metrics._replace(expert_idx=None))
    return fetched


def _finish(config: TrainConfig, program: Program) -> dict[str, Any]:
    run_dir = pathlib.Path(config.run_dir)
    columns = read_columns(run_dir / METRICS)
    if not columns["step"].size:
        return {}
    summary = report.summarize(columns, topology=make_topology(config, program.mesh))
    paths = report.write_report(run_dir, columns, summary)
    _say("\n" + report.comparison(summary))
    routing = [Recorder.FILE] if config.record_routing else []
    names = ", ".join([METRICS, LOADS, *(path.name for path in paths), *routing, "checkpoints/"])
    _say(f"\nIn {run_dir}: {names}")
    return summary


def _headline(config: TrainConfig, program: Program, num_tokens: int) -> str:
    params = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(program.abstract.params))
    topology = make_topology(config, program.mesh)
    sizes = "+".join(str(len(topology.ranks_of_domain(d))) for d in range(topology.num_domains))
    source = ", ".join(config.data) or "the Python standard library"
    platform = program.mesh.devices.flat[0].platform
    return (
        f"{params / 1e6:.1f} M parameters, {config.dtype}; ranks on {platform} in domains of {sizes};"
        f" {_count(num_tokens)} tokens of {source}; run {config.run_dir}"
    )


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 100_000 else f"{number:,}"


def _diagnosis(step: int, metrics: StepMetrics, config: TrainConfig, saved: int | None) -> str:
    bad = np.flatnonzero(metrics.moe.status & Status.BAD_INPUT.value)
    if bad.size:
        what = f"the planner refused the demand of layer {bad[0]} (BAD_INPUT: NaN logits, or 2^31 assignments and more)"
    else:
        what = f"loss {float(metrics.loss)} or gradient norm {float(metrics.grad_norm)} is not finite"
    if saved is None:
        return f"step {step}: {what}. Nothing was saved before; start anew with a lower rate than --lr={config.lr:g}"
    return (
        f"step {step}: {what}. The last checkpoint is of step {saved}; try a lower rate from there:"
        f" {_resume_command(config)} --lr={config.lr / 3:.1g}"
    )


def _resume_command(config: TrainConfig) -> str:
    # The interpreter by its path: the environment of `make train` is on nobody's PATH.
    python = pathlib.Path(os.path.relpath(sys.executable))
    return f"{sys.executable if '..' in python.parts else python} -m train.pretrain --resume --run_dir={config.run_dir}"


def _is_lead() -> bool:
    return jax.process_index() == 0


def _say(message: str) -> None:
    if _is_lead():
        print(message, flush=True)


@functools.cache
def _say_once(message: str) -> None:
    _say(message)


class _Progress:
    """A bar on a terminal; about 15 plain lines elsewhere."""

    def __init__(self, steps: int, done: int) -> None:
        self._steps = steps
        self._bar: tqdm | None = None
        if _is_lead() and sys.stderr.isatty():
            layout = "{bar:10} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=steps, initial=done, bar_format=layout, dynamic_ncols=True, smoothing=0.1)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, record: dict[str, Any]) -> None:
        figures = (
            f"{record['loss']:.3f}",
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"{record['imbalance_before']:.2f} -> {record['imbalance']:.2f}",
            f"{record['inter_domain_before']:.0%} -> {record['inter_domain']:.0%}",
        )
        text = "loss {} | {} | imbalance {} | inter-domain {}".format(*figures)
        if self._bar is not None:
            # Short enough for 80 columns: a figure that is cut off reads like another one.
            short = "loss {} {} imb {} out {}".format(*figures).replace(" -> ", ">")
            self._bar.set_postfix_str(short, refresh=False)
            self._bar.update()
        elif record["step"] in (1, self._steps) or record["step"] % max(1, self._steps // 15) == 0:
            _say(f"step {record['step']:>{len(str(self._steps))}}/{self._steps} | {text}")


if __name__ == "__main__":
    with supervise.failures_told():
        sys.exit(execute("python -m train.pretrain", MEANING, lambda: sys.modules[__name__], sys.argv[1:]))
