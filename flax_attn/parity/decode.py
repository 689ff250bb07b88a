"""How a sequence is split into calls when both sides are run step by step with a cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Decode:
    """Runs both modules step by step with their caches, for several ways of splitting the tokens.

    A step is called like its module, with a chunk of the tokens and `cache=`: None in the first
    step, then the cache returned by the previous step. It returns `(y, cache)`.

    Args:
      cuts: splits, each given by the lengths of its chunks, which sum to T; () uses a few defaults.
      flax: Flax's step; None calls the module itself, with the cache made by
        `module.init_cache(batch, length)` in the first step.
      torch: torch's step; None uses the rows of torch's full forward pass.
      length: length of the cache created if `flax` is None; None means T.
      axes: the inputs that are split, and along which axis; None splits the first input along axis
        -2. Step outputs are concatenated along the first of these axes.

    Raises:
      ValueError: when used, if the lengths do not sum to T, or the module has no `init_cache`.

    Example: a cumulative sum, whose cache is the running sum:

    >>> import torch
    >>> from flax import nnx
    >>> from flax_attn.parity import compare
    >>> class Sums(nnx.Module):
    ...     def init_cache(self, batch, length):
    ...         return np.zeros((batch, 1, 4))
    ...
    ...     def __call__(self, x, cache=0.0):  # B T D
    ...         y = cache + x.cumsum(-2)
    ...         return y if isinstance(cache, float) else (y, y[:, -1:])
    >>> def theirs(module, x):
    ...     return x.cumsum(-2)
    >>> how = {"torch_call": theirs, "decode": Decode(cuts=[(3, 4), (5, 1, 1)])}
    >>> compare(torch.nn.Module(), Sums(), np.ones((2, 7, 4)), dtypes=("float64",), **how).ok
    True
    """

    cuts: Sequence[Sequence[int]] = ()
    flax: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    length: int | None = None
    axes: Mapping[str, int] | None = None

    def along(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Returns the inputs to split and their axes.

        Raises:
          ValueError: if a name is not an input, the axis does not exist, or token counts differ.
        """
        axes = {name: -2 for name in [*arrays][:1]} if self.axes is None else dict(self.axes)
        for name, axis in axes.items():
            if name not in arrays:
                known = ", ".join(arrays) or "none"
                raise ValueError(f"Decode.axes names {name!r}; inputs that hold arrays: {known}.")
            ndim = arrays[name].ndim
            if not -ndim <= axis < ndim:
                shape = list(arrays[name].shape)
                raise ValueError(f"Decode cuts {name} along axis {axis}; its shape is {shape}.")
        if not axes:
            raise ValueError(
                "Decode cuts the tokens of an input, but there is no array among them."
            )
        counts = {name: arrays[name].shape[axis] for name, axis in axes.items()}
        if len({*counts.values()}) > 1:
            text = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise ValueError(f"Inputs that Decode cuts need one number of tokens; got {text}.")
        return axes

    def checked(self, arrays: Mapping[str, np.ndarray]) -> "list[Cut]":
        """Returns the splits of these inputs, validated.

        Raises:
          ValueError: if the inputs cannot be split, or the lengths of a split do not sum to T.
        """
        name, axis = next(iter(self.along(arrays).items()))
        tokens = arrays[name].shape[axis]
        for cut in self.cuts:
            if any(not isinstance(n, int | np.integer) or n < 1 for n in cut):
                raise ValueError(f"A piece of a cut has 1 token or more; got {tuple(cut)}.")
            if sum(cut) != tokens:
                raise ValueError(
                    f"The pieces of a cut must sum to the {tokens} tokens of {name} (axis {axis}); "
                    f"{tuple(cut)} sums to {sum(cut)}."
                )
        if tokens < 1:
            raise ValueError(f"Decode cuts {name} along axis {axis}, where it has no tokens.")
        cuts = [tuple(map(int, cut)) for cut in self.cuts] or handful(tokens)
        return [Cut(cut) for cut in dict.fromkeys(cuts)]


@dataclass(frozen=True)
class Cut:
    """One way of splitting T tokens into calls.

    >>> str(Cut((9, 5, 1, 1, 1))), Cut((2, 1)).spans
    ('9+5+3x1', [(0, 2), (2, 3)])
    """

    lengths: tuple[int, ...]

    def __str__(self) -> str:
        runs = ((len([*same]), length) for length, same in groupby(self.lengths))
        return "+".join(f"{count}x{length}" if count > 1 else f"{length}" for count, length in runs)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The `(start, end)` token range of each chunk, end exclusive."""
        ends = [*accumulate(self.lengths)]
        return list(zip([0, *ends], ends, strict=False))

    def pieces(self, x: Any, axis: int) -> Iterator[Any]:
        """Yields the chunks of a numpy, torch or jax array along `axis`."""
        at = [slice(None)] * x.ndim
        for first, end in self.spans:
            at[axis] = slice(first, end)
            yield x[tuple(at)]

    def step_of(self, token: int) -> int:
        """Index of the chunk that contains a token."""
        return next(i for i, (_, end) in enumerate(self.spans) if token < end)


def handful(tokens: int) -> list[tuple[int, ...]]:
    """Default splits: all at once, two chunks, prefill then single tokens, the reverse, one by one.

    At most three different lengths, so that few programs are compiled.

    >>> handful(5)
    [(5,), (2, 2, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 1, 1)]
    """
    half = tokens // 2
    ones = (1,) * (tokens - half)
    chunks = (half, half) + (1,) * (tokens % 2)
    cuts = [(tokens,), chunks, (half, *ones), (*ones, half), (1,) * tokens]
    return [*dict.fromkeys(cut for cut in cuts if 0 not in cut)]
