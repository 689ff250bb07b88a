"""Whether a layer that `identify` names is the one that a truth of the corpus describes."""

from typing import Any

import numpy as np

from flax_attn import masks, positions
from flax_attn._internal.types import Sizes
from flax_attn.scores import Additive, Alibi, Softcap

LENGTH = 11
NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "out_proj": "o"}
T5_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}


def wrong_options(identified: Any, truth: dict[str, Any]) -> list[str]:
    """The keys of a truth that a named layer contradicts; empty if it is right.

    A bias or a mask that comes with the call may be named by what it is.
    """
    layer = identified.layer
    checks = {
        "sizes": _sizes(layer, truth),
        "biases": _biases(layer) == truth["biases"],
        "scale": abs(_scale(layer) / truth["scale"] - 1) < 1e-9,
        "softcap": _parts(layer, Softcap, "cap") == _listed(truth["softcap"]),
        "mask": _mask(identified, truth["mask"]),
        "rotary": _rotary(getattr(layer, "rotary", None), truth["rotary"], truth["head_dim"]),
        "q_norm": _norm(layer, "q_norm", truth["q_norm"]),
        "k_norm": _norm(layer, "k_norm", truth["k_norm"]),
        "sinks": (getattr(layer, "sinks", None) is not None) == truth["sinks"],
        "bias": _bias(layer, truth["bias"], truth["mask"] == "given"),
        "gate": hasattr(layer, "g_proj") == (truth["gate"] is not None),
        "clip": getattr(layer, "clip_qkv", None) == truth["clip"],
        "dropout": _rate(layer) == truth["dropout"],
        "cross": (type(layer).__name__ == "CrossAttention") == truth["cross"],
        "block": not (truth["pre_norm"] or truth["residual"]),
    }
    return [name for name, right in checks.items() if not right]


def _projection(layer: Any, name: str) -> Any:
    names = [name, *(t5 for t5, ours in T5_NAMES.items() if ours == name)]
    return next(getattr(layer, n) for n in names if hasattr(layer, n))


def _sizes(layer: Any, truth: dict[str, Any]) -> bool:
    query, key = _projection(layer, "q_proj"), _projection(layer, "k_proj")
    heads = query.out_features // layer.head_dim, key.out_features // layer.head_dim
    wanted = truth["heads"], truth["kv_heads"], truth["head_dim"], truth["width"]
    return (*heads, layer.head_dim, query.in_features) == wanted


def _biases(layer: Any) -> set[str]:
    made = {T5_NAMES.get(name, name): x for name, x in vars(layer).items()}
    biased = [n for n, x in made.items() if n in NAMES and getattr(x, "bias", None) is not None]
    return {NAMES[name] for name in biased}


def _scale(layer: Any) -> float:
    if hasattr(layer, "relative_attention_bias"):
        return 1.0
    scale = layer.rules.scale if hasattr(layer, "rules") else None
    return layer.head_dim**-0.5 if scale is None else scale


def _scores(layer: Any) -> list[Any]:
    left, parts = [layer.rules.score] if hasattr(layer, "rules") else [], []
    while left:
        one = left.pop(0)
        if hasattr(one, "parts"):
            left += one.parts
        parts.append(one)
    return parts


def _parts(layer: Any, kind: type, name: str) -> list[Any]:
    return [getattr(x, name) for x in _scores(layer) if isinstance(x, kind)]


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value]


def _mask(identified: Any, wanted: str) -> bool:
    if wanted == "given":
        return any("given by the caller" in line for line in identified.measured)
    mask, sizes = eval(wanted, dict(vars(masks))), Sizes((), 1, LENGTH, LENGTH)
    return np.array_equal(mask.static(sizes), identified.layer.mask.static(sizes))


def _rotary(rotary: Any, wanted: dict[str, Any] | None, head_dim: int) -> bool:
    if wanted is None or rotary is None:
        return wanted is rotary is None
    width = head_dim if rotary.width is None else rotary.width
    pairs = {"half": "halves", "interleaved": "neighbours"}[rotary.layout]
    if width != wanted["width"] or (width > 2 and pairs != wanted["pairs"]):
        return False
    if wanted["base"] is None:
        return True
    scaling = eval(wanted["scaling"] or "None", dict(vars(positions)))
    return type(rotary.scaling) is type(scaling) and np.allclose(
        _rates(rotary, width), _rates(positions.Rotary(wanted["base"], scaling=scaling), width)
    )


def _rates(rotary: Any, width: int) -> np.ndarray:
    scaling = rotary.scaling or positions.LinearScaling(1.0)
    return np.asarray(scaling.rates(rotary.base, width))


def _norm(layer: Any, name: str, wanted: dict[str, Any] | None) -> bool:
    norm = getattr(layer, name, None)
    if norm is None or wanted is None:
        return norm is wanted is None
    gain = None if norm.scale is None else "1 + w" if getattr(norm, "plus_one", False) else "w"
    return wanted == {
        "kind": {"RMSNorm": "rms", "LayerNorm": "layer"}[type(norm).__name__],
        "eps": norm.eps,
        "over_heads": getattr(norm, "over_heads", False),
        "gain": gain,
        "after_rotary": layer.norm_after_rotary,
    }


def _bias(layer: Any, wanted: str | None, mask_comes_in: bool) -> bool:
    kinds = {Alibi: "alibi", Additive: "given"}
    made = [kinds[type(x)] for x in _scores(layer) if type(x) in kinds]
    made += ["t5"] if hasattr(layer, "relative_attention_bias") else []
    # A mask of floats that come with the call is a bias.
    return made == _listed(wanted) or (made == ["given"] and mask_comes_in)


def _rate(layer: Any) -> float:
    return 0.0 if layer.dropout is None else layer.dropout.rate
