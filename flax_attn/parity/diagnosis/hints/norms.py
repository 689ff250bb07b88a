"""Faults of norms: epsilon, gain, bias, variance, axis, statistics, gate."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ... import judge
from .evidence import Evidence, Guesses
from .other_inputs import other_inputs

EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, float(np.finfo(np.float32).eps))
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "the sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "nothing": lambda x: x,
}
# Module attributes above SMALL are not an epsilon; arrays larger than LARGE skip `by_hand`.
SMALL, LARGE = 0.1, 1 << 18
# A relative difference below this is not a deliberate other epsilon, but a partial fault.
CLOSE_ENOUGH = 1e-2
BEFORE, AFTER = "before the gate", "after the gate"
# Divisors of a norm, for a variance v of n values.
SPREADS = {
    "": "the root of v + epsilon",
    "n - 1": "the root of the unbiased variance, over n - 1, + epsilon",
    "outside": "the deviation, the root of v, + epsilon outside the root",
    "n - 1, outside": "the unbiased deviation, over n - 1, + epsilon outside the root",
}


@dataclass(frozen=True)
class Form:
    """The formula of a norm over the last axis.

    Attributes:
      eps: added to the variance.
      centred: whether the mean is subtracted.
      offset: added to the gain: 0, or 1 where weights are stored around zero.
      gated: "" without a gate, else `BEFORE` or `AFTER`: where the norm is applied.
      act: activation of the gate.
      spread: the divisor, a key of `SPREADS`.
    """

    eps: float
    centred: bool
    offset: float = 0.0
    gated: str = ""
    act: str = "nothing"
    spread: str = ""

    def over(self, x: np.ndarray) -> np.ndarray:
        """Normalises `x`, without gain and bias."""
        return normed(x, self.eps, self.centred, spread=self.spread)

    def __call__(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, gate: np.ndarray | None = None
    ) -> np.ndarray:
        opened = 1.0 if gate is None or not self.gated else ACTIVATIONS[self.act](gate)
        if self.gated == AFTER:
            return self.over(x * opened) * (weight + self.offset) + bias
        made = self.over(x) * (weight + self.offset) + bias
        return made * opened


def norm(evidence: Evidence, x: np.ndarray, weight: np.ndarray) -> Guesses:
    """Guesses for layer, RMS and batch norms."""
    call = evidence.call
    bias, declared = call.params.get("bias", np.zeros_like(weight)), _declared_form(evidence)
    if "running_mean" in call.params:
        yield from _batch_norm(evidence, x, weight, bias, declared.eps)
        return
    if x.shape[-1] != weight.shape[0]:
        return
    gate = call.inputs.get("1")
    form = form_of(evidence, x, weight)
    if form is None:  # variations of an unknown formula cannot be tried
        yield "no norm at all", x
        return
    if form.gated:
        yield from _gated(form, x, weight, bias, gate)
    torch_eps = form.eps
    for eps in EPSILONS:
        if f"{eps:.3g}" != f"{torch_eps:.3g}":
            what = f"another epsilon: {eps:.3g}, not {torch_eps:.3g}"
            yield what, replace(form, eps=eps)(x, weight, bias, gate)
    yield from _fitted_epsilon(evidence, form, x, weight, bias, gate)
    yield from _spreads(form, x, weight, bias, gate)
    if form.gated:
        return
    gain = weight + form.offset
    yield from _offsets(form, x, weight, bias)
    yield from other_inputs(evidence, x, lambda x: form.over(x) * gain + bias)
    yield from _gains(evidence, x, gain, bias, form.over(x))
    yield from _axes(form, x, gain, bias)


def by_hand(evidence: Evidence, x: np.ndarray) -> Evidence | None:
    """Evidence with gain and bias renamed to `weight` and `bias`.

    Recognises norms whose class and parameters have other names. None if no norm formula with these
    parameters gives torch's value.
    """
    call = evidence.call
    params = {name: p for name, p in call.params.items() if p.size > 1}
    vectors = [p.ravel() for p in params.values() if x.ndim and p.size == x.shape[-1]]
    known = x.dtype.kind == "f" and x.shape == evidence.plain.shape
    if not known or len(vectors) < len(params) or len(vectors) > 3 or x.size > LARGE:
        return None
    ones, none = np.ones(x.shape[-1]), np.zeros(x.shape[-1])
    facts = call.facts | {k: float(p.ravel()[0]) for k, p in call.params.items() if p.size == 1}
    for gain in (*vectors, ones):
        for bias in (*(p for p in vectors if p is not gain), none):
            plain = replace(call, params={"weight": gain, "bias": bias}, facts=facts)
            named = replace(evidence, call=plain)
            if form_of(named, x, gain) is not None:
                return named
    return None


def _declared_form(evidence: Evidence) -> Form:
    """The formula that the class's name and attributes suggest."""
    call = evidence.call
    small = {k: v for k, v in call.facts.items() if 0 <= v < SMALL}
    named = [k for k in small if "eps" in k] or [k for k, v in small.items() if v]
    centred = "RMS" not in call.kind and "T5" not in call.kind
    return Form(small[named[0]] if named else float(np.finfo(np.float64).eps), centred)


