"""What files of families gave before they became rows: 900 configs, drawn from 64,342.

Each is a small config in either spelling, with one field changed or left out or with other rotary
parameters, and a digest of what the files before gave: the layer, its rules for transformers and
GGUF, those of the whole model, the parts, the warnings; or the sentence of the error. Of all
64,342, 242 differ now: in 74 a value of `attention_dropout` that no layer of the type reads warns;
the others are errors that name a field more exactly, fields that no layer reads and that are not
checked any more, and `head_dim` of Cohere 2, which is served. This test goes with the next commit.
"""

import hashlib
import json
import warnings
from pathlib import Path

import pytest
from flax import nnx

from flax_attn import families
from flax_attn.families._config import warn_once

from .described import described

CASES = json.loads((Path(__file__).parents[2] / "data" / "change_over.json").read_text("utf-8"))


def outcome(made):
    """What a function gives, or its error as text."""
    try:
        return made()
    except Exception as error:  # of any class: its text is compared
        return f"{type(error).__name__}: {error}"


def layer_of(config, index, part):
    layer = nnx.eval_shape(lambda: families.attention(config, index, part=part, rngs=nnx.Rngs(0)))
    return type(layer).__name__ + repr(described(layer))


def rules_of(*of, **how):
    return "; ".join(map(str, families.rules(*of, **how)))


def digest(config, index, part):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = [
            outcome(lambda: layer_of(config, index, part)),
            outcome(lambda: rules_of(config, index, part=part)),
            outcome(lambda: rules_of(config, index, part=part, source="gguf")),
            outcome(lambda: rules_of(config, part=part)),
            outcome(lambda: repr(families.parts(config))),
        ]
        said = [str(x.message) for x in caught]
    outcomes.append([x for x in said if "model_type" in x or "rope" in x])
    return hashlib.sha256(json.dumps(outcomes).encode()).hexdigest()[:16]


@pytest.mark.parametrize("first", range(0, len(CASES), 100))
def test_rows_give_what_files_gave(first):
    for config, index, part, before in CASES[first : first + 100]:
        assert digest(config, index, part) == before, (config, index, part)
