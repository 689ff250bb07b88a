"""Encoders of text, images and sound with multi-head attention, and encoder-decoder models."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from .._internal.caller import warn_once
from ..layers import CrossAttention, LongformerAttention
from ..masks import CAUSAL, FULL, Mask, Window
from ..norms import RMSNorm
from ..positions import Axial, Rotary
from ..weights.rule import Rule
from ._config import NONE, ByPart, Config, Family, Names
from ._fused import fused
from ._kinds import KINDS, alternating, by_layer_types, causal_window, check_causal
from ._parts import (
    ALL_BIASES,
    BIASES,
    ROTARY,
    Arguments,
    at,
    causal_if,
    causal_only,
    decoder,
    encoder,
    renamed,
    windows,
)
from ._published import facts_of
from ._rope import rotary_of_kind
from .decoders import capped

# Parts that one model type has, or a few.


def bidirectional(config: Config, index: int) -> Arguments:
    """EuroBERT's key heads; its class ignores is_causal."""
    return {"heads": config.heads()}


def qkv_bias(config: Config, index: int) -> Arguments:
    """Biases of query, key and value projections if the config has them, one of the output."""
    return {"qkv_bias": config.flag("qkv_bias"), "out_bias": True}


def internvl_norms(config: Config, index: int) -> Arguments:
    """Norms of queries and keys over all heads, and biases, if the config has them."""
    arguments: dict[str, Any] = {"qkv_bias": config.flag("attention_bias"), "out_bias": True}
    if not config.flag("use_qk_norm"):
        return arguments
    eps = 1e-6  # which no field says
    norm = partial(RMSNorm, config.count("hidden_size"), eps=eps, cast="before", over_heads=True)
    return {**arguments, "q_norm": norm, "k_norm": norm}


def dinov3_layer(config: Config, index: int) -> Arguments:
    """A rotary by the centre of each patch, and a bias of each projection if the config has it.

    Call the layer with `positions=`, `2 *B T`: row and column of each patch's centre, from -2 pi at
    one border to 2 pi at the other, and 0 for the class token and the registers. In training the
    model shifts and rescales these positions, as the fields pos_embed_... say.

    Raises:
      ValueError: for biases of queries and values that differ, for one of the keys alone, and for
        heads whose width is no multiple of 4.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if config.entry(name) is not None:
            warn_once(f"{name} is not read by this model_type, whose base is its rope_theta.")
    query, key, value = (config.flag(f"{part}_bias") for part in ("query", "key", "value"))
    if query != value or (key and not query):
        raise ValueError(
            "query_bias and value_bias must be one, and key_bias=True needs both; got "
            f"query_bias={query}, key_bias={key}, value_bias={value}."
        )
    n, h = config.query_heads()
    if h % 4:
        raise ValueError(
            "hidden_size must be a multiple of 4 num_attention_heads, so that rows and columns "
            f"turn as many pairs; got hidden_size={config['hidden_size']}, num_attention_heads={n}."
        )
    rope = Rotary(config.number("rope_theta"), "half", axes=Axial())
    out_bias = config.flag("proj_bias")
    return {"rotary": rope, "qkv_bias": query, "key_bias": key, "out_bias": out_bias}


def modernbert_rotary(config: Config, index: int) -> Arguments:
    """The rotary of a layer's kind; a rope_scaling of older files is of both kinds."""
    kind, bases = MODERNBERT_KIND(config, index), ("local_rope_theta", "global_rope_theta")
    return {"rotary": rotary_of_kind(config, kind, *bases, scales_both=True)}


def modernbert_window(config: Config, index: int) -> Arguments:
    """A window as far ahead as behind in most layers."""
    half, is_local = (
        config.count("local_attention") // 2,
        MODERNBERT_KIND(config, index) == KINDS[1],
    )
    return {"mask": Window(half, half) if is_local else FULL}


