"""Decoders whose layers are all grouped-query attention: a row for each model type.

A row lists the parts that differ from plain causal attention. What no part of `_parts.py` says is a
function above the table.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .._internal.caller import warn_once
from ..layers import GatedQueryAttention
from ..masks import FULL, Mask, Window
from ..norms import RMSNorm
from ..positions import Frequencies, Rotary
from ..rules import Rules
from ..scores import IDENTITY, Softcap
from ..weights.rule import Rule
from ._config import Config, Family, above_zero
from ._fused import fused
from ._gguf import names as gguf_names
from ._gguf import unpermuted
from ._kinds import (
    Kind,
    all_but_every,
    alternating,
    by_layer_types,
    has_rotary,
    is_kind,
    mask_of,
    upper_window,
    uses_window,
    window_if_used,
)
from ._parts import (
    BIASES,
    HEAD_NORMS,
    NO_DROPOUT,
    QKV_BIASES,
    ROTARY,
    Arguments,
    by_kind,
    clipped,
    decoder,
    has_sliding_window,
    input_biases,
    layer_norms,
    renamed,
    rms_norms,
    rotated,
    scaled,
    window_if,
    windows,
)
from ._rope import SHARE, rope_of, rotary, rotary_of, rotary_of_kind
from ._scores import TEMPERATURE_FIELDS, temperature

# Parts that one model type has, or a few.


def one_direction(config: Config, index: int) -> Arguments:
    """No argument; ValueError for a Gemma config that asks for bidirectional attention."""
    if config.flag("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention=True is not served: in transformers what it does depends "
            "on the implementation that is chosen there."
        )
    return {}


def capped(config: Config, index: int) -> Arguments:
    """Gemma 2's scale, and soft-capped logits if the config has a cap."""
    has_cap = config["attn_logit_softcapping"] is not None
    score = Softcap(config.number("attn_logit_softcapping")) if has_cap else IDENTITY
    return {"rules": Rules(score=score, scale=config.number("query_pre_attn_scalar") ** -0.5)}


def gemma3_window(config: Config, index: int) -> Arguments:
    """The rotary and the mask of a layer's kind; a bidirectional window reaches half as far."""
    default = all_but_every("sliding_window_pattern")
    kind = by_layer_types(default)(config, index)
    if config.entry("sliding_window_pattern") is not None and kind != default(config, index):
        raise ValueError(
            f"layer_types and sliding_window_pattern={config['sliding_window_pattern']} differ on "
            f"layer {index}; leave one of them out."
        )
    arguments = {"rotary": rotary_of_kind(config, kind, "rope_local_base_freq")}
    if not config.flag("use_bidirectional_attention"):
        return {**arguments, "mask": mask_of(config, kind)}
    half = config.count("sliding_window") // 2
    mask: Mask = Window(half, half) if kind == "sliding_attention" else FULL
    return {**arguments, "mask": mask}


def granite_scale(config: Config, index: int) -> Arguments:
    """`attention_multiplier`; HyperCLOVA X has None, for the usual scale."""
    if config["attention_multiplier"] is None:
        return {"rules": Rules(scale=config.query_heads()[1] ** -0.5)}
    return {"rules": Rules(scale=config.number("attention_multiplier"))}


def heads_fill_width(config: Config, index: int) -> Arguments:
    """No argument; ValueError unless all heads together are as wide as a token."""
    n, h = config.query_heads()
    if n * h != config.count("hidden_size"):
        raise ValueError(
            f"num_attention_heads * head_dim must be hidden_size; got num_attention_heads={n}, "
            f"head_dim={h}, hidden_size={config['hidden_size']}."
        )
    return {}


def hunyuan_rotary(config: Config, index: int) -> Arguments:
    """A dynamic rotary with alpha is a plain one with another base.

    Raises:
      ValueError: for an alpha without a head_dim, which the class needs.
    """
    rope = rope_of(config, ("alpha",))
    alpha = rope.pop("alpha", None)
    if alpha and rope["rope_type"] != "dynamic":
        warn_once(
            f"alpha={alpha!r} is read beside rope_type='dynamic' alone, and the config has "
            f"{rope['rope_type']!r}: the rotary is built without it."
        )
    if not alpha or rope["rope_type"] != "dynamic":
        return {"rotary": rotary_of(config, rope)}
    width = config.count("head_dim")
    base = above_zero("rope_theta", rope["rope_theta"])
    base *= above_zero("alpha", alpha) ** (width / (width - 2))
    return {"rotary": rotary_of(config, {"rope_type": "default", "rope_theta": base})}


