"""Torch's operation for each operation of a JAX program, and arrays carried between the two."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Operations of torch with the operands of JAX's, by JAX's names; "" is the same name.
SAME_OPERANDS = {
    "neg": "", "exp": "", "exp2": "", "log": "", "log1p": "", "expm1": "", "tanh": "", "sqrt": "",
    "rsqrt": "", "abs": "", "sin": "", "cos": "", "tan": "", "floor": "", "ceil": "", "sign": "",
    "erf": "", "erfc": "", "square": "", "real": "", "imag": "", "conj": "", "add": "", "sub": "",
    "mul": "", "pow": "", "atan2": "", "eq": "", "ne": "", "lt": "", "le": "", "gt": "", "ge": "",
    "complex": "", "logistic": "sigmoid", "is_finite": "isfinite", "add_any": "add",
    "rsub": "", "copy": "clone", "rem": "fmod", "stop_gradient": "detach", "max": "maximum",
    "min": "minimum",
}  # fmt: skip
BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}
REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin", "reduce_or": "any",
    "reduce_and": "all",
}  # fmt: skip
Torch = Callable[..., Any]  # of torch, an equation's parameters and its operands


def operation_of(equation: Any, values: Sequence[Any]) -> Any:
    """The result of an operation by torch's for it; None if torch has none that does the same."""
    import torch

    name, params = equation.primitive.name, equation.params
    if name in ("add", "sub", "mul") and not is_tensor(values[0]):
        values, name = values[::-1], "rsub" if name == "sub" else name
    if name in {**SAME_OPERANDS, **BITS}:
        torch_name = SAME_OPERANDS.get(name) or BITS.get(name) or name
        return getattr(torch, torch_name)(*_for_torch(name, values))
    if name in REDUCTIONS:
        axes = tuple(params["axes"])
        return getattr(torch, REDUCTIONS[name])(values[0], dim=axes) if axes else values[0]
    if name not in TABLE:
        return None
    return TABLE[name](torch, {**params, "aval": equation.outvars[0].aval}, *values)


def _for_torch(name: str, values: Sequence[Any]) -> list[Any]:
    """Operands as torch takes them: the first is a tensor, and bounds are both."""
    import torch

    dtype = next((x.dtype for x in values if is_tensor(x)), torch.float64)
    count = len(values) if name in ("max", "min", *BITS) else 1
    made = [x if is_tensor(x) else torch.tensor(x, dtype=dtype) for x in values[:count]]
    return [*made, *values[count:]]


def _divided(torch: Any, p: Any, x: Any, y: Any) -> Any:
    (x,) = _for_torch("div", [x])
    inexact = x.is_floating_point() or x.is_complex()
    return torch.div(x, y) if inexact else torch.div(x, y, rounding_mode="trunc")


def _converted(torch: Any, p: Any, x: Any) -> Any:
    dtype = torch_dtype(p["new_dtype"])
    x = x if is_tensor(x) or dtype is None else torch.tensor(x)
    return None if dtype is None else x if x.dtype == dtype else x.to(dtype)


def _spread(torch: Any, p: Any, x: Any, *_: Any) -> Any:
    shape = tuple(p["shape"])
    if not is_tensor(x):
        return torch.full(shape, x, dtype=torch_dtype(p["aval"].dtype))
    sizes = [1] * len(shape)
    for place, size in zip(p["broadcast_dimensions"], x.shape, strict=True):
        sizes[place] = size
    x = x if x.ndim == len(shape) else x.reshape(sizes)
    return x if tuple(x.shape) == shape else x.expand(shape)


def _sliced(torch: Any, p: Any, x: Any) -> Any:
    for axis, (low, high) in enumerate(zip(p["start_indices"], p["limit_indices"], strict=True)):
        step = (p["strides"] or [1] * x.ndim)[axis]
        if (low, high, step) != (0, x.shape[axis], 1):
            x = x[(slice(None),) * axis + (slice(low, high, step),)]
    return x


