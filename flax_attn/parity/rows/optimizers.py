"""Equivalent optimizers in torch and optax, by torch's name and options.

Torch's conventions and defaults apply. Where optax has another convention, the transformation is
implemented here; where torch's arithmetic cannot be reproduced, the optimizer is rejected.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
MAXIMIZE = {"maximize": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adam": ADAM | {"amsgrad": False, "decoupled_weight_decay": False},
    "adamw": ADAM | {"weight_decay": 1e-2, "amsgrad": False},
    "rmsprop": {
        **{"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0},
        **{"momentum": 0.0, "centered": False},
    },
    "adagrad": {
        **{"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0},
        **{"initial_accumulator_value": 0.0, "eps": 1e-10},
    },
    "adamax": ADAM | {"lr": 2e-3},
    "radam": ADAM | {"decoupled_weight_decay": False},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
}
DEFAULTS = {name: options | MAXIMIZE for name, options in DEFAULTS.items()}
CLASSES = dict(
    zip(DEFAULTS, "SGD Adam AdamW RMSprop Adagrad Adamax RAdam Adadelta".split(), strict=True)
)

FIRST = "torch adds weight_decay * p to the gradient first, before momentum and moments; optax."
EPS = "torch divides by sqrt(v) + eps, with eps outside the root; optax."
AMSGRAD = {
    "amsgrad": "torch keeps the maximum of the raw second moment, optax.amsgrad that of the "
    "bias-corrected one: they differ from the second step on."
}
# Notes, by the option that makes them relevant.
NOTES: dict[str, dict[str, str]] = {
    "sgd": {
        "dampening": "torch's buffer is momentum * buffer + (1 - dampening) * gradient, but takes "
        "the first gradient whole; optax.sgd has no dampening.",
        "weight_decay": f"{FIRST}sgd has none.",
    },
    "adam": {"weight_decay": f"{FIRST}adam has none, optax.adamw adds it last.", **AMSGRAD},
    "adamw": {
        "weight_decay": "torch's weight_decay is 1e-2 unless given, that of optax.adamw 1e-4.",
        **AMSGRAD,
    },
    "rmsprop": {
        "eps": f"{EPS}rmsprop by sqrt(v + eps), unless eps_in_sqrt=False.",
        "alpha": "torch's alpha is 0.99 unless given, the decay of optax.rmsprop 0.9.",
        "weight_decay": f"{FIRST}rmsprop has none.",
    },
    "adagrad": {
        "eps": f"{EPS}adagrad by sqrt(v + eps). Unless given it is 1e-10 and 1e-7.",
        "lr": "torch's sum of squares starts at 0 unless given, that of optax.adagrad at 0.1.",
        "lr_decay": "torch's lr falls as 1 / (1 + lr_decay * steps before); optax.adagrad's not.",
        "weight_decay": f"{FIRST}adagrad has none.",
    },
    "adamax": {"weight_decay": f"{FIRST}adamax has none, optax.adamaxw adds it last."},
    "radam": {
        "eps": "torch adds eps to sqrt(v) before the correction of the bias, optax.radam after it: "
        "they differ once rectification begins, at the sixth step for betas (0.9, 0.999).",
        "weight_decay": f"{FIRST}radam has none.",
    },
    "adadelta": {"weight_decay": f"{FIRST}adadelta does so too."},
}
REFUSED = {
    "nadam": "torch grows the momentum by a schedule and keeps its product in float32, "
    "optax.nadam has no schedule: apart by 8e-4 after one step",
    "rprop": "optax.rprop applies each update one step late: apart by 9e-3 after one step",
    "adafactor": "torch factors every matrix and caps lr at 1 / sqrt(step), optax.adafactor "
    "factors from 128 rows and columns on and has no cap: apart by 5e-3 after one step",
    "muon": "torch orthogonalises in bfloat16, optax.contrib.muon in the gradient's dtype: apart "
    "by 1e-4 after one step",
    "lbfgs": "torch calls the loss several times a step and scales the first by the gradient's "
    "1-norm, optax.lbfgs once and by the 2-norm: apart by 0.2 after one step",
    "asgd": "optax has no averaged gradient descent",
    "sparseadam": "optax has no optimizer for sparse gradients",
    "lion": "torch has no Lion",
}


@dataclass(frozen=True)
class Optimizer:
    """One optimizer on both sides.

    Attributes:
      name: torch's, in lower case.
      options: all options, including torch's defaults.
      torch: builds the `torch.optim.Optimizer` from an iterable of parameters.
      optax: the equivalent optax transformation.
      notes: the conventions that were aligned.
    """

    name: str
    options: Mapping[str, Any]
    torch: Callable[[Any], Any]
    optax: optax.GradientTransformation
    notes: tuple[str, ...]


def make(name: str, options: Mapping[str, Any] | None = None) -> Optimizer:
    """Returns the optimizer with torch's name and options, in torch and in optax.

    Args:
      name: "sgd", "adam", "adamw", "rmsprop", "adagrad", "adamax", "radam" or "adadelta".
      options: numbers and flags under torch's names; missing ones use torch's defaults.

    Raises:
      ValueError: for an unknown optimizer or one with incompatible conventions, for an unknown
        option, and for values that torch rejects.

    Example:

    >>> sgd = make("sgd", dict(lr=0.5, weight_decay=0.5))
    >>> params, gradients = {"w": jnp.ones(2)}, {"w": jnp.arange(2.0)}
    >>> updates, _ = sgd.optax.update(gradients, sgd.optax.init(params), params)
    >>> print(updates["w"])
    [-0.25 -0.75]
    """
    _check_name(name)
    settings = dict(options or {})
    unknown = [option for option in settings if option not in DEFAULTS[name]]
    if unknown:
        raise ValueError(
            f"{name} has no option {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(DEFAULTS[name])}."
        )
    full = DEFAULTS[name] | settings
    _check_values(name, full)
    return Optimizer(name, full, _in_torch(name, full), _in_optax(name, full), _notes(name, full))


def _notes(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sentence for option, sentence in NOTES[name].items() if options[option])


def _check_name(name: str) -> None:
    if name in REFUSED:
        raise ValueError(
            f"{name} cannot be compared: {REFUSED[name]}; these can: {', '.join(DEFAULTS)}."
        )
    if name not in DEFAULTS:
        raise ValueError(f"No optimizer is called {name!r}; there are {', '.join(DEFAULTS)}.")


def _check_values(name: str, options: Mapping[str, Any]) -> None:
    """Checks the values as torch does: flags, pairs of betas, non-negative numbers."""
    for option, value in options.items():
        if isinstance(DEFAULTS[name][option], bool):
            fits, what = isinstance(value, bool), "True or False"
        elif option == "betas":
            pair = isinstance(value, tuple | list) and len(value) == 2
            fits, what = pair and all(_is_number(b) and b < 1 for b in value), "two in [0, 1)"
        else:
            fits, what = _is_number(value), "a number, not negative"
        if not fits:
            raise ValueError(f"{option} of {name} must be {what}; got {value!r}.")
    if options.get("nesterov") and (not options["momentum"] or options["dampening"]):
        raise ValueError(
            "nesterov needs momentum and no dampening; got "
            f"momentum={options['momentum']}, dampening={options['dampening']}."
        )


def _is_number(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 <= value < float("inf")


def _in_torch(name: str, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    # Older versions of torch lack this option and raise if it is passed.
    late = "decoupled_weight_decay"
    settings = {k: v for k, v in options.items() if k != late or v}

    def build(params: Any) -> Any:
        import torch

        return getattr(torch.optim, CLASSES[name])(params, **settings)

    return build


def _in_optax(name: str, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Chains the (negated) gradient, decay, the optimizer's scaling, decoupled decay and -lr."""
    decay = optax.add_decayed_weights(options["weight_decay"])
    decoupled = name == "adamw" or options.get("decoupled_weight_decay", False)
    return optax.chain(
        optax.scale(-1.0) if options["maximize"] else optax.identity(),
        optax.identity() if decoupled else decay,
        SCALES[name](options),
        decay if decoupled else optax.identity(),
        optax.scale(-options["lr"]),
    )


