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

from .. import masks
from .._internal.checks import check_positive
from .._internal.nearest import did_you_mean
from ..attend import explain
from ..dropout import Dropout
from ..masks import Mask
from ..sharding import context_parallel
from ..where import assume_platform

OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}


def _can_be_written(value: Any) -> bool:
    """Whether a value is a mask, or a class of masks that takes no function and no other mask."""
    if not isinstance(value, type):
        return isinstance(value, Mask)
    combines = value in (Mask, masks.And, masks.Or, masks.Not)
    is_mask = issubclass(value, Mask) and not combines
    return is_mask and "fn" not in inspect.signature(value).parameters


MASKS: dict[str, Any] = {name: x for name, x in vars(masks).items() if _can_be_written(x)}


def explained(options: argparse.Namespace) -> str:
    """Returns the table of verdicts.

    Raises:
      ValueError: for shapes, a dtype, a mask or a platform that are unknown or inconsistent.
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
                mask=mask_of(options.mask),
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


def mask_of(text: str) -> Mask:
    """Parses a mask expression: flax_attn's masks with numbers, lists of numbers, and `& | ~`.

    Executes nothing but the masks' constructors and operators.

    Raises:
      ValueError: for anything else.

    >>> mask_of("Causal() & ~Window(3, 0)")
    And(a=Causal(offset=0), b=Not(a=Window(left=3, right=0, offset=0)))
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--mask {text!r} is no expression: {error}.") from error
    return _mask_of(tree.body, text)


def _mask_of(node: ast.expr, text: str) -> Mask:
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_mask_of(left, text), _mask_of(right, text))
        case ast.UnaryOp(ast.Invert(), inner):
            return ~_mask_of(inner, text)
        case ast.Name(name) if isinstance(MASKS.get(name), Mask):
            return MASKS[name]
        case ast.Call(ast.Name(name), args, keywords) if isinstance(MASKS.get(name), type):
            named = {word.arg: _literal(word.value, text) for word in keywords if word.arg}
            try:
                return MASKS[name](*(_literal(arg, text) for arg in args), **named)
            except TypeError as error:
                raise ValueError(f"--mask {text!r}: {error}.") from error
    source = ast.get_source_segment(text.strip(), node) or text
    if isinstance(node, ast.Name | ast.Call):
        name = source.partition("(")[0]
        hint = did_you_mean(name, MASKS, "the masks are")
        more = "takes arguments, as in Window(3, 0)" if name in MASKS else f"is no mask: {hint}"
        raise ValueError(f"--mask {text!r}: {name} {more}")
    raise ValueError(f"--mask takes masks such as Causal() and & | ~ between them; got {source!r}.")


def _literal(node: ast.expr, text: str) -> Any:
    """A number, a string, or an array from a list."""
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        source = ast.get_source_segment(text.strip(), node)
        raise ValueError(f"--mask {text!r}: {source!r} is no number, text or list.") from error
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
