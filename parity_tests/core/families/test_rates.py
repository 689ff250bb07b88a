"""Rates and factors of the rotary that a config describes: transformers' own, or refused by both.

The oracle is a model of transformers that is built, runs on 7 tokens and gives numbers.
"""

import copy
import warnings

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn._internal.caller import warn_once
from flax_attn.parity import judge
from flax_attn.positions.scaling import plain_rates
from parity_tests.tables import with_nightly

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
SIZES |= {"intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
WIDTH, LENGTH, TYPES = 16, "original_max_position_embeddings", ["type", "rope_type"]
PLAIN = {  # what files have
    "rope_theta": [500.0, 1e4, 1e6],
    "factor": [1.0, 2.0, 8, 40.0],
    LENGTH: [64, 100],
    "beta_fast": [32.0, 4.0],
    "beta_slow": [1.0, 2],
    "mscale": [0.7, 1.0],
    "mscale_all_dim": [1.0, 1.3],
    "attention_factor": [0.5, 1.25],
    "truncate": [True, False],
    "low_freq_factor": [1.0, 2.0],
    "high_freq_factor": [4.0, 8.0],
    "short_factor": [[1.0] * 8, [1.5, 2, 3, 4, 5, 6, 7, 8]],
    "long_factor": [[4.0] * 8, [2.0] * 4 + [9.0] * 4],
    "partial_rotary_factor": [1.0],
}
NEEDED = {  # and what each type may have besides
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (LENGTH,)),
    "yarn": (("factor",), (LENGTH, *list(PLAIN)[3:9])),
    "longrope": (("short_factor", "long_factor"), (LENGTH, "factor", "attention_factor")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
PARTNERS = [("beta_fast", "beta_slow"), ("low_freq_factor", "high_freq_factor")]
PARTNERS += [("mscale", "mscale_all_dim"), ("factor", "attention_factor"), (LENGTH, "longest")]
PARTNER = dict(PARTNERS) | {b: a for a, b in PARTNERS}
BOOLEAN = "a boolean where a number stands, which transformers reads as 0 or 1"


def odd(random, name, rope):
    """Another value, or several: none, its partner's and twice that, zero, below zero, a word."""
    partner = {"longest": 256, **rope}.get(PARTNER.get(name, ""), 1.0)
    partner = partner if isinstance(partner, int | float) else 1.0
    values = [None, 0, -2.0, "4", partner, 2 * partner, 0.5, 3, True]
    if name.endswith("t_factor") or name == "long_factor":
        values = [None, [0.0] + 7 * [1.0], [-1.0] + 7 * [1.0], "x", 9 * [1.0], 4 * [1.0], 8 * [1]]
    return values[random.integers(len(values))]


def drawn(seed: int) -> dict:
    """Fields of a config about its rotary, in one of its spellings."""
    random = np.random.default_rng(seed)
    kind = str(random.choice([*NEEDED, "yarn", "yarn", "longrope", "llama3"]))
    needed, more = NEEDED[kind]
    names = ["rope_theta", *needed, *(name for name in more if random.random() < 0.5)]
    rope = {name: PLAIN[name][random.integers(len(PLAIN[name]))] for name in names}
    for _ in range(random.integers(3)):
        name = str(random.choice([*PLAIN, *3 * (*needed, *more)]))
        rope[name] = odd(random, name, rope)
        if random.random() < 0.1:
            del rope[name]
    word, rope = str(random.choice(TYPES)), {**rope}
    beside = {} if random.random() < 0.5 else {k: rope.pop(k) for k in ["rope_theta"] if k in rope}
    if beside and random.random() < 0.3:
        rope["rope_theta"] = 2000.0
    whole = str(random.choice(["rope_parameters", "rope_scaling"]))
    fields = {whole: {**rope, word: kind}, **beside}
    if random.random() < 0.1:
        fields |= {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}
    if random.random() < 0.1:
        fields |= {LENGTH: 90}
    return fields


def theirs(fields: dict, transformers):
    """Rates and the factor of cos and sin; None if there is no model, or it gives no numbers."""
    import torch

    try:
        model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, **copy.deepcopy(fields)))
        with torch.no_grad():
            y = model.double().eval()(torch.arange(7)[None]).last_hidden_state
        found = model.rotary_emb.inv_freq.double().numpy(), model.rotary_emb.attention_scaling
    except Exception:  # of any kind: no model is what is asked
        return None
    # Some machines' fused attention turns the NaN of infinite rates into zeros.
    return found if bool(torch.isfinite(y).all()) and np.isfinite(found[0]).all() else None


