"""Other names of a family's attention, each proven by one case and by its defaults."""

from dataclasses import replace
from itertools import product

import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._aliases import ALIASES, DEFAULTS
from flax_attn.families._choose import FAMILIES
from flax_attn.families._config import Family
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.families import aliases, parts, witness
from parity_tests.families.configs import CONFIGS
from parity_tests.families.eager import ours, theirs
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .described import described, described_part


@pytest.mark.parametrize("alias", with_nightly(aliases.PLACES, commit=12))
def test_an_alias_has_the_attention_of_its_family(alias, transformers):
    small = replace(next(x for x in CONFIGS if x.name == ALIASES[alias]), alias=alias)
    given = small.spelt("new")
    layer, want = theirs(given, small)
    assert want is not None, layer
    assert judge.same_function(ours(given, small, layer), want).ok


@pytest.mark.parametrize(
    ("alias", "part"),
    with_nightly(product(aliases.MODELS, ["encoder", "decoder", "cross"]), commit=7),
)
def test_an_alias_has_all_three_attentions_of_its_family(alias, part, transformers):
    small = next(x for x in PARTS if (x.name, x.part) == (ALIASES[alias], part))
    small = replace(small, alias=alias)
    layer, want = theirs(small.given, small)
    assert want is not None, layer
    assert judge.same_function(ours(small.given, small, layer), want).ok
    whole = {**parts.config_of({}, alias).to_dict(), "model_type": alias}
    plain, full = (described_part(x, 0, part) for x in ({"model_type": alias}, whole))
    assert plain == full


@pytest.mark.parametrize("alias", aliases.PLACES)
def test_an_alias_has_the_defaults_of_its_own_class(alias, transformers):
    whole = {**witness.found(alias, "Config")().to_dict(), "model_type": alias}
    plain, full = (
        described(nnx.eval_shape(lambda x=x: families.attention(x, 0, rngs=nnx.Rngs(0))))
        for x in ({"model_type": alias}, whole)
    )
    assert plain == full


def test_aliases_are_of_families_and_no_families_themselves():
    assert {*ALIASES.values()} <= {*FAMILIES} and not {*ALIASES} & {*FAMILIES}
    assert {*aliases.PLACES, *aliases.MODELS} == {*ALIASES} >= {*DEFAULTS}
    assert not {*aliases.PLACES} & {*aliases.MODELS}
    for name, fields in DEFAULTS.items():
        family = FAMILIES[ALIASES[name]]
        known = family if isinstance(family, Family) else family["encoder"]
        assert {*fields} <= {*known.defaults}


def test_a_typing_error_in_an_alias_is_named():
    with pytest.raises(ValueError, match="Did you mean 'mixtral'"):
        families.attention({"model_type": "mixtrall"}, 0, rngs=nnx.Rngs(0))
