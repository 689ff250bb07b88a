"""Competitors: the compared implementations, their availability and how each is built."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .program import Program
from .proof import Proof
from .workload import Workload

Build = Callable[[Workload, str], Program]
PACKAGES = {
    "jax.nn": "jax",
    "flax.nnx": "flax",
    "equinox": "equinox",
    "torch": "torch",
    "torch.eager": "torch",
    "torch.compile": "torch",
    "nn.MultiheadAttention": "torch",
    "tokamax": "tokamax",
}
FAMILIES = tuple(PACKAGES)
OWN_FAMILY = "flax_attn"


def always(workload: Workload, which: str) -> None:
    """Returns None: no workload is refused."""


@dataclass(frozen=True)
class Competitor:
    """One implementation of a workload.

    Attributes:
      name: name shown in the tables.
      family: name used by `--against`; "flax_attn" for this library.
      build: maps a workload and a pass to a program.
      refusal: returns why it cannot run a workload in a pass, or None.
      backend: returns the backend of this library used for a workload, or "".
      quadratic: number of T x S weight arrays held at once, in the forward pass and in both
        passes, if it cannot report its memory before it runs.
      prove: custom proof, made before it is built; None for the default of `Race`.
    """

    name: str
    family: str
    build: Build
    refusal: Callable[[Workload, str], str | None] = always
    backend: Callable[[Workload], str] = lambda workload: ""
    quadratic: tuple[int, int] = (0, 0)
    prove: Callable[[Workload, str], Proof] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this library."""
        return self.family == OWN_FAMILY

    def absent(self) -> str | None:
        """Returns why it cannot run on this machine, or None."""
        return None if self.is_ours else absent(self.family)


def absent(family: str) -> str | None:
    """Returns why a family is unavailable (not installed or import fails), or None."""
    package = PACKAGES[family]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"{package} is not installed"
        return f"{package} cannot be imported: {first_line(error)}"
    except Exception as error:  # third-party imports may raise anything
        return f"{package} cannot be imported: {first_line(error)}"
    return None


def first_line(error: BaseException) -> str:
    """Formats an error on one line, its type first."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".")


def lookup(of: Any, path: str) -> Any:
    """Returns `of.a.b[0].c` for the path "a.b.0.c"."""
    for part in path.split("."):
        of = of[int(part)] if part.isdigit() else getattr(of, part)
    return of
