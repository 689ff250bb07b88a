"""Torch's operation for each operation of a JAX program, and arrays carried between the two."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

DIRECT = {
    "neg": "neg", "exp": "exp", "exp2": "exp2", "log": "log", "log1p": "log1p", "expm1": "expm1",
    "tanh": "tanh", "logistic": "sigmoid", "sqrt": "sqrt", "rsqrt": "rsqrt", "abs": "abs",
    "sin": "sin", "cos": "cos", "tan": "tan", "floor": "floor", "ceil": "ceil", "sign": "sign",
    "erf": "erf", "erfc": "erfc", "is_finite": "isfinite", "square": "square", "real": "real",
    "imag": "imag", "conj": "conj", "add": "add", "add_any": "add", "sub": "sub", "mul": "mul",
    "pow": "pow", "atan2": "atan2", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt",
    "ge": "ge", "copy": "clone", "complex": "complex", "rem": "fmod", "stop_gradient": "detach",
}  # fmt: skip
LOGICAL = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not"}
REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin", "reduce_or": "any",
    "reduce_and": "all",
}  # fmt: skip
Torch = Callable[..., Any]  # of an equation's parameters and its operands


def operation_of(equation: Any, values: Sequence[Any]) -> Any:
    """The result of an operation by torch's for it; None if torch has none that does the same."""
    operation = _table().get(equation.primitive.name)
    if operation is None:
        return None
    return operation({**equation.params, "aval": equation.outvars[0].aval}, *values)


@cache
def _table() -> dict[str, Torch]:
    """Torch's operation for each of JAX's, as a function of parameters and operands."""
    import torch

    def direct(name: str) -> Torch:
        return lambda p, *xs: getattr(torch, name)(*_first_tensor(xs))

    table: dict[str, Torch] = {k: direct(name) for k, name in DIRECT.items()}
    table |= {k: _logical(name) for k, name in LOGICAL.items()}
    table |= {k: _reduced(name) for k, name in REDUCTIONS.items()}
    table |= {
        k: lambda p, *xs, n=n: getattr(torch, n)(*_tensors(xs))
        for k, n in (("max", "maximum"), ("min", "minimum"))
    }
    table |= {
        "div": _divided,
        "integer_pow": lambda p, x: x ** p["y"],
        "round": lambda p, x: torch.round(x) if int(p["rounding_method"]) else None,
        "clamp": lambda p, low, x, high: torch.clamp(x, low, high),
        "select_n": lambda p, c, *xs: torch.where(c.bool(), *xs[::-1]) if len(xs) == 2 else None,
        "convert_element_type": lambda p, x: _cast(x, p["new_dtype"]),
        "reduce_precision": lambda p, x: x,
        "optimization_barrier": lambda p, *xs: xs[0] if len(xs) == 1 else None,
        "broadcast_in_dim": _broadcast,
        "reshape": lambda p, x: x.reshape(p["new_sizes"]),
        "squeeze": lambda p, x: x.reshape(p["aval"].shape),
        "expand_dims": lambda p, x: x.reshape(p["aval"].shape),
        "transpose": lambda p, x: x.permute(p["permutation"]),
        "rev": lambda p, x: x.flip(p["dimensions"]),
        "slice": _sliced,
        "split": lambda p, x: torch.split(x, list(p["sizes"]), p["axis"]),
        "stack": lambda p, *xs: torch.stack(xs, p["axis"]),
        "sort": lambda p, *xs: torch.sort(xs[0], p["dimension"])[0] if len(xs) == 1 else None,
        "top_k": lambda p, x: (
            tuple(torch.topk(x, p["k"])) if p["axis"] in (-1, x.ndim - 1) else None
        ),
        "dynamic_slice": _from_places,
        "dynamic_update_slice": _into_places,
        "conv_general_dilated": _convolution,
        "concatenate": lambda p, *xs: torch.cat(xs, p["dimension"]),
        "pad": _padded,
        "iota": _iota,
        "reduce_prod": lambda p, x: x.prod(p["axes"][0]) if len(p["axes"]) == 1 else None,
        "argmax": lambda p, x: x.argmax(p["axes"][0]),
        "argmin": lambda p, x: x.argmin(p["axes"][0]),
        "cumsum": lambda p, x: _along(x, p, lambda y, i: y.cumsum(i)),
        "cumprod": lambda p, x: _along(x, p, lambda y, i: y.cumprod(i)),
        "dot_general": _product,
        "gather": _gathered,
    }
    return table


