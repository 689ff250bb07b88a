"""Fields that a model_type does not read, but whose value its attention has anyway."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx


def _has_norms(layer: nnx.Module) -> Any:
    return getattr(layer, "q_norm", None) is not None


def _has_bias(layer: nnx.Module) -> Any:
    projection = getattr(layer, "q_proj", None)
    return None if projection is None else getattr(projection, "bias", None) is not None


def _rotated_width(layer: nnx.Module) -> Any:
    """Number of rotated components of a head; None without a rotary."""
    rotary = getattr(layer, "rotary", None)
    if rotary is None:
        return None
    return rotary.width or getattr(layer, "rotary_dim", None) or getattr(layer, "head_dim", None)


def _share(layer: nnx.Module) -> Any:
    width, head_dim = _rotated_width(layer), getattr(layer, "head_dim", None)
    return width / head_dim if width and head_dim else None


def _is_interleaved(layer: nnx.Module) -> Any:
    rotary = getattr(layer, "rotary", None)
    return None if rotary is None else rotary.layout == "interleaved"


def _base(layer: nnx.Module) -> Any:
    return getattr(getattr(layer, "rotary", None), "base", None)


def _key_heads(layer: nnx.Module) -> Any:
    return getattr(layer, "num_kv_heads", None)


def _input_width(layer: nnx.Module) -> Any:
    return getattr(getattr(layer, "q_proj", None), "in_features", None)


def _head_count(layer: nnx.Module) -> Any:
    wide, each = getattr(layer, "q_proj", None), getattr(layer, "head_dim", None)
    return None if wide is None or each is None else wide.out_features // each


def _is_multi_query(layer: nnx.Module) -> Any:
    count = _key_heads(layer)
    return None if count is None else count == 1


# Returns a field's value from a layer; None where it cannot be determined.
BUILT: Mapping[str, Callable[[nnx.Module], Any]] = {
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), _has_norms),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias", "attention_bias", "query_bias"), _has_bias),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), _share),
    **dict.fromkeys(("rotary_emb_base", "rope_theta"), _base),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _key_heads),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "embed_dim"), _input_width),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _head_count),
    "rotary_dim": _rotated_width,
    "rope_interleave": _is_interleaved,
    "multi_query": _is_multi_query,
}


def is_as_built(field: str, value: Any, layer: nnx.Module) -> bool:
    """Whether a layer already has the value of a field, so that no warning is needed."""
    built = BUILT[field](layer) if field in BUILT else None
    return built is not None and bool(built == value)
