"""Every model type of transformers, with the config that its class makes: a layer, or a reason."""

import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._published import KNOWN
from parity_tests.tables import with_nightly

from .faulty import FAULTY


def asked(name):
    """The error of `families` for the default config of a class; empty if a layer is built."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        given = CONFIG_MAPPING[name]().to_dict()
    except Exception:  # of two classes, which cannot be made without arguments
        given = {}
    given["model_type"] = name
    try:
        part = next(iter(families.parts(given)), None)
        nnx.eval_shape(lambda: families.attention(given, 0, part=part, rngs=nnx.Rngs(0)))
    except ValueError as refused:
        return str(refused)
    return ""


@pytest.mark.nightly(but=["deepseek_v2", "laguna", "longformer"])
@pytest.mark.parametrize("name", with_nightly(sorted({*KNOWN, *families.TYPES}), commit=9))
def test_a_type_has_a_layer_or_a_reason(name, transformers):
    sentence = asked(name)
    if name in families.TYPES:
        assert FAULTY[name] in sentence if name in FAULTY else sentence == ""
    else:
        if sentence == "":  # of a whole model, a part of which was built
            return
        assert len(sentence.splitlines()) == 1 and sentence.endswith(".")
        is_of_a_part = "is not served" in sentence or any(x in sentence for x in FAULTY.values())
        assert name in sentence or is_of_a_part