def _tensors(xs: Sequence[Any]) -> list[Any]:
    import torch

    return [x if is_tensor(x) else torch.tensor(x, dtype=_dtype_beside(xs)) for x in xs]


def _dtype_beside(xs: Sequence[Any]) -> Any:
    import torch

    return next((x.dtype for x in xs if is_tensor(x)), torch.float64)


def _first_tensor(xs: Sequence[Any]) -> Sequence[Any]:
    """The operands as torch's functions take them: of two, the first is a tensor."""
    return xs if is_tensor(xs[0]) else [*_tensors([xs[0], *xs[1:]])[:1], *xs[1:]]


def _logical(name: str) -> Torch:
    import torch

    bitwise = name.replace("logical", "bitwise")

    def call(p: Any, *xs: Any) -> Any:
        xs = _tensors(xs)
        return getattr(torch, name if xs[0].dtype == torch.bool else bitwise)(*xs)

    return call


def _reduced(name: str) -> Torch:
    import torch

    return lambda p, x: getattr(torch, name)(x, dim=tuple(p["axes"])) if p["axes"] else x


def _divided(p: Any, x: Any, y: Any) -> Any:
    import torch

    x = _first_tensor((x, y))[0]
    return (
        torch.div(x, y)
        if x.is_floating_point() or x.is_complex()
        else torch.div(x, y, rounding_mode="trunc")
    )


def _cast(x: Any, dtype: Any) -> Any:
    import torch

    wanted = _torch_dtype(dtype)
    if wanted is None:
        return None
    x = x if is_tensor(x) else torch.tensor(x)
    return x if x.dtype == wanted else x.to(wanted)


def _broadcast(p: Any, x: Any, *_: Any) -> Any:
    import torch

    shape, places = tuple(p["shape"]), p["broadcast_dimensions"]
    if not is_tensor(x):
        return torch.full(shape, x, dtype=_torch_dtype(p["aval"].dtype))
    if tuple(x.shape) == shape:
        return x
    sizes = [1] * len(shape)
    for place, size in zip(places, x.shape, strict=True):
        sizes[place] = size
    x = x if x.ndim == len(shape) else x.reshape(sizes)
    return x if tuple(x.shape) == shape else x.expand(shape)


def _sliced(p: Any, x: Any) -> Any:
    for axis, (low, high) in enumerate(zip(p["start_indices"], p["limit_indices"], strict=True)):
        step = (p["strides"] or [1] * x.ndim)[axis]
        if (low, high, step) != (0, x.shape[axis], 1):
            x = x[(slice(None),) * axis + (slice(low, high, step),)]
    return x


def _padded(p: Any, x: Any, fill: Any) -> Any:
    import torch

    edges = p["padding_config"]
    if any(inside for _, _, inside in edges):
        return None
    flat = [n for low, high, _ in reversed(edges) for n in (low, high)]
    return torch.nn.functional.pad(x, flat, value=float(fill))


