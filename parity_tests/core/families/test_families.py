"""Each family equals its attention in transformers; unsupported fields of a config are refused."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import FULL, families
from flax_attn._internal.caller import warn_once
from flax_attn.families._choose import family_of
from flax_attn.families._table import FAMILIES
from flax_attn.parity import assert_parity
from parity_tests.families import parts, witness
from parity_tests.families.configs import CONFIGS, NAMES, Small, titled
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .described import described

X = np.random.RandomState(0).standard_normal((2, 7, 48))


def built(given, index=0, **init):
    return families.attention(given, index, rngs=nnx.Rngs(0), **init)


def shaped(given, index=0):
    """The layer with shapes and no values."""
    return nnx.eval_shape(lambda: built(given, index))


def tells_most(small):
    return titled(small) in ("gemma2-0", "deepseek_v3-0")


@pytest.mark.parametrize("small", with_nightly(CONFIGS, commit=tells_most), ids=titled)
def test_outputs_and_gradients_equal_transformers(small, transformers):
    """The config is in the spelling since transformers 5; a test below covers the older one."""
    name, index = small.name, small.index
    config = witness.config_of(small.spelt("new"), name)
    given = config.to_dict()
    assert_parity(
        witness.attention(config, name, index),
        built(given, index),
        kwargs=witness.inputs(config, name, index),
        rules=families.rules(given, index),
        torch_call=witness.call(config, name, index),
        flax_call=witness.flax_call(name),
        dtypes=("float64",),
        eager=False,
        taps=False,
    )


@pytest.mark.parametrize("small", with_nightly(CONFIGS, commit=5), ids=titled)
def test_old_and_new_spelling_build_the_same_layer(small):
    new, old = (in_words(small.spelt(x), small.index) for x in ("new", "old"))
    assert new == old and not isinstance(new, str)


@pytest.mark.nightly(but=["gemma2", "granitemoehybrid", "minimax"])
@pytest.mark.parametrize("name", with_nightly(NAMES, commit=4))
def test_defaults_are_those_of_the_class(name, transformers):
    whole = witness.found(name, "Config")().to_dict()
    last = family_of(whole, None)[1]["num_hidden_layers"] - 1
    for index in {0, 1, min(3, last), last}:
        of_none, of_all = (in_words(x, index) for x in ({"model_type": name}, whole))
        assert of_none == of_all


def in_words(given, index):
    """A description of the layer that a config builds, or the error."""
    try:
        return described(shaped(given, index))
    except ValueError as refused:
        return str(refused)


# Which have no dropout, in transformers neither.
STILL = ("lfm2", "lfm2_moe", "ernie4_5", "ernie4_5_moe")
# All of whose layers are recurrent, so that there are no weights to drop.
RECURRENT = ("falcon_mamba", "mamba", "mamba2")
REFUSED = ("diffllama",)  # whose class refuses any
WITHIN = {"mpt": ("attn_config", "attn_pdrop")}  # which say it in a dict
TOWERS = tuple(x for x in NAMES if x.startswith("qwen") and x.endswith("_vision"))  # nor have these
NEVER = (*STILL, *RECURRENT, *REFUSED, *TOWERS)
TRAINED = {
    "llama": next(x for x in CONFIGS if "attention_dropout" in x.fields),
    "gpt2": Small("gpt2", {"attn_pdrop": 0.25, "resid_pdrop": 0.0}),
    "bloom": Small("bloom", {"attention_dropout": 0.25}),
    "falcon": Small("falcon", {"alibi": True, "attention_dropout": 0.25}),
    "bert": Small("bert", {"attention_probs_dropout_prob": 0.25, "hidden_dropout_prob": 0.0}),
    "vit": Small("vit", {"attention_probs_dropout_prob": 0.25}),
}


DROPPING = [name for name in NAMES if name not in NEVER]


@pytest.mark.nightly(but=["gpt_bigcode", "gpt_neo", "minimax_m2", "olmo_hybrid"])
@pytest.mark.parametrize("name", with_nightly(DROPPING, commit=5))
def test_attention_dropout_of_the_config_is_the_rate_of_the_layer(name):
    small = [x for x in CONFIGS if x.name == name][-1]  # Falcon's has alibi
    given, index = small.spelt("new"), small.index
    for rate in (0.125, 0.0):
        dropout = shaped(dropping(given, name, rate), index).dropout
        assert (dropout.rate if dropout else 0.0) == rate


def dropping(given, name, rate):
    """The config with this share of dropout, in the words of its family."""
    field = FAMILIES[name].names.get("attention_dropout", ("attention_dropout",))[0]
    outer, field = WITHIN.get(name, (None, field))
    return {**given, **({outer: {field: rate}} if outer else {field: rate})}


@pytest.mark.parametrize("name", STILL)
def test_a_family_without_dropout_drops_nothing(name):
    with pytest.warns(UserWarning, match="does not read attention_dropout=0.5"):
        warn_once.cache_clear()
        assert shaped(other(name, attention_dropout=0.5)).dropout is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_class_refuses_dropout_refuses_it_too(name):
    given = next(x for x in CONFIGS if x.name == name).spelt("new")
    with pytest.raises(ValueError, match=r"attention_dropout=0\.5 is not served"):
        built({**given, "attention_dropout": 0.5})


def test_an_encoder_may_say_that_it_is_not_causal():
    assert shaped(other("bert", num_key_value_heads=None, is_causal=False)).mask == FULL


def test_falcon_drops_nothing_with_rotary_positions():
    given = other("falcon", num_key_value_heads=None, attention_dropout=0.5)
    assert shaped(given).dropout is None


@pytest.mark.parametrize("name", with_nightly(TRAINED, commit=["llama", "falcon", "bert"]))
def test_dropout_in_training_equals_transformers(name, transformers):
    small = TRAINED[name]
    config = witness.config_of(small.spelt("new"), name)
    layer, call = witness.attention(config, name, 0), witness.call(config, name, 0)
    given = config.to_dict()
    options = {"dtypes": ("float64",), "eager": False, "taps": False, "train": True}
    options["rules"] = families.rules(given, 0)
    assert_parity(layer, built(given), X[..., : config.hidden_size], torch_call=call, **options)


@pytest.mark.nightly
def test_rotary_with_three_position_axes_equals_transformers(transformers):
    small = next(x for x in CONFIGS if x.name == "qwen2_5_vl_text")
    config = witness.config_of(small.spelt("new"), small.name)
    places = np.random.RandomState(1).randint(0, 9, (3, 2, 7))  # time, row and column
    assert_parity(
        witness.attention(config, small.name, 0),
        built(config.to_dict()),
        X,
        places,
        torch_call=lambda layer, x, places: witness.call(config, small.name, 0)(
            layer, x, position_ids=places
        ),
        flax_call=lambda layer, x, places: layer(x, positions=places),
        dtypes=("float64",),
        eager=False,
        taps=False,
    )


def test_every_family_is_proven():
    assert {*NAMES} | {small.name for small in PARTS} == {*FAMILIES}
    assert {*NAMES} == {*FAMILIES} - {*parts.MODELS}


LLAMA = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "rope_theta": 500.0}
APART = {"rope_theta": 500.0, "mrope_section": [11, 11, 10], "mrope_interleaved": False}
SCALED = {"rope_type": "linear", "factor": 2.0}
FULL_LAYERS = ["full_attention"] * 26
MSCALE = {"rope_type": "yarn", "mscale_all_dim": 1.0}


def llama(**fields):
    return {**LLAMA, **fields}


def other(name, **fields):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return {"model_type": name, **sizes, **fields}


WRONG = {
    "a typing error": (llama(model_type="llma"), "Did you mean 'llama'?"),
    "two letters": (llama(model_type="lamma"), "got 'lamma'. Did you mean 'llama'?"),
    "a type of transformers": (llama(model_type="swin2sr"), "'swin2sr' is known to transformers, "),
    "a type with a reason": (llama(model_type="zamba2"), "is not served: its attention is shared"),
    "a type to come": (
        llama(model_type="qwen9"),
        "must be one of .* others, .* got 'qwen9'. It may be newer than transformers 5.24",
    ),
    "no model_type": ({"hidden_size": 8}, "has no model_type, and no `architectures` that say"),
    "several parts": (
        llama(text_config={"model_type": "glm"}, vision_config={"model_type": "x"}),
        "'llama' is of a model of several parts: text .glm., vision .x.; say part='text'; got",
    ),
    "parts of which none is served": (
        {"model_type": "x", "text_config": {"model_type": "y"}},
        "'x' is of a model of several parts: text .y.; the attention of none of them is served",
    ),
    "quantised": (llama(quantization_config={"bits": 4}), "has a quantization_config"),
    "quantised in another way": (
        other("bitnet", quantization_config={"quant_method": "awq"}),
        "has a quantization_config",
    ),
    "the way of BitNet": (
        llama(quantization_config={"quant_method": "bitnet"}),
        "has a quantization_config",
    ),
    "no decoder": (
        llama(is_causal=False),
        "=False is not served: this model_type is a decoder",
    ),
    "no count": (llama(hidden_size=None), "hidden_size must be a whole number .* got None"),
    "heads": (llama(num_attention_heads=7), "num_attention_heads must divide hidden_size; got"),
    "key heads": (llama(num_key_value_heads=4), "num_key_value_heads must divide num_attention_"),
    "odd heads": (llama(head_dim=5), "need an even head_dim; got head_dim=5"),
    "dropout": (llama(attention_dropout=2.0), "attention_dropout is the share"),
    "no dropout": (llama(attention_dropout=None), "attention_dropout is the share .* got None"),
    "a bias": (llama(attention_bias="yes"), "attention_bias must be one of True, False, None"),
    "a base": (llama(rope_theta=-1.0), "rope_theta must be a number above zero; got -1.0"),
    "a kind": (llama(rope_scaling={"type": "su"}), "rope_type must be one of default, .*'su'"),
    "no factor": (llama(rope_scaling={"type": "linear"}), "rope_type='linear' needs factor"),
    "a share": (other("phi3", partial_rotary_factor=1.5), "is a share, from 0 to 1; got 1.5"),
    "a window of nothing": (other("mistral", sliding_window=0), "sliding_window must be a whole"),
    "a window that is off": (
        other("qwen2", layer_types=["sliding_attention"] * 32),
        "needs use_sliding_window=True and a sliding_window; got sliding_window=4096",
    ),
    "layers too few": (other("gemma2", layer_types=["full_attention"]), "layers=26; got 1"),
    "a kind of layer": (
        other("gpt_oss", num_hidden_layers=1, layer_types=["chunked_attention"]),
        r"layer_types.0. must be one of 'full_attention', 'sliding_attention'; got 'chunked",
    ),
    "both directions": (other("gemma2", use_bidirectional_attention=True), "use_bidirectional_att"),
    "another activation": (
        other("qwen3_next", hidden_act="gelu"),
        "hidden_act must be one of 'silu', 'swish'; got 'gelu'",
    ),
    "key heads of a delta rule": (
        other("qwen3_5_text", linear_num_key_heads=5),
        "linear_num_key_heads must divide linear_num_value_heads; got ",
    ),
    "rotaries of Gemma 4": (
        other("gemma4_text", rope_scaling=SCALED),
        "of a gemma4_text have a dict for each of full_attention, sliding_attention; got",
    ),
    "a rotary of one kind alone": (
        other("gemma4_text", rope_parameters={"full_attention": SCALED}),
        "of a gemma4_text have a dict for each of full_attention, sliding_attention; got",
    ),
    "all layers sharing keys": (
        other("gemma4_text", num_kv_shared_layers=30),
        "=30 of 30 layers is not served: all of them read ",
    ),
    "a type of layers without keys": (
        other("gemma4_text", num_kv_shared_layers=25),
        "num_kv_shared_layers=25 leaves no layer of one of layer_types",
    ),
    "a layer with fields of its own": (
        other("gemma4_text", per_layer_config={"0": {"head_dim": 8, "sliding_window": 9}}),
        r"per_layer_config.0. has sliding_window; .* it may have head_dim",
    ),
    "layers of one type with two widths": (
        other("gemma4_text", per_layer_config={"1": {"head_dim": 8}}),
        "the same head_dim and .* got {} for layer 0, {'head_dim': 8} for layer 1",
    ),
    "Gemma 4 in both directions": (
        other("gemma4_text", use_bidirectional_attention="all"),
        "use_bidirectional_attention must be .vision. or None; got 'all'",
    ),
    "keys of fewer heads": (
        other("deepseek_v2"),
        "num_key_value_heads=3, num_attention_heads=6",
    ),
    "a scale of nothing": (
        other("deepseek_v2", num_key_value_heads=6, rope_scaling=MSCALE),
        "mscale_all_dim=1.0 needs factor",
    ),
    "no dict": (llama(rope_scaling="linear"), "rope_scaling must be a dict .* got 'linear'"),
    "two patterns": (
        other("gemma3_text", sliding_window_pattern=2, layer_types=FULL_LAYERS),
        "layer_types and sliding_window_pattern=2 differ on layer 0",
    ),
    "two names": (
        {"model_type": "gpt2", "n_embd": 48, "hidden_size": 32},
        "says n_embd=48 and hidden_size=32, which are one",
    ),
    "heads under another name": (
        {"model_type": "gpt2", "n_embd": 48, "n_head": 7},
        "n_head must divide n_embd; got n_embd=48, n_head=7",
    ),
    "a width that is not read": (
        other("gpt_neox", head_dim=10),
        "head_dim=10 is not served: .* have hidden_size / num_attention_heads = 8 components",
    ),
    "key heads of an older Falcon": (
        other("falcon", num_kv_heads=2, multi_query=False),
        "num_kv_heads=2 needs new_decoder_architecture=True",
    ),
    "a decoder that looks ahead": (
        other("bert", is_decoder=True, is_causal=False),
        "is_causal=False is not served",
    ),
    "sections": (
        other("qwen2_5_vl_text", rope_scaling={"type": "mrope", "mrope_section": [2, 2]}),
        r"mrope_section must be 3 whole numbers whose sum is .* 4; got .2, 2.",
    ),
    "no chunks": (other("llama4_text", attention_chunk_size=None), "attention_chunk_size must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_fields_are_refused_by_name(name):
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        built(given)


def test_arguments_of_attention_and_rules_are_checked():
    with pytest.raises(TypeError, match=r"config must be a dict, .* got int"):
        built(3)
    with pytest.raises(ValueError, match="llama cannot be read: No such file"):
        built("llama")
    with pytest.raises(ValueError, match="from 0 to 31, since num_hidden_layers=32; got 32"):
        built(LLAMA, 32)
    with pytest.raises(ValueError, match=r"part must be None for llama, .* got 'cross'"):
        built(LLAMA, part="cross")
    with pytest.raises(ValueError, match="source must be one of 'transformers', 'gguf'; got 'x'"):
        families.rules(LLAMA, 0, source="x")


@pytest.mark.parametrize("rope", [None, {}, {"rope_theta": 500.0}, {"rope_type": None}], ids=str)
def test_a_rotary_without_a_kind_that_scales_nothing_is_plain(rope):
    for spelling in ("rope_scaling", "rope_parameters"):
        assert described(shaped(llama(**{spelling: rope}))) == described(shaped(LLAMA))


def test_old_and_new_rotary_fields_may_both_be_given_if_they_agree():
    both = llama(rope_parameters={**SCALED, "rope_theta": 500.0}, rope_scaling=SCALED)
    assert described(shaped(both)) == described(shaped(llama(rope_scaling=SCALED)))


def test_layers_of_gemma4_that_share_keys_use_those_of_their_layer_type(transformers):
    small = next(x for x in CONFIGS if x.fields.get("num_kv_shared_layers"))
    config = witness.config_of(small.spelt("new"), small.name)
    given = config.to_dict()

    def theirs(layer, x, k, v):
        handed = witness.handed(config, small.name, 2, x)
        shared = {"sliding_attention": (k.transpose(1, 2), v.transpose(1, 2))}
        return layer(x, **{**handed, "shared_kv_states": shared})[0]

    pair = np.random.RandomState(1).standard_normal((2, 2, 7, 3, 12))
    assert_parity(
        witness.attention(config, small.name, 2),
        built(given, 2),
        X,
        *pair,
        torch_call=theirs,
        flax_call=lambda layer, x, k, v: layer(x, keys_and_values=(k, v)),
        dtypes=("float64",),
        eager=False,
        taps=False,
    )
    keys = lambda i: built(given, i).keys_and_values_of(X.astype(np.float32))  # noqa: E731
    pairs = [nnx.eval_shape(lambda i=i: keys(i)) for i in (0, 1)]
    assert [k.shape[-1] for k, _ in pairs] == [12, 16]  # of the same type, and of the other
