"""Positions with several axes: which axis rotates which rotary pair.

Positions then have shape `(A, *B, T)`: time, row and column of a token for A = 3.
"""

from typing import NamedTuple

import numpy as np

from .._internal.arrays import is_count
from .._internal.types import frozen


class PairAxes(NamedTuple):
    """Position axis, and index into the list of rates, of each of the P pairs."""

    axis: np.ndarray
    rate: np.ndarray


@frozen
class Sections:
    """M-RoPE: each pair keeps its rate and is rotated by one axis of the positions.

    Also called: multimodal RoPE (M-RoPE), `mrope_section`.

    Args:
      sizes: number of pairs that each axis rotates; they sum to P.
      interleaved: False gives the first `sizes[0]` pairs to the first axis, and so on (Qwen2-VL).
        True gives pair i to axis `i % A` as long as that axis has pairs left, and to the first axis
        otherwise (Qwen3-VL).

    Raises:
      ValueError: unless sizes are integers >= 0; if interleaving cannot give these sizes; in use,
        if the sizes do not sum to the number of pairs.

    Source: Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any
    Resolution", 2024; Qwen3-VL's code.

    >>> Sections((2, 1, 1)).assign(4).axis.tolist()
    [0, 0, 1, 2]
    >>> Sections((2, 1, 1), interleaved=True).assign(4).axis.tolist()
    [0, 1, 2, 0]
    """

    sizes: tuple[int, ...]
    interleaved: bool = False

    def __post_init__(self):
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes or not all(is_count(n, 0) for n in self.sizes):
            raise ValueError(f"sizes of Sections must be whole numbers; got {self.sizes}.")
        self.assign(sum(self.sizes))

    @property
    def count(self) -> int:
        """A, the number of axes."""
        return len(self.sizes)

    @property
    def lists(self) -> int:
        """Number of separate lists of rates; here all axes share one."""
        return 1

    def assign(self, pairs: int) -> PairAxes:
        if sum(self.sizes) != pairs:
            raise ValueError(
                f"sizes of Sections must sum to the {pairs} rotary pairs; got {self.sizes}."
            )
        place = np.arange(pairs)
        axis = np.repeat(np.arange(self.count), self.sizes)
        if self.interleaved:
            round_robin = place % self.count
            axis = np.where(
                place < np.asarray(self.sizes)[round_robin] * self.count, round_robin, 0
            )
        if np.bincount(axis, minlength=self.count).tolist() != [*self.sizes]:
            raise ValueError(
                "Interleaved sections take turns, and the first takes what is left; with sizes "
                f"{self.sizes} an axis would miss pairs."
            )
        return PairAxes(axis, place)


@frozen
class Axial:
    """Rows and columns: each axis of the positions rotates P / A pairs, in order of the axes.

    Also called: 2D RoPE, axial RoPE.

    Args:
      count: A, the number of axes.
      shared: False gives each axis the rates of width / A (the towers of Qwen2-VL and Llama 4).
        True distributes the rates of the whole width over the axes in turn (Pixtral).

    Raises:
      ValueError: if count is not an integer >= 1; in use, if A does not divide P.

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024.

    >>> Axial().assign(4)
    PairAxes(axis=array([0, 0, 1, 1]), rate=array([0, 1, 0, 1]))
    >>> Axial(shared=True).assign(4).rate.tolist()
    [0, 2, 1, 3]
    """

    count: int = 2
    shared: bool = False

    def __post_init__(self):
        if not is_count(self.count, 1):
            raise ValueError(
                f"count of Axial must be a whole number of at least 1; got {self.count!r}."
            )

    @property
    def lists(self) -> int:
        """Number of separate lists of rates."""
        return 1 if self.shared else self.count

    def assign(self, pairs: int) -> PairAxes:
        if pairs % self.count:
            raise ValueError(
                f"Axial deals out the same number of pairs to each of {self.count} axes; got "
                f"{pairs} pairs. For axes of other widths, as in Wan, Flux and HunyuanVideo, give "
                "Sections(sizes) as axes and Frequencies(values), the rates of each axis one after "
                "another, as scaling."
            )
        each = pairs // self.count
        axis, step = np.divmod(np.arange(pairs), each) if each else (np.arange(0),) * 2
        return PairAxes(axis, step * self.count + axis if self.shared else step)
