"""Which results are the same bits, and how far the others differ: the table of docs/contracts.md.

`python -m parity_tests.core.pages.bits` measures six kinds of layer in float32 and bfloat16 and
prints the table; `--write` puts it into the page; `--check` ends with 1 if a row that the page
calls a law is not the same bits, or if another differs by more than twice what the page says.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_attn as fa
from flax_attn import CAUSAL, Rotary, Window
from flax_attn._internal.markdown import cells, fill, table, text_between

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "contracts.md"
MARKS = text_between("<!-- bits -->", "<!-- end of bits -->")
D, T, HALF, LENGTH = 64, 1_100, 550, 1_000
LAYERS: dict[str, Callable[..., Any]] = {
    "grouped heads": partial(fa.GroupedQueryAttention, D, 8, 2, 16, rotary=Rotary()),
    "a window": partial(fa.GroupedQueryAttention, D, 4, 4, 16, mask=CAUSAL & Window(255, 0)),
    "latent": partial(fa.LatentAttention, D, 4, 32, 16, 8, 16),
    "differential": partial(fa.DifferentialAttention, D, 8, 4, 16, 1, rotary=Rotary()),
    "gated delta": partial(fa.GatedDeltaAttention, D, 4, 16, 16),
    "Mamba 2": partial(fa.Mamba2, D, 4, 16, 16),
}
DTYPES = ("float32", "bfloat16")
SAME = "same"
Pair = tuple[Any, Any]


def run(layer: nnx.Module, x: jax.Array, **more: Any) -> np.ndarray:
    """The output of a compiled call, in float64."""
    call = nnx.jit(lambda layer, x, more: layer(x, **more))
    return np.asarray(call(layer, x, more)).astype("float64")


def cached(layer: Any, *parts: jax.Array) -> np.ndarray:
    """The outputs of calls with a cache, one after another."""
    call = nnx.jit(lambda layer, x, cache: layer(x, cache=cache))
    cache, outs = layer.init_cache(1, T, dtype=parts[0].dtype), []
    for x in parts:
        out, cache = call(layer, x, cache)
        outs.append(np.asarray(out).astype("float64"))
    return np.concatenate(outs, axis=1)


def other_rows(layer: nnx.Module, x: jax.Array) -> Pair:
    noise = jax.random.normal(jax.random.key(7), x.shape, x.dtype)
    batches = (jnp.concatenate([x, y]) for y in (noise, 30 * noise))
    one, two = (run(layer, batch)[:1] for batch in batches)
    return one, two


def loops(layer: nnx.Module, x: jax.Array) -> Iterator[Pair]:
    """Four rows of 512 tokens: longer ones have one loop, and so has little work."""
    rows = jax.random.normal(jax.random.key(3), (4, 512, D), x.dtype)

    def on(cores: int) -> np.ndarray:
        with mock.patch("flax_attn.backends.blockwise.plan.cores", lambda: cores):
            return run(layer, rows)

    one = on(1)
    yield from ((one, on(count)) for count in (2, 4))


def again(layer: nnx.Module, x: jax.Array) -> Pair:
    return run(layer, x), run(layer, x)


def step(layer: nnx.Module, x: jax.Array) -> Pair:
    return run(layer, x)[:, -1:], cached(layer, x[:, :-1], x[:, -1:])[:, -1:]


def padding(layer: nnx.Module, x: jax.Array) -> Pair:
    valid = jnp.arange(T)[None] < LENGTH
    return run(layer, x[:, :LENGTH]), run(layer, x, valid=valid)[:, :LENGTH]


def with_cache(layer: nnx.Module, x: jax.Array) -> Pair:
    return run(layer, x), cached(layer, x)


def halves(layer: nnx.Module, x: jax.Array) -> Pair:
    return cached(layer, x), cached(layer, x[:, :HALF], x[:, HALF:])


LAWS = {
    "whatever the batch's other rows hold": other_rows,
    "in 1, 2 or 4 loops": loops,
    "on a second run": again,
}
OTHERS = {
    "a step of decoding, and its row of the prefill": step,
    "padded from 1,000 to 1,100 tokens, and not": padding,
    "with a cache, and without": with_cache,
    "the prefill in two halves, and at once": halves,
}
PROCESS = "in another process"


def made(name: str, dtype: str) -> tuple[nnx.Module, jax.Array]:
    layer = LAYERS[name](rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    return layer, jax.random.normal(jax.random.key(1), (1, T, D), dtype)


def cell(pairs: list[Pair], dtype: str) -> str:
    """ "same", or the share of elements that differ and the largest difference.

    The difference is in units in the last place of the largest element of its row.
    """
    share, worst = 0.0, 0.0
    for one, two in pairs:
        differ = one != two
        share = max(share, float(differ.mean()))
        ulp = float(jnp.finfo(dtype).eps) * np.abs(one).max(axis=-1, keepdims=True)
        worst = max(worst, float((np.abs(one - two) / ulp).max()))
    return f"{100 * share:.0f} %, {worst:.1f}" if share else SAME


def measured(name: str, dtype: str) -> dict[str, str]:
    """All rows of a layer in a dtype, but that of another process."""
    layer, x = made(name, dtype)
    rows = {}
    for what, compare in (*LAWS.items(), *OTHERS.items()):
        result = compare(layer, x)
        rows[what] = cell([result] if isinstance(result, tuple) else list(result), dtype)
    return rows


def digest(name: str, dtype: str) -> str:
    """Of the output's bits."""
    return hashlib.sha256(run(*made(name, dtype)).tobytes()).hexdigest()


