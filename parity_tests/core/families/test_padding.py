"""Left padding: with `empty="mean"` every row is transformers', also those that see nothing."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.masks import Dense
from flax_attn.parity import compare
from parity_tests.families import inputs, parts, prove_part, witness
from parity_tests.families.configs import CONFIGS, NAMES
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

# Three tokens of padding, nothing else, and none. Decoders have empty rows in the first of them.
PRESENT = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0] * 7, [1] * 7])
X = np.random.RandomState(0).standard_normal((*PRESENT.shape, 48))
# Whole models of Llama 4 let the chunks begin behind the padding; here is a layer without chunks.
PADDED = {x.name: x for x in reversed(CONFIGS)} | {
    "llama4_text": next(x for x in CONFIGS if x.name == "llama4_text" and x.index == 1)
}


# Whose rows that see nothing are in transformers the mean of what a causal mask lets them see.
OWN_MEAN = ("gpt_neo",)
EACH = {(small.name, small.part): small for small in reversed(PARTS)}


def padded(layer, x, present, **more):
    mask = layer.mask & Dense(present[:, None, None, :] != 0)
    return layer(x, **more, mask=mask, empty="mean")


def seeing(call):
    """The outputs of tokens that are there, zeros for the others."""
    return lambda layer, x, present: call(layer, x, present) * present[..., None]


@pytest.mark.parametrize("name", with_nightly(NAMES, commit=18))
def test_all_rows_of_left_padded_batches_are_transformers(name, transformers):
    small = PADDED[name]
    config = witness.config_of(small.spelt("new"), name)
    given = config.to_dict()
    call = witness.call(config, name, small.index)
    calls = [seeing(each) if name in OWN_MEAN else each for each in (call, padded)]
    report = compare(
        witness.attention(config, name, small.index),
        families.attention(given, small.index, rngs=nnx.Rngs(0)),
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
def test_all_rows_of_a_part_are_transformers(small, transformers):
    given = inputs(small, parts.config_of(small.given, small.name))
    length = given.get("memory", given["x"]).shape[1]
    present = np.asarray([[0] * 3 + [1] * (length - 3), [0] * length])
    report = prove_part(small, kwargs={**given, "present": present}, flax_call=padded).report
    assert report.certain, report
