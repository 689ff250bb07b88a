"""Installed versions of the libraries."""

from importlib.metadata import PackageNotFoundError, version


def versions(library: str = "torch") -> dict[str, str]:
    """Returns the versions of the libraries of a comparison; "missing" if not installed.

    Args:
      library: that of the first side, "torch" or "jax".
    """
    by_library = {}
    for name in ("torch", "jax", "flax", "numpy")[library == "jax" :]:
        try:
            by_library[name] = version(name)
        except PackageNotFoundError:
            by_library[name] = "missing"
    return by_library
