"""Faults of norms: epsilon, gain, bias, another variance, another axis, other statistics."""

import numpy as np

from .evidence import Evidence, Guesses
from .others import other_inputs

EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, float(np.finfo(np.float32).eps))


def norm(evidence: Evidence, x: np.ndarray, weight: np.ndarray) -> Guesses:
    """Guesses for layer, RMS and batch norms."""
    call = evidence.call
    bias = call.params.get("bias", np.zeros_like(weight))
    facts = {k: v for k, v in call.facts.items() if k in ("eps", "variance_epsilon")}
    own = next(iter(facts.values()), float(np.finfo(x.dtype).eps))
    centred = "RMS" not in call.kind and "T5" not in call.kind
    for eps in EPSILONS:
        if eps != own:
            yield (
                f"another epsilon: {eps:.3g}, not {own:.3g}",
                _normed(x, eps, centred) * weight + bias,
            )
    right = _normed(x, own, centred)
    if "running_mean" in call.params:
        yield from _batch_norm(evidence, x, weight, bias, own)
        return
    if x.shape[-1] == weight.shape[0]:
        yield from other_inputs(evidence, x, lambda x: _normed(x, own, centred) * weight + bias)
        yield from _gains(evidence, x, weight, bias, right)
        yield from _spreads(x, weight, bias, own, centred)


def _normed(x: np.ndarray, eps: float, centred: bool, axis: int = -1) -> np.ndarray:
    gap = x - x.mean(axis, keepdims=True) if centred else x
    with np.errstate(all="ignore"):
        return gap / np.sqrt((gap**2).mean(axis, keepdims=True) + eps)


def _batch_norm(evidence, x, weight, bias, eps) -> Guesses:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    axes = (0, *range(2, x.ndim))
    weight, bias = weight.reshape(shape), bias.reshape(shape)
    mean = evidence.call.params["running_mean"].reshape(shape)
    var = evidence.call.params["running_var"].reshape(shape)
    stats = {
        "the batch's own statistics": (x.mean(axes, keepdims=True), x.var(axes, keepdims=True)),
        "the running statistics": (mean, var),
        "the running variance taken for a deviation": (mean, var**2),
    }
    for what, (m, v) in stats.items():
        yield f"a norm by {what}", (x - m) / np.sqrt(v + eps) * weight + bias
    for other in EPSILONS:
        made = (x - mean) / np.sqrt(var + other) * weight + bias
        yield f"another epsilon: {other:.3g}, not {eps:.3g}", made


def _gains(
    evidence: Evidence, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, right: np.ndarray
) -> Guesses:
    """The right norm with another gain or bias."""
    call = evidence.call
    for name, other in evidence.truth.calls.items():
        gain = other.params.get("weight")
        if other is not call and gain is not None and gain.shape == weight.shape:
            yield f"the weights of {name}", right * gain + other.params.get("bias", bias)
    yield "one taken from the gain", right * (weight - 1) + bias
    yield "the gain missing", right + bias
    yield "the bias missing", right * weight
    yield "one added to the gain", right * (weight + 1) + bias
    yield "the bias inside the gain", (right + bias) * weight
    yield "no norm at all", x
    yield "the norm left out, its gain and bias alone", x * weight + bias


def _spreads(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, own: float, centred: bool
) -> Guesses:
    """Another measure of the spread."""
    other = "the mean not taken off" if centred else "the mean taken off"
    yield f"another norm, {other}", _normed(x, own, not centred) * weight + bias
    gap = x - x.mean(-1, keepdims=True) if centred else x
    spread = np.sqrt((gap**2).mean(-1, keepdims=True))
    yield "epsilon added to the deviation", gap / (spread + own) * weight + bias
    n = x.shape[-1]
    if n > 1:
        unbiased = (gap**2).sum(-1, keepdims=True) / (n - 1)
        yield "the unbiased variance, over n - 1", gap / np.sqrt(unbiased + own) * weight + bias
    total = np.sqrt((gap**2).sum(-1, keepdims=True) + own)
    yield "the sum of squares, not their mean", gap / total * weight + bias
    for axis in range(x.ndim - 1):
        yield f"another axis, {axis}", _normed(x, own, centred, axis) * weight + bias
    narrow = _normed(x.astype(np.float32), own, centred).astype(np.float64)
    yield "a norm in float32", narrow * weight + bias
