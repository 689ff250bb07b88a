"""Faults of a submodule: untransposed or exchanged weights, biases, heads, activations."""

import ml_dtypes
import numpy as np

from ...sides.match import point_of
from .activations import ACTIVATIONS
from .evidence import Evidence, Guesses
from .norms import by_hand, norm
from .other_inputs import other_inputs, same_shape_taps

# Minimum share for a part to count as subtracted.
SOME = 0.25


def submodule(evidence: Evidence) -> Guesses:
    """Guesses by type of the submodule."""
    call = evidence.call
    x, weight = call.inputs.get("0"), call.params.get("weight")
    if x is None:
        return
    named = by_hand(evidence, x)
    if named is not None:
        yield from norm(named, x, named.call.params["weight"])
    elif weight is None and ("Norm" in call.kind or "eps" in call.facts) and x.ndim:
        yield from norm(evidence, x, np.ones(x.shape[-1]))
    if weight is None:
        yield from _activation(evidence) if x.shape == evidence.plain.shape else ()
        yield from _parts(evidence)
    elif "eps" in call.facts or "variance_epsilon" in call.facts or weight.ndim == 1:
        yield from norm(evidence, x, weight) if named is None else ()
    elif x.dtype.kind in "iu":
        yield from _embedding(evidence, x, weight)
    elif weight.ndim == 2:
        ends = weight.shape if call.kind == "Conv1D" else weight.shape[::-1]
        if (x.shape[-1:], evidence.plain.shape[-1:]) == (ends[:1], ends[1:]):
            yield from _linear(evidence, x, weight)
    else:
        yield from _convolution(evidence, weight)


def _parts(evidence: Evidence) -> Guesses:
    """A sum with one of its parts missing or added twice."""
    want = evidence.plain
    for name, part in same_shape_taps(evidence, want):
        missing, more = _part_description(want, part, name)
        yield missing, want - part
        yield f"{name} alone", part
        yield more, want + part
    x = evidence.call.inputs["0"]
    if x.shape == want.shape:
        missing, more = _part_description(want, x, "its input")
        yield f"{missing}, no skip", want - x
        yield more if "taken away" in more else "its input added, a skip too many", want + x


def _part_description(want: np.ndarray, part: np.ndarray, name: str) -> tuple[str, str]:
    """Describes a value without a part, and with the part applied twice.

    The projection of torch's value onto the part shows whether torch adds or subtracts it.
    """
    size = float(np.vdot(part, part).real)
    share = float(np.vdot(part, want).real) / size if size else 0.0
    if share < -SOME:
        return f"{name} taken away twice", f"{name} not taken away"
    return f"{name} not added", f"{name} added twice"


def _linear(evidence: Evidence, x: np.ndarray, weight: np.ndarray) -> Guesses:
    call, want = evidence.call, evidence.plain
    if call.kind == "Conv1D":
        weight = weight.T
    bias = call.params.get("bias", np.zeros(weight.shape[0]))
    outward, inward = weight.shape
    if outward == inward:
        yield "the kernel untransposed", x @ weight + bias
    yield "the bias missing", x @ weight.T
    yield "the bias twice", want + bias
    yield "the bias with the other sign", want - 2 * bias
    yield "the kernel read in the other order of axes", x @ weight.reshape(inward, outward) + bias
    heads = _word(evidence)
    for n in _divisors(outward):
        order = np.arange(outward).reshape(n, -1).T.ravel()
        yield f"its outputs interleaved, {n} {heads} by their width", want[..., order]
        flipped = np.arange(outward).reshape(n, -1)[::-1].ravel()
        yield f"its {n} {heads} in reversed order", want[..., flipped]
        for by, name in ((1, "next"), (-1, "previous")):
            rolled = np.roll(np.arange(outward).reshape(n, -1), by, axis=0).ravel()
            yield f"its {n} {heads} moved to the {name}", want[..., rolled]
        both = np.arange(outward).reshape(n, -1)[:, ::-1].ravel()
        yield f"each of {n} {heads} reversed inside", want[..., both]
        yield f"the bias alone in another order, {n} {heads}", x @ weight.T + bias[order]
        yield f"the bias alone in reversed order of {n} {heads}", x @ weight.T + bias[flipped]
    yield from _other_inputs(x, weight, bias, heads)
    for name, other in evidence.truth.calls.items():
        if other is not call and other.kind == call.kind and name != evidence.tap:
            yield from _weights_of(name, other.params, weight, bias, x)
    yield from other_inputs(evidence, x, lambda x: x @ weight.T + bias)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        rounded, small = (v.astype(dtype).astype(np.float64) for v in (weight, bias))
        yield f"a kernel rounded to {np.dtype(dtype)}", x @ rounded.T + bias
        yield f"kernel and bias rounded to {np.dtype(dtype)}", x @ rounded.T + small
        yield (
            f"weights and inputs rounded to {np.dtype(dtype)}",
            (x.astype(dtype).astype(np.float64) @ rounded.T + small),
        )


