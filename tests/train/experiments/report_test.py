"""The experiments: records, what is kept and what is run again, the checks, and a report that holds together."""

import dataclasses
import json
from html.parser import HTMLParser

import numpy as np
import pytest

from topoep_jax.shapes import SHAPES
from topoep_jax.simulate.published import Value
from train import lock
from train.experiments import __main__ as command
from train.experiments import checks, fig03_placement, fig10_slots, fig11_latency, fig16_locality, plans, store
from train.experiments.figures import DRAWINGS, FIGURES
from train.experiments.record import Record, from_json, of_paper, summarize, to_json
from train.experiments.settings import MODELS, Settings

MODEL = MODELS[0]
SOME = ("none", "topoep_paper", "eplb_fixed_main", "topoep")


def of(planner, value, *, figure="13b", metric="imbalance", unit="", kind="measured", seed=0, **setting):
    return Record(figure, MODEL, planner, setting or {"skew": -4.0}, metric, value, unit, kind, seed)


def test_every_figure_of_the_paper_is_somewhere_once() -> None:
    places = [*FIGURES, *DRAWINGS]
    assert len(places) == len(set(places))
    numbers = {"".join(c for c in place if c.isdecimal()) for place in places if place[0].isdecimal()}
    assert numbers == {str(number) for number in range(1, 17)}


def test_records_survive_json_in_an_order_of_their_own() -> None:
    records = [
        of("none", 2.0, seed=1),
        of("topoep", 1.0),
        of("none", 3.0),
        *of_paper("13b", {"none": Value(4, "I")}, model=MODEL, metric="imbalance", skew=-4.0),
    ]
    text = json.dumps(to_json(records))
    assert text == json.dumps(to_json(reversed(records)))
    assert sorted(from_json(text), key=Record.key) == sorted(records, key=Record.key)


def test_seeds_are_put_together_and_find_their_printed_value() -> None:
    printed = of_paper("13b", {"none": Value(4.09, "I")}, model=MODEL, metric="imbalance", skew=-4.0)
    other = of_paper("13b", {"none": Value(9.0, "C")}, model=MODEL, metric="imbalance", skew=-1.0)
    (summary,) = summarize([of("none", 2.0), of("none", 4.0, seed=1), *other, *printed])
    assert summary.mean == 3.0 and summary.deviation == pytest.approx(2**0.5)
    assert summary.paper is not None and (summary.paper.value, summary.paper.mark) == (4.09, "I")


def test_only_what_a_clock_said_is_apart(tmp_path) -> None:
    clock = of("topoep", 12.0, metric="time of a plan", unit="us")
    command.write_records(tmp_path, [clock, of("topoep", 1.0), of("topoep", 5.0, unit="ms", kind="simulated")])
    written = json.loads((tmp_path / "records.json").read_text())
    assert [record["value"] for record in written["timed"]] == [12.0]
    assert [record["value"] for record in written["records"]] == [1.0, 5.0]


def test_placement_is_the_papers() -> None:
    records = fig03_placement.run(Settings())
    found = {(s.first.setting["placement"], s.first.setting["what"]): (s.mean, s.paper) for s in summarize(records)}
    for placement, mib in (("replica on node 1", 64), ("replica on node 0", 27)):
        mean, paper = found[placement, "all"]
        assert mean == mib == paper.value
    assert found["replica on node 0", "parameters"][0] == 18


@pytest.fixture
def few_planners(monkeypatch):
    monkeypatch.setattr(plans, "ALL", SOME)


def test_plans_of_equal_settings_are_equal_numbers(few_planners) -> None:
    settings = Settings(seeds=1)
    first = to_json(fig16_locality.run(settings))
    plans.scored.cache_clear()
    plans.demand.cache_clear()
    assert to_json(fig16_locality.run(settings)) == first
    for model in MODELS:
        domains = SHAPES[model].topology.num_domains
        plain = next(r for r in from_json(json.dumps(first)) if r.model == model and r.planner == "none")
        assert plain.value == pytest.approx(100 * (1 - 1 / domains), abs=0.5)


