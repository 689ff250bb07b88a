"""Installed versions of the libraries."""

from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Returns the versions of torch, jax, flax and numpy; "missing" if not installed."""
    by_library = {}
    for name in ("torch", "jax", "flax", "numpy"):
        try:
            by_library[name] = version(name)
        except PackageNotFoundError:
            by_library[name] = "missing"
    return by_library
