"""The options of `compare`, in one frozen dataclass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..weights.rule import Rule
from .decode import Decode
from .sides.calls import plain_call

Weights = Literal["random", "given", "as_is"]
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """Validated keywords of `compare`, except those of a single call, which are in `CallSpec`.

    Raises:
      ValueError: for an unknown dtype or kind of weights, no steps, or neither eager nor jit.
    """

    dtypes: Sequence[str] = ("float64", "float32")
    eager: bool = True
    jit: bool = True
    noise: bool = False
    optimizer: tuple[str, Mapping[str, Any]] | None = None
    steps: int = 1
    weights: Weights = "random"
    rules: Sequence[Rule] = ()
    flax_call: Callable[..., Any] | None = None
    decode: Decode | None = None

    def __post_init__(self):
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a whole number, 1 or more; got {self.steps!r}.")
        if not (self.eager or self.jit):
            raise ValueError("Flax must run eagerly or under jit; got eager=False, jit=False.")
        wrong = [dtype for dtype in self.dtypes if dtype not in DTYPES]
        if isinstance(self.dtypes, str) or wrong or not self.dtypes:
            raise ValueError(f"dtypes must be some of {', '.join(DTYPES)}; got {self.dtypes!r}.")
        if self.weights not in ("random", "given", "as_is"):
            kinds = '"random", "given" or "as_is"'
            raise ValueError(f"weights must be {kinds}; got {self.weights!r}.")

    @property
    def modes(self) -> list[str]:
        """The modes in which Flax runs."""
        return ["eager"] * self.eager + ["jit"] * self.jit

    @property
    def call(self) -> Callable[..., Any]:
        """The function that calls the Flax module."""
        return self.flax_call or plain_call
