"""The way from a layer to the softmax: which functions are entered, in their order, by file.

`python -m parity_tests.core.pages.way --write` renews docs/way.md.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import flax_attn
from flax_attn import GroupedQueryAttention, Rotary
from flax_attn._internal.markdown import table, text_between
from parity_tests.core.pages.pages import write_or_print

ROOT = Path(flax_attn.__file__).parent
PAGE = ROOT.parent / "docs" / "way.md"
MARKS = text_between("<!-- way -->", "<!-- end of way -->")


def calls() -> dict[str, Callable[[], object]]:
    """The calls whose way is counted, traced and not computed: they enter the same functions."""
    layer = GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    rotated = GroupedQueryAttention(12, 6, 3, 4, rotary=Rotary(), rngs=nnx.Rngs(0))
    few, many = jnp.ones((2, 5, 12)), jnp.ones((2, 129, 12))
    valid = jnp.arange(5)[None] < jnp.asarray([[5], [3]])
    short, long = layer.init_cache(2, 8), layer.init_cache(2, 8192)
    one = few[:, :1]
    gradients = nnx.grad(lambda layer, x: layer(x).sum())
    return {
        "the plain formula, T = 5": lambda: jax.eval_shape(lambda: layer(few)),
        "with rotary and padding, T = 5": lambda: jax.eval_shape(lambda: rotated(few, valid=valid)),
        "with a cache, T = 5": lambda: jax.eval_shape(lambda: layer(few, cache=short)),
        "one token on a long cache, T = 1": lambda: jax.eval_shape(lambda: layer(one, cache=long)),
        "in blocks with gradients, T = 129": lambda: nnx.eval_shape(gradients, layer, many),
    }


def way(call: Callable[[], object]) -> dict[str, list[str]]:
    """The named functions of flax_attn that a call enters, by file, both in their order."""
    call()  # what is imported and kept the first time is no part of the way
    entered: dict[tuple[str, str], None] = {}

    def profile(frame, event, arg):
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and ROOT in file.parents and not frame.f_code.co_name.startswith("<"):
            entered.setdefault((str(file.relative_to(ROOT)), name.replace(".<locals>", "")))

    jax.clear_caches()  # so that it is traced
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    files: dict[str, list[str]] = {}
    for file, name in entered:
        files.setdefault(file, []).append(name)
    return files


def page() -> str:
    """The generated part of docs/way.md."""
    text = ""
    for what, call in calls().items():
        files = way(call)
        count = sum(map(len, files.values()))
        text += f"\n## {what[0].upper()}{what[1:]}: {count} functions in {len(files)} files\n\n"
        rows = [(f"`{file}`", ", ".join(f"`{x}`" for x in names)) for file, names in files.items()]
        text += table(("file", "functions, in the order in which they are entered"), rows)
    return text + "\n"


if __name__ == "__main__":
    write_or_print(PAGE, MARKS, page())
