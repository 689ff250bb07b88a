"""Old names of modules and attributes, which work for one release with a DeprecationWarning."""

from importlib import import_module

# Of `flax_attn` itself: modules that are in one folder now.
INTERNAL = "arrays checks devices exported lazy markdown nearest progress types".split()
COMMAND = "cli explain_command family_table proving record_command".split()
MOVED = {
    **{f"flax_attn._{name}": f"flax_attn._internal.{name}" for name in INTERNAL},
    **{f"flax_attn.{name}": f"flax_attn.command.{name}" for name in COMMAND},
    "flax_attn._options": "flax_attn.command.options",
    "flax_attn._pytest": "flax_attn.command.pytest_plugin",
    "flax_attn.bench.command": "flax_attn.command.bench_command",
    "flax_attn.bench.contender": "flax_attn.bench.competitor",
    "flax_attn.cache.asked": "flax_attn.cache.checks",
    "flax_attn.device_check.command": "flax_attn.command.check_device_command",
    "flax_attn.flax_drop_in": "flax_attn.drop_in.flax_nnx",
    "flax_attn.masks.answers": "flax_attn.masks.ranges",
    "flax_attn.masks.cut": "flax_attn.masks.shardable",
    "flax_attn.parity.asked": "flax_attn.parity.call_spec",
    "flax_attn.parity.cases.asked": "flax_attn.parity.cases.selection",
    "flax_attn.stored": "flax_attn.cache.stored",
}


def warn_renamed(old: str, new: str, stacklevel: int) -> None:
    """Warns that a name is deprecated; `stacklevel` counts from the function that calls this."""
    from warnings import warn

    warn(
        f"{old} is now called {new}; the old name will be removed in the next release.",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


class RenamedAttribute:
    """Descriptor under the old name of an attribute or a method.

    >>> import warnings
    >>> class Box:
    ...     width = 3
    ...     breadth = RenamedAttribute("width")
    >>> with warnings.catch_warnings(record=True, action="always") as found:
    ...     Box().breadth
    3
    >>> print(found[0].message)
    Box.breadth is now called width; the old name will be removed in the next release.
    """

    def __init__(self, new: str) -> None:
        self.new, self.old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self.old}", self.new, stacklevel=2)
        return getattr(instance, self.new)


def old_module(package: str, name: str, stacklevel: int = 2) -> object:
    """The submodule that `package` once had under `name`, with a warning; or AttributeError."""
    old = f"{package}.{name}"
    if old not in MOVED:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    warn_renamed(old, MOVED[old], stacklevel)
    return import_module(MOVED[old])
