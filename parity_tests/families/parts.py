"""The attentions of models that have several in a layer, and small configs of them."""

from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import Any

from . import witness
from .aliases import MODELS as OTHERS
from .place import Model

BART = {
    **{"d_model": 48, "encoder_attention_heads": 6, "decoder_attention_heads": 4},
    **{"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 9, "decoder_ffn_dim": 11},
    **{"vocab_size": 5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    **{"decoder_start_token_id": 2},
}
T5 = {
    **{"d_model": 48, "d_kv": 10, "num_heads": 6, "num_layers": 2, "num_decoder_layers": 3},
    **{"d_ff": 9, "vocab_size": 5, "relative_attention_num_buckets": 8},
    **{"relative_attention_max_distance": 6},
}
FALCON = {
    **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 5},
    **{"num_hidden_layers": 2, "intermediate_size": 9, "max_position_embeddings": 64},
    **{"mamba_d_ssm": 40, "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 7},
    **{"mamba_d_conv": 3, "rms_norm_eps": 1e-2, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
T5GEMMA = {
    **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    **{"num_hidden_layers": 2, "intermediate_size": 9, "vocab_size": 5, "sliding_window": 2},
    **{"query_pre_attn_scalar": 9, "pad_token_id": None},
}
LESS = {
    **T5GEMMA,
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"num_hidden_layers": 3, "sliding_window": 4, "query_pre_attn_scalar": 7},
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}
HEARD = {"num_mel_bins": 3, "max_source_positions": 9, "max_target_positions": 8}
SIZES = {"bart": BART, "falcon_h1": FALCON, "t5": T5, "umt5": T5, "whisper": {**BART, **HEARD}}
SIZES["t5gemma"] = {"encoder": T5GEMMA, "decoder": LESS}
MODELS = {
    "bart": Model("bart", "Bart"),
    "falcon_h1": Model("falcon_h1", "FalconH1"),
    "t5": Model("t5", "T5"),
    "t5gemma": Model("t5gemma", "T5Gemma"),
    "umt5": Model("umt5", "UMT5"),
    "whisper": Model("whisper", "Whisper"),
    **OTHERS,
}
PATHS = {
    "encoder": "encoder.layers.{}.self_attn",
    "decoder": "decoder.layers.{}.self_attn",
    "cross": "decoder.layers.{}.encoder_attn",
    "attention": "layers.{}.self_attn",
    "recurrent": "layers.{}.mamba",
}
T5_PATHS = {
    "encoder": "encoder.block.{}.layer.0.SelfAttention",
    "decoder": "decoder.block.{}.layer.0.SelfAttention",
    "cross": "decoder.block.{}.layer.1.EncDecAttention",
}


@dataclass(frozen=True)
class Part:
    """One config and one attention of its model."""

    name: str
    part: str
    fields: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    alias: str = ""  # another model_type with the same attentions

    @property
    def model_type(self) -> str:
        """Its own, or its alias."""
        return self.alias or self.name

    @property
    def given(self) -> dict[str, Any]:
        """The config, as files have it."""
        return {"model_type": self.model_type, **SIZES[self.name], **self.fields}

    def spelt(self, spelling: str) -> dict[str, Any]:
        """The same in every spelling, since there is no rotary."""
        return self.given


PARTS = [
    Part("bart", "encoder"),
    Part("bart", "encoder", {"d_model": 32, "encoder_attention_heads": 8}, index=1),
    Part("bart", "decoder", index=2),
    Part("bart", "decoder", {"d_model": 24, "attention_dropout": 0.25}),
    Part("bart", "cross", index=2),
    Part("bart", "cross", {"d_model": 24, "attention_dropout": 0.25}),
    Part("whisper", "encoder"),
    Part("whisper", "decoder", index=2),
    Part("whisper", "cross", {"d_model": 24, "attention_dropout": 0.25}, index=1),
    Part("falcon_h1", "attention", {"head_dim": 10, "key_multiplier": 0.5}),
    Part(
        "falcon_h1",
        "attention",
        {"attention_bias": True, "attention_dropout": 0.25, "mamba_d_ssm": None}
        | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        index=1,
    ),
    Part("falcon_h1", "recurrent", {"hidden_act": "swish", "time_step_limit": [0.5, 0.8]}),
    Part(
        "falcon_h1",
        "recurrent",
        {"mamba_rms_norm": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"ssm_multipliers": [0.5, 1.5, 2.0, 0.25, 3.0], "ssm_in_multiplier": 0.5},
        index=1,
    ),
    Part(
        "falcon_h1",
        "recurrent",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
        | {"mamba_d_ssm": None, "mamba_expand": 3, "mamba_d_head": 18, "mamba_n_groups": 2},
    ),
    Part("t5", "encoder"),
    Part("t5", "encoder", {"num_heads": 4, "dropout_rate": 0.0}, index=1),
    Part("t5", "decoder"),
    Part("t5", "decoder", {"num_heads": 4, "relative_attention_max_distance": 20}, index=2),
    Part("t5", "cross", index=2),
    Part("t5gemma", "encoder", {"attention_dropout": 0.25}),
    Part(
        "t5gemma",
        "encoder",
        {"encoder": {**T5GEMMA, **LINEAR, "attention_bias": True, "attn_logit_softcapping": 3.0}},
        index=1,
    ),
    Part("t5gemma", "decoder"),
    Part("t5gemma", "decoder", {"attention_dropout": 0.25}, index=1),
    Part(
        "t5gemma",
        "decoder",
        {
            "decoder": {**LESS, **LINEAR, "attention_bias": True, "attn_logit_softcapping": None}
            | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        },
        index=1,
    ),
    Part("umt5", "encoder", index=1),
    Part("umt5", "decoder", {"num_heads": 4, "relative_attention_max_distance": 20}, index=2),
    Part("umt5", "cross", {"dropout_rate": 0.0}, index=2),
]


def config_of(given: dict[str, Any], name: str) -> Any:
    """The config of a model_type, as `from_pretrained` makes it of a file's contents."""
    config = getattr(witness.library(), f"{MODELS[name].prefix}Config").from_dict(dict(given))
    config._attn_implementation = "eager"
    return config


def model_of(config: Any, name: str) -> Any:
    """The whole model of a model_type."""
    folder, prefix = MODELS[name]
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(module, f"{prefix}Model")(config).eval()


def of_part(config: Any, part: str) -> Any:
    """The config of a part, where it has one of its own, else that of the whole."""
    return getattr(config, part, config)


def attention(model: Any, small: Part) -> Any:
    """The attention of one layer in a model."""
    return reduce(lambda held, name: getattr(held, name), path_of(small).split("."), model)


def path_of(small: Part) -> str:
    """Where the whole model has it."""
    paths = T5_PATHS if small.name in ("t5", "umt5") else PATHS
    return paths[small.part].format(small.index)


def call(config: Any, small: Part) -> Any:
    """`call(attention, x, memory=None)`, as the layer of the whole model calls it.

    `bias` stands for that which T5's first layer hands to the others.
    """
    of_mask = "mask" if small.name == "t5" else "attention_mask"
    of_memory = "encoder_hidden_states" if small.name == "umt5" else "key_value_states"

    def called(
        layer: Any, x: Any, memory: Any = None, present: Any = None, bias: Any = None
    ) -> Any:
        more = {} if memory is None else {of_memory: memory}
        given = handed(config, small, x)
        mask, angles = given.get(of_mask), given.get("position_embeddings")
        if small.part == "recurrent":
            mask = present
        elif present is not None:
            mask = _joined(mask, present, x.dtype)
        if bias is not None:  # which has the mask in it when it is handed on
            more["position_bias"] = bias[None] if mask is None else bias[None] + mask
        more |= {} if angles is None else {"position_embeddings": angles}
        y = layer(x, **{of_mask: mask}, **more)
        return y[0] if isinstance(y, tuple) else y

    return called


def is_handed_a_bias(small: Part) -> bool:
    """Whether an attention has no positions but the first layer's: T5's self attention."""
    return small.name == "t5" and small.part != "cross" and small.index > 0


def _joined(mask: Any, present: Any, dtype: Any) -> Any:
    """An additive mask with which keys that are not there are hidden too."""
    import torch

    hidden = present[:, None, None, :] == 0
    hidden = hidden if mask is None else hidden | (mask < 0)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def handed(config: Any, small: Part, x: Any) -> dict[str, Any]:
    """What the whole model gives to an attention beside the tokens."""
    import torch

    kept: dict[str, Any] = {}
    with torch.no_grad():
        model = model_of(config, small.model_type)
        for param in model.parameters():
            param.data = param.data.to(x.dtype)
        attention(model, small).register_forward_pre_hook(
            lambda module, args, kwargs: kept.update(kwargs), with_kwargs=True
        )
        read = [of_part(config, part).hidden_size for part in ("encoder", "decoder")]
        x, other = (x.new_zeros(*x.shape[:-1], width) for width in read)
        if small.name == "whisper":
            heard = torch.zeros(len(x), config.num_mel_bins, 2 * config.max_source_positions)
            model(input_features=heard.to(x.dtype), decoder_inputs_embeds=other, use_cache=False)
        elif small.part in ("attention", "recurrent"):
            model(inputs_embeds=x, use_cache=False)
        else:
            model(inputs_embeds=x, decoder_inputs_embeds=other, use_cache=False)
    return {} if small.part == "cross" else kept