def _padded(torch: Any, p: Any, x: Any, fill: Any) -> Any:
    edges = p["padding_config"]
    if any(inside for _, _, inside in edges):
        return None
    flat = [n for low, high, _ in reversed(edges) for n in (low, high)]
    return torch.nn.functional.pad(x, flat, value=float(fill))


def _iota(torch: Any, p: Any) -> Any:
    shape, axis = tuple(p["shape"]), p["dimension"]
    row = torch.arange(shape[axis]).to(torch_dtype(p["dtype"]))
    sizes = [-1 if i == axis else 1 for i in range(len(shape))]
    return row if len(shape) == 1 else row.reshape(sizes).expand(shape)


def _running(name: str) -> Torch:
    def along(torch: Any, p: Any, x: Any) -> Any:
        axis, operation = p["axis"], getattr(torch, name)
        return operation(x.flip(axis), axis).flip(axis) if p["reverse"] else operation(x, axis)

    return along


def _product(torch: Any, p: Any, x: Any, y: Any) -> Any:
    """A matrix product, as torch's own where it is one and else by letters."""
    (of_x, of_y), (batch_x, batch_y) = p["dimension_numbers"]
    dtype = torch_dtype(p["aval"].dtype)
    x, y = x.to(dtype), y.to(dtype)
    if not batch_x and y.ndim == 2 and tuple(of_x) == (x.ndim - 1,):
        return x @ (y if tuple(of_y) == (0,) else y.T)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    one, other = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for i, j in zip((*of_x, *batch_x), (*of_y, *batch_y), strict=True):
        other[j] = one[i]
    rest = [c for i, c in enumerate(one) if i not in (*of_x, *batch_x)]
    rest += [c for i, c in enumerate(other) if i not in (*of_y, *batch_y)]
    out = [*(one[i] for i in batch_x), *rest]
    return torch.einsum(f"{''.join(one)},{''.join(other)}->{''.join(out)}", x, y)


def _gathered(torch: Any, p: Any, x: Any, index: Any) -> Any:
    """Rows of a table; None for other lookups."""
    numbers, sizes = p["dimension_numbers"], tuple(p["slice_sizes"])
    rows = sizes == (1, *x.shape[1:]) and numbers.start_index_map == (0,)
    last = tuple(range(index.ndim - 1, index.ndim + x.ndim - 2))
    if not rows or numbers.collapsed_slice_dims != (0,) or numbers.offset_dims != last:
        return None
    places = index[..., 0].long()
    if not bool(((places >= 0) & (places < x.shape[0])).all()):
        return None
    return torch.nn.functional.embedding(places, x) if x.ndim == 2 else x[places]


def _from_places(torch: Any, p: Any, x: Any, *starts: Any) -> Any:
    """A part that begins where integers say, within the array."""
    for axis, (size, start) in enumerate(zip(p["slice_sizes"], starts, strict=True)):
        x = x.narrow(axis, min(max(int(start), 0), x.shape[axis] - size), size)
    return x


def _into_places(torch: Any, p: Any, x: Any, part: Any, *starts: Any) -> Any:
    """A part written where integers say, as into a cache; None along more than one axis."""
    axes = [i for i in range(x.ndim) if part.shape[i] != x.shape[i]] or [0]
    size = part.shape[axes[0]]
    start = min(max(int(starts[axes[0]]), 0), x.shape[axes[0]] - size)
    return None if axes[1:] else torch.slice_scatter(x, part, axes[0], start, start + size)


def _convolution(torch: Any, p: Any, x: Any, kernel: Any) -> Any:
    """Torch's convolution; None for dilated inputs, as of a transposed one."""
    (of_x, of_kernel, of_out), rank = p["dimension_numbers"], x.ndim - 2
    if rank > 3 or any(n != 1 for n in p["lhs_dilation"]) or p["batch_group_count"] != 1:
        return None
    functions = torch.nn.functional
    edges = [n for low_high in p["padding"][::-1] for n in low_high]
    x, kernel = x.permute(of_x), kernel.permute(of_kernel)
    x = functions.pad(x, edges) if any(edges) else x
    convolution = (functions.conv1d, functions.conv2d, functions.conv3d)[rank - 1]
    steps = tuple(p["window_strides"]), 0, tuple(p["rhs_dilation"]), p["feature_group_count"]
    out = convolution(x, kernel, None, *steps)
    return out.permute([of_out.index(i) for i in range(x.ndim)])


