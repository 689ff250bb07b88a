"""Runs a torch module with its fused attention calls replaced by their formula."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..sides.torch_fused import attention_formula


@contextmanager
def in_single_operations() -> Iterator[None]:
    """Replaces torch's fused attention inside the block, also for torch's own layers."""
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = attention_formula
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


def plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a module that runs its attention in single operations."""

    def plain(module: Any, *args: Any, **kwargs: Any) -> Any:
        with in_single_operations():
            return call(module, *args, **kwargs)

    return plain
