"""The table of docs/models.md has every model type that is served, with the layers that it has."""

import pytest

from flax_attn import families
from flax_attn._internal.markdown import cells
from flax_attn.parity import judge
from parity_tests.core.pages.pages import text_of
from parity_tests.tables import with_nightly

from .page import HEAD, MARKS, WHOLE, first_smalls, layer_of, sight, whole

found = MARKS.search(text_of("docs/models.md"))
assert found is not None
FIRST, *ROWS = cells(found["table"])
SERVED = {row[0]: row for row in ROWS}


def test_the_table_has_every_type():
    assert tuple(FIRST) == HEAD and tuple(SERVED) == families.TYPES
    assert f"[{len(ROWS)} model types](docs/models.md#served-model-types)" in text_of("README.md")
    assert all(float(error) <= judge.SAME_FUNCTION for _, _, _, error, _ in ROWS)


def test_the_list_of_whole_models_has_every_type_that_is_built_whole():
    shown = WHOLE.search(text_of("docs/models.md"))
    assert shown is not None and shown["table"] == whole()
    number = len(families.WHOLE)
    assert f"`families` builds {number} model types whole" in text_of("docs/models.md")
    assert f"[{number} of them whole](docs/models.md#a-whole-model)" in text_of("README.md")


def test_the_page_names_the_worst_errors():
    (worst, name), (second, _) = sorted(((float(row[3]), row[0]) for row in ROWS), reverse=True)[:2]
    assert name == "recurrent_gemma"
    text = " ".join(text_of("docs/models.md").split())
    assert f"at most {worst:.0e}, in the recurrence of RecurrentGemma, and {second:.0e} in" in text


@pytest.mark.nightly(but=["deberta-v2", "granitemoe", "longcat_flash"])
@pytest.mark.parametrize("name", with_nightly(SERVED, commit=24))
def test_a_row_says_which_layers_there_are_and_what_they_see(name):
    made = [layer_of(small) for small in first_smalls(name)]
    layers = dict.fromkeys(type(layer).__name__ for layer in made)
    seen = dict.fromkeys(sight(layer) for layer in made)
    assert SERVED[name][1:3] == [", ".join(layers), ", ".join(seen)]
