"""The rules of a whole model: one `weights.load` of its state fills every attention that it has."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from flax_attn import families, weights
from flax_attn.families._choose import family_of
from flax_attn.families._naming import named_layers
from flax_attn.families._published import ALIASES
from flax_attn.families._whole import Named, of_all
from flax_attn.parity import Rule, port
from flax_attn.weights.known_layers import flax_state
from parity_tests.families import parts, witness
from parity_tests.families.facts import model_of, smalls
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

NOWHERE_ELSE = ("albert", "longcat_flash")  # layers with one attention, a layer with two
UNSERVED = ("glm_moe_dsa",)  # some of whose layers read what an earlier one has chosen
SERVED = [name for name in families.TYPES if name not in (*UNSERVED, *parts.MODELS)]
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


def arrays(model, path, beside):
    """What a model trains below a path, by name, but for what begins with some names."""
    below = {k: v.data for k, v in model.named_parameters() if k.startswith(f"{path}.")}
    return {k: v.numpy() for k, v in below.items() if not k.startswith(beside)}


def alike(one, other):
    found, want = (flax_state(x) for x in (one, other))
    assert found.keys() == want.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value[...], want[path][...], path)


def fills_all(given, model, paths, to=None, **how):
    """One load of all attentions gives what each has by its own rules.

    Args:
      given: the config.
      model: of torch.
      paths: of the attentions, each with the number of its layer.
      to: where the attentions shall be; None for where torch has them.
      how: the part, where the model has some.
    """
    made = {path: families.attention(given, i, rngs=nnx.Rngs(i), **how) for i, path in paths}
    there = {path: path if to is None else to.format(i) for i, path in paths}
    tensors = {}
    for i, path in paths:
        beside = [x.names for x in families.rules(given, i, **how) if x.kind == "skip"]
        tensors |= arrays(model, path, tuple(f"{path}.{name}." for name in beside))
    rules = families.rules(given, to=to, **how)
    weights.load(at({there[path]: layer for path, layer in made.items()}), tensors, rules=rules)
    for i, path in paths:
        one = families.attention(given, i, rngs=nnx.Rngs(9), **how)
        alike(made[path], port(model.get_submodule(path), one, families.rules(given, i, **how)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(SERVED, commit=9))
def test_one_load_fills_every_attention(name, transformers):
    for small in smalls(name):
        config = witness.config_of(small.spelt("new"), name)
        model, given = model_of(config, name), config.to_dict()
        layers = named_layers(given, None, "transformers", ("", None))
        paths = list(dict.fromkeys((i, named.target.format(i)) for i, named in layers))
        for i, path in paths:
            assert type(model.get_submodule(path)) is type(witness.attention(config, name, i))
        for to in (None,) if name in NOWHERE_ELSE else (None, "blocks.{}.attn"):
            fills_all(given, model, paths, to)


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(parts.MODELS, commit=6))
def test_one_load_fills_every_attention_of_all_parts(name, transformers):
    family = ALIASES.get(name, name)
    small = replace(next(x for x in PARTS if x.name == family), alias=name)
    config = parts.config_of(small.given, small.model_type)
    model, given = parts.model_of(config, small.model_type), config.to_dict()
    for part in families.parts(given):
        of = replace(small, part=part)
        layers = family_of(given, part)[1]["num_hidden_layers"]
        paths = [(i, parts.path_of(replace(of, index=i))) for i in range(layers)]
        fills_all(given, model, paths, "blocks.{}.attn", part=part)


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