def test_figures_are_kept_for_equal_settings_alone(tmp_path, monkeypatch) -> None:
    store = command.Store(tmp_path, FIGURES["3"], Settings())
    assert not store.finished()
    store.write(fig03_placement.run(Settings()))
    assert store.finished() and not command.Store(tmp_path, FIGURES["3"], Settings(full=True)).finished()
    half = tmp_path / "figures" / "figure_3.json"
    half.rename(half.with_suffix(".half"))  # As an interrupted run leaves it.
    assert not store.finished()
    half.with_suffix(".json").write_text('{"settings": ')
    assert not store.finished()


def test_a_figure_is_run_again_where_its_inputs_or_versions_changed(tmp_path, monkeypatch) -> None:
    def kept(figure):
        return command.Store(tmp_path, figure, Settings()).finished()

    figure = FIGURES["3"]
    command.Store(tmp_path, figure, Settings()).write(fig03_placement.run(Settings()))
    assert kept(figure) and not kept(dataclasses.replace(figure, inputs=lambda: "times of a GPU"))
    monkeypatch.setattr(store, "environment", lambda: "jax 99")
    assert not kept(figure)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.pictures, self.tags = set(), [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.add(tag)
        self.anchors |= {named["id"]} if "id" in named else set()
        self.links += [named["href"]] if "href" in named else []
        if tag == "img":
            assert named["alt"]
            self.pictures.append(named["src"])


def run(*arguments):
    values = command.define()
    values(["", *arguments])
    return "".join(command.run(values))


def test_the_report_has_no_broken_link_and_needs_no_network(tmp_path, few_planners) -> None:
    out = f"--out={tmp_path}"
    text = run("--figures=3,13b,16,D", "--seeds=2", out)
    assert "holds: no planner of equal slots" in text
    page = Page((tmp_path / "index.html").read_text())
    assert not page.tags & {"script", "link", "iframe"} and len(page.pictures) == 4
    for target in [*page.links, *page.pictures]:
        if target.startswith("#"):
            assert target[1:] in page.anchors
        else:
            assert (tmp_path / target).is_file() and "//" not in target
    (inter,) = (
        row
        for row in json.loads((tmp_path / "summary.json").read_text())["compared"]
        if (row["model"], row["planner"], row["metric"]) == (MODEL, "none", "inter-node share")
    )
    assert (inter["paper"], inter["mark"], inter["seeds"]) == (75.0, "C", 2) and inter["mean"] == pytest.approx(
        75, 1e-2
    )
    before = (tmp_path / "records.json").read_bytes()
    assert "kept" in run("--figures=13b", "--resume", "--seeds=2", out)
    assert (tmp_path / "records.json").read_bytes() == before
    # Another number of draws leaves none of the old ones in the report.
    run("--figures=D", "--seeds=3", out)
    assert {r["figure"] for r in json.loads((tmp_path / "records.json").read_text())["records"]} == {"D"}


def test_two_commands_do_not_write_to_one_folder(tmp_path) -> None:
    run("--figures=3", f"--out={tmp_path}")
    before = (tmp_path / "records.json").read_bytes()
    with (
        lock.sole_writer(tmp_path, "--out"),
        pytest.raises(ValueError, match=r"another command is writing to .*: wait for it, or name another"),
    ):
        run("--figures=D", f"--out={tmp_path}")
    assert (tmp_path / "records.json").read_bytes() == before
    run("--figures=3", "--resume", f"--out={tmp_path}")


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ("run", ValueError("no room"), "no room"),
        ("run", RuntimeError("out of memory"), "RuntimeError: out of memory"),
        ("draw", KeyError("way"), "KeyError: 'way', while its records were drawn"),
    ],
)
def test_a_figure_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch, part, error, said) -> None:
    def fail(*_):
        raise error

    run("--figures=3", f"--out={tmp_path}")  # Earlier numbers of it do not stay.
    good = FIGURES["3"]
    monkeypatch.setitem(FIGURES, "3", dataclasses.replace(good, **{part: fail}))
    with pytest.raises(ValueError, match=f"figure 3: {said}"):
        run("--figures=3,D", f"--out={tmp_path}")
    assert {r["figure"] for r in json.loads((tmp_path / "records.json").read_text())["records"]} == {"D"}


