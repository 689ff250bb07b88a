"""Changes of elementwise operations: activations, sums, factors, conditions, bounds."""

from collections.abc import Callable
from typing import Any

from .operation import Changed, Operation, around, computed, operand, with_arguments
from .replay import Change

ACTIVATIONS = {
    "softplus": "softplus", "silu": "SiLU", "relu": "ReLU", "tanh": "tanh",
    "sigmoid": "the sigmoid", "gelu": "GELU", "leaky_relu": "leaky ReLU", "elu": "ELU",
    "hardtanh": "hardtanh", "hardswish": "hardswish", "mish": "mish", "exp": "exp",
    "expm1": "exp - 1", "abs": "the absolute value", "sin": "the sine", "cos": "the cosine",
    "sqrt": "the square root", "rsqrt": "1 over the square root", "reciprocal": "1 over it",
    "log": "the logarithm", "square": "the square", "log1p": "log(1 + x)", "erf": "erf",
    "log_sigmoid_forward": "the log-sigmoid", "sign": "the sign",
}  # fmt: skip
# What replaces an activation, or stands where torch has none.
FUNCTIONS = (
    "relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "leaky_relu", "exp", "log",
    "square", "abs", "sin", "cos", "sqrt", "rsqrt", "mish", "hardtanh", "hardswish", "softsign",
    "relu6", "selu", "expm1", "log1p", "reciprocal", "logsigmoid",
)  # fmt: skip
EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12)
SMALL = 0.1  # larger added constants are not an epsilon
ROUNDINGS = ("floor", "round", "ceil", "trunc")
COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


def functions() -> dict[str, Callable[[Any], Any]]:
    """Elementwise functions by the words for them."""
    import torch

    named = {n: getattr(torch.nn.functional, n, None) or getattr(torch, n) for n in FUNCTIONS}
    words = {ACTIVATIONS.get(n, n): f for n, f in named.items()}
    return words | {
        "the tanh GELU": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "-exp": lambda x: -torch.exp(x),
        "-tanh": lambda x: -torch.tanh(x),
        "the sigmoid GELU, a factor of 1.702,": lambda x: x * torch.sigmoid(1.702 * x),
        "1 - the sigmoid, what is kept and what is new exchanged,": (
            lambda x: 1 - torch.sigmoid(x)
        ),
        "the squared ReLU": lambda x: torch.relu(x).square(),
    }


def activation(op: Operation) -> Changed:
    """Another activation, or none."""
    import torch

    name = "the softcap's tanh" if _caps(op) else ACTIVATIONS[op.name]
    yield f"{name} left out, an activation missing", operand(0)
    if op.name == "square":
        text = "2 to the power of it: base and exponent exchanged"
        yield text, computed(lambda f, a, k: torch.exp2(a[0]))
    if op.name == "gelu":
        tanh = op.kwargs.get("approximate") == "tanh"
        forms = ("the exact GELU", "the tanh GELU")
        form, here, other = (*forms, "none") if tanh else (*forms[::-1], "tanh")
        yield (
            f"{form} of {op.label(0)}, where torch has {here}",
            computed(lambda f, a, k: f(a[0], approximate=other)),
        )
    for other, function in functions().items():
        if other != name:
            text = f"{other} in the place of {name}: another activation"
            yield text, computed(lambda f, a, k, function=function: function(a[0]))


def _caps(op: Operation) -> bool:
    """Whether an operation is the tanh of a number divided by another one."""
    producer = op.tape.producers[op.node.args[0].value] if op.name == "tanh" else -1
    before = op.tape.nodes[producer] if producer >= 0 else None
    return before is not None and before.name in ("mul", "div") and len(before.operands) == 1


