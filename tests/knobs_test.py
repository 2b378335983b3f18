"""The knobs of a layer are declared once: every form and every command has them, with one meaning."""

import dataclasses
import inspect

import pytest

from topoep_jax import LayerConfig, MoE, linen

FORMS = {"nnx": MoE, "linen": linen.MoE}
SIZES = {"hidden": 16, "ffn": 8, "num_experts": 16, "top_k": 3}


@pytest.mark.parametrize("kind", [LayerConfig, *FORMS.values()], ids=["config", *FORMS])
def test_an_option_that_there_is_not_is_told_those_that_there_are(kind):
    with pytest.raises(TypeError, match=r"there is no option 'slots': take some of .*num_slots, .*hardware"):
        kind(**SIZES, slots=2)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_both_forms_take_and_tell_what_a_layer_has(form):
    options = inspect.signature(form.__init__).parameters
    for field in dataclasses.fields(LayerConfig):
        assert field.name in options
        assert f"\n  {field.name}: " in form.__doc__ and f"\n  {field.name}: " in LayerConfig.__doc__