def ours(fields: dict):
    """Rates and factor of the layer of flax_attn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = families.attention({"model_type": "llama", **SIZES, **fields}, 0, rngs=nnx.Rngs(0))
    rotary = layer.rotary
    if rotary.scaling is None:
        return plain_rates(rotary.base, WIDTH), 1.0
    return np.asarray(rotary.scaling.rates(rotary.base, WIDTH, 7)), rotary.scaling.magnitude


def compared(fields: dict, transformers) -> str:
    """The outcome for a config: "equal", "refused by both", or a text that says what differs."""
    want = theirs(fields, transformers)
    try:
        rates, magnitude = ours(fields)
    except (ValueError, TypeError) as error:
        rope = fields | fields.get("rope_parameters", {}) | fields.get("rope_scaling", {})
        has_boolean = any(x is True for k, x in rope.items() if k != "truncate")
        told = BOOLEAN if has_boolean and "True" in str(error) else f"refused: {error}"
        return "refused by both" if want is None else told
    if want is None:
        return "built by ours alone"
    plain = float(np.linalg.norm(plain_rates(500.0, WIDTH)) + np.linalg.norm(rates))
    close = judge.within_precision(want[0], 0.0, rates, "float32", plain)  # theirs are float32
    factors = (np.asarray([float(x)]) for x in (magnitude, want[1]))
    equal = close.ok and judge.same_function(*factors, zero=True).ok
    return "equal" if equal else f"{rates}, {magnitude} are not {want}"


FINE = ("equal", "refused by both")
# In place of a refusal that transformers does not make, and where ours builds what it does not.
REASONS = {
    BOOLEAN: "a wrong type of JSON",
    "refused: long_factors must hold finite numbers, not zero": "infinite rates of long sequences",
    "built by ours alone": "a null, which we read as a field that is not there",
}


@pytest.mark.parametrize("first", with_nightly(range(0, 4000, 100), commit=[0]))
def test_rotary_rates_of_drawn_configs_equal_transformers(first, transformers):
    told = {x: compared(drawn(x), transformers) for x in range(first, first + 100)}
    known = *FINE, *REASONS
    assert not {seed: text for seed, text in told.items() if not text.startswith(known)}
    assert [*told.values()].count("equal") > 50  # else nothing is proven


READ = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
UNREAD = {  # what transformers builds without, and says nothing of
    "attn_factor=0.87": {"rope_scaling": {**READ, "attn_factor": 0.87}},
    "mrope_section=": {"rope_scaling": {**READ, "mrope_section": [1]}},
    "beta_fast, factor and no rope_type": {"rope_parameters": {"beta_fast": 32, "factor": 2.0}},
    "type='yarn' and rope_type='linear'": {"rope_scaling": {**READ, "type": "yarn"}},
    "factor=3.0 beside a rope_scaling": {
        "rope_parameters": {**READ, "factor": 3.0},
        "rope_scaling": READ,
    },
    "rope_theta=400.0 and rope_theta=500.0": {"rope_theta": 400.0, "rope_scaling": READ},
    f"{LENGTH}=8 and, in its rotary parameters, 16": {
        LENGTH: 8,
        "rope_scaling": {**READ, "rope_type": "yarn", LENGTH: 16},
    },
    "partial_rotary_factor=0.5 is not read": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("words", UNREAD)
def test_rotary_fields_that_transformers_ignores_warn(words, transformers):
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=words):
        families.attention({"model_type": "llama", **SIZES, **UNREAD[words]}, 0, rngs=nnx.Rngs(0))
    assert compared(UNREAD[words], transformers) == "equal"
