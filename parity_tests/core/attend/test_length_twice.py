"""Twice the tokens take at most some twice the memory, but in the layers that a page names."""

import itertools

import jax
import numpy as np
import pytest

from parity_tests.core.cases import every_case, pure, smallest
from parity_tests.core.sources import ROOT
from parity_tests.tables import with_nightly

TOKENS, WIDE = 2048, 64  # and how wide an image of them is
IMAGES = ("axial", "decomposed_relative", "spatial_reduction", "window")
HOLDS_ALL = {  # weights or logits of all pairs, as they are written or as others read them
    "bahdanau": "BahdanauAttention",
    "disentangled": "DisentangledAttention",
    "indexed_sparse": "IndexedSparseAttention",
    "luong": "LuongAttention",
    "relative_shift": "RelativeShiftAttention",
    "selective": "SelectiveAttention",
    "single_head": "SingleHeadAttention",
    "talking_heads": "TalkingHeadsAttention",
}
CHAPTERS = ("self_attention_v1", "self_attention_v2", "simplified_self_attention")
CHAPTERS += ("uniform_causal_average",)  # and those whose tables have a context_length
LAYERS = [
    case
    for case in smallest([c for c in every_case() if not callable(c.config)], 1)
    if "context_length" not in case.config and case.variant not in CHAPTERS
]


def _with_tokens(name, shape, tokens):
    """The shape with so many tokens, and one entry of a batch."""
    if name == "rel_embeddings":
        return shape
    if name in ("k", "v", "values"):  # *B T K H
        return 1, tokens, *shape[-2:]
    return (1,) * (len(shape) - 2) + (tokens, shape[-1])


def memory(case, tokens, backward):
    """MiB that a compiled call needs besides its arguments and results."""
    inputs = {
        name: np.ones((tokens // WIDE, WIDE, x.shape[-1]), np.float32)
        if case.variant in IMAGES
        else np.ones(_with_tokens(name, x.shape, tokens), x.dtype)
        for name, x in case.arrays().items()
        if np.issubdtype(x.dtype, np.floating)
    }
    f, params, floats = pure(case, inputs)

    def both(params, floats, cotangent):
        return jax.vjp(f, params, floats)[1](cotangent)

    o = jax.eval_shape(f, params, floats)
    given = (both, params, floats, o) if backward else (f, params, floats)
    program = jax.jit(given[0]).lower(*given[1:]).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


BOTH = list(itertools.product(LAYERS, (False, True)))
AT_COMMIT = [(case, False) for case in LAYERS[::3] if case.variant not in HOLDS_ALL]
AT_COMMIT += [(case, False) for case in LAYERS if case.variant in ("sigmoid", *IMAGES[1:2])]


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "backward"), with_nightly(BOTH, commit=AT_COMMIT), ids=str)
def test_memory_grows_as_the_tokens_do(case, backward):
    one, two = (memory(case, tokens, backward) for tokens in (TOKENS, 2 * TOKENS))
    if case.variant not in HOLDS_ALL:
        assert two < 3 * one + 1
    elif backward:  # of some layers the gradients alone
        assert two > 2.9 * one


@pytest.mark.parametrize("name", HOLDS_ALL.values())
def test_the_limits_page_names_layers_that_materialize_all_weights(name):
    assert f"`{name}`" in (ROOT / "docs/limits.md").read_text("utf-8")
