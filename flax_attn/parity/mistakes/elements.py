"""Mistakes in elementwise operations: activations, sums, factors, conditions."""

from collections.abc import Callable
from typing import Any

from ..sides.changes import Change, Mistakes, Named, Operation, with_arguments

ACTIVATIONS = {
    "softplus": "softplus",
    "silu": "SiLU",
    "relu": "ReLU",
    "tanh": "tanh",
    "sigmoid": "the sigmoid",
    "gelu": "GELU",
    "leaky_relu": "leaky ReLU",
    "elu": "ELU",
    "hardtanh": "hardtanh",
    "hardswish": "hardswish",
    "mish": "mish",
    "exp": "exp",
    "expm1": "exp - 1",
    "abs": "the absolute value",
    "sin": "the sine",
    "cos": "the cosine",
    "sqrt": "the square root",
    "rsqrt": "1 over the square root",
    "reciprocal": "1 over it",
    "log": "the logarithm",
}
# Activations that replace one another; the others are only left out.
SIMILAR_ACTIVATIONS = ("softplus", "silu", "relu", "tanh", "sigmoid", "gelu", "elu", "exp")
EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12)
SMALL = 0.1  # larger added constants are not an epsilon
COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "", "ne": ""}


def named_or_shape(x: Any, named: Named) -> str:
    """A tensor's or number's name for a description."""
    import torch

    if not torch.is_tensor(x):
        return f"{x:g}" if isinstance(x, int | float) else str(x)
    return named(x) or (f"{x.item():g}" if x.numel() == 1 else f"a part {list(x.shape)}")


def _activation(op: Operation, named: Named) -> Mistakes:
    """Another activation, or none."""
    import torch

    torch_name = ACTIVATIONS[op.name]
    yield f"{torch_name} left out, an activation missing", _operand(0)
    if op.name == "gelu":
        other = "none" if op.kwargs.get("approximate") == "tanh" else "tanh"
        form = "the tanh GELU" if other == "tanh" else "the exact GELU"
        yield f"{form} in the place of torch's", lambda f, a, k: f(a[0], approximate=other)
    if op.name not in SIMILAR_ACTIVATIONS:
        return
    functions: dict[str, Callable[[Any], Any]] = {
        ACTIVATIONS[name]: getattr(torch.nn.functional, name, None) or getattr(torch, name)
        for name in SIMILAR_ACTIVATIONS
    }
    functions |= {"-exp": lambda x: -torch.exp(x), "-tanh": lambda x: -torch.tanh(x)}
    functions["1 - the sigmoid, what is kept and what is new exchanged,"] = lambda x: (
        1 - torch.sigmoid(x)
    )
    for name, function in functions.items():
        if name != torch_name:
            description = f"{name} in the place of {torch_name}: another activation"
            yield description, lambda func, args, kwargs, f=function: f(args[0])


