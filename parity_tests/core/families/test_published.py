"""Configs as they are published: each is built, and shrunk equal to transformers, or refused."""

import re
import warnings

import jax
import pytest
from flax import nnx

from flax_attn import families
from flax_attn._internal.caller import warn_once
from flax_attn.families._choose import family_of, resolved
from flax_attn.families._published import facts_of
from flax_attn.parity import judge
from parity_tests.families import eager
from parity_tests.families.configs import Small
from parity_tests.families.parts import Part
from parity_tests.tables import with_nightly

from .texts import PUBLISHED, shrunk

# All others must be built, each part that they have; None for a model without parts.
QUANTISED = "quantization_config of auto-round of 4 bits"
REFUSED = {
    ("DeepSeek-V4 (small test)", None): "'deepseek_v4' is known to transformers, and its attention",
    ("MiniMax-M1", None): "got 'minimax_m1'. It may be newer than transformers",
    ("Pixtral (small test)", "vision"): "hidden_size / num_attention_heads = 16 components",
    ("Qwen3-Coder-Next (int4)", None): QUANTISED,
    ("gemma-4 assistant text (small test)", None): "all of them read keys and values of another",
}
BY_ITS_CLASS = "model_type 'kimi_k2' is not known here"  # it is DeepSeek-V3's, by its architectures
COMMIT = ("Llama-4-Maverick (4 layers)", "Qwen3-VL-8B", "phimoe (Phi-3.5-MoE's rope)", "gpt2")


def parts_of(config):
    return [*families.parts(config)] or [None]


def built(config, index, part):
    return nnx.eval_shape(lambda: families.attention(config, index, part=part, rngs=nnx.Rngs(0)))


def kinds(config, part):
    """The number of the first layer of each kind, and what was warned of.

    Of a deep model the first layers and the last ones are looked at, since kinds come in turns.
    """
    family, read = family_of(*resolved(config, part))
    depth, first = read.count("num_hidden_layers"), {}
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in dict.fromkeys((*range(min(depth, 9)), depth - 2, depth - 1)):
            if index >= 0 and not family.missing_reason(read, index):
                layer = built(config, index, part)
                first.setdefault(str(nnx.graphdef(layer)), index)
    return [*first.values()], [str(x.message) for x in caught]


@pytest.mark.nightly(
    but=[
        "LFM2-350M",
        "Llama-4-Maverick (4 layers)",
        "Qwen3-Coder-Next (int4)",
        "SmolLM3-3B",
        "gemma-2-9b",
        "phimoe (Phi-3.5-MoE's rope)",
        "t5-small",
    ]
)
@pytest.mark.filterwarnings(f"ignore:{BY_ITS_CLASS}")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_built_without_a_warning_or_refused(name):
    try:
        every = parts_of(PUBLISHED[name])
    except ValueError as refused:
        assert REFUSED[name, None] in str(refused)
        return
    for part in every:
        if (name, part) in REFUSED:
            with pytest.raises(ValueError, match=re.escape(REFUSED[name, part])):
                built(PUBLISHED[name], 0, part)
        else:
            numbers, warned = kinds(PUBLISHED[name], part)
            assert numbers and all(x.startswith(BY_ITS_CLASS) for x in warned), (part, warned)


def compared(config, part):
    sub, rest = resolved(config, part)
    sub = shrunk(sub, facts_of(sub["model_type"]).defaults)
    for index in kinds(sub, rest)[0]:
        is_part = rest is not None
        name = sub["model_type"]
        small = Part(name, rest, index=index) if is_part else Small(name, {}, index=index)
        layer, want = eager.theirs(sub, small)
        assert want is not None, layer
        got = eager.ours(sub, small, layer)
        assert not isinstance(got, Exception), got
        assert judge.same_function(got, want).ok, index


BUILT = [name for name in PUBLISHED if (name, None) not in REFUSED]


@pytest.mark.nightly
@pytest.mark.filterwarnings(f"ignore:{BY_ITS_CLASS}")
@pytest.mark.parametrize("name", with_nightly(BUILT, commit=COMMIT))
def test_a_published_config_gives_the_same_numbers(name, transformers):
    with jax.enable_x64(True):
        for part in parts_of(PUBLISHED[name]):
            if (name, part) not in REFUSED:
                compared(PUBLISHED[name], part)
