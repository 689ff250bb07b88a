"""The tables of docs/models.md: served types with worst error and date, and types built whole.

    python -m parity_tests.core.families.page           # proves every type (half an hour)
    python -m parity_tests.core.families.page qwen3 glm  # proves these, and keeps the other rows

A row is written as soon as its type is proven, so that a stopped command can go on with the types
that are left: `--before DATE` proves those whose rows are older.
"""

import argparse
import datetime
import textwrap
from pathlib import Path

from flax import nnx

from flax_attn import CAUSAL, FULL, LongformerAttention, WindowAttention, families
from flax_attn._internal.markdown import cells, fill, table, text_between
from flax_attn.families import ALIASES
from flax_attn.families._published import FACTS
from flax_attn.families.models.rows import ROWS
from flax_attn.layers._recurrent import Recurrent
from parity_tests.families import prove, prove_part
from parity_tests.families.configs import Small
from parity_tests.families.facts import smalls
from parity_tests.families.parts import Part

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
MARKS = text_between("<!-- served -->", "<!-- end of served -->")
WHOLE = text_between("<!-- whole -->", "<!-- end of whole -->")
HEAD = ("type", "layers", "they see", "worst error", "proven on")


def first_smalls(name: str) -> list[Small | Part]:
    """The small configs that prove a type: all of a family, of an alias one for each part."""
    every = smalls(name)
    if name not in ALIASES:
        return every
    first = {getattr(small, "part", ""): small for small in reversed(every)}
    return [*first.values()]


def layer_of(small: Small | Part) -> nnx.Module:
    """The layer of a small config, without numbers."""
    part = small.part if isinstance(small, Part) else None
    given = small.spelt("new")
    return nnx.eval_shape(
        lambda: families.attention(given, small.index, part=part, rngs=nnx.Rngs(0))
    )


def sight(layer: nnx.Module) -> str:
    """In a word what a token of a layer sees."""
    mask = getattr(layer, "mask", None)
    if isinstance(layer, WindowAttention | LongformerAttention):
        return "window"
    if mask is None:
        return "state" if isinstance(layer, Recurrent) else "all"
    if mask in (CAUSAL, FULL):
        return "causal" if mask == CAUSAL else "all"
    return "chunks" if "Chunked" in str(mask) else "window"


def row(name: str) -> tuple[str, ...]:
    """What the table says of a model type, which is proven for it."""
    layers, seen, errors = dict[str, None](), dict[str, None](), list[float]()
    for small in first_smalls(name):
        layer = layer_of(small)
        layers[type(layer).__name__] = None
        seen[sight(layer)] = None
        proof = prove(small) if isinstance(small, Small) else prove_part(small)
        assert proof.report.ok, str(proof.report)
        errors.append(proof.report.worst("float64", "output", "gradient") or 0.0)
    today = datetime.date.today().isoformat()
    return name, ", ".join(layers), ", ".join(seen), f"{max(errors):.0e}", today


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """The rows that the page has, by model type."""
    match = MARKS.search(PAGE.read_text("utf-8"))
    assert match is not None
    _, *rows = cells(match["table"])
    return {each[0]: tuple(each) for each in rows}


def whole() -> str:
    """The list of the types that are built whole, by what they take and return."""
    shapes = dict[str, list[str]]()
    for name, body in ROWS.items():
        takes = "tokens `*B T`" if body.patch_bias is None else "images `*B Y X channels`"
        returns = "hidden `*B T D`, pooled " + ("`*B P`" if body.pooler else "None")
        returns = "logits `*B T V`" if body.head else returns
        shapes.setdefault(f"- {takes} -> {returns}", []).append(name)
    lines = (
        f"{shape}: {', '.join(names)}" for shape, names in sorted(shapes.items(), reverse=True)
    )
    return "".join(f"{textwrap.fill(x, 110, subsequent_indent='  ')}\n" for x in lines)


def write(rows: dict[str, tuple[str, ...]]) -> None:
    """Puts both into the page, with a row for each type that is served."""
    made = table(HEAD, [rows[name] for name in families.TYPES if name in rows])
    page = fill(PAGE.read_text("utf-8"), MARKS, made)
    PAGE.write_text(fill(page, WHOLE, whole()), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all by default")
    parser.add_argument("--before", metavar="DATE", help="only types proven before this date")
    options = parser.parse_args()
    if unknown := sorted({*options.types} - {*families.TYPES}):
        parser.error(f"no row of flax_attn/families is for {', '.join(unknown)}.")
    if without := [name for name in options.types if name not in FACTS]:
        parser.error(f"first run python -m parity_tests.families.facts {' '.join(without)}")
    rows = rows_of_page()
    for name in options.types or families.TYPES:
        if options.before is None or name not in rows or rows[name][-1] < options.before:
            rows[name] = row(name)
            write(rows)
            print(*rows[name], sep=" | ", flush=True)
    write(rows)


if __name__ == "__main__":
    main()
