"""Left padding: with `empty="mean"` every row is transformers', also those that see nothing."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.masks import Dense
from flax_attn.parity import compare
from parity_tests.families import witness
from parity_tests.families.configs import CONFIGS, NAMES

# Three tokens of padding, nothing else, and none. Decoders have empty rows in the first of them.
PRESENT = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0] * 7, [1] * 7])
X = np.random.RandomState(0).standard_normal((*PRESENT.shape, 48))
# Whole models of Llama 4 let the chunks begin behind the padding; here is a layer without chunks.
PADDED = {x.name: x for x in reversed(CONFIGS)} | {
    "llama4_text": next(x for x in CONFIGS if x.name == "llama4_text" and x.index == 1)
}


def padded(layer, x, present):
    mask = layer.mask & Dense(present[:, None, None, :] != 0)
    return layer(x, mask=mask, empty="mean")


@pytest.mark.parametrize("name", NAMES)
def test_all_rows_of_left_padded_batches_are_transformers(name, transformers):
    small = PADDED[name]
    config = witness.config_of(small.spelt("new"), name)
    given = config.to_dict()
    report = compare(
        witness.attention(config, name, small.index),
        families.attention(given, small.index, rngs=nnx.Rngs(0)),
        X[..., : config.hidden_size],
        PRESENT,
        rules=families.rules(given, small.index),
        torch_call=witness.call(config, name, small.index),
        flax_call=padded,
        dtypes=("float64",),
        eager=False,
        taps=False,
    )
    assert report.certain, report  # torch's finfo.min is so large that its noise hides differences
