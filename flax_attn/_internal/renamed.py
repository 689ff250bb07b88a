"""Old names, which work for two releases with a DeprecationWarning."""


def warn_renamed(old: str, new: str, goes: str, stacklevel: int) -> None:
    """Warns that a name goes with release `goes`; `stacklevel` counts from who calls this."""
    from warnings import warn

    warn(
        f"{old} is now called {new}; the old name goes with {goes}.",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


class RenamedAttribute:
    """Descriptor under the old name of an attribute or a method.

    >>> import warnings
    >>> class Box:
    ...     width = 3
    ...     breadth = RenamedAttribute("width", goes="9.0.0")
    >>> with warnings.catch_warnings(record=True, action="always") as found:
    ...     Box().breadth
    3
    >>> print(found[0].message)
    Box.breadth is now called width; the old name goes with 9.0.0.
    """

    def __init__(self, new: str, goes: str) -> None:
        self.new, self.goes, self.old = new, goes, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self.old}", self.new, self.goes, stacklevel=2)
        return getattr(instance, self.new)
