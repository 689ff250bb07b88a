"""Detects files that are not checkpoints, or of another format, by their first bytes."""

from io import BufferedReader
from pathlib import Path

from ..errors import CheckpointError

FIRST = 64  # number of bytes examined
_PAGE = (
    "It is a web page, and not the file that it shows.",
    "Fetch the file itself: where the page's link has /blob/, the file's has /resolve/.",
)
# First bytes -> description of the file, and a hint.
_OTHERS = {
    b"version https://git-lfs": (
        "It is a pointer of git-lfs, which says what the file is and does not hold it.",
        "Run `git lfs pull` in its repository, or fetch the file itself.",
    ),
    b"<!doctype": _PAGE,
    b"<html": _PAGE,
    b"<?xml": _PAGE,
    b"\x1f\x8b": ("It is packed by gzip.", "Unpack it first: `gunzip` does."),
    b"\x28\xb5\x2f\xfd": ("It is packed by zstd.", "Unpack it first: `unzstd` does."),
    b"\xfd7zxz": ("It is packed by xz.", "Unpack it first: `unxz` does."),
    b"gguf": ("It is a GGUF file, whose name must end in .gguf.", ""),
    b"pk\x03\x04": (
        "It is a zip archive.",
        "numpy's must be called .npz; torch's are read by read_torch.",
    ),
    b"\x80\x02": ("It is a pickle, which only read_torch reads.", ""),
}
_OWN_FORMATS = {"GGUF": (b"gguf",), "zip": (b"pk\x03\x04",), "torch": (b"pk\x03\x04", b"\x80\x02")}


def foreign(path: Path, first: bytes, kind: str = "") -> CheckpointError | None:
    """Returns the error to raise for a file with these first bytes; None if it may be valid.

    Args:
      path: path of the file.
      first: its first `FIRST` bytes.
      kind: expected format, "GGUF", "zip" or "torch", whose own first bytes are allowed.
    """
    if not first:
        return CheckpointError(path, None, "It is empty.", "Fetch or save it again.")
    start = first.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    for begins, (what, hint) in _OTHERS.items():
        if start.startswith(begins) and begins not in _OWN_FORMATS.get(kind, ()):
            return CheckpointError(path, None, what, hint)
    return None


def refuse_foreign(path: Path, file: BufferedReader, kind: str = "") -> None:
    """Raises the error of `foreign` for an open file; leaves its position at the start."""
    error = foreign(path, file.read(FIRST), kind)
    if error is not None:
        raise error
    file.seek(0)
