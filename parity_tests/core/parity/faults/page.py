"""docs/trial.md, its tables written by what makes them: `... faults --write [TABLE ...]`."""

from collections.abc import Callable
from pathlib import Path

from flax_attn._internal.markdown import fill, text_between

PAGE = Path(__file__).parents[4] / "docs" / "trial.md"


def _planted() -> str:
    from .table import markdown, outcomes

    return markdown(outcomes())


def _strange() -> str:
    from .strange import REWRITES, run_all
    from .strange.table import markdown, verdict

    passed = sum(verdict(rewrite.pair) == "equal" for rewrite in REWRITES)
    told = f"{passed} of {len(REWRITES)} faithful or ill-conditioned pairs beside them are equal."
    return f"{markdown(run_all())}\n\n{told}"


def _ported() -> str:
    from .ported import run_all
    from .ported.table import markdown

    return markdown(run_all())


def _policies() -> str:
    from .policies import markdown

    return markdown()


TABLES: dict[str, Callable[[], str]] = {
    "planted": _planted,
    "strange": _strange,
    "ported": _ported,
    "policies": _policies,
}


def write(names: list[str]) -> None:
    """Makes the named tables, or all of them, anew and puts them into the page.

    Raises:
      ValueError: for a table that there is not, or that the page has no place for.
    """
    for name in names or list(TABLES):
        if name not in TABLES:
            raise ValueError(f"{name!r} is no table of the page: {', '.join(TABLES)}.")
        _put(name)


def _put(name: str) -> None:
    marks = text_between(f"<!-- {name} -->", "<!-- end -->")
    fill(PAGE.read_text("utf-8"), marks, "")  # a table without a place is refused before it is made
    made = f"{TABLES[name]()}\n"
    PAGE.write_text(fill(PAGE.read_text("utf-8"), marks, made), "utf-8")