def minimax_m2_rotary(config: Config, index: int) -> Arguments:
    """The share of a head that rotates, by `rotary_dim` if nothing else says it."""
    if config["rotary_dim"] is not None:
        width, (_, h) = config.count("rotary_dim"), config.query_heads()
        if config.entry(SHARE) not in (None, width / h):
            warn_once(
                f"rotary_dim={width} of head_dim={h} is not read beside {SHARE}="
                f"{config.entry(SHARE)!r}, as in transformers: the rotary is built with the latter."
            )
        elif config.entry(SHARE) is None:
            config = config.replaced(**{SHARE: width / h})
    return {"rotary": rotary(config, partial=True)}


def with_temperature(config: Config, index: int) -> Arguments:
    """Ministral 3's rotary, and logits that grow with the query's position."""
    rope = rope_of(config, TEMPERATURE_FIELDS)
    rules = Rules(score=temperature(config, rope))
    return {"rotary": rotary_of(config, rope), "rules": rules}


def norms_without_gains(config: Config, index: int) -> Arguments:
    """NanoChat's, after the rotation."""
    norm = partial(RMSNorm, None, eps=config.number("rms_norm_eps"))
    return {"q_norm": norm, "k_norm": norm, **AFTER_ROTARY}


def olmo3_window(config: Config, index: int) -> Arguments:
    """A window in three layers of four, whose rotary is never scaled."""
    kind = by_layer_types(all_but_every(4))(config, index)
    return {"rotary": rotary_of_kind(config, kind, "default_theta"), "mask": mask_of(config, kind)}


def bitnet_norm(config: Config, index: int) -> Arguments:
    """A norm over all heads before the output projection."""
    how = {"eps": config.number("rms_norm_eps"), "over_heads": True, "cast": "before"}
    return {"o_norm": partial(RMSNorm, config.count("hidden_size"), **how)}


def phimoe_rotary(config: Config, index: int) -> Arguments:
    """A plain rotary, or one scaled as for short sequences, as in transformers 5.24 at any length.

    Raises:
      ValueError: for magnitudes that differ by the length of the sequence.
    """
    magnitudes = ("short_mscale", "long_mscale")
    rope = rope_of(config, magnitudes)
    plain_rotary = rotary_of(config, rope)
    if plain_rotary.scaling is None:
        return {"rotary": plain_rotary}
    short, long = (above_zero(name, rope.get(name)) for name in magnitudes)
    if short != long:
        raise ValueError(
            "short_mscale and long_mscale must be equal, since the magnitude of a rotary does not "
            f"follow the length here; got {short} and {long}."
        )
    rates = plain_rotary.scaling.rates(plain_rotary.base, config.heads()[2], 1)
    return {"rotary": Rotary(scaling=Frequencies(rates, short))}


def equal_biases(config: Config, index: int) -> Arguments:
    """InternLM3's biases; ValueError for one in the attention alone, or in the rest alone."""
    names = [config.name("attention_bias"), config.name("mlp_bias")]
    values = [config["attention_bias"], config["mlp_bias"]]
    if values[0] != values[1]:
        both = " and ".join(f"{name}={x!r}" for name, x in zip(names, values, strict=True))
        raise ValueError(f"{both} are not served: in transformers they must be the same.")
    return BIASES(config, index)


def laguna_layer(config: Config, index: int) -> Arguments:
    """The heads and the gate of a layer of Laguna, and what follows from its kind."""
    if config["num_attention_heads_per_layer"] is not None:
        heads = config.of_layer("num_attention_heads_per_layer", index)
        config = config.replaced(num_attention_heads=heads)
    per_head = config["gating"] is True or config["gating"] == "per-head"
    return {
        **HEAD_NORMS(config, index),
        **by_kind(FULL_BY_DEFAULT, partial=True)(config, index),
        "heads": config.heads(),
        "gate": "head" if per_head else "full",
        "activation": "softplus",
    }


# Kinds of layers, and which of them have a rotary.


def smollm3_kind(config: Config, index: int) -> str:
    """A window in layers without a rotary, if the config uses one."""
    used = uses_window(config) and not has_rotary(config, index)
    return "sliding_attention" if used else "full_attention"


def exaone_default(config: Config, index: int) -> str:
    """A window in all layers but every n-th, n the `sliding_window_pattern`."""
    if config["sliding_window"] is None:
        raise ValueError("sliding_window=None needs layer_types beside it, which the config lacks.")
    return all_but_every("sliding_window_pattern")(config, index)


def exaone_has_rotary(config: Config, index: int) -> bool:
    """Whether a layer has a rotary: one with a window, or any if the config has no window."""
    has_window = EXAONE_KIND(config, index) == "sliding_attention"
    return config["sliding_window"] is None or has_window