def _sgd(o: Mapping[str, Any]) -> optax.GradientTransformation:
    if not o["momentum"]:
        return optax.identity()
    if not o["dampening"]:
        return optax.trace(o["momentum"], o["nesterov"])
    return _dampened(o["momentum"], o["dampening"])


def _adam(o: Mapping[str, Any]) -> optax.GradientTransformation:
    b1, b2 = o["betas"]
    return (_amsgrad if o["amsgrad"] else optax.scale_by_adam)(b1, b2, o["eps"])


def _rmsprop(o: Mapping[str, Any]) -> optax.GradientTransformation:
    scale = optax.scale_by_stddev if o["centered"] else optax.scale_by_rms
    momentum = optax.trace(o["momentum"]) if o["momentum"] else optax.identity()
    return optax.chain(scale(o["alpha"], o["eps"], eps_in_sqrt=False), momentum)


SCALES: dict[str, Callable[[Mapping[str, Any]], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "adagrad": lambda o: _adagrad(o["lr_decay"], o["initial_accumulator_value"], o["eps"]),
    "adamax": lambda o: optax.scale_by_adamax(o["betas"][0], o["betas"][1], o["eps"]),
    "radam": lambda o: _radam(o["betas"][0], o["betas"][1], o["eps"]),
    "adadelta": lambda o: optax.scale_by_adadelta(o["rho"], o["eps"]),
}


class _State(NamedTuple):
    """Number of completed steps, and trees shaped like the parameters."""

    step: jax.Array
    trees: tuple[Any, ...]


def _written_out(
    fills: tuple[float, ...], rule: Callable[..., Any]
) -> optax.GradientTransformation:
    """A transformation from `rule(step, gradient, *slots)`, which returns update and new slots.

    Args:
      fills: initial value of each slot.
      rule: applied to each leaf; the first step is 1.
    """

    def init(params: Any) -> _State:
        trees = tuple(jax.tree.map(lambda p, f=f: jnp.full_like(p, f), params) for f in fills)
        return _State(jnp.zeros((), jnp.int32), trees)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _State]:
        leaves, shape = jax.tree.flatten(updates)
        slots = zip(*map(jax.tree.leaves, state.trees), strict=True)
        rows = [rule(state.step + 1, g, *k) for g, k in zip(leaves, slots, strict=True)]
        updates, *trees = (jax.tree.unflatten(shape, row) for row in zip(*rows, strict=True))
        return updates, _State(state.step + 1, tuple(trees))

    return optax.GradientTransformation(init, update)