def whole() -> list[list[str]]:
    """All rows of the table: what, dtype, and a cell for each layer."""
    columns = {(name, dtype): measured(name, dtype) for name in LAYERS for dtype in DTYPES}
    mine, theirs = digests(), digests_elsewhere()
    for at in columns:
        columns[at][PROCESS] = SAME if mine[at] == theirs[at] else "other bits"
    return [
        [what, dtype, *(columns[name, dtype][what] for name in LAYERS)]
        for what in (*LAWS, PROCESS, *OTHERS)
        for dtype in DTYPES
    ]


def digests() -> dict[tuple[str, str], str]:
    return {(name, dtype): digest(name, dtype) for name in LAYERS for dtype in DTYPES}


def digests_elsewhere() -> dict[tuple[str, str], str]:
    command = [sys.executable, "-m", "parity_tests.core.pages.bits", "--digests"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True, env=os.environ).splitlines()
    return {(name, dtype): value for name, dtype, value in (x.split("|") for x in lines)}


def faults(rows: list[list[str]], page: list[list[str]]) -> Iterator[str]:
    """What the page says and these rows do not hold."""
    said = {(what, dtype): rest for what, dtype, *rest in page}
    for what, dtype, *rest in rows:
        for layer, now, before in zip(LAYERS, rest, said[what, dtype], strict=True):
            if what in (*LAWS, PROCESS) and now != SAME:
                yield f"{what}, {layer}, {dtype}: {now}"
            elif now != SAME and size_of(now) > 2 * max(size_of(before), 1.0):
                yield f"{what}, {layer}, {dtype}: {now}, and the page says {before}"


def size_of(text: str) -> float:
    found = re.search(r"([\d.]+)$", text)
    return float(found[1]) if found else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.core.pages.bits")
    for name in ("--write", "--check", "--digests"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    if given.digests:
        print(*("|".join((*at, value)) for at, value in digests().items()), sep="\n")
        return 0
    rows = whole()
    text = table(["the same bits?", "dtype", *LAYERS], rows)
    print(text)
    page = PAGE.read_text("utf-8")
    if given.write:
        PAGE.write_text(fill(page, MARKS, text), "utf-8")
    wrong = list(faults(rows, cells(MARKS.search(page)["table"])[1:])) if given.check else []
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
