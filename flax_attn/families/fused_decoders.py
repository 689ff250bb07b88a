"""Decoders from before Llama: query, key and value in one weight, ALiBi, or no positions at all."""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_choice, check_divides
from ..masks import CAUSAL, Window
from ..positions import Rotary
from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._fused import fused
from ._parts import (
    ALL_BIASES,
    Arguments,
    biases,
    decoder,
    layer_norms,
    multi_head,
    renamed,
    rotated,
)
from ._rope import rotary
from ._scores import KeyAlibi, RoundedKeyAlibi
from .decoders import heads_fill_width

CODEGEN_SHARDS = 4  # of its fused weight, whatever a file says
MPT_FIELDS = {"attn_pdrop": 0.0, "clip_qkv": None, "softmax_scale": None}  # read of attn_config


def bloom_score(config: Config, index: int) -> Arguments:
    """ALiBi by the position of the key."""
    return {"rules": Rules(score=KeyAlibi(config.query_heads()[0]))}


def gpt2_scale(config: Config, index: int) -> Arguments:
    """The usual scale or 1, divided by the layer's number if the config says so (Mistral's)."""
    h = config.query_heads()[1]
    scale = h**-0.5 if config.flag("scale_attn_weights") else 1.0
    if config.flag("scale_attn_by_inverse_layer_idx"):
        scale /= index + 1
    return {"rules": Rules(scale=scale)}


def bigcode_layer(config: Config, index: int) -> Arguments:
    """One key head if `multi_query`, and the usual scale or 1."""
    n, h = config.query_heads()
    rules = Rules() if config.flag("scale_attn_weights") else Rules(scale=1.0)
    return {"heads": (n, 1 if config.flag("multi_query") else n, h), "rules": rules}


def gpt_neo_mask(config: Config, index: int) -> Arguments:
    """A window in layers of kind "local"; logits are unscaled.

    A token that sees nothing but padding is in transformers the mean of the values before it, as
    far as its window reaches; no `empty=` says that.
    """
    is_local = _gpt_neo_kind(config, index) == "local"
    mask = CAUSAL & Window(config.count("window_size") - 1, 0) if is_local else CAUSAL
    return {"mask": mask, "rules": Rules(scale=1.0), "out_bias": True}


def _gpt_neo_kind(config: Config, index: int) -> str:
    """ "global" or "local": `attention_layers`, else what `attention_types` repeat."""
    kinds, layers = config.listed("attention_layers"), config.count("num_hidden_layers")
    if config["attention_layers"] is None:
        groups = config.listed("attention_types")
        if not all(isinstance(each, list | tuple) and len(each) == 2 for each in groups):
            raise ValueError(f"attention_types must list pairs of kinds and a count; got {groups}.")
        kinds = [kind for group, times in groups for kind in group * times]
    if len(kinds) != layers:
        raise ValueError(
            "attention_types or attention_layers must name one kind for each of "
            f"{config.name('num_hidden_layers')}={layers}; got {len(kinds)}."
        )
    check_choice(f"attention_layers[{index}]", kinds[index], "global", "local")
    return kinds[index]


def gptj_rotary(config: Config, index: int) -> Arguments:
    """Neighbouring components are rotated, `rotary_dim` of each head."""
    (_, h), width = config.query_heads(), config.count("rotary_dim")
    if width % 2 or width > h:
        raise ValueError(
            "rotary_dim must be an even number of components of a head, which is "
            f"{config.name('hidden_size')} / {config.name('num_attention_heads')} = {h} wide; got "
            f"rotary_dim={width}."
        )
    return {"rotary": Rotary(10_000.0, "interleaved", width)}


def in_shards(config: Config, index: int) -> Arguments:
    """No argument; ValueError unless CodeGen's heads can be stored in four parts."""
    heads = config.query_heads()[0]
    check_divides("4", CODEGEN_SHARDS, config.name("num_attention_heads"), heads)
    return {}


def mpt_layer(config: Config, index: int) -> Arguments:
    """What `attn_config` says; ALiBi is always applied, whatever its `alibi` is."""
    fields = config.mapping("attn_config")
    config = config.replaced(**{name: fields.get(name, x) for name, x in MPT_FIELDS.items()})
    scale = None if config["softmax_scale"] is None else config.number("softmax_scale")
    return {
        "rules": Rules(score=KeyAlibi(config.query_heads()[0]), scale=scale),
        "clip_qkv": config.number("clip_qkv") if config["clip_qkv"] else None,
        "dropout": config.rate("attn_pdrop"),
    }


def falcon_layer(config: Config, index: int) -> Arguments:
    """A rotary, or ALiBi by the position of the key.

    The bias is that of `sdpa` in transformers, its default there, rounded to bfloat16 and divided
    by the root of the head's width; a whole model with `eager` attention adds it twice. With rotary
    positions transformers drops no weights.
    """
    heads = n, _, h = falcon_heads(config)
    if config.flag("alibi"):
        return {"heads": heads, "rules": Rules(score=RoundedKeyAlibi(n, h**-0.5))}
    config.rate("attention_dropout")  # raises if it is no share, though nothing is dropped
    return {"heads": heads, "rotary": rotary(config), "dropout": 0.0}


def falcon_heads(config: Config) -> tuple[int, int, int]:
    """N, K and H; K is 1 with multi_query, which the new architecture does not read."""
    is_new = config.flag("new_decoder_architecture")
    if config.flag("multi_query") and not is_new:
        n, h = config.query_heads()
        return n, 1, h
    n, k, h = config.heads()
    if not is_new and k != n:
        raise ValueError(
            f"num_kv_heads={k} needs new_decoder_architecture=True; with multi_query=False each of "
            f"the num_attention_heads={n} has a key of its own."
        )
    return n, k, h


