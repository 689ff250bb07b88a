"""The attentions of models that have several in a layer, and small configs of them."""

from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import Any

from . import witness
from .aliases import MODELS as OTHERS
from .configs import FILE, SIZES
from .place import Model

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
    Part(row["type"], row["part"], row.get("fields", {}), row["layer"]) for row in FILE["parts"]
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
