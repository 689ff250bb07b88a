"""What a module of the corpus is: its making, its inputs, and the truth about it.

`Subject.truth` is None for a module that is no softmax attention of ours. Otherwise it is a dict
with exactly these keys:

  width: features of a token in the input and, unless the output is per head, in the output.
  heads, kv_heads, head_dim: query heads, heads of keys and values, and components of each.
  biases: a frozenset of "q", "k", "v" and "o", the projections that add a bias.
  scale: the factor of `q.k`, a float; with normed q and k, that of the normed ones.
  softcap: c of `c tanh(logits / c)`, or None.
  mask: an expression of `flax_attn.masks`, such as "CAUSAL & Window(4, 0)", or "given" if a mask,
    padding or ids of documents come with the call, alone or joined to a mask of the module's own.
  rotary: None, or a dict of
    base: of the rates; None if cos and sin come with the call.
    width: rotated components of a head, the first ones.
    pairs: "halves" (i and i + width / 2) or "neighbours" (2 i and 2 i + 1).
    scaling: None, or an expression of `flax_attn`, such as "LinearScaling(4.0)".
    given: True if cos and sin come with the call.
  q_norm, k_norm: None, or a dict of
    kind: "rms" or "layer".
    eps: a float, inside the root; 0.0 for vectors divided by their length.
    over_heads: True if the mean is over all heads together.
    gain: "w", "1 + w", or None.
    after_rotary: whether the norm comes after the rotation; False without one.
  sinks: whether each head has a learned logit more in the denominator.
  bias: None, "alibi", "t5", or "given" if it comes with the call.
  gate: None, or "sigmoid" for a factor of the heads' outputs before the output projection.
  clip: the bound to which projected q, k and v are clamped, or None.
  dropout: the rate of dropout on the weights, in train mode.
  cross: whether keys and values come from another argument than queries.
  cache: whether earlier keys and values come with the call or stay in the module.
  pre_norm, residual: whether the module norms its input first, and adds it to its output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

BATCH = 2
KEYS = frozenset(
    "width heads kv_heads head_dim biases scale softcap mask rotary q_norm k_norm sinks bias gate "
    "clip dropout cross cache pre_norm residual".split()
)
DEFAULTS = dict.fromkeys("softcap rotary q_norm k_norm bias gate clip".split())
FALSE = dict.fromkeys("sinks cross cache pre_norm residual".split(), False)

Rng = np.random.RandomState
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A module of the corpus.

    Attributes:
      name: unique.
      make: builds the module in float64 and eval mode, with options and parameters of the rng.
      inputs: `(module, rng, length)` to positional and keyword arguments: numpy arrays, numbers,
        None, and tuples of these.
      truth: what the module is, see above.
      style: how it is written.
    """

    name: str
    make: Callable[[Rng], nn.Module]
    inputs: Callable[[nn.Module, Rng, int], Inputs]
    truth: Callable[[nn.Module], dict[str, Any] | None]
    style: str


def randomised(module: nn.Module, rng: Rng) -> nn.Module:
    """The module in float64 and eval mode; gains, which start at one, stay around it."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            centre = 1.0 if bool((parameter == 1).all()) else 0.0
            noise = rng.standard_normal(tuple(parameter.shape))
            parameter.copy_(torch.as_tensor(centre + 0.3 * noise))
    return module


def drawn(build: Callable[[Rng], nn.Module]) -> Callable[[Rng], nn.Module]:
    """`make` of a subject whose options `build` draws."""
    return lambda rng: randomised(build(rng), rng)


def pick(rng: Rng, *options: Any) -> Any:
    return options[rng.randint(len(options))]


def even_sizes(rng: Rng) -> tuple[int, int]:
    """Heads and head_dim, unlike each other, the batch and the lengths."""
    return pick(rng, (3, 8), (3, 10), (4, 6), (4, 8), (4, 10), (5, 6), (5, 8), (6, 8), (6, 10))


def free_sizes(rng: Rng) -> tuple[int, int, int]:
    """Width, heads and head_dim; the width is not heads * head_dim."""
    return pick(rng, 22, 26, 28, 34), *even_sizes(rng)


def grouped_sizes(rng: Rng) -> tuple[int, int, int, int]:
    """Width, heads, heads of keys and values, and head_dim."""
    sizes = pick(rng, (6, 3, 8), (6, 3, 10), (12, 3, 8), (8, 4, 6), (8, 4, 10))
    return pick(rng, 22, 26, 28, 34), *sizes


def tokens(rng: Rng, length: int, width: int) -> np.ndarray:
    return rng.standard_normal((BATCH, length, width))


def takes_tokens(width: str) -> Callable[[nn.Module, Rng, int], Inputs]:
    """Inputs of a module that takes `B T width` alone; the width is the attribute of that name."""
    return lambda module, rng, length: ((tokens(rng, length, getattr(module, width)),), {})


def takes_sequence_first(width: str) -> Callable[[nn.Module, Rng, int], Inputs]:
    """As `takes_tokens`, with `T B width`."""
    return lambda module, rng, length: (
        (tokens(rng, length, getattr(module, width)).swapaxes(0, 1),),
        {},
    )


def attention_truth(
    width: int,
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    biases: str = "",
    scale: float | None = None,
    mask: str = "FULL",
    dropout: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """A truth with all keys; those of `more` differ from the plain attention's."""
    if unknown := more.keys() - KEYS:
        raise TypeError(f"unknown keys {sorted(unknown)}")
    truth = {
        "width": width,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "biases": frozenset(biases),
        "scale": head_dim**-0.5 if scale is None else float(scale),
        "mask": mask,
        "dropout": float(dropout),
    }
    return {**DEFAULTS, **FALSE, **truth, **more}


def rotary_truth(
    base: float | None,
    width: int,
    pairs: str = "halves",
    scaling: str | None = None,
    handed_in: bool = False,
) -> dict[str, Any]:
    base = None if base is None else float(base)
    return dict(base=base, width=width, pairs=pairs, scaling=scaling, given=handed_in)


def norm_truth(
    kind: str,
    eps: float,
    over_heads: bool = False,
    gain: str | None = "w",
    after_rotary: bool = False,
) -> dict[str, Any]:
    return dict(kind=kind, eps=eps, over_heads=over_heads, gain=gain, after_rotary=after_rotary)