def form_of(evidence: Evidence, x: np.ndarray, weight: np.ndarray) -> Form | None:
    """Torch's formula: the first candidate that gives torch's value, or None."""
    bias = evidence.call.params.get("bias", np.zeros_like(weight))
    forms, gate = _forms(_declared_form(evidence)), evidence.call.inputs.get("1")
    if gate is not None and gate.shape == x.shape:
        forms = (*forms, *_gates(forms))
    forms = (*forms, *(replace(form, spread=s) for s in SPREADS if s for form in forms))
    for form in forms:
        made = form(x, weight, bias, gate)
        if judge.same_function(made, evidence.plain).ok:
            return form
    return None


def _forms(declared: Form) -> tuple[Form, ...]:
    forms = [
        Form(eps, centred, offset)
        for eps in dict.fromkeys((declared.eps, *EPSILONS))
        for centred in (declared.centred, not declared.centred)
        for offset in (0.0, 1.0)
    ]
    return tuple(forms)


def _gates(forms: tuple[Form, ...]) -> Iterator[Form]:
    for act in ACTIVATIONS:
        for gated in (BEFORE, AFTER):
            yield from (replace(form, gated=gated, act=act) for form in forms)


def _gated(form: Form, x, weight, bias, gate) -> Guesses:
    """Another gate order or activation, possibly with another epsilon, or no gate."""
    other = AFTER if form.gated == BEFORE else BEFORE
    for eps in dict.fromkeys((form.eps, *EPSILONS)):
        more = "" if eps == form.eps else f", and another epsilon: {eps:.3g}, not {form.eps:.3g}"
        for act in ACTIVATIONS:
            for gated in (form.gated, other):
                if (gated, act) == (form.gated, form.act):
                    continue
                hint = [] if gated == form.gated else [f"the norm {gated}, torch's {form.gated}"]
                hint += [] if act == form.act else [f"a gate by {act}, torch's by {form.act}"]
                made = replace(form, eps=eps, gated=gated, act=act)
                yield "; ".join(hint) + more, made(x, weight, bias, gate)
        made = replace(form, eps=eps, gated="")
        yield f"the gate missing{more}", made(x, weight, bias)


def _offsets(form: Form, x, weight, bias) -> Guesses:
    """A gain of 1 + w where torch's is w, or the reverse."""
    if form.offset:
        yield "a gain of w, where torch's is 1 + w", replace(form, offset=0.0)(x, weight, bias)
    else:
        yield "a gain of 1 + w, where torch's is w", replace(form, offset=1.0)(x, weight, bias)


