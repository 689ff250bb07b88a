"""Backends: implementations of attention, in the order in which "auto" tries them."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from .. import reference
from ..rules import Request, Rules
from . import blockwise, cudnn, pallas, protocol, splash, tokamax
from .blockwise import autodiff

Attention = Callable[[jax.Array, jax.Array, jax.Array, Rules], tuple[jax.Array, reference.Stats]]


class Backend(NamedTuple):
    """`attention(q, k, v, rules) -> (o, stats)` on B T N H arrays and bound rules.

    `refusal(request, rules)`, where `rules` are the request's bound to its sizes, returns, from
    static facts alone, why it cannot serve a request of static lengths, or None.
    `passed_over(request)` returns why "auto" skips it although it could serve, or None. Without
    either function there is never a reason. If `platforms` are named, "auto" considers the backend
    only on these; where `unproven(request)` returns a reason, which `passed_over` returns too, it
    does not even ask the backend's `refusal`.
    """

    attention: Attention
    refusal: Callable[[Request, Rules], str | None] | None = None
    passed_over: Callable[[Request], str | None] | None = None
    platforms: tuple[str, ...] | None = None
    unproven: Callable[[Request], str | None] | None = None


def _by_lse(forward: Any) -> Attention:
    """Adapts a kernel that returns only the log-sum-exp to one that returns m and l."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        o, lse = forward(q, k, v, rules)
        return o, protocol.of_lse(lse)

    return attention


def _kernel(module: Any, platform: str) -> Backend:
    """The backend of a module with a kernel for one platform."""
    attention = _by_lse(module.forward)
    return Backend(attention, module.refusal, protocol.passed_over, (platform,))


BY_NAME = "serves forward mode and second derivatives, if it is asked for by name"
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "cudnn": _kernel(cudnn, "gpu"),
        "tokamax": _kernel(tokamax, "gpu"),
        "splash": _kernel(splash, "tpu"),
        "pallas": Backend(
            pallas.attention, pallas.refusal, pallas.passed_over, ("gpu",), pallas.unproven
        ),
        "blockwise": Backend(
            blockwise.attention, passed_over=partial(protocol.passed_over, by_blocks=True)
        ),
        "autodiff": Backend(autodiff.attention, None, lambda *_: BY_NAME),
        "reference": Backend(reference.attention),
    }
)
