"""Choice among backends: their verdicts, and a warning when "auto" has only a slow one."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from .._internal.caller import warn_once
from ..rules import Request
from .protocol import MAX_REFERENCE_PAIRS

KERNELS = {"gpu": ("cudnn", "tokamax"), "tpu": ("splash",)}  # fast backends by platform


class Verdict(NamedTuple):
    """A backend's verdict on a request.

    Attributes:
      backend: its name.
      refusal: why it cannot serve the request, or None.
      passed_over: why "auto" skips it although it could serve, or None.
    """

    backend: str
    refusal: str | None
    passed_over: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refuses: {self.refusal}"
        return "accepts" if self.passed_over is None else f"passed over: {self.passed_over}"


class Explanation(tuple[Verdict, ...]):
    """All backends' verdicts, in the order in which "auto" tries them; prints as a table.

    Attributes:
      sequence: context-parallel strategy of a sharded length, or None.
      work: blocks that each device then computes, or None.

    >>> Explanation([Verdict("cudnn", "needs float16 or bfloat16"), Verdict("reference", None)])
    backend    verdict
    cudnn      refuses: needs float16 or bfloat16
    reference  chosen
    """

    sequence: Any
    work: Any = None

    def __new__(cls, verdicts: Iterable[Verdict], sequence: Any = None) -> "Explanation":
        self = super().__new__(cls, verdicts)
        self.sequence = sequence
        return self

    @property
    def chosen(self) -> str | None:
        """The backend that "auto" takes; None if the requested one refuses."""
        fit = (v.backend for v in self if v.refusal is None and v.passed_over is None)
        return next(fit, None)

    def __str__(self) -> str:
        verdicts = ("chosen" if v.backend == self.chosen else str(v) for v in self)
        rows = [("backend", "verdict"), *zip((v.backend for v in self), verdicts, strict=True)]
        if self.sequence is not None:
            rows += [("length", str(self.sequence)), ("sends", self.sequence.sends)]
        if self.work is not None:
            rows.append(("blocks", str(self.work)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    __repr__ = __str__


def slow_path_message(platform: str, verdicts: Explanation, pairs: int) -> str | None:
    """The warning about a slow backend on a platform that has kernels, or None.

    Args:
      platform: "cpu", "gpu" or "tpu"; a CPU has no kernels.
      verdicts: of all backends.
      pairs: T * S; up to `MAX_REFERENCE_PAIRS` the plain formula is a good choice.

    >>> found = Explanation([Verdict("splash", "the mask is not static"), Verdict("plain", None)])
    >>> slow_path_message("tpu", found, 4096 * 4096)
    "attend takes the backend 'plain', slow on a tpu, since no kernel serves the request (splash: \
the mask is not static); backend='plain' asks for it without this warning."
    >>> slow_path_message("cpu", found, 4096 * 4096), slow_path_message("tpu", found, 128 * 128)
    (None, None)
    """
    kernels, chosen = KERNELS.get(platform, ()), verdicts.chosen
    refusals = {v.backend: v.refusal for v in verdicts if v.backend in kernels}
    serves = chosen == "pallas" or None in refusals.values()
    if not kernels or serves or pairs <= MAX_REFERENCE_PAIRS:
        return None  # a kernel serves, or is passed over for a better choice
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    hint = ""
    if any(name in reasons for name in ("Dense", "AtPositions")):
        hint = (
            " Padding at one end of a row is better said by numbers, for a layer valid=Lengths(n) "
            "where it follows n tokens, and valid=~Lengths(n) where n tokens of it come first."
        )
    return (
        f"attend takes the backend {chosen!r}, slow on a {platform}, since no kernel serves the "
        f"request ({reasons}); backend={chosen!r} asks for it without this warning.{hint}"
    )


def warn_if_slow(request: Request, verdicts: Explanation) -> None:
    """Warns, once for each reason, if "auto" has only a slow backend for a request."""
    pairs = request.sizes.T * request.sizes.S
    known = isinstance(pairs, int)  # else `jax.export` left a length symbolic
    sentence = slow_path_message(
        request.where.platform, verdicts, pairs if known else MAX_REFERENCE_PAIRS + 1
    )
    if sentence is not None:
        warn_once(sentence)