@pytest.mark.parametrize(("asked", "said"), [("17", "'17'"), ("all,99", "'99'"), ("", "nothing")])
def test_unknown_figures_are_refused(tmp_path, asked, said) -> None:
    with pytest.raises(ValueError, match=said):
        run(f"--figures={asked}", f"--out={tmp_path}")


def test_a_figure_asked_for_twice_is_run_once(tmp_path) -> None:
    assert run("--figures=3,3", f"--out={tmp_path}").count("figure 3 ") == 1


def verdicts(records):
    return [outcome.verdict for outcome in checks.check(records)]


def planned(imbalance, inter, used=2.0):
    """The same numbers of every planner in `imbalance` and `inter`."""
    records = []
    for planner in imbalance:
        records += [
            of(planner, imbalance[planner]),
            of(planner, used, metric="slots used"),
            of(planner, inter[planner], figure="16", metric="inter-node share", unit="%"),
        ]
    return records


def test_nothing_to_look_at_is_not_success() -> None:
    assert verdicts([]) == ["not run"] * 5


def test_a_planner_that_is_better_in_both_is_seen() -> None:
    even, local = {"topoep": 1.2, "taot": 1.1}, {"topoep": 5.0, "taot": 6.0}
    assert verdicts(planned(even, local))[1] == "holds"
    assert verdicts(planned(even, local | {"taot": 4.0}))[1] == "fails"
    assert verdicts(planned(even, local | {"taot": 4.0}, used=5.0))[1] == "not run"  # No planner of equal slots.


@pytest.mark.parametrize(
    ("skew", "rival", "plain", "want"),
    [
        (-1.0, 2.1, 3.0, ["holds", "holds"]),
        (-1.0, 2.0, 3.0, ["fails", "holds"]),
        (-0.5, 2.0, 3.0, ["fails", "holds"]),
        (0.0, 1.9, 2.0, ["not run", "holds"]),
        (0.0, 2.1, 1.99, ["not run", "fails"]),
    ],
)
def test_times_of_rivals_are_seen(skew, rival, plain, want) -> None:
    times = {"topoep": 2.0, "flexmoe": rival, "none": plain}
    records = [
        of(p, ms, figure="A", metric="predicted layer time", unit="ms", kind="simulated", skew=skew, slots=2.0)
        for p, ms in times.items()
    ]
    assert verdicts(records)[2:4] == want


@pytest.mark.parametrize(
    ("figure", "gains", "want"),
    [
        ("12", [0.0], "holds"),
        ("12", [-0.1], "fails"),
        ("B", [9.0, 0.1], "holds"),
        ("B", [9.0, -0.1], "fails"),  # One draw that loses, whatever the mean.
        ("A", [-9.0], "not run"),
    ],
)
def test_losses_are_seen_where_planning_takes_time(figure, gains, want) -> None:
    records = [
        of(planner, value, figure=figure, metric="gain", unit="%", kind="simulated", seed=seed)
        for planner, values in (("topoep", gains), ("topoep_paper", [-9.0]))
        for seed, value in enumerate(values)
    ]
    found = checks.check(records)[4]
    assert found.verdict == want and all(f"{min(gains)} %" in failure for failure in found.failures)


def test_it_is_said_in_which_model_topoep_does_not_lose() -> None:
    without, charged = (outcome.title for outcome in checks.check([])[3:])
    assert "Figure A" in without and "planning takes no time" in without
    assert "Figure 12" in charged and "Figure B" in charged


