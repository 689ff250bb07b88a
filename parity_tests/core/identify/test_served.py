"""`identify` names the attentions of 40 model types, as transformers publishes them."""

from importlib import import_module

import numpy as np
import pytest

from flax_attn.parity import identify
from parity_tests.tables import with_nightly

pytest.importorskip("transformers", reason="the modules are those of transformers")
SERVED = import_module("parity_tests.core.identify.served").SERVED

BY_NAME = {s.name: s for s in SERVED}
LENGTH = 7
# The reason that is printed where no layer is named.
UNNAMED = {
    "stablelm": "no scaled products",  # a LayerNorm with parameters of its own for each head
    "bert": "no output projection",
    "dinov3_vit": "no scaled products",  # its first token is not rotated
}


@pytest.mark.parametrize("name", with_nightly(BY_NAME, commit=["opt"]))
def test_published_attentions_are_named(name):
    module = BY_NAME[name].make()
    args, kwargs = BY_NAME[name].inputs(module, np.random.RandomState(0), LENGTH)
    result = identify(module, *args, kwargs=kwargs)
    assert (result.layer is None) == (name in UNNAMED), result
    assert UNNAMED.get(name, "") in result.why
