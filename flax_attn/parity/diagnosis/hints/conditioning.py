"""Ill-conditioned steps, which float64 cannot compute accurately on either side."""

import numpy as np

from ... import judge
from ...groups import fills
from .chain import replay, softmax, steps_of
from .evidence import Evidence
from .norms import form_of

# Products with more multiplications are skipped, since extended precision is slow.
MANY = 1 << 24
# Relative perturbation of the terms of a sum, within which torch's value counts as reproduced, and
# the largest error that is ever attributed to rounding.
TERMS, LARGEST = 1e-14, 1e-3


def conditioning(evidence: Evidence) -> str:
    """Hint that the input is inconclusive if torch's error is as large as Flax's, or "".

    Torch's value must first be reproduced from its inputs to within rounding; otherwise torch
    computed another function, and nothing follows.
    """
    exact, moved = _extended(evidence), _extended(evidence, TERMS)
    if exact is None or moved is None or exact.shape != evidence.plain.shape:
        return ""
    layout_value = evidence.layout.value
    arrays = evidence.got, layout_value(evidence.plain), layout_value(exact), layout_value(moved)
    if any(x.shape != evidence.got.shape for x in arrays):
        return ""
    filled = [~np.isfinite(x) | (fills(x.astype(np.float64), "float64") != 0) for x in arrays]
    if any((places != filled[0]).any() for places in filled) or filled[0].all():
        return ""
    got, plain, exact, moved = (x[~filled[0]] for x in arrays)
    if np.linalg.norm(plain - exact) > np.linalg.norm(moved - exact):
        return ""
    torch_error, flax_error = judge.error(plain, exact), judge.error(got, exact)
    limit = min(judge.NO_WORSE * torch_error, LARGEST)
    if not judge.SAME_FUNCTION < torch_error * 2 or not flax_error <= limit:
        return ""
    number = torch_error / float(np.finfo(np.float64).eps)
    return (
        f"rounding alone, this input cannot tell: against the same step in extended precision "
        f"torch itself is off by {torch_error:.1e}, Flax by {flax_error:.1e}; its condition number "
        f"is about {number:.0e}, so choose inputs for which less cancels"
    )


def _extended(evidence: Evidence, terms: float = 0.0) -> np.ndarray | None:
    """Recomputes the step in extended precision from torch's own inputs.

    With `terms`, every term of a sum is larger by this fraction of its magnitude.
    """
    call, wide = evidence.call, np.longdouble
    inputs = {name: x.astype(wide) for name, x in call.inputs.items() if x.dtype.kind == "f"}
    if evidence.point == "scores" and {"query", "key"} <= inputs.keys():
        query, key = inputs["query"], np.swapaxes(inputs["key"], -1, -2)
        if query.size * key.shape[-1] > MANY:
            return None
        steps = steps_of(evidence, call.inputs["query"] @ np.swapaxes(call.inputs["key"], -1, -2))
        made = replay(steps, _sum(query, key, terms))
        return made.reshape(evidence.plain.shape)
    if evidence.point == "weights" and "scores" in inputs:
        score = inputs["scores"]
        finite = np.where(np.isfinite(score), score, 0.0)
        made = softmax(score + terms * _alternating(np.abs(finite) + 1))
        return made.reshape(evidence.plain.shape)
    if evidence.point == "context" and {"weights", "value"} <= inputs.keys():
        if inputs["weights"].size * inputs["value"].shape[-1] > MANY:
            return None
        return _sum(inputs["weights"], inputs["value"], terms)
    return _module(evidence, inputs, terms)


def _sum(left: np.ndarray, right: np.ndarray, terms: float) -> np.ndarray:
    """Matrix product, with every term larger by the fraction `terms` of its magnitude."""
    made = left @ right
    return made + terms * (np.abs(left) @ np.abs(right)) if terms else made


def _alternating(x: np.ndarray) -> np.ndarray:
    """Alternates signs along a row, since a constant per row does not change a softmax."""
    return x * (-1.0) ** np.arange(x.shape[-1])


def _module(evidence: Evidence, inputs: dict[str, np.ndarray], terms: float) -> np.ndarray | None:
    """Recomputes a linear layer or a norm."""
    x, weight = inputs.get("0"), evidence.call.params.get("weight")
    if x is None or weight is None or weight.dtype.kind != "f":
        return None
    bias = evidence.call.params.get("bias", np.zeros(1)).astype(np.longdouble)
    weight = weight.astype(np.longdouble)
    if weight.ndim == 2 and x.size * weight.shape[0] <= MANY:
        weight = weight if evidence.call.kind == "Conv1D" else weight.T
        if x.shape[-1] != weight.shape[0]:
            return None
        return _sum(x, weight, terms) + bias + terms * np.abs(bias)
    if weight.ndim == 1 and x.shape[-1] == weight.shape[0]:
        form = form_of(evidence, evidence.call.inputs["0"], evidence.call.params["weight"])
        if form is None:
            return None
        x = x + terms * _alternating(np.abs(x)) if terms else x
        return form(x, weight, bias, inputs.get("1"))
    return None
