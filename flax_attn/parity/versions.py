"""Which versions of the libraries are here."""

from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of torch (or "missing"), jax, flax and numpy."""
    by_library = {}
    for name in ("torch", "jax", "flax", "numpy"):
        try:
            by_library[name] = version(name)
        except PackageNotFoundError:
            by_library[name] = "missing"
    return by_library
