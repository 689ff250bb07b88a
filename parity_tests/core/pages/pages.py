"""The pages of this project and the code on them, run as a reader would run it."""

import argparse
import ast
import io
import re
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from flax_attn._internal.markdown import fill

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def text_of(name: str) -> str:
    """A page of the checkout; skips the test module where there is none."""
    if not (ROOT / name).exists():
        pytest.skip(f"{name} is not part of an installed package", allow_module_level=True)
    return (ROOT / name).read_text("utf-8")


def write_or_print(path: Path, marks: re.Pattern[str], text: str) -> None:
    """A page with `text` between its marks: written with the option --write, else printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    page = fill(path.read_text("utf-8"), marks, text)
    if parser.parse_args().write:
        path.write_text(page, "utf-8")
    else:
        print(page, end="")


def blocks(text: str, language: str = "python") -> list[str]:
    """The blocks of code in that language, in order."""
    return [block for found, block in BLOCK.findall(text) if found == language]


def sections(text: str) -> dict[str, str]:
    """What stands under each heading."""
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {title: body for title, _, body in (part.partition("\n") for part in parts)}


def run(block: str, name: str, known: dict[str, Any] | None = None) -> str:
    """What the block prints; jax promotes as users have it, and `known` are its globals."""
    heard = io.StringIO()
    known = {"__name__": "page"} if known is None else known
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with redirect_stdout(heard):
            exec(compile(block, name, "exec"), known)
    return heard.getvalue()


def packages(block: str) -> set[str]:
    """The packages that a block imports, and flatbuffers, by which `jax.export` writes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name.partition(".")[0] for name in names}
    return found | ({"flatbuffers"} if "jax.export" in names else set())


def missing(block: str) -> list[str]:
    """Which packages of a block are not installed here."""
    return sorted(filter(_is_missing, packages(block)))


def _is_missing(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is None
    return find_spec(package) is None