def _weights_of(name: str, params: dict, weight: np.ndarray, bias: np.ndarray, x: np.ndarray):
    other = params.get("weight")
    if other is None or other.shape != weight.shape:
        return
    torch_bias = params.get("bias", bias)
    yield f"the weights of {name}: two projections exchanged", x @ other.T + torch_bias
    yield f"the kernel of {name}", x @ other.T + bias
    yield f"the bias of {name}", x @ weight.T + torch_bias


def _word(evidence: Evidence) -> str:
    """What equal parts of an axis are called: heads, if the original has attention."""
    points = {point_of(name) for name in evidence.truth.taps}
    return "heads" if points & {"scores", "weights", "context"} else "parts"


def _other_inputs(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, heads: str) -> Guesses:
    """Input heads in another order, or one of them without effect."""
    inward = weight.shape[1]
    for n in _divisors(inward):
        order = np.arange(inward).reshape(n, -1).T.ravel()
        yield f"its inputs interleaved, {n} {heads} by their width", x[..., order] @ weight.T + bias
        flipped = np.arange(inward).reshape(n, -1)[::-1].ravel()
        yield f"its {n} input {heads} in reversed order", x[..., flipped] @ weight.T + bias
        if x.ndim > 1:
            split = np.swapaxes(x.reshape(*x.shape[:-1], n, -1), -2, -3).reshape(x.shape)
            yield f"{n} {heads} merged without moving them back", split @ weight.T + bias
    yield from _heads_lost(x, weight, bias, heads)


def _heads_lost(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, heads: str) -> Guesses:
    """One input head without effect."""
    inward = weight.shape[1]
    for n in (n for n in _divisors(inward) if n <= 64):
        for head in range(n):
            keep_mask = np.arange(inward) // (inward // n) != head
            yield f"{heads.removesuffix('s')} {head} of {n} lost", (x * keep_mask) @ weight.T + bias


def _divisors(n: int) -> list[int]:
    return [d for d in range(2, n) if n % d == 0] + [n]


def _embedding(evidence: Evidence, ids: np.ndarray, table: np.ndarray) -> Guesses:
    rows, width = table.shape
    yield "the table's rows one too low", np.roll(table, 1, axis=0)[ids]
    yield "the table's rows one too high", np.roll(table, -1, axis=0)[ids]
    yield "ids one too high", table[np.minimum(ids + 1, rows - 1)]
    yield "ids one too low", table[np.maximum(ids - 1, 0)]
    yield "embeddings scaled by the root of their width", evidence.plain * width**0.5
    yield "embeddings divided by the root of their width", evidence.plain / width**0.5
    if evidence.plain.shape[-1] == width:
        yield "row 0 set to zero, as padding", np.where(ids[..., None] == 0, 0.0, table[ids])


def _convolution(evidence: Evidence, weight: np.ndarray) -> Guesses:
    bias = evidence.call.params.get("bias")
    if bias is not None:
        shape = (1, -1) + (1,) * (evidence.plain.ndim - 2)
        yield "the bias missing", evidence.plain - bias.reshape(shape)
        yield "the bias twice", evidence.plain + bias.reshape(shape)


def _activation(evidence: Evidence) -> Guesses:
    x = evidence.call.inputs["0"]
    yield "the submodule missing", x
    for name, function in ACTIVATIONS.items():
        yield f"{name} in the place of {evidence.call.kind}", function(x)
    for tap, value in same_shape_taps(evidence, x):
        for name, function in ACTIVATIONS.items():
            yield f"{name} of {tap}", function(value)
    rate = evidence.call.facts.get("p")
    if rate and rate < 1:
        yield "what dropout keeps not scaled up", evidence.plain * (1 - rate)
        dropped = np.where(evidence.plain == 0, x / (1 - rate), 0.0)
        yield "dropout's mask inverted", dropped
