"""A row for each model type that is built whole: the facts beside its attention.

Source: the modelling code of transformers 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from .._config import Config
from . import names
from .facts import Body, Fact, MlpFacts, NormFacts, Order, grid_of

# Facts that a config says in another way than by the value of one field.


def sqrt_width(config: Config) -> float:
    """The square root of the width of the model (Gemma)."""
    return config.count("hidden_size") ** 0.5


def one_over(field: str) -> Callable[[Config], float]:
    """The inverse of a field."""
    return lambda config: 1 / config.number(field)


def patches(class_tokens: int) -> Callable[[Config], int]:
    """The number of patches of an image of the config's size, and of the class token."""

    def fact(config: Config) -> int:
        rows, columns = grid_of(config)
        return rows * columns + class_tokens

    return fact


def gpt2_width(config: Config) -> int:
    """`n_inner`, or four times the width of the model."""
    if config["n_inner"] is None:
        return 4 * config.count("hidden_size")
    return config.count("n_inner")


def gpt2_positions(config: Config) -> int:
    """The number of GPT-2's positions, which files have under either name."""
    other = config.entry("max_position_embeddings")
    return config.count("n_positions" if other is None else "max_position_embeddings")


def opt_is_before(config: Config) -> bool:
    """Whether OPT's norms stand before attention and the feed-forward part."""
    return config.flag("do_layer_norm_before")


def opt_order(config: Config) -> Order:
    """Where OPT's norms stand: those of the 350M model normalise the sums."""
    return "before" if opt_is_before(config) else "sums"


def opt_embedding_width(config: Config) -> int | None:
    """The width of OPT's embeddings, None for that of the model."""
    narrow = config["word_embed_proj_dim"]
    return None if narrow is None else config.count("word_embed_proj_dim")


def neox_order(config: Config) -> Order:
    """Whether both parts of a layer read the same hidden states."""
    return "parallel" if config.flag("use_parallel_residual") else "before"


def dinov2_width(config: Config) -> int:
    """The hidden units of DINOv2's feed-forward part, of which a gated one keeps two thirds."""
    width = int(config.count("hidden_size") * config.number("mlp_ratio"))
    return (int(width * 2 / 3) + 7) // 8 * 8 if config.flag("use_swiglu_ffn") else width


def dinov2_activation(config: Config) -> str:
    """A gated feed-forward part always uses SiLU."""
    return "silu" if config.flag("use_swiglu_ffn") else config["hidden_act"]


def padding_offset(config: Config) -> int:
    """RoBERTa's positions begin after the number of the padding token."""
    return config.whole("pad_token_id") + 1


def roberta_positions(config: Config) -> int:
    """The positions of RoBERTa's table, whose first rows are those of padding."""
    return config.count("max_position_embeddings") - padding_offset(config)


def no_cross_attention(config: Config) -> None:
    """Raises ValueError for a config with cross attention or a causal encoder."""
    for field in ("add_cross_attention", "is_decoder"):
        if config.entry(field):
            raise ValueError(
                f"{field}=True is not built whole: the model is then one part of an "
                "encoder-decoder. `families.attention` builds its attention."
            )


def nothing_is_dropped(field: str) -> Callable[[Config], None]:
    """A check that raises ValueError for a config that drops whole layers in training."""

    def check(config: Config) -> None:
        if config.rate(field):
            raise ValueError(
                f"{field}={config[field]!r} is not built: no layer is dropped here. Set it to 0, "
                "as it acts in evaluation."
            )

    return check


def no_sinusoids(config: Config) -> None:
    """Raises ValueError for DistilBERT's fixed positions, which are no table to train."""
    if config.flag("sinusoidal_pos_embds"):
        raise ValueError(
            "sinusoidal_pos_embds=True is not built: the positions are trained here. Files hold "
            "them as a table, so set it to False to load one."
        )


def gated(bias: Fact = False, activation: Fact = "hidden_act") -> MlpFacts:
    """A gated feed-forward part as Llama's."""
    return MlpFacts("intermediate_size", activation, is_gated=True, bias=bias)