def modernbert_decoder_window(config: Config, index: int) -> Arguments:
    """A causal window half as long as the encoder's: the token itself is in it.

    Files that transformers has written name that half too, as sliding_window, which then counts.
    """
    check_causal(config)
    mask: Mask = CAUSAL
    if MODERNBERT_KIND(config, index) == KINDS[1]:
        if config["sliding_window"] is not None:
            return {"mask": causal_window(config)}
        mask = CAUSAL & Window(config.count("local_attention") // 2 - 1, 0)
    return {"mask": mask}


def longformer(config: Config, index: int, init: Mapping[str, Any]) -> LongformerAttention:
    """A window for most tokens, global attention for `layer(x, global_tokens=...)`."""
    return LongformerAttention(
        config.count("hidden_size"),
        config.query_heads()[0],
        _longformer_window(config, index),
        dropout=config.rate("attention_dropout"),
        **init,
    )


def _longformer_window(config: Config, index: int) -> int:
    """How many tokens a layer sees beside its own: one number for all layers, or one for each."""
    windows, layers = config["attention_window"], config.count("num_hidden_layers")
    each = windows if isinstance(windows, list | tuple) else [windows] * layers
    whole = all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in each)
    if len(each) != layers or not whole or each[index] % 2:
        raise ValueError(
            "attention_window must be an even number above zero, or a list with one for each of "
            f"num_hidden_layers={layers}; got {windows!r}."
        )
    return each[index]


def convolution_at_ends(config: Config, index: int) -> str:
    """Why a layer of SAM 3 Lite has no attention: the first and last may be convolutions."""
    ends = (0, config.count("num_hidden_layers") - 1)
    is_convolution = config.flag("use_repmixer_blocks") and index in ends
    return "a convolution (use_repmixer_blocks=True)" if is_convolution else ""


def albert_path(config: Config, index: int) -> str:
    """Path of the attention that a layer shares with the others of its group."""
    each = config.count("num_hidden_layers") / config.count("num_hidden_groups")
    return f"encoder.albert_layer_groups.{int(index / each)}.albert_layers.0.attention"


def modernbert_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`Wqkv` holds the rows of all queries, then those of the keys, then those of the values."""
    parts = fused("Wqkv", "(n o) i -> n i o", bias=config.flag("attention_bias"))
    return (*parts, Rule("Wo -> o_proj"))


# Models with an encoder and a decoder, whose layers have two attentions.


def bart_like(*, key_bias: bool) -> ByPart:
    """The rows of a model whose layers are all `CrossAttention`; `key_bias` as in the layer."""

    def row(names: Names, module: str, mask: Mask = FULL) -> Family:
        def attention(config: Config, index: int, init: Mapping[str, Any]) -> CrossAttention:
            arguments = causal_only(config, index) if mask == CAUSAL else {}
            sizes = (config.count("hidden_size"), config.query_heads()[0])
            how: dict[str, Any] = {"mask": mask, "dropout": config.rate("attention_dropout")}
            return CrossAttention(*sizes, key_bias=key_bias, **how, **arguments, **init)

        return Family(attention, names=names, path=at(module))

    return {
        "encoder": row(NONE, "encoder.layers.{}.self_attn"),
        "decoder": row(IN_DECODER, "decoder.layers.{}.self_attn", CAUSAL),
        "cross": row(IN_DECODER, "decoder.layers.{}.encoder_attn"),
    }


IN_DECODER = {
    "num_hidden_layers": ("decoder_layers",),
    "num_attention_heads": ("decoder_attention_heads",),
}


def t5gemma_window(config: Config, index: int) -> Arguments:
    """The encoder's, which reaches as far ahead as behind."""
    kind = by_layer_types(alternating)(config, index)
    reach = config.count("sliding_window") if kind == "sliding_attention" else None
    return {"mask": FULL if reach is None else Window(reach, reach)}


