"""What the harness asks of torch's side: a live module, or what one gave before."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ...weights.described import Source
from ...weights.plan import Plan
from .run import Request, Run

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """What one submodule of torch's is.

    Attributes:
      kind: the import path of its class.
      bases: those of the classes of torch that it is built on, the nearest first.
      settings: its own numbers, texts, truths and tuples of these by name: eps, groups, stride.
    """

    kind: str
    bases: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


class Stepped(NamedTuple):
    """Torch after one step of an optimizer: the gradients that it took, and all its weights."""

    gradients: Arrays
    values: Arrays


class Trial(NamedTuple):
    """One mistake in torch's run.

    Attributes:
      path: of the innermost submodule that it is made in.
      first, last: the numbers of the first and the last of its operations.
      said: in a sentence.
      run: what torch gives with it; None if it fails with it.
    """

    path: str
    first: int
    last: int
    description: str
    run: Callable[[], Run | None]


def inside(path: str, owner: str) -> bool:
    """Whether a submodule is another one, or lies in it."""
    return not owner or path == owner or path.startswith(f"{owner}.")


class FaultTrials(Protocol):
    """Torch's run again, in float64, each time with one mistake in it.

    Attributes:
      count: how many operations the run has.
      built: the module's weights as it was built, before others were drawn.
    """

    @property
    def count(self) -> int: ...
    @property
    def built(self) -> Arrays: ...

    def start(self, path: str) -> int:
        """The number of the first operation in a submodule, or after it all."""
        ...

    def end(self, path: str) -> int:
        """The number of the last operation in a submodule, or after it all."""
        ...

    def without(self, names: Sequence[str]) -> Iterator[Trial]:
        """Parameters that no rule carries, as if Flax had none of them: zeros, or ones."""
        ...

    def other_gradients(self) -> Iterator[Trial]:
        """Gradients that go on where torch stops them, and that stop where torch's go on."""
        ...

    def among(self, wanted: Callable[[int, str], bool]) -> Iterator[Trial]:
        """Every mistake in the operations that are wanted by number and submodule, the last of
        them first."""
        ...


class Original(Protocol):
    """Torch's side of a comparison, with its weights, its inputs and how it is called.

    Attributes:
      name: of its class.
      sources: its tensors.
      parts: the paths of all its submodules.
      values: its weights by name.
      modules: what each of them is, and the whole by the path "".
      trained: whether each of its parameters is trained; None of whole numbers, which cannot be.
      dropouts: the paths of its dropouts.
      notes: sentences about how it was found.
      keeps: the dropout masks that JAX repeats; None if JAX draws them and torch repeats.
      request: the call's arguments, and what is wanted of it.
      dtypes, weights: in which dtypes it is compared and with which weights, unless that is said.
      training: an optimizer with its options, if it must not be said, and how many steps.
      versions: of what it ran under, where that is not here.
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
    def request(self) -> Request: ...
    @property
    def dtypes(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Literal["random", "given", "as_is"]: ...
    @property
    def training(self) -> tuple[tuple[str, Mapping[str, Any]] | None, int]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...

    def check(self, options: Any) -> None:
        """Raises ParityError for options that it cannot serve."""
        ...

    def with_weights(self, strategy: str, plan: Plan | None) -> "Original":
        """The same with its weights for a comparison: "random", "given" or "as_is"."""
        ...

    def run(self, dtype: str, keeps: Sequence[np.ndarray]) -> tuple[Run, Run]:
        """Torch in `dtype`, and the truth: all rounded to `dtype`, computed in float64."""
        ...

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> Iterator[Run]:
        """Torch in `dtype` again, a few times, with every operation moved by its rounding.

        Each run is made when it is asked for.
        """
        ...

    def trials(self, truth: Run) -> FaultTrials | None:
        """Torch again with mistakes in it, in float64; None if it cannot run again."""
        ...

    def steps(self, optimizer: Any, count: int, keeps: Sequence[np.ndarray]) -> Iterator[Stepped]:
        """Torch after each of so many steps of an optimizer, in float64."""
        ...

    def decoded(self, decode: Any, cuts: Sequence[Any], dtype: str) -> tuple[dict, dict]:
        """Torch's own steps by cut, in `dtype` and in float64; empty if it has none."""
        ...
