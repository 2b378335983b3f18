"""The knobs of a layer are declared once: every form and every command has them, with one meaning."""

import dataclasses
import inspect

import pytest

from topoep_jax import LayerConfig, MoE, linen
from topoep_jax.aot import command as aot
from topoep_jax.cli import simulate, study
from topoep_jax.knobs import KIND, KNOBS, Knobs
from topoep_jax.on_mesh import Options
from train import config as trainer

FORMS = {"nnx": MoE, "linen": linen.MoE}
SIZES = {"hidden": 16, "ffn": 8, "num_experts": 16, "top_k": 3}
TUNABLE = [field.name for field in dataclasses.fields(Knobs)]
OF_PLANS = [name for name in KNOBS if KNOBS[name].plans]
COMMANDS = {
    "trainer": (trainer.define(), TUNABLE),
    "aot": (aot.define(), [*(set(TUNABLE) - {"planner_implementation"}), "hidden", "ffn", "num_experts", "top_k"]),
    "plan": (study.define(), [*OF_PLANS, "hidden", "ffn", "num_experts"]),
    "simulate": (simulate.define(), [*OF_PLANS, "chunks", "residuals", "hidden", "ffn", "num_experts", "top_k"]),
}
"""The flags of each, and which of a layer's fields are among them; it has the others from elsewhere, or none."""
CHANGED = {
    "trainer": {"block_rows": 32, "chunks": None, "overflow": None},
    "aot": {"chunks": 2, "overflow": "flag"},
    "plan": {"effort": "default", "cap_factor": None},
    "simulate": {"chunks": 2},
}
"""Defaults that are not those of a layer; None: as the devices are, or no bound."""
FEWER = {"trainer": {"overflow": ("loop", "flag")}, "aot": {"planner": ("none", "topoep_paper", "topoep")}}


@pytest.mark.parametrize("kind", [LayerConfig, *FORMS.values()], ids=["config", *FORMS])
def test_an_option_that_there_is_not_is_told_those_that_there_are(kind):
    with pytest.raises(TypeError, match=r"there is no option 'slots': take some of .*num_slots, .*hardware"):
        kind(**SIZES, slots=2)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_both_forms_take_and_tell_what_a_layer_has(form):
    options = inspect.signature(form.__init__).parameters
    own = {field.name: field.default for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(LayerConfig):
        assert field.name in options
        assert f"\n  {field.name}: {KNOBS[field.name].help}" in form.__doc__
        assert f"\n  {field.name}: {KNOBS[field.name].help}" in LayerConfig.__doc__
        if field.name not in ("chunks", "topology"):  # the devices say them
            assert own[field.name] == field.default


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_means_what_the_layer_means(command):
    values, names = COMMANDS[command]
    defaults = {field.name: field.default for field in dataclasses.fields(LayerConfig)} | CHANGED[command]
    for name in names:
        flag, knob = values[name], KNOBS[name]
        assert knob.help in flag.help
        assert flag.default == (None if defaults[name] is dataclasses.MISSING else defaults[name])
        choices = FEWER.get(command, {}).get(name, knob.choices)
        if KIND[name] is int:
            assert flag.parser.lower_bound == knob.least and all(str(choice) in flag.help for choice in choices)
        elif choices:
            assert tuple(flag.parser.enum_values) == choices


def test_one_thing_has_one_name():
    for name in ("slots", "experts"):
        assert not any(name in values for values, _ in COMMANDS.values())
