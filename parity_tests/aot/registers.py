"""Prints what the kernel for GPUs needs of a multiprocessor, compiled for an H200 without one.

    python -m parity_tests.aot.registers

For 4,096 tokens, 8 query heads, 2 key heads, in bfloat16: registers of a thread and spilled bytes,
as NVIDIA's `ptxas` says them of the machine code that XLA makes, and instructions of the tensor
cores. It needs the extra `aot`, and `ptxas` on the PATH.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn import (
    CAUSAL,
    Dense,
    Dropout,
    MaskFn,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    Window,
)
from flax_attn._internal.markdown import table
from flax_attn.backends import pallas
from flax_attn.request import bind_rules, rules_of

from .targets import compiled, lower

T, HEADS = 4096, (8, 2, 2)
shape = jax.ShapeDtypeStruct
FUNCTIONS = {
    "mask": MaskFn(lambda b, n, q, k: (q - k) % 3 == 0),
    "score": ScoreFn(lambda x, b, n, q, k: x - 0.01 * jnp.abs(q - k)),
}
REQUESTS: Mapping[str, tuple[Any, ...]] = {
    "none": (lambda: {},),
    "`CAUSAL`": (lambda: {"mask": CAUSAL},),
    "`CAUSAL & Window(60, 0)`, `Softcap(5.0)`": (
        lambda: {"mask": CAUSAL & Window(60, 0), "score": Softcap(5.0)},
    ),
    "a `MaskFn` and a `ScoreFn`": (lambda: FUNCTIONS,),
    "`Segments(ids) & CAUSAL`": (
        lambda ids: {"mask": Segments(ids) & CAUSAL},
        shape((1, T), jnp.int32),
    ),
    "`T5Bias(table)`": (lambda x: {"score": T5Bias(x)}, shape((32, 8), jnp.float32)),
    "`CAUSAL` and dropout": (lambda: {"mask": CAUSAL, "dropout": Dropout(0.1, jax.random.key(0))},),
    "a boolean array": (lambda x: {"mask": Dense(x)}, shape((1, 1, T, T), bool)),
}


def outcome(make: Any, q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> Any:
    """The output and the statistics of a request."""
    return pallas.attention(q, k, v, bind_rules(q, k, rules_of(**make(*arrays))))


def compile_one(name: str, width: int) -> None:
    """Compiles a request, for XLA to write its machine code where XLA_FLAGS say."""
    make, *arrays = REQUESTS[name]
    qkv = (shape((1, T, heads, width), jnp.bfloat16) for heads in HEADS)
    compiled(lower("h200", partial(outcome, make), *qkv, *arrays), "h200")


def needs(name: str, width: int) -> str:
    """Registers, spilled bytes and instructions of tensor cores of a request's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"XLA_FLAGS": f"--xla_dump_to={folder}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", __spec__.name, name, str(width)]  # pyright: ignore
        subprocess.run(command, env={**os.environ, **flags}, check=True, capture_output=True)
        (kernel,) = (x for x in Path(folder).glob("*.ptx") if "wgmma" in x.read_text())
        command = ["ptxas", "-v", "-arch=sm_90a", str(kernel), "-o", os.devnull]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        (registers,) = re.findall(r"Used (\d+) registers", text)
        (spilled,) = re.findall(r"(\d+) bytes spill stores", text)
        products = kernel.read_text().count("wgmma.mma_async")
    return f"{registers}, {spilled}, {products}"


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each request."""
    for name in REQUESTS:
        yield name, needs(name, 64), needs(name, 128)


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_one(sys.argv[1], int(sys.argv[2]))
    else:
        print(table(("mask and score", "H 64", "H 128"), rows()))
