"""Plans of the GPU against those of the CPU, bit for bit, and how long they take."""

import itertools
import subprocess
from collections.abc import Iterable

import jax
import numpy as np

from tools.gpu_check import problems
from tools.gpu_check.problems import Question
from tools.gpu_check.runner import Setting

WARMUPS, RUNS = 20, 200


def small(setting: Setting) -> dict[str, object]:
    """Every small case of the list."""
    return _compare(setting, "small", problems.small_questions())


def large(setting: Setting) -> dict[str, object]:
    """The published models; on a dry run a few of their plans."""
    questions = problems.large_questions()
    return _compare(setting, "large", itertools.islice(questions, 3) if setting.dry_run else questions)


def times(setting: Setting) -> dict[str, object]:
    """Microseconds of a plan, median and 99th percentile, launched by the host and replayed as a graph."""
    runs = (2, 5) if setting.dry_run else (WARMUPS, RUNS)
    questions = list(problems.timed_questions(16 if setting.dry_run else 128))
    lines = _plan_check(setting, "timed", questions, *map(str, runs))
    rows: dict[str, dict[str, object]] = {question.name: {} for question in questions}
    for index, kind, median, p99, least in (line.split()[1:] for line in lines if line.startswith("time ")):
        rows[questions[int(index)].name][kind] = {
            "median_us": float(median),
            "p99_us": float(p99),
            "min_us": float(least),
        }
    where = "on the host of a dry run, not a GPU" if setting.dry_run else "between events on the stream"
    return {"where": where, "warmups": runs[0], "runs": runs[1], "times": rows}


def _compare(setting: Setting, name: str, questions: Iterable[Question]) -> dict[str, object]:
    questions = list(questions)
    _plan_check(setting, name, questions, plant=setting.plant == "plans")
    return {"plans": len(questions), "wrong": 0}


def _plan_check(setting: Setting, name: str, questions: list[Question], *timing: str, plant: bool = False) -> list[str]:
    """What plan_check prints.

    Raises:
      AssertionError: it did not solve every problem, or a plan was wrong; the message names some.
    """
    path = setting.folder / f"{name}.problems"
    problems.write(questions, path)
    if plant:  # the last word is the status of the last plan
        with path.open("r+b") as file:
            file.seek(-8, 2)
            file.write(np.int64(16).tobytes())
    done = subprocess.run([setting.folder / "plan_check", path, *timing], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    wrong = [line.split(maxsplit=2) for line in lines if line.startswith("wrong ")]
    named = [f"{questions[int(index)].name}: {what}" for _, index, what in wrong]
    complete = f"solved {len(questions)}" in lines
    assert done.returncode == 0 and complete and not wrong, (
        f"{len(wrong)} of {len(questions)} plans are wrong; status {done.returncode}\n"
        + "\n".join([*named[:20], done.stdout[-500:], done.stderr[-2000:]])
    )
    return lines


def in_programs(setting: Setting) -> dict[str, object]:
    """`implementation="cuda"` inside programs: once, in a loop of demands, and again on the same arguments."""
    implementation = "cpu" if setting.dry_run else "cuda"
    device = jax.devices()[0]
    assert setting.dry_run or device.platform == "gpu", f"JAX does not use the GPU: its devices are {jax.devices()}"
    questions = [question for question in problems.small_questions() if " topoep " in question.name]
    by_problem = [(key, list(group)) for key, group in itertools.groupby(questions, key=lambda asked: asked.problem)]
    compared = 0
    for problem, group in by_problem[:: 16 if setting.dry_run else 1]:
        asked = group[:6]
        solve = problems.solver(problem, "topoep", implementation)
        demand = jax.device_put(np.stack([question.omega for question in asked]), device)
        loop = jax.jit(lambda rows, solve=solve: jax.lax.map(solve, rows))
        wants = [problems.right_answer(question) for question in asked]
        want = jax.tree.map(lambda *fields: np.stack(fields), *wants)
        if setting.plant == "programs":
            want = want._replace(rank_load=want.rank_load + 1)
        for _ in range(3):  # a graph is recorded, then replayed
            _assert_equal(loop(demand), want, asked[0].name)
        _assert_equal(solve(demand[0]), jax.tree.map(lambda field: field[0], want), asked[0].name)
        compared += 3 * len(asked) + 1
    return {"implementation": implementation, "plans": compared, "device": device.device_kind}


def _assert_equal(got: object, want: object, name: str) -> None:
    for field, a, b in zip(type(want)._fields, got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=f"{name}: {field}")
