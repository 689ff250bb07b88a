"""Estimates torch's rounding error by Monte Carlo arithmetic in runs of the torch module.

Every operation's floating result is changed at random by at most one unit in the last place,
forward and backward, so that the spread of a few runs shows how accurate any result can be for this
input. Sums are changed by a unit of the sum of absolute terms, since each addition rounds. Discrete
results (indices, comparisons, numbers rounded to integers) are those of an unchanged run: otherwise
a number just below three could become index two, and the module a different function.
"""

from dataclasses import dataclass, field
from typing import Any

from .dispatch import dispatch_mode

RUNS = 3

# Operations that copy, select or fill values without rounding.
EXACT = {
    *("clone", "copy_", "detach", "contiguous", "_to_copy", "lift_fresh", "alias", "empty_like"),
    *("empty", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "fill_", "zero_"),
    *("new_zeros", "new_empty", "new_full", "new_ones", "scalar_tensor", "arange", "eye"),
    *("cat", "stack", "index_select", "gather", "index", "embedding", "where", "masked_fill"),
    *("masked_fill_", "neg", "neg_", "abs", "relu", "relu_", "sort", "topk", "flip", "roll"),
    *("repeat", "constant_pad_nd", "tril", "triu", "max", "min", "amax", "amin", "maximum"),
    *("minimum", "clamp", "clamp_", "clamp_min", "bernoulli_"),
    *(
        "nan_to_num",
        "unfold_backward",
        "slice_backward",
        "select_backward",
        "threshold_backward",
        "resolve_conj",
    ),
    *("_reshape_copy", "new_empty_strided", "empty_strided", "_conj_physical", "view_as_real_copy"),
}
# Matrix products, and the index of their first operand.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "dot": 0}
SUMS = {"sum", "mean"}


STEPS = {"floor", "ceil", "round", "trunc", "frac", "sign", "sgn", "heaviside", "fix"}


@dataclass(frozen=True)
class RoundingMove:
    """Rounding noise of a run.

    Attributes:
      seed: seed of the noise; None for the unchanged run, which records discrete results.
      decided: discrete results of the unchanged run, in order.
    """

    seed: int | None
    decided: list[Any] = field(default_factory=list)


def noise(settings: RoundingMove, dtype: str) -> Any:
    """Returns a dispatch mode that changes every result by up to one unit of `dtype`."""
    import torch

    drawn = torch.Generator().manual_seed(settings.seed or 0)
    eps = torch.finfo(getattr(torch, dtype)).eps
    later = iter(settings.decided)

    def decide(x: Any) -> None:
        if settings.seed is None:
            settings.decided.append(x.detach().clone())
            return
        known = next(later, None)
        if known is not None and known.shape == x.shape and known.dtype == x.dtype:
            x.copy_(known)

    def move(x: Any, size: Any) -> None:
        by = 2 * torch.rand(x.shape, generator=drawn, dtype=torch.float64) - 1
        moved = x + (eps * by * size).to(x.dtype)
        x.copy_(torch.where(torch.isfinite(moved), moved, x))

    def noisy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        terms = _terms(name, args, kwargs, func) if settings.seed is not None else None
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        pointers = () if func._schema.is_mutable else _memory(args)
        for x in out if isinstance(out, tuple | list) else (out,):
            if not torch.is_tensor(x) or x.untyped_storage().data_ptr() in pointers:
                continue
            if name in STEPS or (not _rounds(x) and any(map(_rounds, args))):
                decide(x)
            elif _rounds(x) and name not in EXACT and settings.seed is not None:
                move(x, x if terms is None or terms.shape != x.shape else terms)
        return out

    return dispatch_mode(noisy)


def _rounds(x: Any) -> bool:
    import torch

    return torch.is_tensor(x) and (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def _terms(name: str, args: Any, kwargs: Any, func: Any) -> Any:
    """Returns the sum of absolute terms of a sum or product; None for other operations."""
    first = PRODUCTS.get(name)
    if first is not None:
        return func(*map(_size, args), **kwargs)
    if name in SUMS and _rounds(args[0]):
        return func(args[0].abs(), *args[1:], **kwargs)
    return None


def _memory(args: Any) -> set[int]:
    """Storage addresses of the arguments: a result at one of them is an unchanged argument."""
    import torch

    flat = (x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,)))
    return {x.untyped_storage().data_ptr() for x in flat if torch.is_tensor(x)}


def _size(x: Any) -> Any:
    return x.abs() if _rounds(x) else x
