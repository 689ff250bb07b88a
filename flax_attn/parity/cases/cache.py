"""Compiled programs kept in the user's cache folder, so that a second proof is much quicker."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

LARGEST = 2**30  # bytes of all that is kept
CHOSEN = "JAX_COMPILATION_CACHE_DIR"  # jax's own variable, which goes first


def cache_settings(wanted: bool = True) -> Mapping[str, str]:
    """Environment variables by which jax keeps what it compiles; none if it cannot or must not.

    The folder belongs to one machine, since programs are compiled for its processor; the oldest
    files of all machines are deleted where they have grown beyond 1 GiB.

    Args:
      wanted: False keeps nothing; so does a folder that cannot be written.
    """
    if not wanted or os.environ.get(CHOSEN):
        return {}
    try:
        root = folder()
        here = root / (platform.node() or "here")
        here.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
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
    """Where compiled programs are kept: `flax_attn/xla` in the user's cache folder."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "flax_attn" / "xla"


def prune(root: Path, largest: int = LARGEST) -> None:
    """Deletes the files of a folder that were not used for longest, until the rest is small enough.

    Args:
      root: the folder, which holds nothing else.
      largest: bytes that may stay.
    """
    files = []
    for path in root.rglob("*"):
        try:
            facts = path.stat()
        except OSError:  # another command has just deleted it
            continue
        if path.is_file():
            files.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    left = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if left <= largest:
            return
        left -= size
        path.unlink(missing_ok=True)
