"""Old import paths and attributes, which work for one release with a DeprecationWarning."""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MOVED = {
    "flax_attn._arrays": "flax_attn._internal.arrays",
    "flax_attn._checks": "flax_attn._internal.checks",
    "flax_attn._devices": "flax_attn._internal.devices",
    "flax_attn._exported": "flax_attn._internal.exported",
    "flax_attn._lazy": "flax_attn._internal.lazy",
    "flax_attn._markdown": "flax_attn._internal.markdown",
    "flax_attn._nearest": "flax_attn._internal.nearest",
    "flax_attn._options": "flax_attn.command.options",
    "flax_attn._progress": "flax_attn._internal.progress",
    "flax_attn._pytest": "flax_attn.command.pytest_plugin",
    "flax_attn._types": "flax_attn._internal.types",
    "flax_attn.bench.command": "flax_attn.command.bench_command",
    "flax_attn.bench.contender": "flax_attn.bench.competitor",
    "flax_attn.cache.asked": "flax_attn.cache.checks",
    "flax_attn.cli": "flax_attn.command.cli",
    "flax_attn.device_check.command": "flax_attn.command.check_device_command",
    "flax_attn.explain_command": "flax_attn.command.explain_command",
    "flax_attn.family_table": "flax_attn.command.family_table",
    "flax_attn.flax_drop_in": "flax_attn.drop_in.flax_nnx",
    "flax_attn.masks.answers": "flax_attn.masks.ranges",
    "flax_attn.masks.cut": "flax_attn.masks.shardable",
    "flax_attn.parity.asked": "flax_attn.parity.call_spec",
    "flax_attn.parity.cases.asked": "flax_attn.parity.cases.selection",
    "flax_attn.proving": "flax_attn.command.proving",
    "flax_attn.record_command": "flax_attn.command.record_command",
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


class MovedModules:
    """Finder, last in `sys.meta_path`, and loader of modules under their old names."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None, /
    ) -> "ModuleSpec | None":
        if fullname not in MOVED:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(fullname, self)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        warn_renamed(spec.name, MOVED[spec.name], stacklevel=2)
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        # The import system replaced the module's spec by that of the old name.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
