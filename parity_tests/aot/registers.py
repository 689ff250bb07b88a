"""Prints what the kernels for GPUs need of a multiprocessor, compiled for an H200 without one.

    python -m parity_tests.aot.registers [DTYPE]

For 4,096 tokens, 8 query heads, 2 key heads, of each kernel: registers of a thread and spilled
bytes, as NVIDIA's `ptxas` says them of the machine code that XLA makes, kilobytes of shared memory,
and how many blocks fit on a multiprocessor. It needs the extra `aot`, and `ptxas` on the PATH.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as of_jax

from flax_attn import (
    CAUSAL,
    Alibi,
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
from flax_attn.rules import bind_rules, rules_of

from .targets import compiled, lower

T, HEADS = 4096, (8, 2, 2)
WIDTHS = (64, 128)
# Of a multiprocessor of compute capability 9.0.
REGISTERS, THREADS, SHARED, BLOCKS = 65_536, 2_048, 233_472, 32
shape = jax.ShapeDtypeStruct
FUNCTIONS = {
    "mask": MaskFn(lambda b, n, q, k: (q - k) % 3 == 0),
    "score": ScoreFn(lambda x, b, n, q, k: x - 0.01 * jnp.abs(q - k)),
}
SLOPES, TABLE = (shape(x, jnp.float32) for x in ((8,), (32, 8)))
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
    "`CAUSAL`, `Alibi(slopes)`, trained": (
        lambda x: {"mask": CAUSAL, "score": Alibi(x)},
        SLOPES,
    ),
    "`T5Bias(table)`": (lambda x: {"score": T5Bias(jax.lax.stop_gradient(x))}, TABLE),
    "`T5Bias(table)`, trained": (lambda x: {"score": T5Bias(x)}, TABLE),
    "`CAUSAL` and dropout": (lambda: {"mask": CAUSAL, "dropout": Dropout(0.1, jax.random.key(0))},),
    "a boolean array": (lambda x: {"mask": Dense(x)}, shape((1, 1, T, T), bool)),
}
OF_JAX = {"jax's own, none": False, "jax's own, causal": True}
KERNELS = {"attend_forward": "forward", "attend_dq": "dq", "attend_dk_dv": "dk and dv"}


class Needs(NamedTuple):
    """What a kernel needs."""

    registers: int
    spilled: int
    shared: int
    blocks: int
    products: int  # instructions of the tensor cores
    in_tf32: int

    def __str__(self) -> str:
        return f"{self.registers}, {self.spilled}, {self.shared / 1024:.0f}, {self.blocks}"


def attention(make: Any, q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
    """The output of a request."""
    return pallas.attention(q, k, v, bind_rules(q, k, rules_of(**make(*arrays))))[0]


def attention_of_jax(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of `jax.experimental.pallas.ops.gpu.attention`."""
    block_sizes = of_jax.BlockSizes(
        block_q=128,
        block_k=64,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    return of_jax.mha(q, k, v, None, block_sizes=block_sizes, causal=causal)


def both_passes(fn: Callable[..., jax.Array], *args: jax.Array) -> tuple[Any, ...]:
    """An output, and the gradients of all arrays of floating numbers."""
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*changed: jax.Array) -> jax.Array:
        given = dict(zip(floats, changed, strict=True))
        return fn(*(given.get(i, x) for i, x in enumerate(args)))

    o, pull = jax.vjp(of_floats, *(args[i] for i in floats))
    return o, pull(o)


def compile_one(name: str, width: int, dtype: str) -> None:
    """Compiles a request, for XLA to write its machine code where XLA_FLAGS say."""
    heads = HEADS
    if name in OF_JAX:
        fn, arrays, heads = partial(attention_of_jax, OF_JAX[name]), (), (8, 8, 8)
    else:
        make, *arrays = REQUESTS[name]
        fn = partial(attention, make)
    qkv = (shape((1, T, n, width), dtype) for n in heads)
    compiled(lower("h200", partial(both_passes, fn), *qkv, *arrays), "h200")


def needs(name: str, width: int, dtype: str = "bfloat16") -> dict[str, Needs]:
    """What the kernels of a request need, by name, in the order in which they run."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"XLA_FLAGS": f"--xla_dump_to={folder}", "JAX_PLATFORMS": "cpu"}
        flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # which tests ask for elsewhere
        command = [sys.executable, "-m", __spec__.name, "--compile", name, str(width), dtype]  # pyright: ignore
        subprocess.run(command, env={**os.environ, **flags}, check=True, capture_output=True)
        (sequence,) = Path(folder).glob("*.thunk_sequence.txt")
        kernels = re.findall(
            r"kCustomKernel .*\] (\w+) grid.*threads: \[(\d+),.*memory: (\d+)", sequence.read_text()
        )
        code = {
            re.search(r"\.entry (\w+)", text)[1]: (path, text)  # pyright: ignore
            for path in Path(folder).glob("*.ptx")
            if ".entry" in (text := path.read_text())
        }
        # Fusions are XLA's own.
        ours = [x for x in kernels if x[0] in code and not re.match("wrapped|.*fusion", x[0])]
        return {x: _needs(*code[x], int(n), int(m)) for x, n, m in ours}


def _needs(path: Path, code: str, threads: int, shared: int) -> Needs:
    command = ["ptxas", "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (registers,) = map(int, re.findall(r"Used (\d+) registers", text))
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", text))
    by_warp = -(-registers * 32 // 256) * 256  # registers are lent to a warp in such pieces
    fits = REGISTERS // (by_warp * threads // 32), THREADS // threads, BLOCKS
    blocks = min(*fits, SHARED // (shared + 1024))
    counts = (code.count(word) for word in ("wgmma.mma_async", "tf32"))
    return Needs(registers, spilled, shared, blocks, *counts)


def rows(dtype: str = "bfloat16") -> Iterator[tuple[str, ...]]:
    """A row for each request and width, with the kernels of its passes."""
    for name in (*REQUESTS, *(OF_JAX if dtype == "bfloat16" else ())):
        for width in WIDTHS:
            each = needs(name, width, dtype)
            if name in OF_JAX:  # it has one kernel for all gradients
                made = (str(each[kernel]) for kernel in ("mha_forward", "mha_backward"))
                yield name, str(width), *made, "with dq"
            else:
                yield name, str(width), *(str(each[kernel]) for kernel in KERNELS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_one(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        print(table(("mask and score", "H", *KERNELS.values()), rows(*sys.argv[1:])))