def _operand(place: int) -> Change:
    """Returns an operand instead of the result."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        x, like = args[place], func(*args, **kwargs)
        x = x if torch.is_tensor(x) else torch.full_like(like, x)
        return x.to(like.dtype).expand(like.shape).clone()

    return change


def _product(op: Operation, named: Named) -> Mistakes:
    """A factor or divisor left out, inverted, or replaced by 1 + w."""
    import torch

    one, two = op.args[:2]
    first, second = (named_or_shape(x, named) for x in (one, two))
    if op.name == "div":
        yield f"not divided by {second}, by which torch normalises or scales", _operand(0)
        yield f"multiplied with {second}, not divided by it", lambda f, a, k: a[0] * a[1]
        return
    yield f"{second} left out, a factor that torch multiplies with", _operand(0)
    if torch.is_tensor(two):
        yield f"{first} left out, a factor that torch multiplies with", _operand(1)
        yield (
            f"1 + {second} as a factor, where torch has {second}",
            lambda f, a, k: f(a[0], a[1] + 1),
        )
    else:
        yield f"divided by {second}, not multiplied with it", lambda f, a, k: a[0] / a[1]


def _added(op: Operation, named: Named) -> Mistakes:
    """Another added constant: an epsilon, the 1 of a gain, a position offset."""
    number = op.args[1]
    if 0 < abs(number) < SMALL:
        yield f"no epsilon of {number:g}", _operand(0)
        for eps in EPSILONS:
            if eps != number:
                yield f"another epsilon: {eps:g}, not {number:g}", with_arguments({1: eps})
        return
    gain = ": a gain or a scale of w, where torch's is 1 + w" if number == 1 else ""
    yield f"{number:g} not added{gain}", _operand(0)
    for by in (-1, 1) if isinstance(number, int) else ():
        description = f"numbers or positions shifted: {number + by} added, torch {number}"
        yield description, with_arguments({1: number + by})


def _sum(op: Operation, named: Named) -> Mistakes:
    """A term of a sum or difference left out, or with the other sign."""
    import torch

    one, two = op.args[:2]
    if not torch.is_tensor(two):
        yield from _added(op, named)
        return
    first, second = (named_or_shape(x, named) for x in (one, two))
    if op.name == "add":
        for description, place in ((second, 0), (first, 1)):
            yield f"{description} not added, where torch adds it", _operand(place)
        description = f"{second} taken away, where torch adds it: the other sign"
        yield description, lambda f, a, k: a[0] - a[1]
        yield f"{first} with the other sign", lambda f, a, k: a[1] - a[0]
        return
    yield f"{second} not taken away, where torch takes it from {first}", _operand(0)
    yield f"{first} left out of a difference", lambda f, a, k: -a[1]
    yield f"{second} alone, not the difference of {first} and it", _operand(1)
    yield f"{second} added, where torch takes it away: the other sign", lambda f, a, k: a[0] + a[1]
    yield "a difference with the other sign", lambda f, a, k: f(a[1], a[0])


def _complement(op: Operation, named: Named) -> Mistakes:
    """w instead of 1 - w."""
    yield f"w in the place of {op.args[1]:g} - w: the two exchanged", _operand(0)


def _comparison(op: Operation, named: Named) -> Mistakes:
    """A bound that is inclusive instead of exclusive, or a constant condition."""
    import torch

    other = COMPARISONS[op.name]
    if other:
        description = f"a mask or bound off by one: {other} in the place of {op.name}"
        yield description, lambda func, args, kwargs: getattr(torch, other)(*args, **kwargs)
    for truth, where in ((True, "everywhere"), (False, "nowhere")):
        yield (
            f"a mask or padding left out: what torch asks by `{op.name}` is true {where}",
            lambda f, a, k, truth=truth: torch.full_like(f(*a, **k), truth),
        )


def _diagonal(op: Operation, named: Named) -> Mistakes:
    """A causal mask with another diagonal."""
    start = op.args[1] if len(op.args) > 1 else 0
    for by in (-1, 1):
        description = f"a causal mask off by one: its diagonal at {start + by}, torch {start}"
        yield description, lambda f, a, k, by=by: f(a[0], start + by)
    yield "a triangular mask left out", _operand(0)


def _condition(op: Operation, named: Named) -> Mistakes:
    """A condition left out or inverted."""
    import torch

    if len(op.args) < 3:
        return
    for place, where in ((1, "where it holds"), (2, "where it does not")):
        yield f"a condition left out: everywhere what torch has {where}", _operand(place)
    yield (
        "a condition inverted, its two sides exchanged",
        lambda f, a, k: torch.where(a[0], a[2], a[1]),
    )


def _left_out(description: str) -> Callable[[Operation, Named], Mistakes]:
    return lambda op, named: iter([(description, _operand(0))])


ELEMENTS: dict[str, Callable[[Operation, Named], Mistakes]] = {
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(("mul", "div"), _product),
    **dict.fromkeys(("add", "sub"), _sum),
    "rsub": _complement,
    **dict.fromkeys(COMPARISONS, _comparison),
    **dict.fromkeys(("tril", "triu"), _diagonal),
    "where": _condition,
    "neg": _left_out("a minus sign left out: the other sign"),
    "masked_fill": _left_out("a mask left out: nothing is filled"),
    **dict.fromkeys(("clamp", "clamp_min"), _left_out("a clamp left out")),
    "pow": _left_out("a power left out"),
    "floor": _left_out("not rounded down"),
    "round": _left_out("not rounded"),
}