def _fitted_epsilon(evidence: Evidence, form: Form, x, weight, bias, gate) -> Guesses:
    """Another epsilon, solved for from Flax's value."""
    gain, flax, original = weight + form.offset, evidence.got, x
    if flax.shape != x.shape or not gain.all():
        return
    if form.gated and gate is not None:
        opened = ACTIVATIONS[form.act](gate)
        flax, x = (flax, x * opened) if form.gated == AFTER else (flax / opened, x)
    gap = x - x.mean(-1, keepdims=True) if form.centred else x
    spread = (gap**2).mean(-1)
    with np.errstate(all="ignore"):
        times = (((flax - bias) / gain) ** 2).mean(-1)
        eps = spread / times - spread
        if form.spread:
            n = x.shape[-1]
            wide = spread * n / (n - 1) if "n - 1" in form.spread else spread
            eps = spread / times - wide
            eps = (spread / times) ** 0.5 - wide**0.5 if "outside" in form.spread else eps
        eps = float(np.median(eps))
    for guess in (float(f"{eps:.3g}"), eps):
        if 0 < guess < np.inf and abs(guess - form.eps) > CLOSE_ENOUGH * form.eps:
            made = replace(form, eps=guess)(original, weight, bias, gate)
            yield f"another epsilon: {guess:.6g}, not {form.eps:.3g}", made


def normed(
    x: np.ndarray, eps: float, centred: bool, axis: int = -1, spread: str = ""
) -> np.ndarray:
    """`x` divided by the root of its mean square, after subtracting the mean if `centred`."""
    gap = x - x.mean(axis, keepdims=True) if centred else x
    n = x.shape[axis]
    less = 1 if "n - 1" in spread and n > 1 else 0
    with np.errstate(all="ignore"):
        variance = (gap**2).sum(axis, keepdims=True) / (n - less)
        if "outside" in spread:
            return gap / (np.sqrt(variance) + eps)
        return gap / np.sqrt(variance + eps)


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
        is_itself = other is call or name == evidence.tap
        if not is_itself and gain is not None and gain.shape == weight.shape:
            yield f"the weights of {name}", right * gain + other.params.get("bias", bias)
    yield "one taken from the gain", right * (weight - 1) + bias
    yield "the gain missing", right + bias
    yield "the bias missing", right * weight
    yield "one added to the gain", right * (weight + 1) + bias
    yield "the bias inside the gain", (right + bias) * weight
    yield "no norm at all", x
    yield "the norm left out, its gain and bias alone", x * weight + bias


def _spreads(form: Form, x, weight, bias, gate) -> Guesses:
    """Another divisor."""
    for spread, what in SPREADS.items():
        if spread != form.spread:
            hint = f"divided by {what}, torch's by {SPREADS[form.spread]}"
            yield hint, replace(form, spread=spread)(x, weight, bias, gate)
            for eps in (eps for eps in EPSILONS if f"{eps:.3g}" != f"{form.eps:.3g}"):
                made = replace(form, spread=spread, eps=eps)(x, weight, bias, gate)
                yield f"{hint}; and another epsilon: {eps:.3g}, not {form.eps:.3g}", made


def _axes(form: Form, x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> Guesses:
    """Another centring, axis, sum or dtype."""
    eps, centred = form.eps, form.centred
    other = "the mean not taken off" if centred else "the mean taken off"
    yield f"another norm, {other}", replace(form, centred=not centred).over(x) * gain + bias
    gap = x - x.mean(-1, keepdims=True) if centred else x
    total = np.sqrt((gap**2).sum(-1, keepdims=True) + eps)
    yield "the sum of squares, not their mean", gap / total * gain + bias
    for axis in range(x.ndim - 1):
        yield f"another axis, {axis}", normed(x, eps, centred, axis) * gain + bias
    narrow = normed(x.astype(np.float32), eps, centred).astype(np.float64)
    yield "a norm in float32", narrow * gain + bias