RMS, LAYER = NormFacts("rms", "rms_norm_eps"), NormFacts("layer", "layer_norm_eps")
PLAIN = MlpFacts("intermediate_size", "hidden_act")
LLAMA = Body(RMS, gated(), names.LLAMA)
GEMMA = Body(
    NormFacts("rms", "rms_norm_eps", plus_one=True, cast="after"),
    gated(activation="hidden_activation"),
    names.GEMMA,
    order="both",
    embedding_factor=sqrt_width,
    softcap="final_logit_softcapping",
)
BERT = Body(
    LAYER,
    PLAIN,
    names.BERT,
    base="bert",
    head="",
    order="sums",
    final_norm=False,
    embedding_norm=True,
    positions="max_position_embeddings",
    token_types="type_vocab_size",
    dropout="hidden_dropout_prob",
    embedding_dropout="hidden_dropout_prob",
    pooler="first",
    pooler_activation=lambda config: "tanh",
    check=no_cross_attention,
)
VIT = Body(
    LAYER,
    PLAIN,
    names.VIT,
    names.VIT_SAVED,
    base="vit",
    head="",
    positions=patches(1),
    patch_bias=True,
    class_token=True,
    dropout="hidden_dropout_prob",
    embedding_dropout="hidden_dropout_prob",
    pooler="first",
    pooler_activation="pooler_act",
    pooler_width="pooler_output_size",
)
CLIP_TEXT = Body(
    LAYER,
    PLAIN,
    names.CLIP_TEXT,
    base="text_model",
    head="",
    positions="max_position_embeddings",
    pooler="end",
)
CLIP_IMAGES = Body(
    LAYER,
    PLAIN,
    names.CLIP_IMAGES,
    base="vision_model",
    head="",
    final_norm=False,
    embedding_norm=True,
    positions=patches(1),
    patch_bias=False,
    class_token=True,
    pooler="token",
    pooler_norm=True,
)
ROWS: Mapping[str, Body] = {
    "bert": BERT,
    "clip_text_model": CLIP_TEXT,
    "clip_vision_model": CLIP_IMAGES,
    "cohere": Body(
        NormFacts("layer", "layer_norm_eps", bias=False),
        gated(),
        names.COHERE,
        order="shared",
        logit_factor="logit_scale",
    ),
    "dinov2": Body(
        LAYER,
        MlpFacts(dinov2_width, dinov2_activation, is_gated="use_swiglu_ffn"),
        names.DINOV2,
        lambda config: names.DINOV2_SAVED if config.flag("use_swiglu_ffn") else (),
        base="dinov2",
        head="",
        branch_scale=True,
        positions=patches(1),
        patch_bias=True,
        class_token=True,
        mask_token="use_mask_token",
        embedding_dropout="hidden_dropout_prob",
        pooler="token",
        check=nothing_is_dropped("drop_path_rate"),
    ),
    "distilbert": Body(
        NormFacts("layer", 1e-12),
        MlpFacts("hidden_dim", "activation"),
        names.DISTILBERT,
        base="distilbert",
        head="",
        order="sums",
        final_norm=False,
        embedding_norm=True,
        positions="max_position_embeddings",
        dropout="dropout",
        embedding_dropout="dropout",
        check=no_sinusoids,
    ),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": Body(
        NormFacts("layer", "layer_norm_epsilon"),
        MlpFacts(gpt2_width, "activation_function"),
        names.GPT2,
        base="transformer",
        positions=gpt2_positions,
        dropout="resid_pdrop",
        embedding_dropout="embd_pdrop",
        check=no_cross_attention,
    ),
    "gpt_neox": Body(
        LAYER,
        PLAIN,
        names.GPT_NEOX,
        base="gpt_neox",
        saved_head="embed_out",
        order=neox_order,
        dropout="hidden_dropout",
        embedding_dropout="hidden_dropout",
    ),
    "granite": replace(
        LLAMA,
        mlp=gated("mlp_bias"),
        embedding_factor="embedding_multiplier",
        residual_factor="residual_multiplier",
        logit_factor=one_over("logits_scaling"),
    ),
    "llama": replace(LLAMA, mlp=gated("mlp_bias")),
    "mistral": LLAMA,
    "modernbert": Body(
        NormFacts("layer", "norm_eps", bias="norm_bias"),
        MlpFacts(
            "intermediate_size",
            "hidden_activation",
            is_gated=True,
            bias="mlp_bias",
            dropout="mlp_dropout",
        ),
        names.MODERNBERT,
        base="model",
        head="",
        first_norm=False,
        embedding_norm=True,
        embedding_dropout="embedding_dropout",
    ),
    "olmo2": Body(
        NormFacts("rms", "rms_norm_eps", cast="after"), gated(), names.OLMO2, order="after"
    ),
    "opt": Body(
        NormFacts("layer", 1e-5, has_gain="layer_norm_elementwise_affine"),
        MlpFacts("ffn_dim", "activation_function", bias="enable_bias"),
        lambda config: names.opt(opt_is_before(config)),
        order=opt_order,
        final_norm=lambda config: (
            opt_is_before(config) and not config.flag("_remove_final_layer_norm")
        ),
        embedding_width=opt_embedding_width,
        positions="max_position_embeddings",
        position_offset=2,
        dropout="dropout",
        check=nothing_is_dropped("layerdrop"),
    ),
    "phi3": Body(RMS, gated(), names.PHI3, dropout="resid_pdrop"),
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "roberta": replace(
        BERT, base="roberta", positions=roberta_positions, position_offset=padding_offset
    ),
    "siglip_text_model": replace(
        CLIP_TEXT, names=names.SIGLIP_TEXT, pooler="last", pooler_width="projection_size"
    ),
    "siglip_vision_model": replace(
        CLIP_IMAGES,
        names=names.SIGLIP_IMAGES,
        final_norm=True,
        embedding_norm=False,
        positions=patches(0),
        patch_bias=True,
        class_token=False,
        pooler="attention",
        pooler_norm=False,
    ),
    "smollm3": replace(LLAMA, mlp=gated("mlp_bias")),
    "starcoder2": Body(
        NormFacts("layer", "norm_epsilon"),
        MlpFacts("intermediate_size", "hidden_act", bias="use_bias"),
        names.STARCODER2,
        dropout="residual_dropout",
        embedding_dropout="embedding_dropout",
    ),
    "vit": VIT,
}
# The model types that `families.model` builds.
WHOLE: tuple[str, ...] = tuple(sorted(ROWS))