def ministral_kind(config: Config, index: int) -> str:
    """A window in every layer, if the config has one."""
    return "full_attention" if config["sliding_window"] is None else "sliding_attention"


def one_in_four(config: Config, index: int) -> str:
    """Full attention in the first layer of each four."""
    return "sliding_attention" if index % 4 else "full_attention"


def qwen2_moe_chosen(config: Config, index: int) -> bool:
    """Whether a layer may have a window: every second of the lower ones."""
    return index % 2 == 0 and index < config.whole("max_window_layers")


# Rules of weights.


def llama_gguf(config: Config, index: int) -> tuple[Rule, ...]:
    """llama.cpp rotates neighbouring components, so its query and key rows are stored in pairs."""
    n, k, _ = config.heads()
    bias = config.flag("attention_bias")
    return (*unpermuted("q", n, bias), *unpermuted("k", k, bias), *gguf_names("v", "output"))


def gemma3_gguf(config: Config, index: int) -> tuple[Rule, ...]:
    """llama.cpp's files store a norm's gain as 1 + w, transformers' as w."""
    gains = (Rule.shifted(f"attn_{x}_norm -> {x}_norm", by=-1.0) for x in "qk")
    return (*gains, *gguf_names("q", "k", "v", "output"), Rule.skip("post_*"))


def phi3_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`qkv_proj` holds the rows of all query heads, then those of the key and of the value."""
    n, k, h = config.heads()
    return fused("qkv_proj", "(n o) i -> n i o", bias=False, o=(n * h, k * h, k * h))


def stacked_norms(config: Config, index: int) -> tuple[Rule, ...]:
    """StableLM's norms, one module per head in torch."""
    n, k, _ = config.heads() if config.flag("qk_layernorm") else (0, 0, 0)
    modules = {name: ",".join(map(str, range(heads))) for name, heads in (("q", n), ("k", k))}
    return tuple(
        Rule(f"{x}_layernorm.norms.{{{numbers}}}.weight -> {x}_norm.scale", "n h -> n h")
        for x, numbers in modules.items()
        if numbers
    )


NEIGHBOURS: dict[str, Any] = {"layout": "interleaved"}  # of a head, which are rotated together
AFTER_ROTARY = {"norm_after_rotary": True}
OVER_HEADS = partial(rms_norms, over_heads=True)
HALF_ROTARY = rotated(partial=True)
GLM_ROTARY: dict[str, Any] = {**NEIGHBOURS, "partial": True}
FULL_BY_DEFAULT = by_layer_types(lambda config, index: "full_attention")
PATTERN = by_layer_types(all_but_every("sliding_window_pattern"))
AFMOE_KIND = by_layer_types(all_but_every("global_attn_every_n_layers"))
EXAONE_KIND = by_layer_types(exaone_default)
ALTERNATING = windows(by_layer_types(alternating))
EVERY_FOURTH = {"sliding_window_pattern": 4}
USE_BIAS = {"attention_bias": ("use_bias",)}


def has_window(kind: Kind) -> Callable[[Config, int], bool]:
    """Returns whether a layer has a window."""
    return is_kind(kind, "sliding_attention")


