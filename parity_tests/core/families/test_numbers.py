"""Padding beside positions: transformers' layers as `generate` calls them, and as `forward` does.

`generate` counts the real tokens of each row, as our layers do. `forward` counts slots, which
`positions=jnp.arange(T)` beside `valid` does too. Rows are given one by one, since transformers
takes some rates from the longest row of a batch.
"""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.layers._recurrent import Recurrent
from flax_attn.parity import assert_parity
from parity_tests.families import witness
from parity_tests.families.configs import CONFIGS
from parity_tests.tables import with_nightly

PRESENT = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1], [1] * 7])
X = np.random.RandomState(0).standard_normal((*PRESENT.shape, 48))
COUNTED = np.maximum(PRESENT.cumsum(-1) - 1, 0)
SLOTS = np.broadcast_to(np.arange(7), PRESENT.shape)

# Layers whose place in transformers asks for other inputs than tokens.
SMALL = {
    f"{small.name} {small.index}": small
    for small in reversed(CONFIGS)
    if witness.PLACES[small.name].called is None
}
# Their numbers are not those of `position_ids`: the reason.
OTHERWISE = {
    "llama4_text 1": "its temperature counts slots, whatever position_ids say",
}
COMMIT = ("ministral3 0", "mistral4 0", "llama4_text 0", "phi3 0", "gemma3_text 0", "bloom 0")


def by_rows(call):
    """Each row by itself; zeros for padding."""

    def called(layer, x, present, at):
        import torch

        rows = [
            call(layer, x[i : i + 1], present=present[i : i + 1], position_ids=at[i : i + 1])
            for i in range(len(x))
        ]
        return torch.cat(rows) * present[..., None]

    return called


def compared(key, at, flax_call):
    small = SMALL[key]
    config = witness.config_of(small.spelt("new"), small.name)
    layer = families.attention(config.to_dict(), small.index, rngs=nnx.Rngs(0))
    if isinstance(layer, Recurrent):
        pytest.skip("a recurrence counts nothing")
    assert_parity(
        witness.attention(config, small.name, small.index),
        layer,
        X[..., : config.hidden_size],
        PRESENT,
        at,
        rules=families.rules(config.to_dict(), small.index),
        torch_call=by_rows(witness.call(config, small.name, small.index)),
        flax_call=flax_call,
        dtypes=("float64",),
        eager=False,
        taps=False,
        grads=False,
    )


@pytest.mark.nightly(but=["bloom 0"])
@pytest.mark.parametrize(
    "key", with_nightly([x for x in SMALL if x not in OTHERWISE], commit=[x for x in COMMIT])
)
def test_padded_rows_equal_transformers_as_called_by_generate(key, transformers):
    compared(key, COUNTED, lambda layer, x, present, at: layer(x, valid=present != 0))


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["ministral3 0", "llama4_text 1"])
def test_slots_as_positions_equal_transformers_forward(key, transformers):
    compared(key, SLOTS, lambda layer, x, present, at: layer(x, valid=present != 0, positions=at))