def product(op: Operation) -> Changed:
    """A factor or divisor left out, or replaced by 1 + w."""
    one, two = op.label(0), op.label(1)
    more = "" if 1 in op.tensors else "not scaled: "
    if op.name == "div":
        if keeps(op):
            yield f"what dropout keeps not scaled up by 1 / {two}", operand(0)
        yield f"{more}not divided by {two}, by which torch normalises or scales", operand(0)
        return
    yield f"{more}{two} left out, a factor that torch multiplies with", operand(0)
    if 1 in op.tensors:
        yield f"{one} left out, a factor that torch multiplies with", operand(1)
        for place, label in ((1, two), (0, one)):
            yield (
                f"1 + {label} as a factor, where torch has {label}",
                around(lambda x: 1 + x, place),
            )


def keeps(op: Operation) -> bool:
    """Whether an operation scales the mask of a dropout."""
    x = op.args[0]
    return op.name == "div" and 1 not in op.tensors and bool(((x == 0) | (x == 1)).all())


def total(op: Operation) -> Changed:
    """A term of a sum or difference left out, or with the other sign."""
    if 1 not in op.tensors:
        yield from _constant_added(op)
        return
    one, two = op.label(0), op.label(1)
    if op.name == "add":
        for label, place in ((two, 0), (one, 1)):
            yield f"{label} not added, where torch adds it", operand(place)
        text = f"{two} taken away, where torch adds it: the other sign"
        yield text, computed(lambda f, a, k: a[0] - a[1])
        yield f"{one} with the other sign", computed(lambda f, a, k: a[1] - a[0])
        return
    yield f"{two} not taken away, where torch takes it from {one}", operand(0)
    yield f"{one} left out of a difference", computed(lambda f, a, k: (-a[1]).expand_as(f(*a)))
    yield f"{two} alone, not the difference of {one} and it", operand(1)
    text = f"{two} added, where torch takes it away: the other sign"
    yield text, computed(lambda f, a, k: a[0] + a[1])
    yield "a difference with the other sign", computed(lambda f, a, k: f(a[1], a[0]))


def operators(op: Operation) -> Changed:
    """Another operator between the same operands."""
    if op.name not in ("mul", "div", "add", "sub"):
        return
    one, two = op.label(0), op.label(1)
    texts = {
        "mul": f"multiplied with {two}",
        "div": f"divided by {two}",
        "add": f"{two} added",
        "sub": f"{two} taken away",
    }
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
    }
    for name, function in functions.items():
        if name != op.name:
            text = f"{one} {texts[name]}, where torch has: {texts[op.name]}"
            yield text, computed(lambda f, a, k, function=function: function(a[0], a[1]))
    yield (
        f"{two} divided by {one}, where torch has: {texts[op.name]}",
        computed(lambda f, a, k: a[1] / a[0]),
    )


def _constant_added(op: Operation) -> Changed:
    """Another added constant: an epsilon, the 1 of a gain, a position offset."""
    number = op.args[1]
    if isinstance(number, float) and 0 < abs(number) < SMALL:
        yield f"no epsilon of {number:g}", operand(0)
        for eps in EPSILONS:
            if eps != number:
                yield f"another epsilon: {eps:g}, not {number:g}", with_arguments({1: eps})
        return
    gain = ": a gain or a scale of w, where torch's is 1 + w" if number == 1 else ""
    verb = "added" if op.name == "add" else "taken away"
    yield f"{number:g} not {verb}{gain}", operand(0)
    yield (
        f"{number:g} {'taken away' if op.name == 'add' else 'added'}, not {verb}",
        with_arguments({1: -number}),
    )


def complement(op: Operation) -> Changed:
    """w instead of 1 - w."""
    number = op.args[1]
    yield f"w in the place of {number:g} - w: the two exchanged", operand(0)
    yield (
        f"w - {number:g}, not {number:g} - w: the other sign",
        computed(lambda f, a, k: -f(*a, **k)),
    )
    yield (
        f"{number:g} + w, not {number:g} - w: the other sign",
        computed(lambda f, a, k: a[1] + a[0]),
    )