# Rules of the fused weights.


def head_by_head(name: str, *others: Rule, bias: str | bool = True) -> Any:
    """Rules of a weight that stores query, key and value of each head together.

    Args:
      name: of its module.
      others: rules of other weights.
      bias: whether it has a bias, or the field that says so.
    """

    def rules(config: Config, index: int) -> tuple[Rule, ...]:
        has_bias = config.flag(bias) if isinstance(bias, str) else bias
        heads = config.query_heads()[0]
        return (*fused(name, "(h n d) i -> n i (h d)", bias=has_bias, h=heads), *others)

    return rules


def gpt2_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`c_attn` holds the columns of the query, then those of the key and of the value.

    Both weights are stored (in, out), which a file does not show.
    """
    parts = fused("c_attn", "i (n o) -> n i o", bias=True)
    out = (Rule("c_proj.weight -> o_proj.kernel", "i o -> i o"), Rule("c_proj.bias -> o_proj.bias"))
    return (*parts, *out)


def bigcode_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`c_attn` holds all queries, the key and the value; with a key for each head, head by head."""
    n, h = config.query_heads()
    if not config.flag("multi_query"):
        return head_by_head("c_attn", Rule("c_proj -> o_proj"))(config, index)
    parts = fused("c_attn", "(n o) i -> n i o", bias=True, o=(n * h, h, h))
    return (*parts, Rule("c_proj -> o_proj"))


def codegen_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`qkv_proj` holds four parts, each of queries, values and keys of a quarter of the heads."""
    sides = "qkv_proj.weight -> {q_proj,v_proj,k_proj}.kernel"
    heads = Rule(sides, "(m n d) i -> n i (m d)", m=CODEGEN_SHARDS)
    return (heads, Rule("out_proj -> o_proj"))


def mpt_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`Wqkv` holds all queries, then all keys and all values."""
    return (*fused("Wqkv", "(n o) i -> n i o", bias=False), Rule("out_proj -> o_proj"))


def falcon_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Layout of `query_key_value`.

    The new architecture: of each key head the queries that share it, the key and the value.
    multi_query: all queries, the key and the value. Neither: of each head query, key and value.
    """
    (n, k, h), bias = falcon_heads(config), config.flag("bias")
    sizes: dict[str, Any]
    if config.flag("new_decoder_architecture"):
        layout, sizes = "(k n o h) i -> n i (k o h)", {"o": (n // k, 1, 1), "h": h}
    elif config.flag("multi_query"):
        layout, sizes = "(n o) i -> n i o", {"o": (n * h, h, h)}
    else:
        layout, sizes = "(h n d) i -> n i (h d)", {"h": n}
    return (*fused("query_key_value", layout, bias=bias, **sizes), Rule("dense -> o_proj"))


def phi_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the names of the norms, if there are any, and of the output projection."""
    norms = ("q_layernorm -> q_norm", "k_layernorm -> k_norm")
    return (*map(Rule, norms if config.flag("qk_layernorm") else ()), Rule("dense -> o_proj"))


def persimmon_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Phi's, with query, key and value head by head in one weight."""
    return (*head_by_head("query_key_value")(config, index), *phi_rules(config, index))


ATTN_PDROP = {"attention_dropout": ("attn_pdrop",)}
PHI_NORMS = layer_norms("qk_layernorm", by_head=False, use_bias=True)
# The output's dropout (resid_pdrop, hidden_dropout) and residual sums stand outside these layers.
ROWS: Mapping[str, Family] = {
    "bloom": decoder(
        multi_head,
        bloom_score,
        ALL_BIASES,
        rules=head_by_head("query_key_value", Rule("dense -> o_proj")),
        names={"hidden_size": ("hidden_size", "n_embed")},
    ),
    "codegen": decoder(in_shards, multi_head, gptj_rotary, rules=codegen_rules, names=ATTN_PDROP),
    "falcon": decoder(
        falcon_layer,
        biases("bias"),
        rules=falcon_rules,
        names={
            "hidden_size": ("hidden_size", "n_embed"),
            "num_key_value_heads": ("num_kv_heads",),
        },
    ),
    "gpt2": decoder(multi_head, gpt2_scale, ALL_BIASES, rules=gpt2_rules, names=ATTN_PDROP),
    "gpt_bigcode": decoder(bigcode_layer, ALL_BIASES, rules=bigcode_rules, names=ATTN_PDROP),
    "gpt_neo": decoder(
        multi_head,
        gpt_neo_mask,
        rules=renamed(
            *(f"attention.{x}_proj -> {x}_proj" for x in "qkv"), "attention.out_proj -> o_proj"
        ),
        defaults={"attention_types": [[["global", "local"], 12]], "attention_layers": None},
    ),
    "gpt_neox": decoder(
        multi_head,
        rotated(partial=True),
        biases(),
        rules=head_by_head("query_key_value", Rule("dense -> o_proj"), bias="attention_bias"),
        names={"rope_theta": ("rotary_emb_base",), "partial_rotary_factor": ("rotary_pct",)},
    ),
    "gptj": decoder(multi_head, gptj_rotary, rules=renamed("out_proj -> o_proj"), names=ATTN_PDROP),
    "mpt": decoder(
        multi_head,
        mpt_layer,
        rules=mpt_rules,
    ),
    "opt": decoder(multi_head, biases("enable_bias"), rules=renamed("out_proj -> o_proj")),
    "persimmon": decoder(
        multi_head, rotated(partial=True), PHI_NORMS, ALL_BIASES, rules=persimmon_rules
    ),
    "phi": decoder(heads_fill_width, rotated(partial=True), PHI_NORMS, ALL_BIASES, rules=phi_rules),
}