def _iota(p: Any) -> Any:
    import torch

    shape, axis = tuple(p["shape"]), p["dimension"]
    row = torch.arange(shape[axis]).to(_torch_dtype(p["dtype"]))
    return (
        row
        if len(shape) == 1
        else row.reshape([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)
    )


def _along(x: Any, p: Any, function: Any) -> Any:
    axis = p["axis"]
    return function(x.flip(axis), axis).flip(axis) if p["reverse"] else function(x, axis)


def _product(p: Any, x: Any, y: Any) -> Any:
    import torch

    (inner_x, inner_y), (batch_x, batch_y) = p["dimension_numbers"]
    wide = _torch_dtype(p["aval"].dtype)
    x, y = x.to(wide), y.to(wide)
    plain = not batch_x and y.ndim == 2 and tuple(inner_x) == (x.ndim - 1,)
    if plain:
        return x @ (y if tuple(inner_y) == (0,) else y.T)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    of_x, of_y = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for i, j in zip((*inner_x, *batch_x), (*inner_y, *batch_y), strict=True):
        of_y[j] = of_x[i]
    batch = [of_x[i] for i in batch_x]
    rest = [c for i, c in enumerate(of_x) if i not in (*inner_x, *batch_x)]
    rest += [c for i, c in enumerate(of_y) if i not in (*inner_y, *batch_y)]
    text = f"{''.join(of_x)},{''.join(of_y)}->{''.join((*batch, *rest))}"
    return torch.einsum(text, x, y)


def _gathered(p: Any, x: Any, index: Any) -> Any:
    """Rows of a table, or one element of each row; None for other lookups."""
    import torch

    numbers, sizes = p["dimension_numbers"], tuple(p["slice_sizes"])
    rows = (1, *x.shape[1:]) == sizes and numbers.start_index_map == (0,)
    last = tuple(range(index.ndim - 1, index.ndim - 1 + x.ndim - 1))
    if not rows or numbers.collapsed_slice_dims != (0,) or numbers.offset_dims != last:
        return None
    places = index[..., 0].long()
    if places.numel() and not bool(((places >= 0) & (places < x.shape[0])).all()):
        return None
    return torch.nn.functional.embedding(places, x) if x.ndim == 2 else x[places]


def _from_places(p: Any, x: Any, *starts: Any) -> Any:
    """A part that begins where integers say, within the array."""
    for axis, (size, start) in enumerate(zip(p["slice_sizes"], starts, strict=True)):
        x = x.narrow(axis, min(max(int(start), 0), x.shape[axis] - size), size)
    return x


def _into_places(p: Any, x: Any, part: Any, *starts: Any) -> Any:
    """A part written where integers say: only along one axis, as into a cache."""
    import torch

    axes = [i for i in range(x.ndim) if part.shape[i] != x.shape[i]]
    if len(axes) > 1:
        return None
    axis = axes[0] if axes else 0
    size = part.shape[axis]
    start = min(max(int(starts[axis]), 0), x.shape[axis] - size)
    return torch.slice_scatter(x, part, axis, start, start + size)


def _convolution(p: Any, x: Any, kernel: Any) -> Any:
    """Torch's convolution; None for dilated inputs, as of a transposed one."""
    import torch

    (of_x, of_kernel, of_out), count = p["dimension_numbers"], x.ndim - 2
    if count > 3 or any(n != 1 for n in p["lhs_dilation"]) or p["batch_group_count"] != 1:
        return None
    edges = [n for low_high in p["padding"][::-1] for n in low_high]
    x = x.permute(of_x)
    x = torch.nn.functional.pad(x, edges) if any(edges) else x
    function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
    strides, dilation = tuple(p["window_strides"]), tuple(p["rhs_dilation"])
    groups = p["feature_group_count"]
    kernel = kernel.permute(of_kernel)
    out = function[count - 1](x, kernel, None, strides, 0, dilation, groups)
    return out.permute([of_out.index(i) for i in range(x.ndim)])


def literal(x: Any) -> Any:
    """A constant of a program: a number, as torch's own code passes it."""
    value = np.asarray(x)
    return to_torch(x) if value.ndim or value.dtype.kind not in "biuf" else value.item()


def to_torch(x: Any) -> Any:
    """An array as a tensor that is as wide as can be; what torch has no dtype for as it is."""
    import torch

    if is_tensor(x):
        return x
    x = x if hasattr(x, "dtype") else np.asarray(x)
    dtype = _torch_dtype(x.dtype)
    if dtype is None:
        return x
    wide = np.asarray(x)
    wide = wide.astype(np.int64) if wide.dtype.kind == "u" else wide
    wide = wide.astype(np.float64) if wide.dtype.kind not in "biufc" else wide
    return torch.from_numpy(np.array(wide)).to(dtype)


def _torch_dtype(dtype: Any) -> Any:
    import torch

    if jnp.issubdtype(dtype, jnp.bool_):
        return torch.bool
    if jnp.issubdtype(dtype, jnp.integer):
        return torch.int64
    if jnp.issubdtype(dtype, jnp.floating):
        return torch.float64
    return torch.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else None


def to_jax(x: Any, dtype: Any) -> Any:
    if not is_tensor(x) and not np.isscalar(x):
        return x
    array = x.detach().resolve_conj().numpy() if is_tensor(x) else np.asarray(x)
    wide = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.asarray(array) if wide else jnp.asarray(array).astype(dtype)


def is_tensor(x: Any) -> bool:
    return type(x).__module__ == "torch" or hasattr(x, "requires_grad")


def is_float(x: Any) -> bool:
    return is_tensor(x) and x.is_floating_point()
