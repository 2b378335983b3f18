"""What `make mutants` breaks is what the sources hold; running the mutants takes compilers, and minutes."""

import json

import pytest

from tests.parity.variants import VARIANTS
from tools import model_mutants, mutants, order_mutants

BODY = """\
template <class Team>
TOPOEP_BODY void Fill(Team& team,
                      int32_t n) {
  const Links links(n, n);
  team.Sync();  // not team.Sync() twice
  for (;;) team_.Sync();
}
class A {
  void Sync() { Barrier().Sync(); }
};
"""


def test_barriers_are_found_in_the_text():
    sites = mutants.sites_of("xla_ffi/plan/a.h", BODY)
    assert [(site.nth, site.line, site.function) for site in sites] == [(1, 5, "Fill"), (2, 6, "Fill"), (3, 9, "Sync")]
    with pytest.raises(SystemExit, match="two Sync"):
        mutants.sites_of("a.h", "team.Sync(); team.Sync();")


def test_every_barrier_was_left_out_and_missed():
    rows = json.loads(mutants.RESULTS.read_text())["syncs"]
    sites = mutants.find_sites()
    assert len(sites) > 40
    assert [(row["file"], row["nth"]) for row in rows] == [site.key for site in sites], "run make mutants"
    assert all(map(mutants.is_killed, rows))


def test_a_mutant_that_nothing_misses_is_named(monkeypatch, tmp_path):
    row = {"file": "xla_ffi/plan/a.h", "nth": 1, "killed_by": mutants.SURVIVED}
    results = tmp_path / "mutants.json"
    results.write_text(json.dumps({"syncs": [row], "faults": []}))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "RESULTS", results)
    sites = mutants.sites_of("xla_ffi/plan/a.h", BODY)
    wrong = mutants.check_results(sites, ["drop_signal:ready"])
    assert [text for text in wrong if "survived" in text]
    assert [text for text in wrong if "a.h:6 has no row" in text]
    assert [text for text in wrong if "there are 3 and 1" in text]


def test_every_stage_of_the_pipeline_was_left_out_and_missed() -> None:
    rows = json.loads(order_mutants.RESULTS.read_text())["stages"]
    assert [row["stage"] for row in rows] == order_mutants.find_stages(), "run make mutants"
    assert all(row["noticed_by"] for row in rows)


def test_every_error_in_the_models_was_made_and_missed() -> None:
    rows = model_mutants.read_rows()
    errors = model_mutants.read_mutants()
    assert [row["mutant"] for row in rows] == [error.name for error in errors], "run make mutants"
    assert all(map(model_mutants.is_killed, errors, rows))
    assert {variant.name for variant in VARIANTS} == {name for error in errors for name in error.variants}


@pytest.mark.parametrize("mutant", model_mutants.read_mutants(), ids=lambda mutant: mutant.name)
def test_every_error_can_still_be_made(mutant) -> None:
    assert mutant.old != mutant.new
    assert compile(mutant.source(), mutant.file, "exec")
