"""Argument parser that suggests similar commands or options, and checks of output paths."""

import argparse
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from .._internal.nearest import did_you_mean
from .wrap import wrapped

# Packages that every command needs; their distributions have the same names.
REQUIRED = ("einops", "flax", "jax", "jaxtyping", "numpy", "optax", "rich")
VALUE = re.compile(r"^argument (--\S+?)(?:/\S+)?: takes")  # of a `type` that names its option so
CHOICE = re.compile(r"argument command: invalid choice: '([^']*)'")


class Help(argparse.HelpFormatter):
    """Wraps help at spaces, never inside a name such as `--no-cache`."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width).split("\n")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(wrapped(" ".join(text.split()), width - len(indent)), indent)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one sentence, with the nearest valid name.

    Attributes:
      commands: the parsers of the commands, by name; empty for a command's own parser.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": Help, **kwargs})
        self.commands: Mapping[str, argparse.ArgumentParser] = {}

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses as argparse does, but reports unknown arguments for the chosen command."""
        options, unread = self.parse_known_args(args, namespace)
        if unread:
            parser = self.commands.get(getattr(options, "command", ""), self)
            parser.error(f"unrecognized arguments: {' '.join(unread)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Prints one sentence to stderr and exits with code 2."""
        message = VALUE.sub(r"\1 takes", message)
        choice = CHOICE.match(message)
        if choice is not None:
            suggestion = did_you_mean(choice[1], self.commands, "the commands are")
            message = f"there is no command {choice[1]!r}: {suggestion}"
        elif message.startswith("unrecognized arguments: -"):
            option = message.split()[2].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            suggestion = did_you_mean(option, known, "its options are")
            message = f"there is no option {option}: {suggestion}"
        elif message.endswith("are required: command"):
            message = f"which command? It takes {', '.join(self.commands)}."
        columns = shutil.get_terminal_size().columns
        self.exit(2, wrapped(f"{self.prog}: {message}", columns) + "\n")


class Version(argparse.Action):
    """Prints the version; looks it up only when requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"flax-attn {version('flax-attn')}")
        parser.exit()


def missing() -> str:
    """One sentence listing required packages that are not installed, or ""."""
    names = " ".join(name for name in REQUIRED if find_spec(name) is None)
    return f"flax-attn needs packages that are not installed: pip install {names}" if names else ""


def check_file(option: str, name: str) -> None:
    """Checks in advance that a file can be written.

    Tries it, since permissions are not conclusive: opens the file without changing it, or creates
    and removes a temporary file in its folder.

    Raises:
      ValueError: for a folder, a file in a missing folder, or a file that cannot be written.
    """
    path = Path(name)
    if path.is_dir() or not name:
        raise ValueError(f"{option} takes a file to write; {name!r} is a folder.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {name}: there is no folder {path.parent} to write into.")
    if not path.exists():
        check_folder(option, path.parent, name)
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise _unwritable(option, name, error) from error


def check_folder(option: str, folder: Path, name: str = "") -> None:
    """Checks that files can be created in an existing folder; `name` is used in the error.

    Raises:
      ValueError: if no file can be created there.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, name or str(folder), error) from error


def made_folder(option: str, name: str) -> Path:
    """Creates a folder if needed and returns it.

    Raises:
      ValueError: if it cannot be created.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{option} {name} cannot be made a folder: {reason}.") from error
    return folder


def _unwritable(option: str, name: str, error: OSError) -> ValueError:
    reason = (error.strerror or str(error)).lower()
    return ValueError(f"{option} {name} cannot be written: {reason}.")
