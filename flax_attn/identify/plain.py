"""Runs a torch module with its fused attention calls replaced by their formula."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..parity.sides.torch_fused import attention_formula

# Where torch's own layers and modules that name it in full find `flex_attention`.
FLEX = "torch.nn.attention.flex_attention"


def flex_formula(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **_: Any,
) -> Any:
    """torch's `flex_attention` in single operations, with gradients on any device."""
    import torch

    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    factor: Any = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    sizes = scores.shape
    b, n, q, k = (
        torch.arange(size).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    )
    if score_mod is not None:
        scores = score_mod(scores, b, n, q, k)
    if block_mask is not None:
        visible = block_mask.mask_mod(b, n, q, k)
        scores = torch.where(visible, scores, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    result = torch.matmul(weights, value)
    return (result, torch.logsumexp(scores, dim=-1)) if return_lse else result


@contextmanager
def in_single_operations(module: Any, flex_only: bool = False) -> Iterator[None]:
    """Replaces torch's fused attention inside the block, for torch's own layers too.

    Args:
      module: the torch module that runs; names imported into its files are replaced as well.
      flex_only: whether only `flex_attention` is, which has no gradients on a CPU.
    """
    import torch

    places = [*_files(module), torch.nn.functional]
    library: Any = torch
    homes = () if flex_only else (torch.nn.functional, library._C._nn)
    formulas: dict[Any, Any] = {x.scaled_dot_product_attention: attention_formula for x in homes}
    if FLEX in sys.modules:
        places.append(sys.modules[FLEX])
        formulas[sys.modules[FLEX].flex_attention] = flex_formula
    replaced = [
        (place, name, value)
        for place in places
        for name, value in [*vars(place).items()]
        if callable(value) and _hashable(value) and value in formulas
    ]
    try:
        for place, name, value in replaced:
            setattr(place, name, formulas[value])
        yield
    finally:
        for place, name, value in replaced:
            setattr(place, name, value)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _files(module: Any) -> Sequence[Any]:
    """The Python modules in which the classes of a module and its submodules are defined."""
    kinds = [kind for part in module.modules() for kind in type(part).__mro__]
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    return [sys.modules[name] for name in names if name in sys.modules]


def plainly(call: Callable[..., Any], flex_only: bool = False) -> Callable[..., Any]:
    """A call of a module that runs its attention in single operations."""

    def plain(module: Any, *args: Any, **kwargs: Any) -> Any:
        with in_single_operations(module, flex_only):
            return call(module, *args, **kwargs)

    return plain
