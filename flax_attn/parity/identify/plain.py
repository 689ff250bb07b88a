"""Runs a torch module with its fused attention calls replaced by their formula."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def attention_formula(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` in single operations, with torch's arguments.

    Shapes: query `*B N T H`, key `*B K S H`, value `*B K S V` -> `*B N T V`.
    """
    import torch

    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    weights = torch.softmax(scores, -1)
    return torch.nn.functional.dropout(weights, dropout_p, dropout_p > 0) @ value


@contextmanager
def in_single_operations() -> Iterator[None]:
    """Replaces torch's fused attention inside the block, also for torch's own layers."""
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = attention_formula
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


def plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a module that runs its attention in single operations."""

    def plain(module: Any, *args: Any, **kwargs: Any) -> Any:
        with in_single_operations():
            return call(module, *args, **kwargs)

    return plain
