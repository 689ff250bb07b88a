"""Names of a model's weights in transformers, and where `Decoder` and `Encoder` have them.

A rule may match nothing, since a config may leave a part out; every weight must be filled anyway.
"""

from ...weights.rule import Rule


def renamed(*names: str) -> tuple[Rule, ...]:
    """Rules that only rename."""
    return tuple(Rule.optional(name) for name in names)


def in_block(torch: str, *names: str) -> tuple[Rule, ...]:
    """Rules that rename what is in a layer, `torch` being the path of the layers there."""
    sides = (name.split(" -> ") for name in names)
    return renamed(*(f"{torch}.*.{source} -> layers.*.{target}" for source, target in sides))


def halves(torch: str, layers: str = "layers") -> tuple[Rule, ...]:
    """The rules of a projection that stores the gate, then what it multiplies."""
    sides = f"{layers}.*.{torch}.{{}} -> layers.*.mlp.{{{{gate_proj,up_proj}}}}.{{}}"
    return (
        Rule.optional(sides.format("weight", "kernel"), "(n o) i -> n i o"),
        Rule.optional(sides.format("bias", "bias"), "(n o) -> n o"),
    )


EMBEDDING = renamed("embed_tokens -> embed_tokens", "norm -> norm")
MLP = "mlp -> mlp"
BEFORE = (
    "input_layernorm -> norm_before_attention",
    "post_attention_layernorm -> norm_before_mlp",
)
TWO_STEPS = ("mlp.fc1 -> mlp.up_proj", "mlp.fc2 -> mlp.down_proj")
C_FC = "mlp.c_fc -> mlp.up_proj", "mlp.c_proj -> mlp.down_proj"
LLAMA = (*EMBEDDING, *in_block("layers", *BEFORE, MLP))
GEMMA = (
    *EMBEDDING,
    *in_block(
        "layers",
        "input_layernorm -> norm_before_attention",
        "post_attention_layernorm -> norm_after_attention",
        "pre_feedforward_layernorm -> norm_before_mlp",
        "post_feedforward_layernorm -> norm_after_mlp",
        MLP,
    ),
)
OLMO2 = (
    *EMBEDDING,
    *in_block(
        "layers",
        "post_attention_layernorm -> norm_after_attention",
        "post_feedforward_layernorm -> norm_after_mlp",
        MLP,
    ),
)
PHI3 = (
    *EMBEDDING,
    *in_block("layers", *BEFORE, "mlp.down_proj -> mlp.down_proj"),
    *halves("mlp.gate_up_proj"),
)
GPT2 = (
    *renamed("wte -> embed_tokens", "wpe -> embed_positions", "ln_f -> norm"),
    *in_block(
        "h",
        "ln_1 -> norm_before_attention",
        "ln_2 -> norm_before_mlp",
        "mlp.c_fc.bias -> mlp.up_proj.bias",
        "mlp.c_proj.bias -> mlp.down_proj.bias",
    ),
    Rule.optional("h.*.mlp.c_fc.weight -> layers.*.mlp.up_proj.kernel", "i o -> i o"),
    Rule.optional("h.*.mlp.c_proj.weight -> layers.*.mlp.down_proj.kernel", "i o -> i o"),
)
GPT_NEOX = (
    *renamed("embed_in -> embed_tokens", "final_layer_norm -> norm"),
    *in_block(
        "layers",
        *BEFORE,
        "mlp.dense_h_to_4h -> mlp.up_proj",
        "mlp.dense_4h_to_h -> mlp.down_proj",
    ),
)
STARCODER2 = (*EMBEDDING, *in_block("layers", *BEFORE, *C_FC))
COHERE = (*EMBEDDING, *in_block("layers", "input_layernorm -> norm_before_attention", MLP))


def opt(is_before: bool) -> tuple[Rule, ...]:
    """OPT's names: its norms stand before attention and the feed-forward part, or after them."""
    place = "before" if is_before else "after"
    return (
        *renamed(
            "decoder.embed_tokens -> embed_tokens",
            "decoder.embed_positions -> embed_positions",
            "decoder.project_in -> project_in",
            "decoder.project_out -> project_out",
            "decoder.final_layer_norm -> norm",
        ),
        *in_block(
            "decoder.layers",
            f"self_attn_layer_norm -> norm_{place}_attention",
            "fc1 -> mlp.up_proj",
            "fc2 -> mlp.down_proj",
            f"final_layer_norm -> norm_{place}_mlp",
        ),
    )


