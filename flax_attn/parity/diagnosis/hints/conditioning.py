"""Steps that no arithmetic of float64 computes well: both sides are off, and neither is wrong."""

import numpy as np

from ... import judge
from .chain import replay, softmax, steps_of
from .evidence import Evidence
from .norms import form_of

# More multiplications than this are not done again in extended precision, which is slow.
MANY = 1 << 24


def conditioning(evidence: Evidence) -> str:
    """That the input cannot tell, if torch itself is as far off as Flax, or ""."""
    exact = _extended(evidence)
    if exact is None or exact.shape != evidence.plain.shape:
        return ""
    own = judge.error(evidence.plain, exact)
    theirs = judge.error(evidence.got, evidence.layout.value(exact))
    if not own * 2 > judge.SAME_FUNCTION or not theirs <= judge.NO_WORSE * own:
        return ""
    number = own / float(np.finfo(np.float64).eps)
    return (
        f"rounding alone, this input cannot tell: against the same step in extended precision "
        f"torch itself is off by {own:.1e}, Flax by {theirs:.1e}; its condition number is about "
        f"{number:.0e}, so choose inputs for which less cancels"
    )


def _extended(evidence: Evidence) -> np.ndarray | None:
    """The step computed again in extended precision from torch's own inputs."""
    call, wide = evidence.call, np.longdouble
    given = {name: x.astype(wide) for name, x in call.inputs.items() if x.dtype.kind == "f"}
    if evidence.point == "scores" and {"query", "key"} <= given.keys():
        query, key = given["query"], np.swapaxes(given["key"], -1, -2)
        if query.size * key.shape[-1] > MANY:
            return None
        steps = steps_of(evidence, call.inputs["query"] @ np.swapaxes(call.inputs["key"], -1, -2))
        return replay(steps, query @ key).reshape(evidence.plain.shape)
    if evidence.point == "weights" and "scores" in given:
        return softmax(given["scores"]).reshape(evidence.plain.shape)
    if evidence.point == "context" and {"weights", "value"} <= given.keys():
        if given["weights"].size * given["value"].shape[-1] > MANY:
            return None
        return given["weights"] @ given["value"]
    return _module(evidence, given)


def _module(evidence: Evidence, given: dict[str, np.ndarray]) -> np.ndarray | None:
    """A linear layer or a norm."""
    x, weight = given.get("0"), evidence.call.params.get("weight")
    if x is None or weight is None or weight.dtype.kind != "f":
        return None
    bias = evidence.call.params.get("bias", np.zeros(1)).astype(np.longdouble)
    weight = weight.astype(np.longdouble)
    if weight.ndim == 2 and x.size * weight.shape[0] <= MANY:
        weight = weight if evidence.call.kind == "Conv1D" else weight.T
        return x @ weight + bias if x.shape[-1] == weight.shape[0] else None
    if weight.ndim == 1 and x.shape[-1] == weight.shape[0]:
        form = form_of(evidence, evidence.call.inputs["0"], evidence.call.params["weight"])
        return None if form is None else form(x, weight, bias, given.get("1"))
    return None
