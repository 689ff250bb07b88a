"""Interface of the first side: a torch module, JAX, or recorded results of either."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ...weights.described import Source
from ...weights.plan import Plan
from .run import Run, RunRequest
from .tape import Tape

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """Description of one torch submodule.

    Attributes:
      kind: import path of its class.
      bases: import paths of its base classes in torch, the nearest first.
      settings: numbers, strings, booleans and tuples of them by name, such as eps or stride.
    """

    kind: str
    bases: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


class Stepped(NamedTuple):
    """Result of one optimizer step in torch: the gradients used, and all weights."""

    gradients: Arrays
    values: Arrays


class Original(Protocol):
    """The first side of a comparison, the truth, with its weights, inputs and call.

    Attributes:
      name: name of its class.
      sources: descriptions of its tensors.
      parts: paths of all submodules.
      values: weights by name.
      modules: description of each submodule by path; "" is the whole module.
      trained: whether each parameter is trained; None for integers, which cannot be.
      dropouts: paths of its dropout modules.
      notes: sentences about its state or origin.
      keeps: dropout masks that JAX repeats; None if JAX draws them and torch repeats.
      request: the call's arguments, and what to compute.
      dtypes, weights: default dtypes, and default weights, of a comparison.
      training: default optimizer with its options (None: no training), and number of steps.
      versions: versions of the packages that recorded it; empty for a live module.
      library: "torch" or "jax"; what torch's side says of itself holds for either.
    """

    @property
    def name(self) -> str: ...
    @property
    def sources(self) -> Sequence[Source]: ...
    @property
    def parts(self) -> Sequence[str]: ...
    @property
    def values(self) -> Arrays: ...
    @property
    def modules(self) -> Mapping[str, Part]: ...
    @property
    def trained(self) -> Mapping[str, bool | None]: ...
    @property
    def dropouts(self) -> Sequence[str]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def keeps(self) -> Sequence[np.ndarray] | None: ...
    @property
    def request(self) -> RunRequest: ...
    @property
    def dtypes(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Literal["random", "given", "as_is"]: ...
    @property
    def training(self) -> tuple[tuple[str, Mapping[str, Any]] | None, int]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def library(self) -> Literal["torch", "jax"]: ...

    def check(self, options: Any) -> None:
        """Raises ParityError for options that it does not support."""
        ...

    def with_weights(self, strategy: str, plan: Plan | None) -> "Original":
        """Returns a copy with the weights of a strategy: "random", "given" or "as_is"."""
        ...

    def with_output(self, name: str) -> "Original":
        """Returns a copy whose output has this name."""
        ...

    def run(self, dtype: str, keeps: Sequence[np.ndarray]) -> tuple[Run, Run]:
        """Runs torch in `dtype`, and in float64 with everything rounded to `dtype` (the truth)."""
        ...

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> Iterator[Run]:
        """Yields runs in `dtype` with random rounding noise in every operation.

        Runs are computed lazily.
        """
        ...

    def buffers(self) -> Arrays:
        """Returns the module's buffers by name, in their dtypes."""
        ...

    def with_buffers(self, values: Arrays) -> "Original | None":
        """Returns a copy with these buffers in float64 runs; None if torch cannot be run again."""
        ...

    def quick(self, keeps: Sequence[np.ndarray]) -> Run:
        """Runs torch in float64 without gradients."""
        ...

    def program(self, truth: Run) -> Tape | None:
        """Returns every operation of a float64 run; None if torch cannot be run again."""
        ...

    def steps(self, optimizer: Any, count: int, keeps: Sequence[np.ndarray]) -> Iterator[Stepped]:
        """Yields the result of each of `count` optimizer steps, in float64."""
        ...

    def decoded(self, decode: Any, cuts: Sequence[Any], dtype: str) -> tuple[dict, dict]:
        """Returns torch's decoding steps by cut, in `dtype` and in float64; empty if none."""
        ...
