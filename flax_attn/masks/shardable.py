"""Prepares masks and scores for sharding along queries and keys."""

from dataclasses import fields, replace
from typing import Any

from .._internal.arrays import bound_offset
from .._internal.types import FROZEN, Sizes
from .documents import Documents, check_same_tokens
from .nodes import Segments


def shardable(node: Any, sizes: Sizes) -> Any:
    """Returns an equal mask or score whose arrays can be sharded along queries and keys separately.

    `Segments` gets separate ids for queries and keys, and `offset="end"` becomes an int.
    """
    if type(node) not in FROZEN:
        return node
    if isinstance(node, Segments) and node.ids is not None:
        return Segments(q_ids=node.ids, kv_ids=node.ids)
    if isinstance(node, Documents):
        check_same_tokens(node, sizes)
    changed = {}
    for name, part in ((field.name, getattr(node, field.name)) for field in fields(node)):
        ready = shardable(part, sizes)
        if name == "offset" and isinstance(part, str):  # "end"
            ready = bound_offset(type(node).__name__, part, sizes)
        if ready is not part:
            changed[name] = ready
    return replace(node, **changed) if changed else node
