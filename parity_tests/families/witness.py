"""The attention of transformers' classes, given what their whole model gives it."""

import copy
import inspect
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from flax_attn.parity.sides.torch.float64 import lifted

from .place import Place
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


def place_of(name: str) -> Place:
    """Where the classes of a family are, by the tables of transformers if no place says it."""
    place, auto = PLACES[name], library().models.auto.configuration_auto
    if place.folder:
        return place
    prefix = auto.CONFIG_MAPPING_NAMES[name].removesuffix("Config")
    return place._replace(folder=auto.model_type_to_module_name(name), prefix=prefix)


def found(name: str, kind: str) -> Any:
    """A class of a family: its Config, Attention or Model, or its block."""
    place = place_of(name)
    if kind == "Config":
        folder, _, prefix = f"{place.folder}.{place.config or place.prefix}".rpartition(".")
        folder = folder.rpartition(".")[2]
        module = import_module(f"transformers.models.{folder}.configuration_{folder}")
        name = f"{prefix}{place.text}Config"
        return getattr(module, name if hasattr(module, name) else f"{prefix}Config")
    module = import_module(f"transformers.models.{place.folder}.modeling_{place.folder}")
    kind = place.attention if kind == "Attention" else kind
    names = (f"{place.prefix}{place.text}{kind}", f"{place.prefix}{kind}", kind)
    return getattr(module, next(name for name in names if hasattr(module, name)))


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
        seen = _seen(present, x, PLACES[name].causal)
        return {} if seen is None else {"attention_mask": seen}
    import torch

    place, kept, places = PLACES[name], [], count()
    # Of the embedded tokens, whose values are not looked at.
    width = getattr(config, "embedding_size", None) or getattr(config, place.width)
    embedded = x.new_zeros(*x.shape[:-1], width)
    with torch.no_grad():
        with ExitStack() as patched:
            for block in (found(name, kind) for kind in place.block.split()):
                module = import_module(block.__module__)
                layer = _stand_in(block, config, place.gives, index, places, kept)
                patched.enter_context(patch.object(module, block.__name__, layer))
                for table in _tables_of(module, block):
                    known = {key: layer for key, value in table.items() if value is block}
                    patched.enter_context(patch.dict(table, known))
            model = found(name, "Model")(config).eval()
        for param in model.parameters():
            param.data = param.data.to(x.dtype)
        model(inputs_embeds=embedded, attention_mask=present, use_cache=False, **more)
    return {key: kept[0][key] for key in (*HANDED, *place.hands) if key in kept[0]}


def _stand_in(block: Any, config: Any, gives: str, index: int, places: Any, kept: list) -> Any:
    """A class in place of a block, that keeps what the block at `index` is given."""
    import torch

    kinds = getattr(config, "layer_types", None) or [None]

    class Layer(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__()
            given = inspect.signature(block.__init__).bind(self, *args, **kwargs).arguments
            place: int | None = given.get("layer_idx")
            self.place = next(places) if place is None else place
            # By which the whole models of ModernBERT and Nemotron-H pick a mask.
            self.attention_type = self.block_type = kinds[self.place % len(kinds)]
            # That of Gemma 4 looks at these when it is built.
            self.self_attn = SimpleNamespace(is_kv_shared_layer=False)
            self.layer_scalar = torch.nn.Buffer(torch.ones(1))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(block.forward).bind(self, *args, **kwargs).arguments
            if self.place == index:
                kept.append({**bound.pop("kwargs", {}), **bound})
            return args[0] if gives == "tensor" else (args[0], None)

    return Layer


def _tables_of(module: Any, block: Any) -> list[dict[Any, Any]]:
    """The dicts of a module that have a class among their values."""
    tables = [x for x in vars(module).values() if type(x) is dict]
    return [x for x in tables if any(value is block for value in x.values())]


def _seen(present: Any, x: Any, causal: bool) -> Any:
    """An additive mask of the tokens that are there, and of those before if `causal`; or None."""
    import torch

    if present is None and not causal:
        return None
    present = torch.ones(x.shape[:2]) if present is None else present
    blocked = present[:, None, None, :].expand(-1, 1, x.shape[1], -1) == 0
    if causal:
        blocked = blocked | torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
    return torch.zeros(blocked.shape, dtype=x.dtype).masked_fill(blocked, torch.finfo(x.dtype).min)


def attention(config: Any, name: str, index: int) -> Any:
    """The attention of one layer, or what it has in its place; its tables are in float64."""
    mixers, place = MIXERS.get(name, {}), PLACES[name]
    if place.path:
        path = place.path if isinstance(place.path, str) else place.path(config, index)
        return found(name, "Model")(config).get_submodule(path.format(index))
    kind = mixers.get(config.layer_types[index], "Attention") if mixers else place.attention
    cls = found(name, "CrossAttention" if crosses(config, name, index) else kind)
    takes = inspect.signature(cls).parameters
    named = [name for name in PLACED if name in takes]
    each = {name: getattr(config, field, None) for name, field in EACH.items()}
    more = {name: values[index] for name, values in each.items() if values}
    if "initialize_mixer_weights" in takes:
        more["initialize_mixer_weights"] = False  # which the whole model draws
    with lifted():
        layer = cls(config, **dict.fromkeys(named, index), **more)
    for param in layer.parameters():
        param.data = param.data.float()
    return layer


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
    other = PLACES[name].called
    if other is not None:
        return lambda layer, **inputs: other.torch(layer, config, index, **inputs)

    def called(layer: Any, x: Any, present: Any = None, **more: Any) -> Any:
        if crosses(config, name, index):
            return layer(x, **{"cross_attention_states": x, **more})[0]
        given = taken(layer, handed(config, name, index, x, present, **more))
        if PLACES[name].output:
            return _output_of(layer, PLACES[name].output, x, given)
        if "residual" in inspect.signature(layer.forward).parameters:  # Bloom's adds it
            return layer(x, residual=x, **given)[0] - x
        if hasattr(layer, "output"):  # BERT's has the sum with the residual and a norm in there
            return layer.output.dense(layer.self(x, **given)[0])
        y = layer(x, **given)
        return y[0] if isinstance(y, tuple) else y

    return called


def _output_of(layer: Any, path: str, x: Any, given: dict[str, Any]) -> Any:
    """What a module in an attention gives when the attention is called."""
    kept: list[Any] = []
    inner = layer.get_submodule(path)
    hook = inner.register_forward_hook(lambda module, args, y: kept.append(y))
    layer(x, **given)
    hook.remove()
    return kept[0]


def inputs(config: Any, name: str, index: int) -> dict[str, np.ndarray]:
    """What both sides are given: two sequences of seven tokens, unless the place says otherwise."""
    other = PLACES[name].called
    if other is not None:
        return other.inputs(config, index)
    return {"x": np.random.RandomState(7).standard_normal((2, 7, config.hidden_size))}


def flax_call(name: str) -> Any:
    """How the layer of Flax is called by these inputs."""
    other = PLACES[name].called
    return None if other is None else other.flax
