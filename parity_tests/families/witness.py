"""The attention of transformers' classes, given what their whole model gives it."""

import copy
import inspect
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flax_attn.parity.sides.torch_float64 import lifted

from .places import MIXERS, PLACES

HANDED = ("position_embeddings", "position_ids", "attention_mask", "alibi", "position_bias")
HANDED = (*HANDED, "shared_kv_states")
PLACED = ("layer_idx", "layer_id")  # how classes are told which layer they are of
EACH = {"num_heads": "num_attention_heads_per_layer"}  # what they are told beside, by the config


def library() -> Any:
    """transformers, which says nothing of the configs that it doubts."""
    found = import_module("transformers")
    found.logging.set_verbosity_error()
    return found


def found(name: str, kind: str) -> Any:
    """A class of a family: its Config, Attention or Model, or its block."""
    place = PLACES[name]
    library()
    file = "configuration" if kind == "Config" else "modeling"
    module = import_module(f"transformers.models.{place.folder}.{file}_{place.folder}")
    if kind == "Config":
        return getattr(module, f"{place.config or place.prefix}{place.text}Config")
    kind = place.attention if kind == "Attention" else kind
    name = f"{place.prefix}{place.text}{kind}"
    if hasattr(module, name):
        return getattr(module, name)
    return getattr(module, f"{place.prefix}{kind}")


def config_of(given: dict[str, Any], name: str) -> Any:
    """The config of a family, as `from_pretrained` makes it of a file's contents."""
    config = found(name, "Config").from_dict(copy.deepcopy(given))
    twice = name == "falcon" and config.alibi  # eager attention in a whole model adds it twice
    config._attn_implementation = "sdpa" if twice else "eager"
    return config


def handed(
    config: Any, name: str, index: int, x: Any, present: Any = None, **more: Any
) -> dict[str, Any]:
    """Which rotary angles, which mask and what else the whole model hands to a layer's attention.

    Args:
      config: of the model.
      name: of the family.
      index: of the layer.
      x: the embedded tokens.
      present: 1 for each token that is there, 0 for padding; None for all.
      more: that the model is given, such as position_ids.
    """
    if not PLACES[name].whole:
        return {} if present is None else {"attention_mask": _additive(present, x)}
    import torch

    place = PLACES[name]
    block, kept = found(name, place.block), []
    width = getattr(config, place.width)  # of the embedded tokens, whose values are not looked at
    embedded = x.new_zeros(*x.shape[:-1], width)
    places = count()

    class Layer(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__()
            given = inspect.signature(block.__init__).bind(self, *args, **kwargs).arguments
            self.place = given.get("layer_idx", next(places))
            # The whole model of Gemma 4 looks at these when it is built.
            self.self_attn = SimpleNamespace(is_kv_shared_layer=False)
            self.layer_scalar = torch.nn.Buffer(torch.ones(1))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(block.forward).bind(self, *args, **kwargs).arguments
            if self.place == index:
                kept.append({**bound.pop("kwargs", {}), **bound})
            return args[0] if place.gives == "tensor" else (args[0], None)

    with torch.no_grad():
        with patch.object(import_module(block.__module__), block.__name__, Layer):
            model = found(name, "Model")(config).eval()
        for param in model.parameters():
            param.data = param.data.to(x.dtype)
        model(inputs_embeds=embedded, attention_mask=present, use_cache=False, **more)
    return {key: kept[0][key] for key in HANDED if key in kept[0]}


def _additive(present: Any, x: Any) -> Any:
    import torch

    blocked = present[:, None, None, :].expand(-1, 1, x.shape[1], -1) == 0
    return torch.zeros(blocked.shape, dtype=x.dtype).masked_fill(blocked, torch.finfo(x.dtype).min)


def attention(config: Any, name: str, index: int) -> Any:
    """The attention of one layer, or what it has in its place; its tables are in float64."""
    mixers = MIXERS.get(name, {})
    kind = mixers.get(config.layer_types[index], "Attention") if mixers else "Attention"
    cls = found(name, "CrossAttention" if crosses(config, name, index) else kind)
    named = [name for name in PLACED if name in inspect.signature(cls).parameters]
    each = {name: getattr(config, field, None) for name, field in EACH.items()}
    more = {name: values[index] for name, values in each.items() if values}
    with lifted():
        return cls(config, **dict.fromkeys(named, index), **more)


def crosses(config: Any, name: str, index: int) -> bool:
    """Whether a layer looks at a memory."""
    field = PLACES[name].crossing
    return bool(field) and index in getattr(config, field)


def taken(layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a module takes by name, or all of it if it takes whatever it is given."""
    names = inspect.signature(layer.forward).parameters
    return given if "kwargs" in names else {k: x for k, x in given.items() if k in names}


def call(config: Any, name: str, index: int) -> Any:
    """`call(attention, x)`, as the layer of the whole model calls it; `more` as of `handed`.

    A layer that looks at a memory looks at x, as ours does without one.
    """

    def called(layer: Any, x: Any, present: Any = None, **more: Any) -> Any:
        if crosses(config, name, index):
            return layer(x, **{"cross_attention_states": x, **more})[0]
        given = taken(layer, handed(config, name, index, x, present, **more))
        if "residual" in inspect.signature(layer.forward).parameters:  # Bloom's adds it
            return layer(x, residual=x, **given)[0] - x
        if hasattr(layer, "output"):  # BERT's has the sum with the residual and a norm in there
            return layer.output.dense(layer.self(x, **given)[0])
        y = layer(x, **given)
        return y[0] if isinstance(y, tuple) else y

    return called
