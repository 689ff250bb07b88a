"""Writes what derivatives through "autodiff" cost into a page: `python docs/derivative_costs.py`.

The last row is the default's gradient, for comparison. Needs nothing else to run beside it; takes
about two minutes.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp

from flax_attn import CAUSAL, attend
from flax_attn._internal.markdown import fill, table, text_between

PAGE = Path(__file__).with_name("recipes.md")
MARKS = text_between("<!-- derivatives -->", "<!-- end of derivatives -->")
TOKENS, WIDTH = 16384, 64
HEAD = (f"one causal head, {TOKENS:,} tokens", "memory", "seconds", "seconds to compile")


def programs(x, along):
    """By name, each a function of x."""

    def f(x, backend="autodiff"):
        return attend(x, x, x, mask=CAUSAL, backend=backend)

    def loss(x, backend="autodiff"):
        return (f(x, backend) ** 2).sum()

    def changed(x):
        return jax.jvp(f, (x,), (along,))[1]

    return {
        "forward": f,
        "gradient": jax.grad(loss),
        "jvp": changed,
        "gradient of a jvp": jax.grad(lambda x: (changed(x) ** 2).sum()),
        "gradient of a gradient": jax.grad(lambda x: (jax.grad(loss)(x) * along).sum()),
        "gradient, by the default": jax.grad(lambda x: loss(x, "auto")),
    }


def row(name, program, x):
    begun = time.perf_counter()
    compiled = jax.jit(program).lower(x).compile()
    ready = time.perf_counter()
    jax.block_until_ready(compiled(x))
    done = time.perf_counter()
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return [name, f"{memory:.0f} MiB", f"{done - ready:.1f}", f"{ready - begun:.1f}"]


def main():
    x, along = (jax.random.normal(jax.random.key(i), (TOKENS, 1, WIDTH)) for i in range(2))
    assert x.dtype == jnp.float32
    rows = [row(name, program, x) for name, program in programs(x, along).items()]
    text = f"\n{table(HEAD, rows)}\nWidth {WIDTH}, float32, on a {jax.default_backend()}.\n"
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, text), "utf-8")


if __name__ == "__main__":
    main()
