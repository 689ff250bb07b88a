"""The rules of a whole model; test_saved.py fills every attention of one by a single load."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._whole import Named, of_all
from flax_attn.parity import Rule
from flax_attn.weights.known_layers import flax_state

LLAMA = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 3}


def at(modules):
    """A module that holds others at their paths."""
    root = nnx.Dict()
    for path, layer in modules.items():
        *above, last = path.split(".")
        node = root
        for name in above:
            if name not in node:
                node[name] = nnx.Dict()
            node = node[name]
        node[last] = layer
    return root


def alike(one, other):
    found, want = (flax_state(x) for x in (one, other))
    assert found.keys() == want.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value[...], want[path][...], path)


def test_layers_that_differ_keep_their_numbers():
    one, other = (
        Named("h.{}.a", "b.{}.c", (Rule("x.w -> y.k", "i o -> o i"),), rest)
        for rest in (True, False)
    )
    assert list(map(str, of_all(enumerate([one, other])))) == [
        'Rule("h.0.a.x.w -> b.0.c.y.k", "i o -> o i")',
        'Rule("h.0.a -> b.0.c")',
        'Rule("h.1.a.x.w -> b.1.c.y.k", "i o -> o i")',
    ]


def test_a_rule_inside_a_module_keeps_its_kind():
    assert (
        str(Rule.shifted("w -> scale", by=1.0).inside("a.*", "b.*"))
        == 'Rule.shifted("a.*.w -> b.*.scale", by=1.0)'
    )
    assert str(Rule.tied("b -> a").inside("m", "n")) == 'Rule.tied("m.b -> m.a")'


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"index": 0, "prefix": "model"}, "leave out the index; got 0 and prefix='model', to=None"),
        ({"index": 0, "to": "a.{}.b"}, "leave out the index; got 0 and prefix='', to='a.{}.b'"),
        ({"to": "blocks.attn"}, "{} for the number of a layer, .* got 'blocks.attn' for None"),
    ],
)
def test_bad_arguments_of_the_rules_of_a_whole_model_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        families.rules(LLAMA, **how)
    with pytest.raises(
        ValueError, match=r"one part, .* got 'b.{}' for encoder and decoder and cross"
    ):
        families.rules({"model_type": "bart"}, to="b.{}")
