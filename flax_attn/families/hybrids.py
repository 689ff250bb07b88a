"""Decoders with two kinds of layers: delta rules, other recurrences or convolutions, and attention.

Models with a state space are in `state_space.py`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from .._internal.checks import check_choice, check_divides
from ..layers import (
    RGLRU,
    CrossAttention,
    GatedDeltaAttention,
    GatedQueryAttention,
    GatedShortConvolution,
    KimiDeltaAttention,
    LightningAttention,
)
from ..norms import RMSNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._fused import convolutions, fused
from ._kinds import all_but_every, by_layer_types, causal_window, is_kind
from ._parts import (
    BIASES,
    NO_DROPOUT,
    ROTARY,
    Arguments,
    Part,
    decoder,
    has_sliding_window,
    hybrid,
    renamed,
    rms_norms,
    rotated,
)
from ._rope import rope_of, rotary
from .decoders import OVER_HEADS
from .deepseek import latent

# The gated delta rule: Qwen3-Next, Qwen3.5, OLMo hybrid.


def gated_delta(
    config: Config, index: int, init: Mapping[str, Any], **arguments: Any
) -> GatedDeltaAttention:
    """The gated delta rule, by a config's sizes; `arguments` are further ones.

    Raises:
      ValueError: for a hidden_act that is not silu, which the convolution would apply.
    """
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    n, k, key, value = delta_sizes(config)
    layer_kwargs: dict[str, Any] = {"eps": config.number("rms_norm_eps"), **arguments, **init}
    return GatedDeltaAttention(
        config.count("hidden_size"),
        n,
        key,
        value,
        num_key_heads=k,
        conv_size=config.count("linear_conv_kernel_dim"),
        **layer_kwargs,
    )


def delta_sizes(config: Config) -> tuple[int, int, int, int]:
    """How many heads of values and of keys the delta rule has, and the widths of key and value."""
    n, k = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    check_divides("linear_num_key_heads", k, "linear_num_value_heads", n)
    return n, k, config.count("linear_key_head_dim"), config.count("linear_value_head_dim")


def gated_attention(part: Part) -> Family:
    """The row of Qwen3-Next's full attention, with this rotary."""
    norms = rms_norms(plus_one=True)
    return decoder({"fused": True}, norms, BIASES, part, layer=GatedQueryAttention)