def _dampened(momentum: float, dampening: float) -> optax.GradientTransformation:
    """Momentum whose buffer takes the first gradient in full, later ones times 1 - dampening."""

    def rule(step: Any, g: Any, buffer: Any) -> tuple[Any, ...]:
        buffer = jnp.where(step == 1, g, momentum * buffer + (1 - dampening) * g)
        return buffer, buffer

    return _written_out((0.0,), rule)


def _amsgrad(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with the running maximum of the second moment, bias-corrected after the maximum."""

    def rule(step: Any, g: Any, m: Any, v: Any, top: Any) -> tuple[Any, ...]:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        top = jnp.maximum(top, v)
        return m / (1 - b1**step) / (jnp.sqrt(top / (1 - b2**step)) + eps), m, v, top

    return _written_out((0.0, 0.0, 0.0), rule)


def _adagrad(lr_decay: float, start: float, eps: float) -> optax.GradientTransformation:
    """Gradients divided by the root of their sum of squares, with eps outside the root."""

    def rule(step: Any, g: Any, total: Any) -> tuple[Any, ...]:
        total = total + g**2
        return g / (jnp.sqrt(total) + eps) / (1 + lr_decay * (step - 1)), total

    return _written_out((start,), rule)


def _radam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with variance rectification; eps is added before the bias correction."""
    longest = 2 / (1 - b2) - 1

    def rule(step: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        rho = longest - 2 * step * b2**step / (1 - b2**step)
        ratio = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
        adapted = jnp.sqrt(ratio * (1 - b2**step)) / (jnp.sqrt(v) + eps)
        return m / (1 - b1**step) * jnp.where(rho > 5, adapted, 1.0), m, v

    return _written_out((0.0, 0.0), rule)
