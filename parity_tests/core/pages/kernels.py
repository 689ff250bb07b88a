"""Which backend `attend` takes for which request on which device, and why others refuse.

`python -m parity_tests.core.pages.kernels --write` renews docs/kernels.md. `explain` answers for
machines that are assumed and for shapes alone, so nothing is computed.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import flax_attn
from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Causal,
    Chunked,
    Documents,
    Dropout,
    Lengths,
    MaskFn,
    Prefix,
    ScoreFn,
    Segments,
    Softcap,
    Window,
)
from flax_attn._internal.markdown import table, text_between
from flax_attn.backends import tokamax
from flax_attn.backends.choice import Explanation

from .pages import write_or_print

PAGE = Path(flax_attn.__file__).parents[1] / "docs" / "kernels.md"
MARKS = text_between("<!-- kernels -->", "<!-- end of kernels -->")
LENGTH, STORED, HEADS, KEY_HEADS, WIDTH = 4096, 8192, 16, 4, 128
H100 = "H100, H200"
DEVICES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "CPU": ("cpu", None),
    "A100": ("gpu", (8, 0)),
    H100: ("gpu", (9, 0)),
    "TPU": ("tpu", None),
}
KERNELS = {"cudnn": H100, "tokamax": H100, "splash": "TPU"}  # and the device that is asked about


class Request(NamedTuple):
    """What is asked of `attend`, in words, as code, and as its arguments.

    Attributes:
      words: what it is called.
      code: the code that asks for it.
      rules: what `explain` takes by name.
      T, S: the numbers of queries and keys.
      H, h: the widths of keys and values.
      dtype: of q, k and v.
    """

    words: str
    code: str
    rules: dict[str, Any]
    T: int = LENGTH
    S: int = LENGTH
    H: int = WIDTH
    h: int = WIDTH
    dtype: Any = jnp.bfloat16


def requests() -> list[Request]:
    """All rows, in their order."""
    return [*_masks(), *_packed(), *_scores(), *_others(), *_shapes()]


def _shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that is known when the program runs, as under jit."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def _masks() -> list[Request]:
    n, early = Lengths(_shape(1)), LENGTH // 4
    seen = _shape(LENGTH, LENGTH, dtype=jnp.bool_)
    return [
        Request("no mask", "", {}),
        Request("causal", "CAUSAL", {"mask": CAUSAL}),
        Request(
            "causal, the last queries of longer keys",
            'Causal("end")',
            {"mask": Causal("end")},
            early,
        ),
        Request("window to the left", "Window(1023, 0)", {"mask": Window(1023, 0)}),
        Request("window to both sides", "Window(512, 512)", {"mask": Window(512, 512)}),
        Request("causal in chunks", "CAUSAL & Chunked(1024)", {"mask": CAUSAL & Chunked(1024)}),
        Request("prefix LM", "CAUSAL | Prefix(100)", {"mask": CAUSAL | Prefix(100)}),
        Request("padding", "Lengths(n)", {"mask": n}),
        Request("causal with padding", "CAUSAL & Lengths(n)", {"mask": CAUSAL & n}),
        Request("causal, padding first", "CAUSAL & ~Lengths(n)", {"mask": CAUSAL & ~n}),
        Request("a boolean array", "mask=array", {"mask": seen}),
        Request("a mask function of yours", "MaskFn(fn)", {"mask": MaskFn(_even)}),
    ]


def _packed() -> list[Request]:
    """Packed documents; `Documents` looks at its lengths, so these are numbers."""
    lengths, ids = Documents([LENGTH // 8] * 8), Segments(_shape(1, LENGTH))
    return [
        Request(
            "packed documents, by lengths",
            "CAUSAL & Documents(lengths)",
            {"mask": CAUSAL & lengths},
        ),
        Request("packed documents, by ids", "CAUSAL & Segments(ids)", {"mask": CAUSAL & ids}),
    ]


def _scores() -> list[Request]:
    bias = Additive(_shape(HEADS, LENGTH, LENGTH, dtype=jnp.float32))
    scores = {
        ("capped logits", "Softcap(50.0)"): Softcap(50.0),
        ("ALiBi", "Alibi(slopes)"): Alibi(_shape(HEADS, dtype=jnp.float32)),
        ("an additive bias", "Additive(x)"): bias,
        ("a score function of yours", "ScoreFn(fn)"): ScoreFn(_twice),
    }
    return [
        Request(words, code, {"mask": CAUSAL, "score": score})
        for (words, code), score in scores.items()
    ]


def _others() -> list[Request]:
    sinks, drop = _shape(HEADS, dtype=jnp.float32), Dropout(0.1, jax.random.key(0))
    return [
        Request("sinks", "sinks=x", {"mask": CAUSAL, "sinks": sinks}),
        Request("dropout", "Dropout(0.1, key)", {"mask": CAUSAL, "dropout": drop}),
    ]


def _shapes() -> list[Request]:
    causal: dict[str, Any] = {"mask": CAUSAL}
    numbers = {"q_positions": _shape(1, 1), "kv_positions": _shape(1, STORED)}
    return [
        Request("float32 inputs", "q.astype(float32)", causal, dtype=jnp.float32),
        Request("heads 256 wide", "H = h = 256", causal, H=256, h=256),
        Request("keys 96 wide, values 64", "H = 96, h = 64", causal, H=96, h=64),
        Request(
            "positions of queries and keys",
            "CAUSAL, q_positions=, kv_positions=",
            causal | numbers,
            *(1, STORED),
        ),
        Request(
            "a step of decoding, as layers with a cache ask for it",
            "T = 1, Lengths(n)",
            {"mask": Lengths(_shape(1))},
            *(1, STORED),
        ),
        Request("128 tokens", "T = S = 128", causal, 128, 128),
        Request("64 tokens", "T = S = 64", causal, 64, 64),
    ]


def _even(b: Any, n: Any, q: Any, k: Any) -> Any:
    return (q + k) % 2 == 0


def _twice(logits: Any, b: Any, n: Any, q: Any, k: Any) -> Any:
    return 2 * logits


@contextmanager
def tokamax_is_there(is_there: bool = True) -> Iterator[None]:
    """As on a machine with tokamax, or without it, whatever is installed on this one."""
    find_spec = importlib.util.find_spec

    def answer(name: str, package: str | None = None) -> Any:
        if name == "tokamax":
            return SimpleNamespace() if is_there else None
        return find_spec(name, package)

    with (
        mock.patch.object(importlib.util, "find_spec", answer),
        mock.patch.object(tokamax, "_of_version", lambda: None),  # it imports the installed one
    ):
        yield


def verdicts(request: Request, device: str) -> Explanation:
    """What `explain` says of a request on one of `DEVICES`, whatever backend is asked for here."""
    arrays = (
        jax.ShapeDtypeStruct((1, *sizes), request.dtype)
        for sizes in (
            (request.T, HEADS, request.H),
            (request.S, KEY_HEADS, request.H),
            (request.S, KEY_HEADS, request.h),
        )
    )
    with (
        flax_attn.assume_platform(*DEVICES[device]),
        flax_attn.use_backend("auto"),
        jax.numpy_rank_promotion("allow"),  # as users have it
    ):
        return flax_attn.explain(*arrays, **request.rules)


def chosen(request: Request, device: str) -> str:
    """The backend that `attend` takes."""
    return verdicts(request, device).chosen or "none"


def said(request: Request, kernel: str) -> str:
    """What a kernel says of a request on the device that it is asked about."""
    (verdict,) = [v for v in verdicts(request, KERNELS[kernel]) if v.backend == kernel]
    if verdict.refusal is not None:
        return verdict.refusal
    return "serves" if verdict.passed_over is None else str(verdict)


def in_code(text: str) -> str:
    """Code in a cell of a table, whose end a bar would be; backticks know no other name for it."""
    if "|" in text:
        return f"<code>{text.replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def matrix() -> str:
    """The table of requests by devices, and which rows need tokamax."""
    with tokamax_is_there():
        rows = [(r, [chosen(r, device) for device in DEVICES]) for r in requests()]
        by_tokamax = [r for r in requests() if chosen(r, H100) == "tokamax"]
    with tokamax_is_there(False):
        others = {chosen(r, H100) for r in by_tokamax}
    assert others == {"blockwise"}, f"the sentence below says blockwise, not {others}"
    cells = [(r.words, in_code(r.code), *(f"`{x}`" for x in names)) for r, names in rows]
    listed = "\n".join(f"- {r.words}" for r in by_tokamax)
    return (
        table(("what you ask for", "in code", *DEVICES), cells)
        + f"\nWithout tokamax, `attend` takes `blockwise` on an {H100.replace(', ', ' or ')} "
        f"in {len(by_tokamax)} of these rows:\n\n{listed}\n"
    )


def reasons() -> str:
    """The table of what the kernels say, of requests that one of them does not serve."""
    with tokamax_is_there():
        rows = [(r.words, *(said(r, kernel) for kernel in KERNELS)) for r in requests()]
    headings = [f"`{kernel}` on {device}" for kernel, device in KERNELS.items()]
    some = [row for row in rows if {*row[1:]} != {"serves"}]
    return table(("what you ask for", *headings), some)


def page() -> str:
    """The generated part of docs/kernels.md."""
    return (
        f"\n## What is taken\n\n{matrix()}\n## Why the others do not serve\n\n"
        "What each kernel says of a request; where all three serve it, the row is left out. "
        "*Passed over*\nmeans that the kernel works if you name it. Reasons name masks by their "
        "classes: `Or` is what `|` makes,\nand `Dense` is a boolean array.\n\n"
        f"{reasons()}\n"
    )


if __name__ == "__main__":
    write_or_print(PAGE, MARKS, page())