ERNIE = decoder(BIASES, rotated(**NEIGHBOURS), NO_DROPOUT, names=USE_BIAS)
EXAONE = decoder(
    rotated(exaone_has_rotary), HEAD_NORMS, windows(EXAONE_KIND), defaults=EVERY_FOURTH
)
GRANITE = decoder(ROTARY, granite_scale, BIASES)
HUNYUAN = decoder(
    hunyuan_rotary,
    AFTER_ROTARY,
    HEAD_NORMS,
    BIASES,
    rules=renamed("query_layernorm.weight -> q_norm.scale", "key_layernorm.weight -> k_norm.scale"),
)
QWEN3_VL = decoder(rotated(sections=(24, 20, 20), interleaved=True), HEAD_NORMS, BIASES)
ROWS: Mapping[str, Family] = {
    "afmoe": decoder(
        BIASES,
        rotated(has_window(AFMOE_KIND)),
        windows(AFMOE_KIND),
        HEAD_NORMS,
        layer=GatedQueryAttention,
        rules=renamed("gate_proj -> g_proj"),
    ),
    "apertus": decoder(BIASES, ROTARY, HEAD_NORMS),
    "bitnet": decoder(
        heads_fill_width,
        bitnet_norm,
        BIASES,
        ROTARY,
        rules=renamed("attn_sub_norm.weight -> o_norm.scale"),
    ),
    "cohere": decoder(layer_norms("use_qk_norm"), rotated(**NEIGHBOURS), BIASES),
    "cohere2": decoder(
        rotated(has_window(PATTERN), **NEIGHBOURS), BIASES, windows(PATTERN), defaults=EVERY_FOURTH
    ),
    "cwm": decoder(windows(by_layer_types(one_in_four)), ROTARY),
    "ernie4_5": ERNIE,
    "ernie4_5_moe": ERNIE,
    "exaone4": EXAONE,
    "exaone_moe": EXAONE,
    "gemma": decoder(one_direction, BIASES, ROTARY),
    "gemma2": decoder(one_direction, ALTERNATING, capped, BIASES, ROTARY),
    "gemma3_text": decoder(
        gemma3_window,
        rms_norms(plus_one=True),
        scaled("query_pre_attn_scalar", -0.5),
        BIASES,
        gguf=gemma3_gguf,
        defaults={"sliding_window_pattern": 6},
    ),
    "glm4": decoder(rotated(**GLM_ROTARY), input_biases()),
    "glm4_moe": decoder(
        rms_norms(unless_off="use_qk_norm", cast="before"), HALF_ROTARY, input_biases()
    ),
    "glm4v_moe_text": decoder(rotated(partial=True, sections=(8, 12, 12)), input_biases()),
    "glm4v_text": decoder(rotated(**GLM_ROTARY, sections=(8, 12, 12)), QKV_BIASES),
    "gpt_oss": decoder(ALTERNATING, BIASES, ROTARY, {"sinks": True}),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "helium": decoder(heads_fill_width, rotated(**NEIGHBOURS), input_biases()),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "internlm3": decoder(
        equal_biases,
        ROTARY,
        names={
            "attention_bias": ("attention_bias", "qkv_bias"),
            "mlp_bias": ("mlp_bias", "bias"),
        },
    ),
    "laguna": decoder(laguna_layer, BIASES, layer=GatedQueryAttention),
    "llama": decoder(BIASES, ROTARY, gguf=llama_gguf),
    "mellum": decoder(by_kind(FULL_BY_DEFAULT), HEAD_NORMS, BIASES),
    "minimax_m2": decoder(
        minimax_m2_rotary, OVER_HEADS(cast="before"), defaults={"rotary_dim": None}
    ),
    "ministral": decoder(windows(by_layer_types(ministral_kind)), ROTARY),
    "ministral3": decoder(with_temperature, has_sliding_window),
    "mistral": decoder(ROTARY, has_sliding_window),
    "nanochat": decoder(norms_without_gains, BIASES, rotated(reverse=True)),
    "nemotron": decoder(HALF_ROTARY, BIASES),
    "olmo": decoder(BIASES, clipped, ROTARY),
    "olmo2": decoder(ROTARY, OVER_HEADS(cast="after"), BIASES),
    # The class has no base for layers with a window, which do not read rope_theta.
    "olmo3": decoder(
        olmo3_window, BIASES, OVER_HEADS(cast="after"), defaults={"default_theta": 500_000.0}
    ),
    "olmoe": decoder(heads_fill_width, OVER_HEADS(cast="before"), BIASES, clipped, ROTARY),
    "phi3": decoder(
        has_sliding_window,
        rotated(partial=True, renamed={"su": "longrope", "yarn": "longrope"}),
        rules=phi3_rules,
    ),
    "phimoe": decoder(BIASES, phimoe_rotary, has_sliding_window),
    "qwen2": decoder(windows(upper_window), ROTARY, QKV_BIASES),
    "qwen2_5_vl_text": decoder(
        rotated(renamed={"mrope": "default"}, sections=(16, 24, 24)),
        windows(upper_window),
        QKV_BIASES,
    ),
    "qwen2_moe": decoder(
        windows(window_if_used(qwen2_moe_chosen)), input_biases("qkv_bias"), ROTARY
    ),
    "qwen3": decoder(windows(upper_window), BIASES, ROTARY, HEAD_NORMS),
    "qwen3_moe": decoder(window_if(uses_window), HEAD_NORMS, BIASES, ROTARY),
    "qwen3_omni_moe_text": QWEN3_VL,
    "qwen3_vl_moe_text": QWEN3_VL,
    "qwen3_vl_text": QWEN3_VL,
    "seed_oss": decoder(input_biases(out="attention_out_bias"), ROTARY),
    "smollm3": decoder(
        rotated(has_rotary, always_checked=False), BIASES, windows(by_layer_types(smollm3_kind))
    ),
    "stablelm": decoder(
        layer_norms("qk_layernorm"), HALF_ROTARY, input_biases("use_qkv_bias"), rules=stacked_norms
    ),
    "starcoder2": decoder(BIASES, ROTARY, has_sliding_window, names=USE_BIAS),
}
