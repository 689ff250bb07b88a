"""The table of served model types in docs/models.md: layers, masks, worst error and date.

`python -m parity_tests.core.families.page --write` proves every type and renews it; the proofs that
are made already are kept in a file that it is given, a line each.
"""

import argparse
import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flax import nnx

from flax_attn import CAUSAL, FULL, LongformerAttention, WindowAttention, families
from flax_attn._internal.markdown import fill, table, text_between
from flax_attn.families import ALIASES
from flax_attn.layers._recurrent import Recurrent
from parity_tests.families import prove, prove_part
from parity_tests.families.configs import CONFIGS, Small
from parity_tests.families.parts import PARTS, Part

from .aliases import ROOT

PAGE = ROOT / "docs" / "models.md"
MARKS = text_between("<!-- served -->", "<!-- end of served -->")
HEAD = ("type", "layers", "they see", "worst error", "proven on")


def smalls(name: str) -> list[Small | Part]:
    """The small configs that prove a model type: all of a family, of an alias one for each part."""
    family = ALIASES.get(name, name)
    of = [small for small in (*CONFIGS, *PARTS) if small.name == family]
    if name == family:
        return of
    first = {getattr(small, "part", ""): small for small in reversed(of)}
    return [replace(small, alias=name) for small in first.values()]


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
    for small in smalls(name):
        layer = layer_of(small)
        layers[type(layer).__name__] = None
        seen[sight(layer)] = None
        proof = prove(small) if isinstance(small, Small) else prove_part(small)
        assert proof.report.ok, str(proof.report)
        errors.append(proof.report.worst("float64", "output", "gradient") or 0.0)
    today = datetime.date.today().isoformat()
    return name, ", ".join(layers), ", ".join(seen), f"{max(errors):.0e}", today


def rows(kept: Path) -> Iterator[tuple[str, ...]]:
    """The rows of all types; those in the file are not proven again, the others are added to it."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    known = {line.split("|")[0]: tuple(line.split("|")) for line in lines}
    for name in families.TYPES:
        if name not in known:
            known[name] = row(name)
            with kept.open("a") as file:
                file.write("|".join(known[name]) + "\n")
        yield known[name]


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--write", required=True, type=Path, help="the file of proofs made already")
    made = table(HEAD, list(rows(asked.parse_args().write)))
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, made), "utf-8")
