"""What an error says of a call with arguments that a function does not take."""

from collections.abc import Iterable
from typing import Any, NamedTuple

BUILDS = ("__init__", "init_cache")


class Signature(NamedTuple):
    """What a function takes, without `self`.

    Attributes:
      names: the names of its arguments, in order.
      positional: those that may be passed by position.
      required: those without a default.
    """

    names: tuple[str, ...]
    positional: tuple[str, ...]
    required: tuple[str, ...]


def misfit(
    name: str,
    owner: Any,
    takes: Signature,
    count: int,
    named: Iterable[str],
    built: Signature | None = None,
) -> str:
    """What does not fit in a call, and what would.

    Args:
      name: the function's name.
      owner: the object of a method, or None.
      takes: what the function takes.
      count: how many arguments are passed by position.
      named: names of those passed by name.
      built: what the constructor of a method's object takes.

    >>> misfit("f", None, Signature(("x", "mask"), ("x",), ("x",)), 0, ["mask"])
    'f needs x; it takes x, mask.'
    """
    from .other_names import EXAMPLES, advice

    called = name if owner is None else type(owner).__name__
    example = EXAMPLES.get(called, "") if name == "__init__" else ""
    if owner is not None and name != "__init__":
        called = f"{called}, when called," if name == "__call__" else f"{called}.{name}"
    unknown = [key for key in named if key not in takes.names]
    if unknown:
        kinds = (getattr(owner, "mask_is_of", "pairs"),) if "mask" in takes.names else ()
        then = () if built is None or name != "__call__" else built.names
        return advice(called, unknown, takes.names + kinds, name in BUILDS, then) + example
    if count > len(takes.positional):
        by_name = [x for x in takes.names if x not in takes.positional]
        by_place = ", ".join(takes.positional) or "nothing"
        more = f"; by name only: {', '.join(by_name)}" if by_name else ""
        if name == "__call__" and takes.positional == ("x",):
            more += "; CrossAttention and TransformerMultiHeadAttention attend to another input"
        return f"{called} takes {by_place} by position, and got {count} arguments{more}.{example}"
    missing = [x for x in takes.required if x not in {*takes.positional[:count], *named}]
    if missing == ["rngs"]:
        return f"{called} draws its weights from rngs=; pass rngs=nnx.Rngs(0), or another seed."
    return f"{called} needs {', '.join(missing)}; it takes {', '.join(takes.names)}.{example}"
