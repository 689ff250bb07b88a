"""What other libraries call the functions and classes of this one."""

from collections.abc import Sequence

from .nearest import did_you_mean

_LAYER = "GroupedQueryAttention"
# By the other name in lower case without underscores; the value is code of this library.
NAMES = {
    "multiheadattention": "TransformerMultiHeadAttention",
    "multiheaddotproductattention": "TransformerMultiHeadAttention",
    "mha": "TransformerMultiHeadAttention",
    "attention": "attend, or a layer such as GroupedQueryAttention",
    "selfattention": _LAYER,
    "multiqueryattention": f"{_LAYER} with num_kv_heads=1",
    "mqa": f"{_LAYER} with num_kv_heads=1",
    "gqa": _LAYER,
    "groupedattention": _LAYER,
    "llamaattention": f"{_LAYER}, or families.attention(config)",
    "slidingwindowattention": f"{_LAYER} with mask=CAUSAL & Window(n, 0)",
    "multiheadlatentattention": "LatentAttention",
    "mla": "LatentAttention",
    "encoderdecoderattention": "CrossAttention",
    "retention": "LightningAttention",
    "gateddeltanet": "GatedDeltaAttention",
    "deltanet": "GatedDeltaAttention",
    "flashattention": "attend, which chooses such a backend where it can",
    "flashattn": "attend, which chooses such a backend where it can",
    "flashattnfunc": "attend, which chooses such a backend where it can",
    "memoryefficientattention": "attend",
    "scaleddotproductattention": "attend, or dot_product_attention, which is called as jax.nn's",
    "sdpa": "attend",
    "flexattention": "attend(mask=MaskFn(f), score=ScoreFn(f))",
    "ringattention": "sharding.context_parallel",
    "pagedattention": "attend_cached with a PagedCache",
    "getattentionweights": "attention_weights",
    "kvcache": "Cache",
    "dynamiccache": "Cache",
    "rope": "Rotary",
    "rotaryembedding": "Rotary",
    "applyrotaryposemb": "rotate",
    "relativepositionbias": "T5Bias",
    "causalmask": "CAUSAL",
    "makecausalmask": "CAUSAL",
    "tril": "CAUSAL",
    "paddingmask": "Lengths(n), or valid= of a layer",
    "makeattentionmask": "Dense(q_valid[:, None, :, None] & k_valid[:, None, None])",
    "segmentids": "Segments(ids)",
    "blockmask": "MaskFn(f)",
    "createblockmask": "MaskFn(f)",
    "attentionbias": "Additive(bias)",
    "logitsoftcap": "Softcap(c)",
    "port": "flax_attn.parity.port",
    "compare": "flax_attn.parity.compare",
    "assertparity": "flax_attn.parity.assert_parity",
    "convertweights": "flax_attn.parity.port, or flax_attn.weights.load",
    "loadweights": "flax_attn.weights.load",
    "fromtorch": "flax_attn.parity.port",
    "fromnumpy": "flax_attn.weights.load",
    "frompretrained": "flax_attn.weights.load and flax_attn.families",
}


def instead_of(name: str, public: Sequence[str]) -> str:
    """The end of an error for an unknown name: what to take here, or the nearest names.

    >>> instead_of("MultiheadAttention", ["TransformerMultiHeadAttention"])
    '; take TransformerMultiHeadAttention'
    >>> instead_of("Causall", ["CAUSAL", "Causal"])
    '; did you mean Causal?'
    """
    here = NAMES.get(name.replace("_", "").lower())
    if here is not None:
        return f"; take {here}"
    hint = did_you_mean(name, public, "")
    return f"; {hint}" if hint.startswith("did you mean") else ""
