"""Writes the table of trace and compile times into a page: `python docs/compile_times.py`.

Each program is traced and compiled anew, by turns with that of `jax.nn`, and nothing is run. Needs
nothing else to run beside it; takes about five minutes.
"""

import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from flax_attn import CAUSAL, __version__, attend
from flax_attn._internal.markdown import fill, table, text_between

PAGE = Path(__file__).with_name("benchmarks") / "notes.md"
MARKS = text_between("<!-- compile -->", "<!-- end of compile -->")
TOKENS = [2**n for n in range(8, 18)]
ROUNDS, HEADS, WIDTH = 3, 4, 64
FUNCTIONS = {
    "attend": lambda q, k, v: attend(q, k, v, mask=CAUSAL),
    "jax.nn": partial(jax.nn.dot_product_attention, is_causal=True),
    "autodiff": lambda q, k, v: attend(q, k, v, mask=CAUSAL, backend="autodiff"),
}


def both_passes(function):
    return jax.grad(lambda q, k, v: function(q, k, v).sum(), (0, 1, 2))


def seconds(function, tokens):
    """To trace and to compile it, without anything from before."""
    jax.clear_caches()
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.float32)
    begun = time.perf_counter()
    lowered = jax.jit(function).lower(x, x, x)
    traced = time.perf_counter()
    lowered.compile()
    return traced - begun, time.perf_counter() - traced


def row(tokens):
    cells = [f"{tokens:,}"]
    for passes in (lambda function: function, both_passes):
        taken = {name: [] for name in FUNCTIONS}
        for _ in range(ROUNDS):
            for name, function in FUNCTIONS.items():
                taken[name].append(seconds(passes(function), tokens))
        both = {n: [statistics.median(x) for x in zip(*t, strict=True)] for n, t in taken.items()}
        cells += ["{:.2f} + {:.2f}".format(*both["attend"])]
        theirs = sum(both["jax.nn"])
        cells += [f"{sum(both[name]) / theirs:.1f}x" for name in ("attend", "autodiff")]
    return cells


def main():
    columns = ["attend", "over jax.nn", "autodiff over jax.nn"]
    head = ["T", *(f"{kind}: {x}" for kind in ("fwd", "fwd+bwd") for x in columns)]
    rows = []
    for tokens in TOKENS:
        rows.append(row(tokens))
        print(*rows[-1], flush=True)
    versions = f"flax_attn {__version__}, JAX {jax.__version__}, {jax.default_backend()}"
    text = f"\n{table(head, rows)}\n{versions}.\n"
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, text), "utf-8")


if __name__ == "__main__":
    main()