def test_a_value_far_from_the_papers_is_listed_with_its_cause() -> None:
    printed = of_paper("13b", {"topoep_paper": Value(1.41, "C")}, model=MODEL, metric="imbalance", skew=-4.0)
    near = [of("topoep_paper", value, seed=seed) for seed, value in enumerate((1.3, 1.5))]
    far = [of("topoep_paper", value, seed=seed) for seed, value in enumerate((2.3, 2.31))]
    assert verdicts([*near, *printed])[0] == "holds"
    (failure,) = checks.check([*far, *printed])[0].failures
    assert "2.3" in failure and "1.41" in failure and checks.CAUSES["13b", "imbalance"] in failure


def test_every_value_that_may_fail_has_a_cause() -> None:
    metrics = {("10", "imbalance"), ("13b", "imbalance"), ("16", "inter-node share"), ("16", "replica-served share")}
    assert set(checks.CAUSES) == metrics
    # It stands beside values of any number of draws, so it says of how many its own are, and not how far they lie.
    assert all("draws" in cause and "deviation" not in cause for cause in checks.CAUSES.values())


def test_times_of_a_gpu_are_read_where_there_are_some(tmp_path) -> None:
    assert not fig11_latency.gpu_times(tmp_path)
    times = {"EP32 E128 topoep fast": {"graph": {"median_us": 90.0, "p99_us": 99.0, "min_us": 80.0}}}
    passed = {"name": "plan_times", "status": "passed", "details": {"times": times}}
    (tmp_path / "run.json").write_text(json.dumps({"checks": [passed, passed | {"status": "failed"}]}))
    (record,) = fig11_latency.gpu_times(tmp_path)
    assert (record.value, record.unit, record.planner, record.kind) == (90.0, "us", "topoep", "measured")
    assert record.setting == {"ranks": 32, "experts": 128, "effort": "fast", "where": "GPU, run, graph"}


def test_steps_of_both_planners_are_counted_at_every_size() -> None:
    records = list(fig11_latency.of_size(8, 64))
    steps = [(r.planner, r.setting["effort"]) for r in records if r.metric == "dependent steps"]
    assert steps == [("topoep_paper", "-")] * 4 + [("topoep", "fast")]
    kinds = {r.planner: r.kind for r in records if r.metric == "dependent steps"}
    assert kinds == {"topoep_paper": "measured", "topoep": "simulated"}  # Counted, and a bound.
    assert not any(r.timed for r in records if r.metric == "dependent steps")


def test_what_is_drawn_of_the_papers_times_is_in_records() -> None:
    ours = of("topoep_paper", 900.0, figure="11", metric="time of a plan", unit="us", ranks=32, experts=64)
    printed = list(fig11_latency.printed())
    assert [r.value for r in printed] == [131, 510, 337, 455] and {r.kind for r in printed} == {"paper"}
    assert all(summary.paper is None for summary in summarize([ours, *printed]))


def test_an_expert_is_worth_a_pull_to_other_domains_with_enough_rows() -> None:
    shape = SHAPES["e640"]
    omega = np.zeros((shape.topology.num_ranks, shape.num_experts), np.int64)
    enough = 3 * shape.ffn // 2  # Rows of a domain, beyond which the pull is quicker.
    omega[0, [0, 200, 300, 400]] = 9 * enough, enough + 1, enough, enough - 1  # Expert 0 is at home.
    omega[8:10, 500] = enough // 2 + 1
    assert fig10_slots.worth_a_pull(omega, plans.problem(shape)) == 1
    omega[1, 300] = 1
    assert fig10_slots.worth_a_pull(omega, plans.problem(shape)) == 2


@pytest.mark.full
def test_the_quick_set_draws_every_figure(tmp_path) -> None:
    text = run("--seeds=2", f"--out={tmp_path}")
    assert "not run" not in text and (tmp_path / "index.html").is_file()
    assert {path.stem for path in tmp_path.glob("figures/*.png")} == {figure.name for figure in FIGURES.values()}
    records = json.loads((tmp_path / "records.json").read_text())
    shares = {(r["metric"], r["unit"]) for r in [*records["records"], *records["timed"]] if "share" in r["metric"]}
    assert {unit for _, unit in shares} == {"%"}, shares
