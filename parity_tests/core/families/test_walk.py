"""No field of a config is ignored: a change is the same on both sides, or refused by its name.

What transformers builds and runs of a small config with changes drawn by a seed is built and equal,
or stands in the table of reasons.
"""

import re

import pytest

from parity_tests.core.drawing import float64 as float64
from parity_tests.families.configs import BOTH, place, titled
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .walk import compared, drawn, walk

# Of each family the first config in the new spelling, the second in the old one, and so on.
TURNS = [pair for pair in BOTH if (place(pair[0]) % 2 == 0) == (pair[1] == "new")]
EACH = {(small.name, small.part): small for small in reversed(PARTS)}


NOW = [pair for pair in TURNS if titled(pair[0]) + pair[1] in ("gemma-0new", "olmo2-1old")]


@pytest.mark.filterwarnings("ignore:.*transformers:UserWarning")  # that both read it otherwise
@pytest.mark.nightly
@pytest.mark.parametrize(("small", "spelling"), with_nightly(TURNS, commit=NOW), ids=titled)
def test_no_field_is_ignored(small, spelling, transformers):
    walk(small, spelling)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "small",
    with_nightly(EACH.values(), commit=[EACH["umt5", "cross"]]),
    ids=map("-".join, EACH),
)
def test_no_field_of_a_part_is_ignored(small, transformers):
    walk(small, "new")


REASONS = {  # what a refusal says of the field, and what is missing
    r"\S+ must be a (whole number of at least 1|number above zero); got 0(\.0)?\.$": "a size of 0",
    "index must be the place of a layer": "the layer itself: the model is not so deep",
    "in place of self attention": "attention: the layer has another kind of mixer",
    r"num_attention_heads( of a stage)? must divide": "heads for a part of the width",
    "bi_data=True is not served": "a half of a batch that is read backwards",
    "an even head_dim; got head_dim=1,": "a pair: transformers makes two components of one",
    r"partial_rotary_factor\S* (is not served: this|must be qk_rope)": "rates of most pairs",
    "must leave an even width beside": "a ramp, or rates by the length, of an odd width",
    "partial_rotary_factor is a share, from 0 to 1": "components: rotary_dim is wider than a head",
    "clamp_len=.* is not served": "distances that are cut off",
    "deberta_buckets needs an even number": "buckets for far distances",
    "_factors must hold finite numbers": "rates of the sequences that are longer, or shorter",
    "time_step_limit must be two numbers": "steps: the lower limit is above the upper one",
    "pos_att_type must list c2p, p2c or both": "a term: other words change the scale alone",
    "relative_attention=False is not served": "distances: it is the attention of BERT",
    "use_rel_pos=False is not served": "the tables: it is the attention of a ViT",
    "relative_attention_max_distance must exceed": "distances for the buckets of the logarithm",
    "hidden_act must be one of 'silu', 'swish'": "a convolution with another activation",
    "query_bias and value_bias must be one": "a layer with a bias of some of the projections",
    "by indexer_types, or index_topk_freq": "an indexer: it reads the choice of an earlier layer",
}
SEEDS = [range(12), *(range(first, first + 100) for first in range(100, 2100, 100))]


@pytest.mark.parametrize("seeds", with_nightly(SEEDS, commit=SEEDS[:1]), ids=str)
def test_what_transformers_builds_is_built_and_equal(seeds, float64, transformers):
    told = {seed: compared(*drawn(seed)) for seed in seeds}
    reasons = re.compile("|".join(["^equal$", "^no model$", *REASONS]))
    assert not {seed: text for seed, text in told.items() if not reasons.search(text)}
    assert [*told.values()].count("equal") > len(seeds) / 2  # else nothing is proven