def comparison(op: Operation) -> Changed:
    """A bound that is inclusive instead of exclusive, or a constant condition."""
    import torch

    other = COMPARISONS[op.name]
    text = f"a mask or bound off by one: {other} in the place of {op.name}"
    yield text, computed(lambda f, a, k: getattr(torch, other)(*a))
    yield f"the other way: not {op.name}", computed(lambda f, a, k: ~f(*a, **k))
    for truth, where in ((True, "everywhere"), (False, "nowhere")):
        yield (
            f"a mask or padding left out: what torch asks by `{op.name}` is true {where}",
            computed(lambda f, a, k, truth=truth: torch.full_like(f(*a, **k), truth)),
        )


def diagonal(op: Operation) -> Changed:
    """A triangular mask with another diagonal, the other triangle, or none."""
    import torch

    start = op.args[1] if len(op.args) > 1 else 0
    for by in (-1, 1):
        text = f"a causal mask off by one: its diagonal at {start + by}, torch {start}"
        yield text, computed(lambda f, a, k, by=by: f(a[0], start + by))
    yield "a triangular mask left out", operand(0)
    other = torch.triu if op.name == "tril" else torch.tril
    yield f"the other triangle than torch's {op.name}", computed(lambda f, a, k: other(a[0], start))


def condition(op: Operation) -> Changed:
    """A condition left out or inverted."""
    import torch

    if len(op.args) < 3:
        return
    for place, where in ((1, "where it holds"), (2, "where it does not")):
        yield f"a condition left out: everywhere what torch has {where}", operand(place)
    yield (
        "a condition inverted, its two sides exchanged",
        computed(lambda f, a, k: torch.where(a[0], a[2], a[1])),
    )


def filled(op: Operation) -> Changed:
    """A fill left out, at the other places, or with another number."""
    import torch

    hides = op.args[1].expand(op.out.shape)
    empty = hides.any() and bool((hides == hides.all(-1, keepdim=True)).all())
    rows = "rows that see nothing: " if empty else ""
    yield f"{rows}a mask left out, nothing is filled", operand(0)
    yield (
        "a mask inverted: filled where torch does not",
        computed(lambda f, a, k: f(a[0], ~a[1], *a[2:])),
    )
    numbers = {
        "0": 0.0, "-inf": -torch.inf, "-1e9": -1e9, "-1e4": -1e4, "1": 1.0,
        "the lowest number of float64": torch.finfo(torch.float64).min,
        "the lowest number of float32": torch.finfo(torch.float32).min,
    }  # fmt: skip
    keys = op.out.shape[-1]
    numbers[f"1 / {keys}, an average of the row"] = 1 / keys
    for text, number in numbers.items():
        yield (
            f"{rows}filled with {text}, torch with {op.label(2)}",
            computed(lambda f, a, k, number=number: torch.masked_fill(a[0], a[1], number)),
        )


def minimum(op: Operation) -> Changed:
    """The smaller of two in the place of the larger, one of the two, or their sum."""
    import torch

    other = torch.minimum if op.name == "maximum" else torch.maximum
    yield (
        f"the {other.__name__} in the place of the {op.name}",
        computed(lambda f, a, k: other(a[0], a[1])),
    )
    for place in (0, 1):
        yield f"{op.label(place)} alone, not the {op.name} of two", operand(place)
    yield f"a sum in the place of the {op.name}", computed(lambda f, a, k: a[0] + a[1])


def inverted(op: Operation) -> Changed:
    yield f"a condition inverted: torch's {op.name} left out", operand(0)


def power(op: Operation) -> Changed:
    """Another exponent."""
    yield "a power left out", operand(0)
    if isinstance(op.args[1], int | float):
        for other in (1, 2, 3, 0.5, -0.5, -1, -op.args[1]):
            if other != op.args[1]:
                text = f"another power: {other:g}, torch {op.args[1]:g}"
                yield text, with_arguments({1: other})
        text = f"{op.args[1]:g} to the power of {op.label(0)}: base and exponent exchanged"
        yield text, computed(lambda f, a, k: a[1] ** a[0])


