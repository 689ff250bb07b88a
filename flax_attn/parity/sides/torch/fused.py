"""Points inside `F.scaled_dot_product_attention`, recomputed from its arguments.

Torch's fused kernels expose neither scores nor weights, and its math path multiplies queries and
keys by the root of the scale. The call returns torch's own output; the formula is evaluated step by
step next to it, and its gradients are computed from the gradient that arrives at the output.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .points import Points

FLAT = ("query", "key", "value", "context")


@contextmanager
def record_sdpa(points: Points, written_out: bool) -> Iterator[None]:
    """Records every call of `F.scaled_dot_product_attention` in `points` inside the block.

    Torch's own code looks it up in `torch.nn.functional`, inside functions that a function mode
    does not intercept; other code may hold a reference to it, which only a mode intercepts.

    Args:
      written_out: whether the formula takes the place of the call, as a recorded program needs it.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    original = torch.nn.functional.scaled_dot_product_attention

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is original:
                return on_sdpa(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def on_sdpa(*args, **kwargs):
        if points.muted:
            return original(*args, **kwargs)
        if written_out:
            return _written_out(points, *args, **kwargs)
        return _record_call(points, original, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = on_sdpa
    try:
        with Mode():
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


class SdpaSteps(NamedTuple):
    """All points of one call, `*B N T ...`, and the steps from query-key product to scores."""

    query: Any
    key: Any
    scores: Any
    weights: Any
    value: Any
    context: Any
    steps: tuple[tuple[Any, ...], ...]


class _SdpaArguments(NamedTuple):
    """Arguments of a call other than query, key and value."""

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _record_call(
    points: Points, original: Callable, query, key, value, *args: Any, **kwargs: Any
) -> Any:
    import torch

    # Torch's kernel may run products and softmax of its own, which must not be recorded as points;
    # only the dropout mask that it draws is needed.
    points.drawn = None
    with _detached(points):
        out = original(query, key, value, *args, **kwargs)
        sdpa = _SdpaArguments(*args, **kwargs)
        keep = points.drawn
        with torch.no_grad():
            operands = _broadcast(*(x.detach() for x in (query, key, value)))
            made = _steps(operands, sdpa, keep)._replace(context=out.detach())
    names = _note(points, made)
    # The gradient arrives during the module's backward pass, after this call has returned.
    if out.requires_grad:
        out.register_hook(
            lambda behind: _point_gradients(points, names, operands, sdpa, keep, behind)
        )
    return out


@contextmanager
def _detached(points: Points) -> Iterator[None]:
    points.muted = True
    try:
        yield
    finally:
        points.muted = False


def _broadcast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Repeats key and value heads to one per query head, and broadcasts the batch axes."""
    import torch

    if query.ndim > 2 and key.shape[-3] != query.shape[-3] and key.shape[-3] > 1:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, dim=-3) for x in (key, value))
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def _steps(operands: tuple[Any, Any, Any], sdpa: _SdpaArguments, keep: Any) -> SdpaSteps:
    """Evaluates attention step by step; fully masked rows have weights of zero."""
    import torch

    query, key, value = operands
    scale = query.shape[-1] ** -0.5 if sdpa.scale is None else sdpa.scale
    scores = query @ key.mT * scale
    shape = tuple(scores.shape)
    done: list[tuple[Any, ...]] = [("mul", 0, (None, scale), shape)]
    mask = sdpa.attn_mask
    if sdpa.is_causal:
        mask = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
        done.append(("masked_fill", 0, (None, ~mask, -torch.inf), shape))
    elif mask is not None:
        scores = scores + mask.detach()
        done.append(("add", 0, (None, mask.detach()), shape))
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    if nothing.any():  # filled before the softmax as well: a NaN there would reach the gradients
        weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    dropped = weights if keep is None else weights * keep.reshape(shape) / (1 - sdpa.dropout_p)
    return SdpaSteps(query, key, scores, weights, value, dropped @ value, tuple(done))


def _written_out(points: Points, *args: Any, **kwargs: Any) -> Any:
    """A call in single operations, whose points are recorded."""
    with _detached(points):
        made = attention_formula(*args, **kwargs)
    _note(points, made)
    return made.context


def attention_formula(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> SdpaSteps:
    """`scaled_dot_product_attention` in single operations, with torch's arguments.

    Shapes: query `*B N T H`, key `*B K S H`, value `*B K S V` -> context `*B N T V`.
    """
    import torch

    sdpa, operands = _SdpaArguments(*args, **kwargs), _broadcast(query, key, value)
    drawn = torch.empty(*operands[0].shape[:-1], operands[1].shape[-2], dtype=query.dtype)
    keep = drawn.bernoulli_(1 - sdpa.dropout_p) if sdpa.dropout_p else None
    return _steps(operands, sdpa, keep)


def _flat(x: Any) -> Any:
    # `(B N) T H`, as in the batched products of attention that is written out.
    return x.reshape(-1, *x.shape[-2:])


def _note(points: Points, made: SdpaSteps) -> dict[str, str]:
    """Records all points; returns their names."""
    flat = {name: _flat(getattr(made, name)) for name in FLAT}
    product = {name: flat[name] for name in ("query", "key")}
    names = {name: points.note(name, x, {}) for name, x in product.items()}
    names["scores"] = points.note("scores", made.scores, product, made.steps)
    scored = {**product, "scores": made.scores}
    names["weights"] = points.note("weights", made.weights, scored)
    names["value"] = points.note("value", flat["value"], {})
    mixed = {"weights": _flat(made.weights), "value": flat["value"]}
    names["context"] = points.note("context", flat["context"], mixed)
    return names


def _point_gradients(
    points: Points,
    names: dict[str, str],
    operands: tuple[Any, Any, Any],
    sdpa: _SdpaArguments,
    keep: Any,
    behind: Any,
) -> None:
    """Records the gradients of all points, by autograd through the formula."""
    import torch

    # New leaves keep this graph apart from the module's; hooks run with gradients disabled.
    with _detached(points), torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in operands)
        made = _steps(leaves, sdpa, keep)
        wanted = ("query", "key", "scores", "weights", "value")
        inner = [getattr(made, name) for name in wanted]
        gradients = torch.autograd.grad(made.context, inner, behind.detach())
    for name, gradient in zip(wanted, gradients, strict=True):
        points.note_gradient(names[name], _flat(gradient) if name in FLAT else gradient)
    points.note_gradient(names["context"], _flat(behind))