def qwen3_next_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """The delta rule's projections are fused by heads of keys: the parts of one after another."""
    n, k, key, value = delta_sizes(config)
    qkvz = (key, key, n // k * value, n // k * value)
    heads = "(g n o) i -> n i (g o)"
    return (
        Rule("in_proj_qkvz.weight -> {q,k,v,g}_proj.kernel", heads, o=qkvz),
        Rule("in_proj_ba.weight -> {b,a}_proj.kernel", heads, o=(n // k, n // k)),
        *ENDS,
    )


def qwen3_5_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Queries, keys and values of the delta rule are fused: all of one after another."""
    n, k, key, value = delta_sizes(config)
    parts = (k * key, k * key, n * value)
    return (
        Rule("in_proj_qkv.weight -> {q,k,v}_proj.kernel", "(n o) i -> n i o", o=parts),
        Rule("in_proj_z -> g_proj"),
        Rule("in_proj_b -> b_proj"),
        Rule("in_proj_a -> a_proj"),
        *ENDS,
    )


def olmo_delta(config: Config, index: int, init: Mapping[str, Any]) -> GatedDeltaAttention:
    """The delta rule of OLMo hybrid, which may have negative eigenvalues."""
    negative = config.flag("linear_allow_neg_eigval")
    return gated_delta(_olmo_sizes(config), index, init, negative=negative, eps=1e-5)


def olmo_rotary(config: Config, index: int) -> Arguments:
    """A rotary, if the config has one."""
    return {"rotary": rotary(config) if _has_rotary(config) else None}


def _has_rotary(config: Config) -> bool:
    """Whether there is a rotary: unless the config says that its base is None."""
    inside = config.entry("rope_scaling") or config.entry("rope_parameters") or {}
    if "rope_theta" in inside:
        return inside["rope_theta"] is not None
    return not config.is_explicit_null("rope_theta")


def _olmo_sizes(config: Config) -> Config:
    """The config with all sizes of the delta rule."""
    heads = config.count("num_attention_heads")
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    sizes = {name: config[name] or value for name, value in sizes.items()}
    key = config["linear_key_head_dim"]
    if key is None:
        key = int(0.75 * config.count("hidden_size") / sizes["linear_num_key_heads"])
    value = config["linear_value_head_dim"]
    value = 2 * key if value is None else value
    return config.replaced(**sizes, linear_key_head_dim=key, linear_value_head_dim=value)


def olmo_default(config: Config, index: int) -> str:
    """The delta rule in all layers but every fourth, or the last of fewer."""
    last = config.count("num_hidden_layers") - 1
    return "full_attention" if index % 4 == 3 or index == last < 3 else LINEAR


def has_olmo_delta(config: Config, index: int) -> bool:
    """Whether a layer has the delta rule."""
    return by_layer_types(olmo_default, LINEAR)(config, index) == LINEAR


def olmo_saved_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """In files the convolutions of the delta rule are three."""
    if not has_olmo_delta(config, index):
        return ()
    sizes = _olmo_sizes(config)
    heads = (sizes.count("linear_num_key_heads"), sizes.count("linear_num_value_heads"))
    key = heads[0] * sizes.count("linear_key_head_dim")
    value = heads[1] * sizes.count("linear_value_head_dim")
    return convolutions(key, key, value)


# Kimi Linear: Kimi's delta rule, and latent attention without a rotary.


def _kimi_config(config: Config) -> Config:
    """The config with the sizes that stand in the dict of the delta rule."""
    inside = config.mapping("linear_attn_config")
    return config.replaced(
        **{name: inside[key] for key, name in KIMI_FIELDS.items() if key in inside}
    )


def kimi_delta(config: Config, index: int, init: Mapping[str, Any]) -> KimiDeltaAttention:
    """Kimi's delta rule, whose decay is by component."""
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    config = _kimi_config(config)
    width = config.count("linear_head_dim")
    return KimiDeltaAttention(
        config.count("hidden_size"),
        config.count("linear_num_heads"),
        width,
        width,
        conv_size=config.count("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
        **init,
    )


def has_kimi_delta(config: Config, index: int) -> bool:
    """By layer_types, or by the lists of linear_attn_config, which count from 1."""
    inside = config.mapping("linear_attn_config")

    def default(index: int) -> str:
        listed = [inside.get(name) for name in ("kda_layers", "full_attn_layers")]
        if None in listed:
            return "full_attention" if index and index % 4 == 0 else "linear_attention"
        for each, kind in zip(listed, ("linear_attention", "full_attention"), strict=True):
            if not isinstance(each, list | tuple):
                raise ValueError(
                    "kda_layers and full_attn_layers of linear_attn_config must be lists of "
                    f"layers, counted from 1; got {each!r}."
                )
            if index + 1 in each:
                return kind
        raise ValueError(
            f"kda_layers and full_attn_layers of linear_attn_config lack layer {index + 1} of "
            f"{config.count('num_hidden_layers')}, counted from 1."
        )

    return config.layer_type(index, default, "linear_attention") == "linear_attention"


def kimi_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """The delta rule's decay is a module of its own."""
    return (
        Rule("forget_gate.A_log -> A_log", "1 1 n 1 -> n"),
        Rule("forget_gate.* -> *"),
        Rule("o_norm.weight -> o_norm.scale"),
    )


def kimi_saved_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """In files the decay has no module of its own, and the convolutions are three."""
    if not has_kimi_delta(config, index):
        return ()
    wide = _kimi_config(config)
    each = wide.count("linear_num_heads") * wide.count("linear_head_dim")
    return (
        *convolutions(each, each, each),
        Rule("A_log -> A_log", "1 1 n 1 -> n"),
    )


# MiniMax: lightning attention, and Mistral's.


def lightning(config: Config, index: int, init: Mapping[str, Any]) -> LightningAttention:
    """Lightning attention, which looks back further in later layers."""
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    (n, h), layers = config.query_heads(), config.count("num_hidden_layers")
    factor = 1 - index / (layers - 1 + 1e-5) + 1e-5
    return LightningAttention(config.count("hidden_size"), n, h, h, slope_factor=factor, **init)


def lightning_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Lightning attention fuses query, key and value head by head.

    Where a file holds its tables of decays too, which follow from the config, skip them by
    `Rule.skip`: `slope_rate`, `query_decay`, `key_decay`, `diagonal_decay`.
    """
    n, h = config.query_heads()
    return fused("qkv_proj", "(h n o) i -> n i (h o)", bias=False, h=n, o=h)


def minimax_default(config: Config, index: int) -> str:
    """Lightning attention in every second layer."""
    return "linear_attention" if index % 2 else "full_attention"


# LFM2: gated short convolutions.


def convolution(config: Config, index: int, init: Mapping[str, Any]) -> GatedShortConvolution:
    """A gated short convolution."""
    size, bias = config.count("conv_L_cache"), config.flag("conv_bias")
    return GatedShortConvolution(config.count("hidden_size"), conv_size=size, use_bias=bias, **init)


def lfm2_default(config: Config, index: int) -> str:
    """Attention in the layers that `full_attn_idxs` lists, or in all."""
    is_full = config["full_attn_idxs"] is None or index in config.listed("full_attn_idxs")
    return "full_attention" if is_full else "conv"


# RecurrentGemma: Griffin's recurrence.


def griffin(config: Config, index: int, init: Mapping[str, Any]) -> RGLRU:
    """Griffin's recurrence."""
    check_choice("hidden_activation", config["hidden_activation"], "gelu_pytorch_tanh")
    width, n = config.count("hidden_size"), config.count("num_attention_heads")
    inner = width if config["lru_width"] is None else config.count("lru_width")
    check_divides("num_attention_heads", n, "lru_width", inner)
    return RGLRU(width, n, width=inner, conv_size=config.count("conv1d_width"), **init)


def has_griffin(config: Config, index: int) -> bool:
    """By block_types, which are repeated from the first layer on."""
    kinds = config["block_types"]
    if not isinstance(kinds, list | tuple) or not kinds:
        raise ValueError(f"block_types must list kinds of layers; got {kinds!r}.")
    kind = kinds[index % len(kinds)]
    check_choice(f"block_types[{index % len(kinds)}]", kind, "recurrent", "attention")
    return kind == "recurrent"


def recurrent_gemma_attention(config: Config, index: int) -> Arguments:
    """A window in every attention layer, part of each head rotated, and biases."""
    bias, rope = config.flag("attention_bias"), rotary(config, partial=True)
    if rope_of(config)["rope_type"] != "default":
        raise ValueError("rope_type must be 'default' in this model_type, as in transformers.")
    mask = causal_window(config)
    return {"rotary": rope, "mask": mask, "qkv_bias": bias, "out_bias": True}


# Llama 3.2 Vision's text: cross attention to the image's tokens, `layer(x, memory)`.


def cross_attention(config: Config, index: int, init: Mapping[str, Any]) -> CrossAttention:
    """Normalized cross attention without biases."""
    (n, k, h), eps = config.heads(), config.number("rms_norm_eps")
    norm = partial(RMSNorm, h, eps=eps, cast="before", param_dtype=init["param_dtype"])
    return CrossAttention(
        *(config.count("hidden_size"), n),
        num_kv_heads=k,
        norms=(norm(), norm()),
        use_bias=False,
        dropout=config.rate("attention_dropout"),
        **init,
    )


def crosses(config: Config, index: int) -> bool:
    """Whether a layer has cross attention."""
    return index in config.listed("cross_attention_layers")


KIMI_FIELDS = {  # of linear_attn_config, and what the class calls them
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# What the delta rule calls otherwise than its class in transformers.
ENDS = (Rule("norm.weight -> o_norm.scale"), Rule("out_proj -> o_proj"))
LINEAR = "linear_attention"
DELTA_MODULES = ("linear_attn", "self_attn")
has_delta = is_kind(
    by_layer_types(all_but_every("full_attention_interval", LINEAR), LINEAR), LINEAR
)
QWEN3_5 = hybrid(
    has_delta,
    Family(gated_delta, qwen3_5_rules),
    gated_attention(rotated(partial=True, sections=(11, 11, 10), interleaved=True)),
    DELTA_MODULES,
    defaults={"full_attention_interval": 4},
)
LFM2 = hybrid(
    is_kind(by_layer_types(lfm2_default, "conv"), "conv"),
    Family(convolution),
    decoder(
        rms_norms("norm_eps", cast="before"),
        ROTARY,
        NO_DROPOUT,
        rules=renamed(
            *(f"{x}_layernorm.weight -> {x}_norm.scale" for x in "qk"), "out_proj -> o_proj"
        ),
    ),
    ("conv", "self_attn"),
)
ROWS: Mapping[str, Family] = {
    "kimi_linear": hybrid(
        has_kimi_delta,
        Family(kimi_delta, kimi_rules),
        Family(latent(None)),
        defaults={"linear_attn_config": None},
    ),
    "lfm2": LFM2,
    # Its class lacks full_attn_idxs.
    "lfm2_moe": LFM2._replace(derived=lambda config: config.replaced(full_attn_idxs=None)),
    "minimax": hybrid(
        is_kind(by_layer_types(minimax_default, LINEAR), LINEAR),
        Family(lightning, lightning_rules),
        decoder(ROTARY, has_sliding_window),
    ),
    "mllama_text_model": hybrid(
        crosses,
        Family(cross_attention, renamed("o_proj -> out_proj")),
        decoder(ROTARY),
        ("cross_attn", "self_attn"),
        names={"attention_dropout": ("dropout",)},
        defaults={"cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38)},
    ),
    "olmo_hybrid": hybrid(
        has_olmo_delta,
        Family(olmo_delta, renamed("o_norm.weight -> o_norm.scale")),
        decoder(olmo_rotary, OVER_HEADS(cast="after"), BIASES),
        DELTA_MODULES,
    ),
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": hybrid(
        has_delta,
        Family(gated_delta, qwen3_next_rules),
        gated_attention(rotated(partial=True)),
        DELTA_MODULES,
        defaults={"full_attention_interval": 4},
    ),
    "recurrent_gemma": hybrid(
        has_griffin,
        Family(griffin, renamed("rg_lru.* -> *")),
        decoder(recurrent_gemma_attention),
        defaults={"max_position_embeddings": 8192},
    ),
}
