"""Backends: the ways one attention can be computed, in the order in which "auto" tries them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from .. import reference
from ..rules import Rules
from . import blockwise, cudnn, protocol, splash, tokamax

Attention = Callable[[jax.Array, jax.Array, jax.Array, Rules], tuple[jax.Array, reference.Stats]]
Refusal = Callable[[jax.Array, jax.Array, jax.Array, Rules], str | None]


def _never(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    return None


class Backend(NamedTuple):
    """`attention(q, k, v, rules) -> (o, stats)` on B T N H arrays and bound rules.

    `refusal` gives, from static facts alone, the reason why it cannot serve a request, or None;
    `passed_over` the reason why "auto" passes it over although it could, or None.
    """

    attention: Attention
    refusal: Refusal
    passed_over: Refusal = _never


def _by_lse(forward: Any) -> Attention:
    """A kernel that gives the log-sum-exp alone, as the others give m and l."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        o, lse = forward(q, k, v, rules)
        return o, protocol.of_lse(lse)

    return attention


_known = protocol.with_known_lengths
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "cudnn": Backend(_by_lse(cudnn.forward), _known(cudnn.refusal), protocol.passed_over),
        "tokamax": Backend(_by_lse(tokamax.forward), _known(tokamax.refusal), protocol.passed_over),
        "splash": Backend(_by_lse(splash.forward), _known(splash.refusal), protocol.passed_over),
        "blockwise": Backend(blockwise.attention, _known(_never), blockwise.passed_over),
        "reference": Backend(reference.attention, _never),
    }
)
