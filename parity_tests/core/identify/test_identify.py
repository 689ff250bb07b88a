"""`identify` names the layer that a module is, with the type's own options, and no other."""

from importlib import import_module

import numpy as np
import pytest

from flax_attn.parity import identify
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the corpus is of torch's modules")
corpus = import_module("parity_tests.core.identify")
wrong_options = import_module("parity_tests.core.identify.truths").wrong_options

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BY_NAME = {s.name: s for s in corpus.SUBJECTS}
LENGTH = 7
# What no layer of ours is, or what cannot be measured: the reason that is printed.
UNNAMED = {
    "handed_padding_no_output": "no output projection",
    "single_head": "no output projection",
    "cross_residual": "made from the result of native_layer_norm in ln_1",
    "block_with_norm_and_residual": "made from the result of native_layer_norm in norm",
    "sinks_as_column": "no projections lead to",
    "softmax_by_logsumexp": "no softmax between two products",
    "blocks_as_axis": "no axis of the weights has the queries",
    "tiles_of_keys": "no axis of the weights has the queries",
    "one_query_at_a_time": "no axis of the weights has the queries",
}
NAMED = [s.name for s in corpus.ATTENTION if s.name not in UNNAMED]
AT_COMMIT = ["fused_groups_outermost", "norm_of_heads_after_rotary", "handed_document_ids"]


def identified(name, seed=0):
    rng = np.random.RandomState(seed)
    module = BY_NAME[name].make(rng)
    args, kwargs = BY_NAME[name].inputs(module, rng, LENGTH)
    return identify(module, *args, kwargs=kwargs), BY_NAME[name].truth(module)


@pytest.mark.parametrize("name", with_nightly(NAMED, commit=AT_COMMIT))
def test_modules_are_named_with_their_options(name):
    result, truth = identified(name)
    assert result.layer is not None, result
    assert wrong_options(result, truth) == [], f"{truth}\n{result}"
    assert all(report.ok for report in result.reports) and len(result.reports) >= 3


@pytest.mark.parametrize("name", with_nightly(UNNAMED, commit=["single_head"]))
def test_what_is_not_named_is_said(name):
    result, _ = identified(name)
    assert result.layer is None and UNNAMED[name] in result.why, result


OTHERS = [s.name for s in corpus.OTHERS]


@pytest.mark.parametrize("name", with_nightly(OTHERS, commit=2))
def test_nothing_else_is_named(name):
    result, _ = identified(name)
    assert result.layer is None and result.why
