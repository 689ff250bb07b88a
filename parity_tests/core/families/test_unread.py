"""Fields that a model_type does not read: some warn once by name, the others are ignored."""

import re
import warnings

import pytest
from flax import nnx

from flax_attn import families
from flax_attn._internal.caller import warn_once
from flax_attn.families import _unread
from flax_attn.families._choose import _READ_BY_ANY
from flax_attn.families._config import Config, Family
from flax_attn.families._published import ALIASES, KNOWN, facts_of
from flax_attn.families._table import FAMILIES
from parity_tests.core.drawing import float64 as float64
from parity_tests.families import parts
from parity_tests.families.configs import CONFIGS
from parity_tests.families.parts import PARTS
from parity_tests.tables import each

from .faulty import FAULTY

LLAMA = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6}
SERVED = families.TYPES


def built(given, index=0, **how):
    return nnx.eval_shape(lambda: families.attention(given, index, rngs=nnx.Rngs(0), **how))


def part_of(name):
    parts = [*families.parts({"model_type": name})]
    return {"part": parts[0]} if parts else {}


def said(given, **how):
    """All warnings of a config; the memory of earlier warnings is cleared first."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            built(given, **how)
    assert all(x.filename.endswith("test_unread.py") for x in caught)
    return [str(x.message) for x in caught]


WORTH_SAYING = {
    "softcap": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    "norms": ({"use_qk_norm": True}, "use_qk_norm=True"),
    "window": ({"sliding_window": 4096}, "sliding_window=4096"),
    "a bias": ({"qkv_bias": True}, "qkv_bias=True"),
    "part of the heads": ({"rotary_dim": 4}, "rotary_dim=4"),
    "a share of the heads": ({"rotary_pct": 0.5}, "rotary_pct=0.5"),
    "pairs beside each other": ({"rope_interleave": True}, "rope_interleave=True"),
    "keys of one head": ({"multi_query": True}, "multi_query=True"),
    "a letter": (
        {"hidden_sise": 48, "hidden_size": None},
        "hidden_sise=48 .did you mean hidden_si",
    ),
    "a letter less": ({"num_key_value_head": 3}, "did you mean num_key_value_heads"),
    "two swapped": ({"attentoin_bais": True}, "did you mean attention_bias"),
    "of a field that is there": ({"hidden_sizee": 1}, "hidden_sizee=1 .did you mean hidden_size"),
    "the first letter": ({"nidden_size": 48}, "nidden_size=48 .did you mean hidden_size"),
    "two fields": (
        {"use_qk_norm": 1, "head_dimm": 8},
        "use_qk_norm=1, head_dimm=8 .did you mean h",
    ),
}


SILENT = {
    "nothing": {"attn_logit_softcapping": None, "use_qk_norm": False, "rope_scaling": {}},
    "another part of the model": {"mlp_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    "a name of no slip": {"heads": 7, "logit_scale": 2.0, "_name_or_path": "x", "quant": 4},
    "a private field": {"_hidden_size": 12},
    "a field of a class that is not served": {"sliding_windows": [1], "num_labels": 2},
    "the same by another name": {"num_heads": 6},
    "what is built": {
        **{"qkv_bias": False, "rotary_dim": 8, "rotary_pct": 1.0, "rope_interleave": False},
        **{"multi_query": False, "num_kv_heads": 6},
    },
}


BUILT = {
    "qwen3": {"use_qk_norm": True, "rotary_pct": 1},
    "deepseek_v2": {"rope_interleave": True},
    "phi": {"rotary_dim": 4, "partial_rotary_factor": 0.5},
    "nomic_bert": {"n_embd": 48, "n_head": 6},
}
NOT_BUILT = {
    "nomic_bert": {"n_embd": 24, "n_head": 6},
    "deepseek_v2": {"rope_interleave": False},
    "phi": {"rotary_dim": 8, "partial_rotary_factor": 0.5},
    "nemotron_h": {"rope_theta": 10000.0},
}


SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


def sizes_of(name):
    special = {
        "deepseek_v2": {"num_key_value_heads": 6},
        "nomic_bert": {"num_key_value_heads": 6},
        "nemotron_h": {"hybrid_override_pattern": "*M", "num_hidden_layers": 2},
    }
    return {**SIZES, **special.get(name, {})}


def of_family(name, fields):
    return {"model_type": name, **sizes_of(name), **fields}


# Configs, and words of the one warning that each gives; None for no warning.
WARNINGS = {
    **{f"llama: {x}": ({**LLAMA, **new}, words) for x, (new, words) in WORTH_SAYING.items()},
    **{f"llama: {x}": ({**LLAMA, **new}, None) for x, new in SILENT.items()},
    **{f"{x}, which has it": (of_family(x, new), None) for x, new in BUILT.items()},
    **{f"{x}, which lacks it": (of_family(x, new), x) for x, new in NOT_BUILT.items()},
}


@each("title", WARNINGS)
def test_a_field_that_is_not_read_warns_once_by_its_name(title):
    given, words = WARNINGS[title]
    if given.get("hidden_size", 0) is None:
        given = {k: v for k, v in {**given, "num_attention_heads": 8}.items() if k != "hidden_size"}
    texts = said(given)
    if words is None:
        assert not texts
    else:
        (text,) = texts
        assert re.search(words, text), text
        assert text.startswith(f"model_type '{given['model_type']}' does not read ")


def test_fields_of_another_class_each_warn():
    m3 = {"use_gemma_norm": True, "qk_norm_type": "per_head", "sparse_attention_config": {"a": 1}}
    given = {**LLAMA, **m3, "model_type": "minimax_m2", "rotary_dim": 4, "num_key_value_heads": 3}
    given |= {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "vocab_size": 9}
    told = said(given)
    assert [text.partition("=")[0] for text in told] == [*m3]
    assert all("MiniMaxM3Sparse" in text and "'minimax_m2'" in text for text in told)
    assert not said({**given, "architectures": ["MiniMaxM2ForCausalLM"]})
    assert len(said({**LLAMA, "architectures": ["Llama4ForCausalLM"], "moe_layers": [1]})) == 1


def test_a_config_that_is_refused_warns_of_nothing():
    with pytest.raises(ValueError, match="num_attention_heads must divide"):
        said({**LLAMA, "num_attention_heads": 7, "use_qk_norm": True})


@pytest.mark.nightly
def test_the_defaults_of_every_class_warn_of_nothing(transformers):
    from parity_tests.families.facts import config_class

    for name in SERVED:
        given = {**config_class(name)().to_dict(), "model_type": name}
        if name in FAULTY:
            with pytest.raises(ValueError, match=FAULTY[name]):
                built(given, **part_of(name))
        else:
            assert not said(given, **part_of(name)), name


def test_the_types_of_transformers_are_known(transformers):
    from parity_tests.families.facts import others

    assert KNOWN == {*others()} and len({*KNOWN, *SERVED}) > 800


@pytest.mark.nightly
def test_every_field_that_a_layer_is_built_from_is_known_as_read(monkeypatch):
    """No field that a layer is built from can warn."""
    asked = set()

    class Fields(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    made = Config.__init__
    monkeypatch.setattr(
        Config, "__init__", lambda self, fields, *more: made(self, Fields(fields), *more)
    )
    for small in (*CONFIGS, *PARTS):
        how = {} if small in CONFIGS else {"part": small.part}
        entry = FAMILIES[small.name]
        for spelling in ("old", "new"):
            asked.clear()
            built(small.spelt(spelling), small.index, **how)
            row = entry if isinstance(entry, Family) else entry[small.part]
            read = _unread.read_by(row, facts_of(small.name))
            assert asked - {"model_type"} <= read | _unread.GENERAL, small
            assert asked & {*_READ_BY_ANY}


@pytest.mark.nightly
def test_fields_that_the_class_of_an_alias_lacks_do_what_they_do_there(float64, transformers):
    from .aliases import lacking, tried_lacking

    alone = [alias for alias in ALIASES if alias not in parts.MODELS]
    aliases = [alias for alias in alone if lacking(alias, ALIASES[alias])]
    assert {"dots1", "emu3_text_model"} <= {*aliases}
    assert not [fault for alias in aliases if (fault := tried_lacking(alias, ALIASES[alias]))]
