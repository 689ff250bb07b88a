"""`flax-attn explain`: the backends' verdicts on a request given on the command line."""

import argparse
import ast
import inspect
import operator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .. import masks, scores
from .._internal.checks import check_positive
from .._internal.nearest import did_you_mean
from ..attend import explain
from ..dropout import Dropout
from ..masks import Mask
from ..scores import Score
from ..sharding import context_parallel
from ..where import assume_platform

OPERATORS = {
    "mask": {ast.BitAnd: operator.and_, ast.BitOr: operator.or_},
    "score": {ast.RShift: operator.rshift},
}
EXAMPLES = {"mask": "Causal() & Window(3, 0)", "score": "Softcap(30.0) >> Alibi([0.5, 0.25])"}


def _can_be_written(value: Any, base: type, *others: type) -> bool:
    """Whether a value is of a base class, or a class below it that is made of numbers alone."""
    if not isinstance(value, type):
        return isinstance(value, base)
    is_one = issubclass(value, base) and value is not base and value not in others
    return is_one and "fn" not in inspect.signature(value).parameters


COMBINED = (masks.And, masks.Or, masks.Not)
INNER = (scores.Chain, scores.Placed, scores.AtPositions)
NAMES: dict[str, dict[str, Any]] = {
    "mask": {name: x for name, x in vars(masks).items() if _can_be_written(x, Mask, *COMBINED)},
    "score": {name: x for name, x in vars(scores).items() if _can_be_written(x, Score, *INNER)},
}


def explained(options: argparse.Namespace) -> str:
    """Returns the table of verdicts.

    Raises:
      ValueError: for unknown or inconsistent shapes, dtypes, masks, scores and platforms.
    """
    try:
        dtype = jnp.dtype(options.dtype)
    except TypeError as error:
        raise ValueError(
            f"--dtype takes float64, float32, bfloat16 or float16; got {options.dtype!r}."
        ) from error
    q = tuple(options.q)
    kv = tuple(options.kv or q)
    v = tuple(options.v or kv)
    for name, shape in {"q": q, "kv": kv, "v": v}.items():
        if min(shape) < 0:
            raise ValueError(f"--{name} takes sizes of 0 or more; got {' '.join(map(str, shape))}.")
    mesh = None
    if options.shards is not None:
        check_positive(shards=options.shards)
        mesh = AbstractMesh((options.shards,), ("length",), (AxisType.Explicit,))
    arrays = [_array(shape, dtype, mesh) for shape in (q, kv, v)]
    heads = q[-2] if len(q) > 1 else 1
    rate = options.dropout
    sinks: Any = jax.ShapeDtypeStruct((heads,), dtype) if options.sinks else None
    try:
        with (
            _platform(options.on, options.capability),
            context_parallel(options.strategy, layout=options.layout),
        ):
            verdicts = explain(
                *arrays,
                mask=read("mask", options.mask),
                score=read("score", options.score),
                sinks=sinks,
                dropout=None if rate is None else Dropout(rate, jax.random.key(0)),
            )
    except TypeError as error:
        raise ValueError(str(error)) from error
    return f"{_sizes_read(q=q, k=kv, v=v)}\n{verdicts}"


def _array(shape: tuple[int, ...], dtype: Any, mesh: AbstractMesh | None) -> Any:
    """An array without values; its length is sharded over the mesh."""
    if mesh is None or len(shape) < 3:
        return jax.ShapeDtypeStruct(shape, dtype)
    spec = jax.P(*[None] * (len(shape) - 3), "length")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def _sizes_read(**shapes: tuple[int, ...]) -> str:
    """Lists the size of each axis, since `T N H` and `N T H` cannot be distinguished by shape.

    >>> _sizes_read(q=(2, 5, 6), v=(3, 2, 5, 7))
    'q: T 2, N 5, H 6; v: B 3, S 2, K 5, h 7'
    """
    axes = {"q": "TNH", "k": "SKH", "v": "SKh"}
    parts = []
    for name, shape in shapes.items():
        letters = "B" * (len(shape) - 3) + axes[name]
        sizes = (f"{letter} {size}" for letter, size in zip(letters, shape, strict=True))
        parts.append(f"{name}: {', '.join(sizes)}")
    return "; ".join(parts)


def read(kind: str, text: str) -> Any:
    """Parses an expression of masks, or of scores with numbers and `>>`.

    Executes nothing but their constructors and operators.

    Raises:
      ValueError: for anything else.

    >>> read("mask", "Causal() & ~Window(3, 0)")
    And(a=Causal(offset=0), b=Not(a=Window(left=3, right=0, offset=0)))
    >>> read("score", "Softcap(30.0) >> Alibi([0.5, 0.25])")
    Chain(first=Softcap(cap=30.0), then=Alibi(slopes=[0.5  0.25], offset=0))
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--{kind} {text!r} is no expression: {error}.") from error
    return _read(tree.body, kind, text)


def _read(node: ast.expr, kind: str, text: str) -> Any:
    names, operators = NAMES[kind], OPERATORS[kind]
    match node:
        case ast.BinOp(left, op, right) if type(op) in operators:
            return operators[type(op)](_read(left, kind, text), _read(right, kind, text))
        case ast.UnaryOp(ast.Invert(), inner) if kind == "mask":
            return ~_read(inner, kind, text)
        case ast.Name(name) if name in names and not isinstance(names[name], type):
            return names[name]
        case ast.Call(ast.Name(name), args, keywords) if isinstance(names.get(name), type):
            named = {word.arg: _literal(word.value, kind, text) for word in keywords if word.arg}
            try:
                return names[name](*(_literal(arg, kind, text) for arg in args), **named)
            except TypeError as error:
                raise ValueError(f"--{kind} {text!r}: {error}") from error
    source = ast.get_source_segment(text.strip(), node) or text
    if isinstance(node, ast.Name | ast.Call):
        name = source.partition("(")[0]
        hint = did_you_mean(name, names, f"the {kind}s are")
        more = (
            f"takes arguments, as in {EXAMPLES[kind]}" if name in names else f"is no {kind}: {hint}"
        )
        raise ValueError(f"--{kind} {text!r}: {name} {more}")
    raise ValueError(f"--{kind} takes {kind}s such as {EXAMPLES[kind]}; got {source!r}.")


def _literal(node: ast.expr, kind: str, text: str) -> Any:
    """A number, a string, or an array from a list."""
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        source = ast.get_source_segment(text.strip(), node)
        raise ValueError(f"--{kind} {text!r}: {source!r} is no number, text or list.") from error
    return np.asarray(value) if isinstance(value, list | tuple) else value


def _platform(name: str | None, capability: str | None) -> Any:
    if capability is not None and name != "gpu":
        raise ValueError("--capability is a GPU's: it goes with --on gpu.")
    if name is None:
        return nullcontext()
    if capability is None:
        return assume_platform(name)
    major, dot, minor = capability.partition(".")
    if not (major.isdigit() and dot and minor.isdigit()):
        raise ValueError(f"--capability takes a number such as 9.0; got {capability!r}.")
    return assume_platform(name, (int(major), int(minor)))