def gated(op: Operation) -> Changed:
    """A gated unit: the other half as the gate, another gate, or none."""
    import torch

    axis = op.args[1] if len(op.args) > 1 else -1

    def of_halves(function: Callable[[Any, Any], Any]) -> Change:
        return computed(lambda f, a, k: function(*a[0].chunk(2, axis)))

    text = "the first half as the gate, where torch's glu takes the second"
    yield text, of_halves(lambda x, gate: gate * torch.sigmoid(x))
    yield "the gate left out: the first half alone", of_halves(lambda x, gate: x)
    yield "the gate alone: the first half left out", of_halves(lambda x, gate: torch.sigmoid(gate))
    yield "a gate without its sigmoid", of_halves(lambda x, gate: x * gate)
    text = "the first half through the sigmoid too"
    yield text, of_halves(lambda x, gate: torch.sigmoid(x) * torch.sigmoid(gate))
    for name, function in functions().items():
        if name != "the sigmoid":
            text = f"{name} in the place of the gate's sigmoid: another activation"
            yield text, of_halves(lambda x, gate, f=function: x * f(gate))
    yield (
        "every other number as the gate, where torch's glu takes the second half",
        computed(
            lambda f, a, k: f(torch.cat([a[0].movedim(axis, 0)[i::2] for i in (0, 1)]), 0).movedim(
                0, axis
            )
        ),
    )


def narrowed(op: Operation) -> Changed:
    """A number that torch rounds to a narrow dtype and Flax does not, or to another one."""
    producer = op.tape.producers[op.node.args[0].value]
    before = op.tape.nodes[producer] if producer >= 0 else None
    if before is None or before.name != op.name or not op.out.is_floating_point():
        return
    dtype = str(op.args[0].dtype).removeprefix("torch.")
    text = f"torch rounds {op.called(before.args[0].value)} to {dtype} here, Flax "
    whole = before.args[0].value

    def as_it_was(f: Any, a: Any, k: Any, more: Any) -> Any:
        return more[whole]

    yield f"{text}does not", Change(as_it_was, more=(whole,))


def rounding(op: Operation) -> Changed:
    """Another way to round, or none."""
    import torch

    yield f"not rounded: torch's {op.name} left out", operand(0)
    others = {name: getattr(torch, name) for name in ROUNDINGS}
    others["half away from zero"] = lambda x: x.sign() * (x.abs() + 0.5).floor()
    for name, function in others.items():
        if name != op.name:
            text = f"rounded by {name}, torch by {op.name}"
            yield text, computed(lambda f, a, k, function=function: function(a[0]))


def left_out(text: str) -> Callable[[Operation], Changed]:
    """A row for an operation of one operand that is left out."""
    return lambda op: iter([(text, operand(0))])


def clamped(op: Operation) -> Changed:
    """A clamp left out, or one of its bounds."""
    yield "a clamp left out", operand(0)
    for place in (1, 2) if op.name == "clamp" and len(op.args) > 2 else ():
        yield f"a clamp without its bound {op.label(place)}", with_arguments({place: None})


ELEMENTS: dict[str, Callable[[Operation], Changed]] = {
    **dict.fromkeys(ACTIVATIONS, activation),
    **dict.fromkeys(("mul", "div"), product),
    **dict.fromkeys(("add", "sub"), total),
    "rsub": complement,
    **dict.fromkeys(COMPARISONS, comparison),
    **dict.fromkeys(("tril", "triu"), diagonal),
    "where": condition,
    "masked_fill": filled,
    **dict.fromkeys(("maximum", "minimum"), minimum),
    **dict.fromkeys(("logical_not", "bitwise_not"), inverted),
    "neg": left_out("a minus sign left out: the other sign"),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), clamped),
    "_to_copy": narrowed,
    "pow": power,
    "glu": gated,
    **dict.fromkeys(ROUNDINGS, rounding),
    "_conj": left_out("a conjugate left out"),
}