BERT = (
    *renamed(
        "embeddings.word_embeddings -> embed_tokens",
        "embeddings.position_embeddings -> embed_positions",
        "embeddings.token_type_embeddings -> embed_types",
        "embeddings.LayerNorm -> norm_of_embeddings",
        "pooler.dense -> pooler.dense",
    ),
    *in_block(
        "encoder.layer",
        "attention.output.LayerNorm -> norm_after_attention",
        "intermediate.dense -> mlp.up_proj",
        "output.dense -> mlp.down_proj",
        "output.LayerNorm -> norm_after_mlp",
    ),
)
DISTILBERT = (
    *renamed(
        "embeddings.word_embeddings -> embed_tokens",
        "embeddings.position_embeddings -> embed_positions",
        "embeddings.LayerNorm -> norm_of_embeddings",
    ),
    *in_block(
        "transformer.layer",
        "sa_layer_norm -> norm_after_attention",
        "ffn.lin1 -> mlp.up_proj",
        "ffn.lin2 -> mlp.down_proj",
        "output_layer_norm -> norm_after_mlp",
    ),
)
MODERNBERT = (
    *renamed(
        "embeddings.tok_embeddings -> embed_tokens",
        "embeddings.norm -> norm_of_embeddings",
        "final_norm -> norm",
    ),
    *in_block(
        "layers",
        "attn_norm -> norm_before_attention",
        "mlp_norm -> norm_before_mlp",
        "mlp.Wo -> mlp.down_proj",
    ),
    *halves("mlp.Wi"),
)
PATCHES = (
    *renamed(
        "embeddings.patch_embeddings.projection -> embed_patches",
        "layernorm -> norm",
    ),
    Rule.optional("embeddings.cls_token -> class_token", "1 1 d -> d"),
    Rule.optional("embeddings.position_embeddings -> embed_positions.embedding", "1 p d -> p d"),
)
VIT_POOLER = renamed("pooler.dense -> pooler.dense")
VIT_NORMS = (
    "layernorm_before -> norm_before_attention",
    "layernorm_after -> norm_before_mlp",
)
VIT = (*PATCHES, *VIT_POOLER, *in_block("layers", *VIT_NORMS, *TWO_STEPS))
VIT_SAVED = (
    *PATCHES,
    *VIT_POOLER,
    *in_block(
        "encoder.layer",
        *VIT_NORMS,
        "intermediate.dense -> mlp.up_proj",
        "output.dense -> mlp.down_proj",
    ),
)
DINOV2 = (
    *PATCHES,
    Rule.optional("embeddings.mask_token -> mask_token", "1 d -> d"),
    *in_block(
        "encoder.layer",
        "norm1 -> norm_before_attention",
        "layer_scale1.lambda1 -> norm_after_attention.scale",
        "norm2 -> norm_before_mlp",
        "layer_scale2.lambda1 -> norm_after_mlp.scale",
        *TWO_STEPS,
        *(f"mlp.{name} -> mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ),
)
# Of a gated feed-forward part; the others have one name.
DINOV2_SAVED = (
    *halves("mlp.weights_in", "encoder.layer"),
    *in_block("encoder.layer", "mlp.weights_out -> mlp.down_proj"),
)
CLIP_LAYERS = in_block(
    "encoder.layers",
    "layer_norm1 -> norm_before_attention",
    "layer_norm2 -> norm_before_mlp",
    *TWO_STEPS,
)
CLIP_TEXT = (
    *renamed(
        "embeddings.token_embedding -> embed_tokens",
        "embeddings.position_embedding -> embed_positions",
        "final_layer_norm -> norm",
    ),
    *CLIP_LAYERS,
)
CLIP_IMAGES = (
    *renamed(
        "embeddings.patch_embedding -> embed_patches",
        "embeddings.position_embedding -> embed_positions",
        "embeddings.class_embedding -> class_token",
        "pre_layrnorm -> norm_of_embeddings",
        "post_layernorm -> pooler.norm",
    ),
    *CLIP_LAYERS,
)
SIGLIP_TEXT = (*CLIP_TEXT, *renamed("head -> pooler.dense"))
SIGLIP_IMAGES = (
    *renamed(
        "embeddings.patch_embedding -> embed_patches",
        "embeddings.position_embedding -> embed_positions",
        "post_layernorm -> norm",
        "head.attention.out_proj -> pooler.attention.out_proj",
        "head.layernorm -> pooler.norm",
        "head.mlp.fc1 -> pooler.mlp.up_proj",
        "head.mlp.fc2 -> pooler.mlp.down_proj",
    ),
    Rule.optional("head.probe -> pooler.probe", "1 1 d -> d"),
    Rule.optional(
        "head.attention.in_proj_weight -> pooler.attention.{q_proj,k_proj,v_proj}.kernel",
        "(n o) i -> n i o",
    ),
    Rule.optional(
        "head.attention.in_proj_bias -> pooler.attention.{q_proj,k_proj,v_proj}.bias",
        "(n o) -> n o",
    ),
    *CLIP_LAYERS,
)