def t5gemma_part(name: str, window: Any) -> Family:
    """A part of T5Gemma: Gemma 2's attention by a config of its own, the whole model's dropout.

    Cross attention is not served: its heads have a width of their own, its logits a scale and cap.
    """
    # What Gemma 2 refuses, and no class of this model reads.
    unread = {"use_bidirectional_attention": None, "is_causal": None}
    defaults = {k: v for k, v in facts_of("gemma2").defaults.items() if k not in unread}

    def derived(config: Config) -> Config:
        dropout = {"attention_dropout": config["attention_dropout"]}
        return Config({**config.mapping(name), **dropout}, defaults, NONE, unread)

    return decoder(
        window,
        capped,
        BIASES,
        ROTARY,
        path=at(f"{name}.layers.{{}}.self_attn"),
        defaults={**defaults, "encoder": None, "decoder": None},
        derived=derived,
    )


def modernbert_default(config: Config, index: int) -> str:
    """Full attention in the first of each n layers, a window in the others."""
    return KINDS[index % config.count("global_attn_every_n_layers") != 0]


MODERNBERT_KIND = by_layer_types(modernbert_default)
MODERNBERT = {"global_attn_every_n_layers": 3, "rope_parameters": None}
PROBABILITY = {"attention_dropout": ("attention_probs_dropout_prob",)}
BERT_PATH = "encoder.layer.{}.attention.self"
SIGLIP = encoder(ALL_BIASES, rules=renamed("out_proj -> o_proj"))
T5GEMMA = {
    "encoder": t5gemma_part("encoder", t5gemma_window),
    "decoder": t5gemma_part("decoder", windows(by_layer_types(alternating))),
}
ROWS: Mapping[str, Family | ByPart] = {
    # The output projection stands in the same module, followed by a norm.
    "albert": encoder(
        ALL_BIASES,
        rules=renamed(
            *("query -> q_proj", "key -> k_proj", "value -> v_proj", "dense -> o_proj"),
            skipped="LayerNorm",
        ),
        names=PROBABILITY,
        path=albert_path,
    ),
    "bart": bart_like(key_bias=True),
    # `attention.self` with the `dense` of `attention.output`: the LayerNorm of the latter, its sum
    # with the residual and its dropout, `hidden_dropout_prob`, stand outside.
    "bert": encoder(
        causal_if("is_decoder"),
        ALL_BIASES,
        rules=renamed(
            *("self.query -> q_proj", "self.key -> k_proj", "self.value -> v_proj"),
            "output.dense -> o_proj",
            skipped="output.LayerNorm",
        ),
        names=PROBABILITY,
    ),
    "clip_text_model": encoder(
        {"mask": CAUSAL}, causal_only, ALL_BIASES, rules=renamed("out_proj -> o_proj")
    ),
    "clip_vision_model": SIGLIP,
    "dinov3_vit": encoder(dinov3_layer),
    "distilbert": encoder(
        ALL_BIASES,
        rules=renamed(
            *("q_lin -> q_proj", "k_lin -> k_proj", "v_lin -> v_proj", "out_lin -> o_proj")
        ),
    ),
    "eurobert": encoder(BIASES, ROTARY, bidirectional),
    "hubert": SIGLIP,
    "idefics3_vision": SIGLIP,
    "internvl_vision": encoder(internvl_norms, rules=renamed("projection_layer -> o_proj")),
    # The projection of its output stands in `attention.output`.
    "longformer": Family(longformer, names=PROBABILITY, path=at(BERT_PATH)),
    "modernbert": encoder(
        modernbert_window, modernbert_rotary, BIASES, rules=modernbert_rules, defaults=MODERNBERT
    ),
    "modernbert-decoder": encoder(
        modernbert_decoder_window,
        modernbert_rotary,
        BIASES,
        rules=renamed("Wo -> o_proj"),
        defaults={**MODERNBERT, "sliding_window": None},
    ),
    "nomic_bert": encoder(ROTARY, names=PROBABILITY),
    "sam3_lite_text_text_model": SIGLIP._replace(missing_reason=convolution_at_ends),
    "siglip_text_model": SIGLIP,
    "siglip_vision_model": SIGLIP,
    "t5gemma": T5GEMMA,
    # The names are those of the modules in transformers 5; `_saved.py` has those of older files.
    "vit": encoder(qkv_bias, names=PROBABILITY),
    "wav2vec2": SIGLIP,
    "whisper": bart_like(key_bias=False),
}
