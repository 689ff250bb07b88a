"""What other libraries call an argument, and what does its work here.

In a code, $ stands for the argument under its other name, of the shape that `when` says. A test
runs every one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .nearest import did_you_mean

MASKS = ("pairs", "a token", "recurrence")  # of a pair of query and key, of a token, only CAUSAL


class Advice(NamedTuple):
    """What to pass in place of an argument.

    Attributes:
      needs: the argument that a function must take for this to apply, several joined by +, or
        what its `mask` is of (`MASKS`); "" always applies.
      code: what to write, as keyword arguments, $ for the argument; "" if `when` says all.
      when: for which values of the argument; "" for all.
    """

    needs: str
    code: str
    when: str = ""


_HF_KEYS = "mask=Dense(jnp.asarray($)[:, None, None] == 1)"
_HF_PAIRS = Advice(
    "pairs",
    "mask=Dense(jnp.asarray($) == 0)",
    "zeros at pairs that may attend and finfo.min at others, (B, 1, T, S)",
)
_HF_MASK = (
    Advice("valid", "valid=jnp.asarray($) == 1", "ones at real tokens, (B, T)"),
    Advice("memory", _HF_KEYS, "ones at real tokens of the memory, (B, S)"),
    Advice("a token", "mask=jnp.asarray($) == 1", "ones at real tokens, (B, S)"),
    Advice("pairs", _HF_KEYS, "ones at keys that may be seen, (B, S)"),
    _HF_PAIRS,
)
_TORCH_KEYS = "mask=Dense(~jnp.asarray($)[:, None, None])"
_TORCH_PADDING = (
    Advice("valid", "valid=~jnp.asarray($)", "True at padding, (B, T)"),
    Advice("memory", _TORCH_KEYS, "True at padding of the memory, (B, S)"),
    Advice("a token", "mask=~jnp.asarray($)", "True at padding, (B, S)"),
    Advice("pairs", _TORCH_KEYS, "True at keys that are padding, (B, S)"),
)
_TORCH_MASK = (
    Advice(
        "pairs",
        "mask=Dense(~jnp.asarray($))",
        "True where nn.MultiheadAttention must not look, (T, S)",
    ),
    Advice(
        "pairs",
        "mask=Dense(jnp.asarray($))",
        "True where scaled_dot_product_attention may look, (T, S)",
    ),
    Advice("score", "score=Additive($)", "numbers that are added to the logits"),
)
_CAUSAL = (
    Advice("pairs", "mask=CAUSAL", "True"),
    Advice("recurrence", "mask=CAUSAL", "True"),
    Advice("pairs", "mask=FULL", "False"),
    Advice("causal", "causal=True"),
)
_BIAS = (
    Advice("score", "score=Additive($)"),
    Advice("rules", "rules=Rules(score=Additive($))"),
)
_WEIGHTS = (
    Advice(
        "",
        "with taps.listen() as values: y = layer(x)",
        "weights of each head, before dropout, which dict(values)['weights'] then has",
    ),
)
_CACHE = (
    Advice(
        "cache",
        "cache=layer.init_cache(batch, length)",
        "the first call, which gives y and the cache of the next",
    ),
)
_TRAIN = (
    Advice("deterministic", "deterministic=False", "training, with dropout"),
    Advice("deterministic", "deterministic=True", "evaluation"),
)
_SOFTCAP = (
    Advice("score", "score=Softcap(30.0)"),
    Advice("rules", "rules=Rules(score=Softcap(30.0))"),
)
_SCALE = (Advice("scale", "scale=0.125"), Advice("rules", "rules=Rules(scale=0.125)"))
_WINDOW = (
    Advice(
        "pairs",
        "mask=CAUSAL & Window(3, 0)",
        "the last 4 keys, the query's included",
    ),
)
_SEGMENTS = (
    Advice("segments", "segments=$", "numbers of documents, (B, T)"),
    Advice("pairs", "mask=Segments($)", "numbers of documents, (B, T)"),
)
_LENGTHS = (Advice("pairs", "mask=Lengths($)", "the number of real keys of each row, (B,)"),)
_DROP = (Advice("dropout", "dropout=Dropout(0.1, jax.random.key(0))"),)
_KEYS = (Advice("", "", "a layer draws dropout from the rngs= that it was built with"),)
_GROUPS = (Advice("", "", "leave it out, since k and v may have fewer heads than q"),)
_FIRST = (Advice("", "", "it comes first, without a name"),)

# By the other name: when a function or a layer is called.
CALLS: dict[str, tuple[Advice, ...]] = {
    "attention_mask": _HF_MASK,
    "padding_mask": _HF_MASK,
    "encoder_attention_mask": _HF_MASK[1:],
    "valid": (
        Advice("pairs", "mask=Dense(jnp.asarray($)[:, None, None])", "True at real tokens, (B, S)"),
    ),
    "key_padding_mask": _TORCH_PADDING,
    "src_key_padding_mask": _TORCH_PADDING,
    "attn_mask": _TORCH_MASK,
    "src_mask": _TORCH_MASK,
    "tgt_mask": _TORCH_MASK,
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "causal_mask": _CAUSAL,
    "use_causal_mask": _CAUSAL,
    "bias": _BIAS,
    "attn_bias": _BIAS,
    "attention_bias": _BIAS,
    "position_bias": (Advice("bias", "bias=$"), *_BIAS),
    "return_weights": _WEIGHTS,
    "return_attention": _WEIGHTS,
    "return_attention_scores": _WEIGHTS,
    "return_attn_weights": _WEIGHTS,
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "sow_weights": _WEIGHTS,
    "past_key_value": _CACHE,
    "past_key_values": _CACHE,
    "layer_past": _CACHE,
    "kv_cache": _CACHE,
    "use_cache": _CACHE,
    "decode": _CACHE,
    "cache_position": _CACHE,
    "train": _TRAIN,
    "training": _TRAIN,
    "is_training": _TRAIN,
    "inference": _TRAIN,
    "position_ids": (Advice("positions", "positions=$"),),
    "input_pos": (Advice("positions", "positions=$"),),
    "softcap": _SOFTCAP,
    "logit_softcap": _SOFTCAP,
    "attn_logits_soft_cap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "sm_scale": _SCALE,
    "softmax_scale": _SCALE,
    "scaling": _SCALE,
    "scale": _SCALE,
    "window": _WINDOW,
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "local_window_size": _WINDOW,
    "segment_ids": _SEGMENTS,
    "query_segment_ids": _SEGMENTS,
    "key_value_seq_lengths": _LENGTHS,
    "query_seq_lengths": _LENGTHS,
    "lengths": _LENGTHS,
    "dropout_p": _DROP,
    "dropout_rate": _DROP,
    "dropout_rng": _DROP,
    "rngs": _KEYS,
    "rng": _KEYS,
    "enable_gqa": _GROUPS,
    "implementation": (Advice("backend", "backend='blockwise'"),),
    "hidden_states": _FIRST,
    "inputs": _FIRST,
    "inputs_q": _FIRST,
    "key_value_states": (Advice("memory", "memory=$"),),
    "encoder_hidden_states": (Advice("memory", "memory=$"),),
    "context": (Advice("memory", "memory=$"),),
    "query": _FIRST,
    "key": (Advice("k", "k=$"), Advice("memory", "memory=$", "the input of its projection")),
    "value": (Advice("v", "v=$"), Advice("memory", "memory=$", "the input that k has")),
    "alibi_slopes": (Advice("score", "score=Alibi($)"),),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_tokens"), (Advice("new", "new=$"),)),
    "input_ids": (Advice("prompt", "prompt=$"), Advice("tokens", "tokens=$")),
    "eos_token_id": (Advice("end", "end=$"),),
    "score_mod": (Advice("score", "score=ScoreFn($)"),),
    "mask_mod": (Advice("pairs", "mask=MaskFn($)"),),
}

_IN = ("in_features", "embed_dim", "dim", "d_in")
_HEADS = ("num_heads",)
_KV_HEADS = ("num_kv_heads",)
_WIDTH = ("head_dim", "head_size", "key_dim")
_BIASES = ("qkv_bias", "use_bias", "bias")
# By the other name: what it may be called here when a layer is built, the likeliest first.
RENAMED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("hidden_size", "embed_dim", "d_model", "dim", "in_features", "features", "n_embd",
         "model_dim", "input_dim", "query_size", "query_dim", "d_in", "hidden_dim"), _IN
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads"), _HEADS
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "n_kv_heads", "kv_heads", "num_kv_groups", "num_query_groups",
         "n_kv_head"), _KV_HEADS
    ),
    **dict.fromkeys(
        ("dim_head", "d_head", "head_width", "size_per_head", "d_kv", "head_size", "head_dim"),
        _WIDTH,
    ),
    **dict.fromkeys(
        ("dropout_rate", "attention_dropout", "attn_dropout", "dropout_p", "attn_drop",
         "attn_pdrop", "attention_probs_dropout_prob"), ("dropout",)
    ),
    **dict.fromkeys(("bias", "use_bias", "attention_bias", "qkv_bias", "add_bias"), _BIASES),
    **dict.fromkeys(
        ("block_size", "max_len", "max_length", "max_seq_len", "max_cache_len", "max_seqlen",
         "seq_len", "size"), ("context_length", "length")
    ),
    **dict.fromkeys(("batch_size", "max_batch_size", "rows"), ("batch",)),
    **dict.fromkeys(("theta", "rope_theta"), ("base",)),
    "out_features": ("d_out",),
    "layer_norm_eps": ("eps",),
    "epsilon": ("eps",),
    "w_init": ("kernel_init",),
    "weight_dtype": ("param_dtype",),
    "hidden_act": ("activation",),
    "kv_lora_rank": ("kv_rank",),
    "q_lora_rank": ("q_rank",),
    "qk_nope_head_dim": ("nope_dim",),
    "qk_rope_head_dim": ("rotary_dim",),
    "v_head_dim": ("value_dim",),
    "window_size": ("window",),
    "cross_attention_dim": ("memory_features",),
    "context_dim": ("memory_features",),
    "kv_dim": ("memory_features",),
}  # fmt: skip
_NEW_KEYS = (Advice("rngs", "rngs=nnx.Rngs(0)"),)
_ROTARY = (Advice("rotary", "rotary=Rotary(base=5e5)"),)
_QK_NORM = (Advice("q_norm", "q_norm=RMSNorm(16, eps=1e-6), k_norm=RMSNorm(16, eps=1e-6)"),)
# Of a constructor that is called otherwise.
EXAMPLES = {"Window": " Window(63, 0) sees the query's own key and the 63 before it."}
# When a layer is built, and another name alone is not enough.
CONSTRUCTORS: dict[str, tuple[Advice, ...]] = {
    **dict.fromkeys(("key", "rng", "seed", "keys"), _NEW_KEYS),
    **dict.fromkeys(("causal", "is_causal"), _CAUSAL),
    **dict.fromkeys(("window", "sliding_window", "window_size", "local_window_size"), _WINDOW),
    **dict.fromkeys(("softcap", "logit_softcap", "attn_logit_softcapping"), _SOFTCAP[1:]),
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale", "scaling"), _SCALE[1:]),
    **dict.fromkeys(("rope_theta", "rope", "rope_base", "rotary_emb", "use_rope"), _ROTARY),
    **dict.fromkeys(("qk_norm", "normalize_qk", "use_qk_norm"), _QK_NORM),
    **dict.fromkeys(("decode", "use_cache"), _CACHE),
    **dict.fromkeys(
        ("bias", "use_bias", "attention_bias", "add_bias"),
        (Advice("qkv_bias+out_bias", "qkv_bias=True, out_bias=True", "biases of all projections"),),
    ),
    "score": (Advice("rules", "rules=Rules(score=$)"),),
    "alibi_slopes": (Advice("rules", "rules=Rules(score=Alibi($))"),),
    **dict.fromkeys(
        ("alibi", "use_alibi"),
        (Advice("rules", "rules=Rules(score=Alibi(alibi_slopes(4)))", "4 heads"),),
    ),
    "score_mod": (Advice("rules", "rules=Rules(score=ScoreFn($))"),),
    "mask_mod": (Advice("mask", "mask=MaskFn($)"),),
    "batch_first": (Advice("", "", "leave it out, since the batch always comes first"),),
    "qkv_features": (Advice("head_dim", "head_dim=16", "one head's part of it"),),
    "device": (Advice("", "", "jax.default_device(device) says where arrays are made"),),
    "config": (
        Advice("", "", "flax_attn.families builds the attention that a published config has"),
    ),
}


def advice(
    called: str,
    unknown: Sequence[str],
    names: Iterable[str],
    constructs: bool,
    built: Iterable[str] = (),
) -> str:
    """A sentence or two for each unknown argument.

    Args:
      called: what was called.
      unknown: arguments that it does not take.
      names: those that it takes, and what its mask is of.
      constructs: whether a layer, or a cache, is built.
      built: what the layer's constructor takes, when the layer is called.

    >>> print(advice("Layer", ["rope_theta"], ["dim", "rotary"], constructs=True))
    Layer takes no rope_theta=; what does so is, for example, `rotary=Rotary(base=5e5)`.
    """
    names, built = tuple(names), tuple(built)
    return " ".join(_advice(called, name, names, constructs, built) for name in unknown)


def _advice(
    called: str, name: str, names: tuple[str, ...], constructs: bool, built: tuple[str, ...]
) -> str:
    start = f"{called} takes no {name}="
    fitting = _fitting((CONSTRUCTORS if constructs else CALLS).get(name, ()), names)
    renamed = [here for here in RENAMED.get(name, ()) if here in names] if constructs else []
    if renamed and not fitting:
        return f"{start}; it is called {renamed[0]} here."
    if not fitting and name in built:
        return f"{start}; give it when the layer is built."
    if not fitting and built:
        codes = [part.code for part in _fitting(CONSTRUCTORS.get(name, ()), built) if part.code]
        if codes:
            code = codes[0].replace("$", name)
            return f"{start}; it is given when the layer is built, as `{code}`."
    if not fitting:
        known = [x for x in names if x not in MASKS]
        return f"{start}; {did_you_mean(name, known, 'it takes')}"
    return f"{start}; {'; '.join(_instead(part, name) for part in fitting)}."


def _fitting(table: Iterable[Advice], names: tuple[str, ...]) -> list[Advice]:
    """The advice that applies, each code once; a layer's `valid` also hides padding as keys."""
    fitting: list[Advice] = []
    for part in table:
        applies = not part.needs or set(part.needs.split("+")).issubset(names)
        if applies and part.code not in [other.code for other in fitting]:
            fitting.append(part)
    if "valid" in names and "memory" not in names:
        fitting = [part for part in fitting if part.code not in (_HF_KEYS, _TORCH_KEYS)]
    return fitting


def _instead(part: Advice, name: str) -> str:
    if not part.code:
        return part.when
    code = f"`{part.code.replace('$', name)}`"
    if part.when:
        return f"for {part.when}: {code}"
    return f"instead: {code}" if "$" in part.code else f"what does so is, for example, {code}"