def _chosen(torch: Any, p: Any, which: Any, *xs: Any) -> Any:
    if not is_tensor(which):
        return xs[int(which)]
    return torch.where(which.bool(), *xs[::-1]) if len(xs) == 2 else None


TABLE: Mapping[str, Torch] = {
    "div": _divided,
    "integer_pow": lambda torch, p, x: x ** p["y"],
    "round": lambda torch, p, x: torch.round(x) if int(p["rounding_method"]) else None,
    "clamp": lambda torch, p, low, x, high: torch.clamp(x, low, high),
    "select_n": _chosen,
    "convert_element_type": _converted,
    "reduce_precision": lambda torch, p, x: x,
    "optimization_barrier": lambda torch, p, *xs: xs[0] if len(xs) == 1 else tuple(xs),
    "broadcast_in_dim": _spread,
    "reshape": lambda torch, p, x: x.reshape(p["new_sizes"]),
    "squeeze": lambda torch, p, x: x.reshape(p["aval"].shape),
    "transpose": lambda torch, p, x: x.permute(p["permutation"]),
    "rev": lambda torch, p, x: x.flip(p["dimensions"]),
    "slice": _sliced,
    "split": lambda torch, p, x: torch.split(x, list(p["sizes"]), p["axis"]),
    "stack": lambda torch, p, *xs: torch.stack(xs, p["axis"]),
    "concatenate": lambda torch, p, *xs: torch.cat(xs, p["dimension"]),
    "sort": lambda torch, p, *xs: xs[0].sort(p["dimension"])[0] if len(xs) == 1 else None,
    "top_k": lambda torch, p, x: tuple(x.topk(p["k"], p["axis"])),
    "argmax": lambda torch, p, x: x.argmax(p["axes"][0]),
    "argmin": lambda torch, p, x: x.argmin(p["axes"][0]),
    "cumsum": _running("cumsum"),
    "cumprod": _running("cumprod"),
    "pad": _padded,
    "iota": _iota,
    "dynamic_slice": _from_places,
    "dynamic_update_slice": _into_places,
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "gather": _gathered,
}


def literal(x: Any) -> Any:
    """A constant of a program: a number, as torch's own code passes it."""
    value = np.asarray(x)
    return to_torch(x) if value.ndim or value.dtype.kind not in "biuf" else value.item()


def to_torch(x: Any) -> Any:
    """An array as a tensor that is as wide as can be; what torch has no dtype for as it is."""
    import torch

    x = x if hasattr(x, "dtype") else np.asarray(x)
    dtype = None if is_tensor(x) else torch_dtype(x.dtype)
    if dtype is None:
        return x
    wide = {torch.int64: np.int64, torch.float64: np.float64}.get(dtype)
    return torch.from_numpy(np.array(np.asarray(x), wide)).to(dtype)


def to_jax(x: Any, dtype: Any) -> Any:
    """A tensor or a number as JAX's array, in `dtype` if that is no float."""
    if is_tensor(x):
        x = x.detach().resolve_conj().numpy()
    elif not isinstance(x, bool | int | float):
        return x
    array = np.asarray(x)
    return jnp.asarray(array, None if jnp.issubdtype(dtype, jnp.inexact) else dtype)


def torch_dtype(dtype: Any) -> Any:
    """Torch's widest dtype of a kind; None for random keys."""
    import torch

    kinds = {jnp.bool_: torch.bool, jnp.integer: torch.int64, jnp.floating: torch.float64}
    kinds[jnp.complexfloating] = torch.complex128
    return next((wide for kind, wide in kinds.items() if jnp.issubdtype(dtype, kind)), None)


def is_tensor(x: Any) -> bool:
    """Whether a value is torch's."""
    return hasattr(x, "requires_grad")


def is_float(x: Any) -> bool:
    """Whether a value is a tensor of floating numbers."""
    return is_tensor(x) and x.is_floating_point()
