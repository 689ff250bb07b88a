"""Left padding: with `empty="mean"` every row equals transformers, fully masked rows too."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.layers._recurrent import Recurrent
from flax_attn.masks import Dense
from flax_attn.parity import compare
from parity_tests.families import inputs, parts, prove_part, witness
from parity_tests.families.configs import CONFIGS, NAMES
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

# Three tokens of padding, nothing else, and none. Decoders have empty rows in the first of them.
PRESENT = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0] * 7, [1] * 7])
X = np.random.RandomState(0).standard_normal((*PRESENT.shape, 48))
# Whole models of Llama 4 let the chunks begin behind the padding; here is a layer without chunks.
PADDED = {x.name: x for x in reversed(CONFIGS)} | {
    "llama4_text": next(x for x in CONFIGS if x.name == "llama4_text" and x.index == 1),
    # Its recurrence takes padding for tokens; here is a layer with attention.
    "recurrent_gemma": next(x for x in CONFIGS if x.name == "recurrent_gemma" and x.index == 2),
}


# Whose rows that see nothing are in transformers the mean of what a causal mask lets them see.
OWN_MEAN = ("gpt_neo",)
EACH = {(small.name, small.part): small for small in reversed(PARTS)}


def padded(layer, x, present, **more):
    if isinstance(layer, Recurrent):
        return layer(x, **more, valid=present != 0)
    mask = layer.mask & Dense(present[:, None, None, :] != 0)
    return layer(x, **more, mask=mask, empty="mean")


def seeing(call):
    """The outputs of real tokens, zeros for padding."""

    def called(layer, x, present, **more):
        return call(layer, x, present=present, **more) * present[..., None]

    return called


OF_TOKENS = [name for name in NAMES if witness.PLACES[name].called is None]


@pytest.mark.parametrize("name", with_nightly(OF_TOKENS, commit=18))
def test_all_rows_of_left_padded_batches_equal_transformers(name, transformers):
    small = PADDED[name]
    config = witness.config_of(small.spelt("new"), name)
    given = config.to_dict()
    layer = families.attention(given, small.index, rngs=nnx.Rngs(0))
    calls = [witness.call(config, name, small.index), padded]
    if name in OWN_MEAN or isinstance(layer, Recurrent):
        calls = list(map(seeing, calls))
    report = compare(
        witness.attention(config, name, small.index),
        layer,
        X[..., : config.hidden_size],
        PRESENT,
        rules=families.rules(given, small.index),
        torch_call=calls[0],
        flax_call=calls[1],
        dtypes=("float64",),
        eager=False,
        taps=False,
    )
    assert report.certain, report  # torch's finfo.min is so large that its noise hides differences


@pytest.mark.parametrize("small", with_nightly(EACH.values(), commit=6), ids=map("-".join, EACH))
def test_all_padded_rows_of_a_part_equal_transformers(small, transformers):
    config = parts.config_of(small.given, small.name)
    layer = families.attention(config.to_dict(), small.index, part=small.part, rngs=nnx.Rngs(0))
    calls, given = [parts.call(config, small), padded], inputs(small, config)
    if isinstance(layer, Recurrent):
        calls = list(map(seeing, calls))
    length = given.get("memory", given["x"]).shape[1]
    present = np.asarray([[0] * 3 + [1] * (length - 3), [0] * length])
    how = {"kwargs": {**given, "present": present}, "torch_call": calls[0]}
    report = prove_part(small, **how, flax_call=calls[1]).report
    assert report.certain, report
