"""One run of one module: what goes in, and what is recorded of it on either side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import ParityError
from ...taps import POINTS
from .. import draw
from .leaves import leaves, rebuilt


@dataclass
class Run:
    """Everything recorded of one forward and backward pass, as numpy arrays.

    Attributes:
      outputs: every numeric leaf of the output by name: "output", or "output[0]", "output.key"
        where there are several; Python numbers and numpy arrays too.
      others: every other leaf that its text tells: None and strings.
      taps: outputs of submodules and named points, by path, in the order of the calls.
      gradients: of inputs ("input x") and parameters (the module's own names).
      keeps: dropout's keep-masks, in the order they were drawn; of Flax those that it drew, even
        where it repeated torch's.
      rates: what share each of them was asked to keep, NaN where that is not known.
      places: which submodule drew each of them.
      redrawn: the masks of further calls of Flax with other random keys.
      tap_gradients: of taps, where they are known.
      state: running statistics and other variables or buffers after the call, by path.
      changed: what of the module's own state the call changed, by path.
      order: torch's submodules in the order in which their calls began.
      calls: what each tap of torch was computed from.
      inputs: of Flax's submodules, by the names of the taps of their outputs: the array arguments
        of that call in their order.
      notes: sentences about the run.
      findings: of the program that ran: products below the asked precision, hidden casts.
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: list[np.ndarray] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    redrawn: list[list[np.ndarray]] = field(default_factory=list)
    tap_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    calls: dict[str, "Call"] = field(default_factory=dict)
    inputs: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)

    def point(self, tap: str) -> str:
        """Which point inside attention a tap is, `"scores"` say; "" of a submodule's output.

        The name alone does not tell: a submodule may be called `query` as well.
        """
        name = tap.rpartition(".")[2].partition("#")[0]
        call = self.calls.get(tap)
        is_output = tap in self.inputs if call is None else call.kind != name
        return "" if is_output or name not in POINTS else name


@dataclass(frozen=True)
class Step:
    """One operation on every element between a product and the softmax.

    Attributes:
      name: torch's, without underscores at its end.
      place: which operand the value itself is.
      others: the operands, None in the value's place.
      shape: of the result.
    """

    name: str
    place: int
    others: tuple[Any, ...]
    shape: tuple[int, ...]


@dataclass
class Call:
    """What one tap was computed from, in torch.

    Attributes:
      kind: the type name of a submodule, or the name of a point inside attention.
      inputs: its array arguments; of a point, the points it follows from.
      params: the submodule's own parameters and buffers, by role.
      facts: the submodule's own numbers, eps say.
      steps: of scores, what was done to the product of query and key.
    """

    kind: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What both sides are asked to run.

    Attributes:
      args, kwargs: the call's arguments; numpy arrays, also those in containers, are inputs,
        anything else is passed as it is.
      seed: of the cotangents.
      train: whether both modules are in train mode.
      grads, taps: whether gradients and taps are wanted.
      constants: names of inputs that are not differentiated, nor is anything below them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    train: bool
    grads: bool
    taps: bool
    constants: frozenset[str] = frozenset()

    def arrays(self) -> dict[str, np.ndarray]:
        """The input arrays by name: a keyword or a position, and where they lie below it."""
        named = {**{str(i): arg for i, arg in enumerate(self.args)}, **self.kwargs}
        pairs = (leaf for name, value in named.items() for leaf in leaves(value, name))
        return {name: value for name, value in pairs if is_input(value)}

    def fill(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `values` in the arrays' places."""

        def filled(name: str, value: Any) -> Any:
            return rebuilt(value, lambda at, leaf: values.get(at, leaf), name)

        args = tuple(filled(str(i), arg) for i, arg in enumerate(self.args))
        return args, {name: filled(name, value) for name, value in self.kwargs.items()}

    def in_dtype(self, dtype: str) -> "Request":
        """The request with its inputs rounded."""
        args, kwargs = self.fill(narrowed(self.arrays(), dtype))
        return replace(self, args=args, kwargs=kwargs)

    def is_constant(self, name: str) -> bool:
        """Whether an input array is one of `constants`, or lies below one."""
        return any(name == c or name.startswith((f"{c}.", f"{c}[")) for c in self.constants)

    def cotangent(self, name: str, like: Any) -> np.ndarray:
        """The random numbers that an output is multiplied with before gradients are taken."""
        return draw.like(self.seed, f"cotangent/{name}", like.shape, "complex" in str(like.dtype))


def checked_constants(names: Iterable[str], request: Request) -> Request:
    """The request with inputs that are not differentiated.

    Raises:
      TypeError: if the names are one string.
      ValueError: for a name that no input has.
    """
    if isinstance(names, str):
        raise TypeError(f"constants are names in a tuple, ({names!r},); got {names!r}.")
    with_names = replace(request, constants=frozenset(map(str, names)))
    arrays = list(request.arrays())
    for name in with_names.constants:
        one = replace(request, constants=frozenset([name]))
        if not any(map(one.is_constant, arrays)):
            raise ValueError(
                f"constants names the input {name!r}, but the inputs that hold arrays are "
                f"{', '.join(arrays) or 'none'}."
            )
    return with_names


def is_input(value: Any) -> bool:
    """Whether a leaf of the arguments is an array that both sides get in their own kind."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OUSMm"


def is_floating(array: Any) -> bool:
    """Whether an array holds floating or complex numbers, bfloat16 included."""
    return array.dtype.kind in "fc" or array.dtype.name in ("bfloat16", "float16")


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` in `dtype` if it is floating, else as it is; no copy if it has that dtype.

    Complex numbers have the precision of `dtype`, and of float32 where it is narrower.
    """
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    if array.dtype.kind == "c":
        kind = np.dtype(complex_dtype(dtype))
    return array.astype(kind, copy=False) if is_floating(array) else array


def narrowed(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Arrays by name, each `rounded`."""
    return {name: rounded(x, dtype) for name, x in arrays.items()}


class MaskMismatch(ParityError):
    """A dropout mask of Flax that does not fit where torch drops.

    Args:
      number: of the mask, from 1 on.
      shape, want: of Flax's, and of torch's.
      place: the submodule of torch's that drops.
      drawn: the submodule of Flax that drew it, where that is known.
    """

    def __init__(
        self, number: int, shape: Sequence[int], want: Sequence[int], place: str, drawn: str = ""
    ):
        self.facts = number, shape, want, place
        where = f", drawn in {drawn}," if drawn else ""
        super().__init__(
            f"Dropout mask {number} has shape {list(shape)} in Flax{where} and {list(want)} in "
            f"{place or 'the module'} of torch: this dropout stands in another place."
        )


def fit_mask(keep: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """A dropout mask in the other side's shape; None unless leading axes alone are split otherwise.

    >>> fit_mask(np.ones((6, 5, 4)), (2, 3, 5, 4)).shape, fit_mask(np.ones((5, 4)), (4, 5))
    ((2, 3, 5, 4), None)
    """
    same_matrix = keep.shape[-2:] == shape[-2:] and min(keep.ndim, len(shape)) >= 2
    if keep.shape == shape or (same_matrix and keep.size == int(np.prod(shape))):
        return keep.reshape(shape)
    return None


def complex_dtype(dtype: str) -> str:
    """The dtype of complex numbers in a run: there are none narrower than complex64."""
    return "complex128" if dtype == "float64" else "complex64"
