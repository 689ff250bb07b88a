"""surface.txt holds every public name with its signature, and every option of the command.

It is the same for each Python, jax and flax that the library supports, and without torch.
"""

import inspect
import runpy
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from flax import nnx

from flax_attn.command import cli

FILE = Path(__file__).with_name("surface.txt")
PATHS = " .drop_in .families .masks .parity .parity.judge .recurrence .sharding .taps .weights"
# The methods of layers that users call; the others are hooks.
CALLED = {*runpy.run_path(str(FILE.parents[2] / "docs" / "reference.py"))["CALLED"]}


def public(module: Any) -> dict[str, Any]:
    """What it lists, or what it and its submodules define; and the same under old names."""
    homes = {name: getattr(x, "__module__", "") for name, x in vars(module).items()}
    mine = [n for n, home in homes.items() if n[0] != "_" and home.startswith(module.__name__)]
    new = dir(module) if hasattr(module, "__all__") else mine
    old = {n: name for n, (name, _) in getattr(module, "_RENAMED", {}).items()}
    return {f"{module.__name__}.{n}": getattr(module, old.get(n, n)) for n in [*new, *old]}


MODULES = [import_module(f"flax_attn{path}") for path in PATHS.split(" ")]
PUBLIC = {name: value for module in MODULES for name, value in public(module).items()}
FIRST = {id(value): name for name, value in reversed(PUBLIC.items())}


class Default(str):
    """A default of a signature: a public name, or a short text without addresses."""

    def __new__(cls, value: Any) -> "Default":
        text = FIRST.get(id(value)) or getattr(value, "__qualname__", repr(value))
        return str.__new__(cls, text if len(text) < 60 else type(value).__name__)

    __repr__ = str.__str__


def signature(function: Any) -> str:
    """Without annotations and `self`; behind it the keywords that a `TypedDict` lists."""
    given = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    defaults = [p.default if p.default is p.empty else Default(p.default) for p in given]
    both = zip(given, defaults, strict=True)
    plain = inspect.Signature([p.replace(annotation=p.empty, default=x) for p, x in both])
    keywords = [get_args(p.annotation) for p in given if p.kind is p.VAR_KEYWORD]
    listed = [n for kinds in keywords for x in kinds for n in getattr(x, "__annotations__", ())]
    return f"{plain}{' with ' * bool(listed)}{', '.join(listed)}"


def is_ours(cls: type) -> bool:
    return cls.__module__.startswith("flax_attn.")


def members(cls: type) -> set[str]:
    """Public methods with their signatures, properties and fields."""
    names = {n for part in cls.__mro__ if is_ours(part) for n in vars(part)}
    names |= {*getattr(cls, "__dataclass_fields__", ())}
    names = {n for n in names if n[0] != "_" or n == "__call__"}
    names = names & CALLED if issubclass(cls, nnx.Module) else names
    values = {name: getattr(cls, name, None) for name in names}
    return {f".{name}{signature(x) if callable(x) else ''}" for name, x in values.items()}


def entries() -> Iterator[str]:
    for name, value in PUBLIC.items():
        first = FIRST[id(value)]
        if first == name and isinstance(value, type):
            made = signature(value.__init__ if issubclass(value, nnx.Module) else value)
            bases = [x for x in value.__mro__ if id(x) in FIRST or not is_ours(x)]
            base = next(x for x in bases if x is not value)
            yield f"{name}{made}: {base.__name__}"
            yield from (name + text for text in members(value) - members(base))
        elif first == name and (inspect.isroutine(value) or hasattr(value, "__wrapped__")):
            yield name + signature(value)
        else:
            yield f"{name}: {type(value).__name__ if first == name else first}"
    parser = cli._parser(["bench"])
    for of in (parser, *parser.commands.values()):
        for x in of._actions:
            default = f"= {x.default!r}" if x.default and x.dest != "help" else ""
            parts = of.prog, ", ".join(x.option_strings), x.metavar, x.nargs, default
            yield " ".join(str(part) for part in parts if part)


def surface() -> str:
    wrap = textwrap.TextWrapper(100, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(map(wrap.fill, sorted(entries()))) + "\n"


def test_the_public_names_are_those_of_surface_txt():
    held, now = FILE.read_text("utf-8"), surface()
    old, new = ({*text.replace("\n    ", " ").splitlines()} for text in (held, now))
    lines = [f"{'-' if x in old else '+'} {x}" for x in sorted(old ^ new)]
    advice = "If you mean it, `python -m parity_tests.core.test_surface` writes the file anew."
    assert held == now, "\n".join(["surface.txt says otherwise:", *lines, advice])


if __name__ == "__main__":
    FILE.write_text(surface(), "utf-8")
