"""Competitors: who runs, whether it is there, and how it is built for a workload."""

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
    """No reason to refuse."""


@dataclass(frozen=True)
class Competitor:
    """One way to compute a workload.

    Attributes:
      name: as the tables show it.
      family: what `--against` calls it; "flax_attn" for this library.
      build: from a workload and a pass to a program.
      refusal: the reason why it cannot serve a workload in a pass, or None.
      backend: which backend of this library it takes, asked of the workload; else "".
      quadratic: how many arrays of T x S weights it is known to hold at once, forward and then
        backward, if it cannot tell its memory before it runs.
      prove: its own proof, made before it is built; None for that of the race.
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
        """Whether it is this library's."""
        return self.family == OWN_FAMILY

    def absent(self) -> str | None:
        """The reason why it cannot run here at all, or None."""
        return None if self.is_ours else absent(self.family)


def absent(family: str) -> str | None:
    """Why a family is not here: not installed, or it cannot be imported; else None."""
    package = PACKAGES[family]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"{package} is not installed"
        return f"{package} cannot be imported: {first_line(error)}"
    except Exception as error:  # somebody else's import may raise anything
        return f"{package} cannot be imported: {first_line(error)}"
    return None


def first_line(error: BaseException) -> str:
    """The error in one line, its kind first."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".")


def lookup(of: Any, path: str) -> Any:
    """`of.a.b[0].c` for "a.b.0.c"."""
    for part in path.split("."):
        of = of[int(part)] if part.isdigit() else getattr(of, part)
    return of
