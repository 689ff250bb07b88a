"""Checkpoint tensors that are not weights: tables and masks that a layer computes itself.

Source: `_keys_to_ignore_on_load_unexpected` of the classes in transformers 5.24, the buffers that
they register, and those that older versions wrote into files.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from flax import nnx

from .entry import Entry
from .known_layers import flax_path, flax_state
from .rule import Rule

Shape = tuple[int, ...]


def _is_square(shape: Shape) -> bool:
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _is_any(shape: Shape) -> bool:
    return True


# Suffix of a buffer's name -> predicate on its shape.
BUFFERS: Mapping[str, Callable[[Shape], bool]] = {
    r"inv_freq|original_inv_freq": lambda shape: len(shape) == 1,
    r"(cos|sin)_cached": lambda shape: len(shape) in (2, 4),
    r"bias|causal_mask": _is_square,  # causal mask of GPT-2 and its successors
    r"masked_bias": lambda shape: shape in ((), (1,)),
    r"position_ids": lambda shape: len(shape) == 2,  # 0, 1, 2, ... of BERT and CLIP
    r"embed_positions": lambda shape: len(shape) == 2,  # sines and cosines of GPT-J
    r"slope_rate|(query|key|diagonal)_decay": lambda shape: len(shape) in (3, 4),  # MiniMax's
    r"relative_position_index": _is_any,  # Swin's windows
    r"EncDecAttention\.relative_attention_bias\.weight": _is_any,  # in T5's files, but never read
}


def without_buffers(
    entries: Mapping[str, Entry], prefix: str, module: nnx.Module, rules: Sequence[Rule]
) -> dict[str, Entry]:
    """Returns the tensors except those known to be buffers.

    Args:
      entries: the layer's tensors, named without the prefix.
      prefix: prefix of their names.
      module: the layer; tensors named like one of its Params are kept.
      rules: tensors that a rule skips or ties, or maps to such a Param, are kept too.
    """
    full = f"{prefix}." if prefix else ""
    buffers = {name for name, x in entries.items() if _may_be_buffer(full + name, x.shape)}
    if not buffers:
        return dict(entries)
    names = list(entries)
    weights = names_of_params(names, module, rules)
    for rule in rules:
        if rule.kind != "move":
            weights |= {name for sources, _ in rule.groups(names) for name in sources}

    left_out = buffers - weights
    return {name: x for name, x in entries.items() if name not in left_out}


def names_of_params(names: list[str], module: nnx.Module, rules: Sequence[Rule]) -> set[str]:
    """Returns the names of tensors that are a layer's Params, by themselves or by a rule."""
    state = flax_state(module)
    weights = {name for name in names if flax_path(module, name) in state}
    for rule in rules:
        for sources, targets in rule.groups(names) if rule.kind == "move" else ():
            if any(flax_path(module, x) in state for x in targets):
                weights |= {*sources}
    return weights


def _may_be_buffer(name: str, shape: Shape) -> bool:
    return any(re.search(rf"(^|\.)({end})$", name) and fits(shape) for end, fits in BUFFERS.items())
