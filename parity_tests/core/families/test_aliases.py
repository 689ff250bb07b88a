"""Other names of a family's attention, each proven by one case and by its defaults."""

from dataclasses import replace
from itertools import product

import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._choose import SAME, WHY_NOT
from flax_attn.families._published import ALIASES, FACTS, KNOWN
from flax_attn.families._table import FAMILIES
from flax_attn.families._typos import distance
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.families import aliases, parts, witness
from parity_tests.families.configs import CONFIGS
from parity_tests.families.eager import ours, theirs
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .described import described, described_part

SERVED = [*FAMILIES, *ALIASES]
ALONE = [name for name in ALIASES if name not in parts.MODELS]  # with one attention in a layer


@pytest.mark.nightly
@pytest.mark.parametrize("alias", with_nightly(ALONE, commit=12))
def test_an_alias_has_the_attention_of_its_family(alias, transformers):
    small = replace(next(x for x in CONFIGS if x.name == ALIASES[alias]), alias=alias)
    given = small.spelt("new")
    layer, want = theirs(given, small)
    assert want is not None, layer
    assert judge.same_function(ours(given, small, layer), want).ok


@pytest.mark.nightly
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


@pytest.mark.nightly(but=["granite_docling_text"])
@pytest.mark.parametrize("alias", with_nightly(ALONE, commit=4))
def test_an_alias_has_the_defaults_of_its_own_class(alias, transformers):
    whole = {**witness.found(alias, "Config")().to_dict(), "model_type": alias}
    plain, full = (
        described(nnx.eval_shape(lambda x=x: families.attention(x, 0, rngs=nnx.Rngs(0))))
        for x in ({"model_type": alias}, whole)
    )
    assert plain == full


def test_aliases_are_of_families_and_no_families_themselves():
    assert {*ALIASES.values()} <= {*FAMILIES} and not {*ALIASES} & {*FAMILIES}
    assert {*aliases.PLACES, *aliases.MODELS} <= {*ALIASES}
    assert not {*aliases.PLACES} & {*aliases.MODELS}
    assert {*FACTS} == {*SERVED}


def refused(name):
    """The error for a model_type that is not supported."""
    with pytest.raises(ValueError, match="model_type") as caught:
        families.attention({"model_type": name}, 0, rngs=nnx.Rngs(0))
    return str(caught.value)


@pytest.mark.nightly
def test_a_misspelt_model_type_gets_a_suggestion():
    for name in SERVED:
        for slip in (name[0] + name, name[:2] + name[3:], name.upper()):
            if len(name) > 5 and slip not in (*KNOWN, *SERVED):
                named = refused(slip).split("Did you mean ")[1].strip("'?")
                near = [distance(slip.lower(), x) for x in (named, name)]
                assert named == name or near[0] <= near[1], slip


@pytest.mark.nightly
def test_an_unrelated_model_type_gets_no_suggestion():
    for name in KNOWN:
        why = f": {WHY_NOT[name]}." if name in WHY_NOT else f".{SAME}"
        known = f"model_type {name!r} is known to transformers, and its attention is not served"
        assert refused(name) == known + why
    assert {*WHY_NOT} <= {*KNOWN}
    for name in (*SERVED, *KNOWN):
        assert "Did you mean" not in refused(f"{name}9") and "mean" not in refused(f"z{name}")


def test_a_refusal_names_ten_types():
    listed = refused("x").split("one of ")[1].split(" or ")[0].split(", ")
    assert len(listed) == 10 and {*listed} <= {*SERVED}
