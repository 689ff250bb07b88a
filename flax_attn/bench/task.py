"""A task: what all competitors of one race compute, with its inputs, its costs and its truth."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BOTH = "fwd", "fwd+bwd"
PASSES = (FORWARD, BOTH)
DTYPES = ("float32", "bfloat16", "float16")
COTANGENT = "cotangent"
SHORT_LENGTH, SHORT_HEADS = 1024, 2
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """One computation of given sizes in one pass; each kind of it has a class of its own.

    Attributes:
      length: T, and S where it is not named.
      width: H, the width of one head.
      heads: N.
      batch: B.
      dtype: of inputs and weights.
      which: the pass, "fwd" or "fwd+bwd".
      seed: of the inputs and weights.
    """

    length: int
    width: int = 64
    heads: int = 8
    batch: int = 1
    dtype: str = "float32"
    which: str = FORWARD
    seed: int = 0

    by_least: ClassVar[bool] = False  # a table shows the least timing, not the median
    proven_whole: ClassVar[bool] = True  # some rows at these sizes, besides all rows of `small`

    @property
    def table(self) -> str:
        """What all tasks of one table share, in words."""
        raise NotImplementedError

    @property
    def cells(self) -> dict[str, str]:
        """What tells it from others of its table, by heading."""
        sizes = {"T": str(self.length), "B x N": f"{self.batch} x {self.heads}"}
        return {**sizes, "pass": self.which}

    @property
    def features(self) -> int:
        """The model width D of a layer."""
        return self.heads * self.width

    @property
    def weights(self) -> int:
        """Number of query-key pairs over all heads and batch entries, including masked ones."""
        return self.batch * self.heads * self.length**2

    @property
    def flops(self) -> int:
        """FLOPs; 0 if they are not counted."""
        return 0

    @property
    def bytes(self) -> int:
        """Minimum bytes moved: q, k, v, o; backward adds these and as many gradients."""
        tensor = self.batch * self.length * self.features * jnp.dtype(self.dtype).itemsize
        return tensor * (4 if self.which == FORWARD else 12)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name; by default of one layer's."""
        x = (self.batch, self.length, self.features)
        return {"x": x, COTANGENT: x}

    def inputs(self, draw: int = 0) -> Arrays:
        """Normal inputs and a cotangent by name, rounded to the dtype.

        Read-only, since all competitors share them.
        """
        return dict(_inputs(self, draw))

    def drawn(self, shapes: Mapping[str, tuple[int, ...]], draw: int) -> Arrays:
        """Draws normal arrays; weights are scaled by their number of inputs."""
        normal = np.random.default_rng((self.seed, draw)).standard_normal
        arrays = {name: normal(shape, np.float32) for name, shape in shapes.items()}
        kind = jnp.dtype(self.dtype)
        return {
            name: (x * len(x) ** -0.5 if name.endswith("weight") else x).astype(kind)
            for name, x in arrays.items()
        }

    def proof_inputs(self) -> Arrays:
        """The first inputs, with a cotangent that is 0 where nothing is verified."""
        return self.inputs()

    def small(self) -> Self:
        """A task of the same kind that is small enough to verify all of it."""
        return self

    def shortened(self) -> Self:
        """Two heads of one sequence, and at most `SHORT_LENGTH` tokens."""
        heads = min(self.heads, SHORT_HEADS)
        return replace(self, batch=1, heads=heads, length=min(self.length, SHORT_LENGTH))

    def verified(self, results: Arrays) -> Arrays:
        """The part of a competitor's results that is verified."""
        return results

    def references(self) -> tuple[Arrays, Arrays]:
        """That part as the plain formula gives it, in the dtype and in float64."""
        raise NotImplementedError

    def __str__(self) -> str:
        return ", ".join([label(self.cells), self.table])


@lru_cache(maxsize=2)  # drawing some million numbers takes a second
def _inputs(task: Task, draw: int) -> Arrays:
    arrays = task.drawn(task.shapes(), draw)
    for x in arrays.values():
        x.flags.writeable = False
    return arrays


def label(cells: Mapping[str, str]) -> str:
    """Names a task in words, as in "T 256, B x N 8 x 4, fwd"."""
    return ", ".join(x if head == "pass" else f"{head} {x}" for head, x in cells.items())


def platform() -> str:
    """The platform that JAX uses: "cpu", "gpu" or "tpu"."""
    return jax.devices()[0].platform
