"""Encoder, decoder, cross and other attentions of one config equal their classes."""

import pytest
from flax import nnx

from flax_attn import families
from parity_tests.families import parts, prove_part
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .described import described_part


def titled(small):
    return f"{small.name}-{small.part}-{small.index}"


def tells_most(small):
    return titled(small) == "t5-decoder-0"


@pytest.mark.parametrize("small", with_nightly(PARTS, commit=tells_most), ids=titled)
def test_each_part_equals_its_class_in_transformers(small, transformers):
    report = prove_part(small).report
    assert report.certain, report


@pytest.mark.nightly(but=["falcon_h1", "t5gemma"])
@pytest.mark.parametrize("name", {small.name: None for small in PARTS})
def test_defaults_are_those_of_the_class(name, transformers):
    whole = parts.config_of({}, name).to_dict()
    for part in families.parts({"model_type": name}):
        for index in (0, 3):
            plain, full = (described_part(x, index, part) for x in ({"model_type": name}, whole))
            assert plain == full


def built(given, index, part):
    layer = lambda: families.attention(given, index, part=part, rngs=nnx.Rngs(0))  # noqa: E731
    return nnx.eval_shape(layer)


def test_a_part_is_asked_for_by_its_name():
    given = PARTS[0].given
    with pytest.raises(ValueError, match="one of encoder, decoder, cross for bart; got None"):
        families.attention(given, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="one of encoder, decoder, cross for bart; got 'self'"):
        families.rules(given, 0, part="self")
    with pytest.raises(ValueError, match="from 0 to 1, since encoder_layers=2; got 2"):
        built(given, 2, "encoder")
    assert built(given, 2, "decoder").q_proj.in_features == 48


def test_parts_lists_the_attentions_of_a_config():
    assert [*families.parts(PARTS[0].given)] == ["encoder", "decoder", "cross"]
    assert [*families.parts({"model_type": "falcon_h1"})] == ["attention", "recurrent"]
    assert families.parts({"model_type": "llama"}) == families.parts({"model_type": "glm"}) == {}


def test_a_decoder_without_a_depth_of_its_own_is_as_deep_as_the_encoder():
    given = {"model_type": "t5", "num_layers": 2}
    assert built(given, 1, "decoder").q.in_features == 512
    with pytest.raises(ValueError, match="since num_decoder_layers=2; got 2"):
        built(given, 2, "cross")
