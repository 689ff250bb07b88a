"""Persistent compilation cache in the user's cache folder, which speeds up later runs."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

LARGEST = 2**30  # maximum size of the cache in bytes
CHOSEN = "JAX_COMPILATION_CACHE_DIR"  # jax's own variable, which takes precedence


def cache_settings(wanted: bool = True) -> Mapping[str, str]:
    """Returns environment variables for jax's persistent compilation cache, or none if unavailable.

    Each machine has its own subfolder, since programs are compiled for its processor. The least
    recently used files of all machines are deleted beyond `LARGEST` bytes.

    Args:
      wanted: False disables the cache, as does a folder that is not writable.
    """
    if not wanted or os.environ.get(CHOSEN):
        return {}
    try:
        root = folder()
        here = root / (platform.node() or "here")
        here.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return {}
    if not os.access(here, os.W_OK):
        return {}
    prune(root)
    return {
        CHOSEN: str(here),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def folder() -> Path:
    """The cache folder: `flax_attn/xla` in the user's cache folder."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "flax_attn" / "xla"


def prune(root: Path, largest: int = LARGEST) -> None:
    """Deletes the least recently used files of a folder until it is small enough.

    Args:
      root: the folder; it must contain nothing else.
      largest: maximum size in bytes.
    """
    files = []
    for path in root.rglob("*"):
        try:
            facts = path.stat()
        except OSError:  # deleted by another process
            continue
        if path.is_file():
            files.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    left = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if left <= largest:
            return
        left -= size
        path.unlink(missing_ok=True)
