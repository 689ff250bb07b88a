"""Competitors: the compared implementations, their availability and how each is built."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax

from .program import Program
from .proof import Proof, prove_at
from .task import Task, platform

Build = Callable[[Any], Program]  # of a task
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


def always(task: Any) -> None:
    """Returns None: no task is refused."""


@dataclass(frozen=True)
class Competitor:
    """One implementation of a task.

    Attributes:
      name: name shown in the tables.
      family: name used by `--against`; "flax_attn" for this library.
      build: maps a task to a program.
      refusal: returns why it cannot run a task, or None.
      backend: returns the backend of this library used for a task, or "".
      quadratic: number of T x S weight arrays held at once, in the forward pass and in both
        passes, if it cannot report its memory before it runs.
      prove: custom proof, made before it is built; None for that of `proof_in_small`.
    """

    name: str
    family: str
    build: Build
    refusal: Callable[[Any], str | None] = always
    backend: Callable[[Any], str] = lambda task: ""
    quadratic: tuple[int, int] = (0, 0)
    prove: Callable[[Any], Proof] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this library."""
        return self.family == OWN_FAMILY

    def proof_in_small(self, task: Task) -> Proof | None:
        """Verifies all of a smaller task; None if `task` is small and nothing is added.

        On an accelerator also at "highest" precision for float32, whose products it rounds.
        """
        if self.prove is not None:
            return self.prove(task)
        small, proof = task.small(), None
        precisions = ["highest"] if platform() != "cpu" and task.dtype == "float32" else []
        for precision in [*precisions, None] if small != task else precisions:
            with jax.default_matmul_precision(precision):
                proof = prove_at(self.build, small)
            if not proof.ok:
                break
        return proof

    def absent(self) -> str | None:
        """Returns why it cannot run on this machine (not installed or import fails), or None."""
        if self.is_ours:
            return None
        package = PACKAGES[self.family]
        try:
            import_module(package)
        except Exception as error:  # third-party imports may raise anything
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed"
            return f"{package} cannot be imported: {first_line(error)}"
        return None


def first_line(error: BaseException) -> str:
    """Formats an error on one line, its type first."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".")
