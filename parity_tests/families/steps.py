"""transformers' attention step by step, with the cache that its whole model hands to it."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from . import parts, witness
from .configs import Small
from .parts import Part

Step = Callable[..., tuple[Any, Any]]


def step(config: Any, small: Small | Part, tokens: int) -> Step:
    """`step(attention, x, memory=None, cache=None)`, which returns its rows and the cache.

    The cache, the rotary angles and the mask are those of the whole model: a layer with a window
    forgets what lies behind it, and keys and values of a memory are made once.

    Args:
      config: of the model.
      small: which of its attentions.
      tokens: how many there will be, for which the mask is made once.
    """
    kept: dict[Any, dict[str, Any]] = {}

    def stepped(layer: Any, x: Any, memory: Any = None, cache: Any = None) -> tuple[Any, Any]:
        if x.dtype not in kept:
            kept[x.dtype] = _handed(config, small, x.new_zeros(len(x), tokens, x.shape[-1]))
        past, start = (_empty(config, small), 0) if cache is None else cache
        end = start + x.shape[1]
        given = {k: _rows(v, start, end, _held(past, layer)) for k, v in kept[x.dtype].items()}
        given |= {} if memory is None else {"key_value_states": memory}
        is_new = "cache" in signature(layer.forward).parameters  # its name since transformers 5.24
        given |= {"cache" if is_new else "past_key_values": past}
        return layer(x, **given)[0], (past, end)

    return stepped


def _handed(config: Any, small: Small | Part, x: Any) -> dict[str, Any]:
    """What the whole model gives to an attention for all tokens: angles, and a mask."""
    if isinstance(small, Small):
        return witness.handed(config, small.name, small.index, x)
    given = parts.handed(config, small, x)
    of_mask = "mask" if small.name == "t5" else "attention_mask"
    return {of_mask: given[of_mask]} if of_mask in given else {}


def _empty(config: Any, small: Small | Part) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    if isinstance(small, Part):
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=config)


def _held(past: Any, layer: Any) -> int:
    """How many tokens the cache gives to a layer beside the new ones."""
    own = getattr(past, "self_attention_cache", past)
    layers = own.layers[layer.layer_idx : layer.layer_idx + 1]
    return layers[0].keys.shape[-2] if layers and layers[0].is_initialized else 0


def _rows(given: Any, start: int, end: int, held: int) -> Any:
    """What belongs to some of the tokens: rows of cos and sin, or of a mask with its last keys."""
    if isinstance(given, tuple):
        return tuple(x[:, start:end] for x in given)
    return None if given is None else given[..., start:end, start - held : end]
