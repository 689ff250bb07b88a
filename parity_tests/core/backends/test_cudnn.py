"""cuDNN's adapter: what it refuses, what it calls, and what it computes with a stand-in kernel."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    Additive,
    Causal,
    Chunked,
    Dense,
    Dropout,
    Lengths,
    MaskFn,
    Prefix,
    Segments,
    Softcap,
    Window,
    attend,
    explain,
    reference,
)
from flax_attn.backends import cudnn
from flax_attn.rules import Rules
from flax_attn.where import assume_platform
from parity_tests.core.backends import flash
from parity_tests.core.backends.flash import check_precision, check_same, normal, outcome
from parity_tests.core.backends.refusal import told
from parity_tests.tables import with_nightly

B, T, S, N, K, H = 2, 11, 13, 6, 3, 8


def arrays(dtype=jnp.bfloat16, T=T, S=S, H=H, h=None):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h or H)
    return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def verdict(name, *given, **rules):
    return next(v for v in explain(*given, **rules) if v.backend == name)


# What it refuses, on a GPU.

KEY, LENGTHS_OF_KEYS = jax.random.key(0), Lengths(np.asarray([9, 4]))
REFUSED = {
    "float32": (dict(dtype=jnp.float32), {}, "needs float16 or bfloat16, since it would round"),
    "odd width": (dict(H=12), {}, "multiple of 8 and at most 128; it is 12"),
    "wide": (dict(H=136), {}, "at most 128; it is 136"),
    "other values": (dict(h=16), {}, "values as wide as keys; they are 16 and 8"),
    "dropout": ({}, dict(dropout=Dropout(0.5, KEY)), "draws other dropout masks"),
    "softcap": ({}, dict(score=Softcap(2.0)), "takes no score; got Softcap"),
    "bias": ({}, dict(score=Additive(np.zeros((T, S)))), "got Additive"),
    "scale": ({}, dict(scale=jnp.asarray(0.3)), "needs scale as a number"),
    "dense": ({}, dict(mask=Dense(np.ones((T, S), bool))), "got Dense"),
    "chunks": ({}, dict(mask=CAUSAL & Chunked(3)), "length masks; got Chunked"),
    "segments": (
        {},
        dict(mask=Segments(q_ids=np.arange(T), kv_ids=np.arange(S))),
        "got Segments",
    ),
    "function": ({}, dict(mask=MaskFn(lambda b, n, q, k: k <= q)), "got MaskFn"),
    "not": ({}, dict(mask=~CAUSAL), "got Not"),
    "padding before fewer keys": ({}, dict(mask=~LENGTHS_OF_KEYS), "as many queries as keys"),
    "padding before, twice": ({}, dict(mask=~LENGTHS_OF_KEYS & ~Prefix(2)), "several ~Lengths"),
    "from the end": ({}, dict(mask=Causal("end")), "this one ends at +2 keys"),
    "window to the right": ({}, dict(mask=Window(2, 1)), "this one ends at +1 keys"),
    "no end": ({}, dict(mask=Window(2, None)), "a window to the left alone, Window(left, 0)"),
    "nothing seen": ({}, dict(mask=CAUSAL & Window(0, 5, offset=3)), "a window to the left alone"),
    "few keys": (dict(T=14), dict(mask=Window(2, 0)), "no more queries than keys; they are 14"),
}


@pytest.mark.nightly(but=["few keys", "from the end", "no end", "other values", "wide"])
@pytest.mark.parametrize("name", REFUSED)
def test_cudnn_refuses_unsupported_requests_by_name(name):
    shapes, rules, words = REFUSED[name]
    given = arrays(**shapes)
    with assume_platform("gpu"):
        found = verdict("cudnn", *given, **rules)
        assert words in str(found) and str(found).startswith("refuses: ")
        with told(NotImplementedError, "'cudnn' cannot serve this request", words):
            attend(*given, backend="cudnn", **rules)


@pytest.mark.nightly
def test_the_refusal_names_the_machine():
    given = arrays()
    assert "needs an NVIDIA GPU; the platform is cpu" in str(verdict("cudnn", *given))
    with assume_platform("gpu", (7, 5)):
        assert "capability 8.0 or later; this one has 7.5" in str(verdict("cudnn", *given))
    with assume_platform("gpu", (9, 0)):
        assert verdict("cudnn", *arrays(H=256)).refusal is None
        assert "at most 256; it is 264" in str(verdict("cudnn", *arrays(H=264)))
    with told(ValueError, "'cpu', 'gpu' or 'tpu'; got 'cuda'"):
        assume_platform("cuda")


def test_the_refusal_names_another_version_of_jax(monkeypatch):
    monkeypatch.setattr(cudnn, "REQUIRED_NAMES", ("gone",))
    with assume_platform("gpu"):
        assert f"this version of jax, {jax.__version__}" in str(verdict("cudnn", *arrays()))


# What it calls: lowered for a GPU, without one.

LENGTHS = Lengths(np.asarray([9, 4]), q=np.asarray([11, 7]))
CALLS = {
    "full": (FULL, "NO_MASK", 0),
    "causal": (CAUSAL, "CAUSAL", 0),
    "window": (Window(4, 0), "CAUSAL", 5),
    "causal window": (CAUSAL & Window(4, None), "CAUSAL", 5),
    "self alone": (Window(0, 0), "CAUSAL", 1),
    "lengths": (LENGTHS, "PADDING", 0),
    "prefix": (Prefix(7), "PADDING", 0),
    "all": (CAUSAL & LENGTHS & Window(4, 0), "PADDING_CAUSAL", 5),
}


def calls(wanted=("o", "lse"), **rules):
    """The custom calls of forward and backward pass: name, mask, window, scale."""
    q, k, v = arrays()

    def both(q, k, v):
        def f(q, k, v):
            o, lse = attend(q, k, v, backend="cudnn", return_lse=True, **rules)
            return [{"o": o, "lse": lse}[name] for name in wanted]

        out, back = jax.vjp(f, q, k, v)
        return out, *back(out)

    with assume_platform("gpu"):
        text = jax.jit(both).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@__cudnn\$(\w+)\(.*?backend_config = \"(.*?)\", ", text)
    keys = ("mask_type", "sliding_window_length", "fmha_scale")
    return [
        (name, *(re.search(rf"{key}\W+(?:22: \W*(?:22)?)?([\w.]+)", said)[1] for key in keys))
        for name, said in ((name, said.replace("\\22", '"')) for name, said in found)
    ]


@pytest.mark.nightly(but=["all", "causal", "prefix"])
@pytest.mark.parametrize("name", CALLS)
def test_the_mask_reaches_the_kernel(name):
    mask, kind, window = CALLS[name]
    found = calls(("o",), mask=mask, scale=0.25)
    says = (kind, str(window), "0.25")
    assert found == [("fmhaSoftmax", *says), ("fmhaSoftmaxBackward", *says)]


def test_a_second_backward_call_is_made_for_the_lse_alone():
    sinks = jnp.zeros(N)
    assert [name for name, *_ in calls(("o",), sinks=sinks)].count("fmhaSoftmaxBackward") == 1
    assert [name for name, *_ in calls()].count("fmhaSoftmaxBackward") == 2


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None)], ids=str)
def test_an_axis_of_some_arrays_is_mapped(axes):
    """By this library, since the rule of jax fails: here lengths have no such axis."""
    wide = [jnp.zeros((3, *x.shape), x.dtype) for x in arrays()]
    given = [x if axis == 0 else x[0] for x, axis in zip(wide, axes, strict=True)]

    def both(q, k, v):
        o, back = jax.vjp(partial(attend, mask=LENGTHS, backend="cudnn"), q, k, v)
        return back(o)

    with assume_platform("gpu"):
        lowered = jax.jit(jax.vmap(both, axes)).trace(*given).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__cudnn$") == 2
    assert [x.shape for x in lowered.out_info] == [x.shape for x in wide]


def test_auto_chooses_cudnn_on_its_devices():
    given = [jnp.zeros((1, 512, N, H), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    with assume_platform("gpu"):
        assert explain(*(given[0],) * 3, mask=CAUSAL, sinks=jnp.zeros(N)).chosen == "cudnn"
        assert explain(*(given[1],) * 3, mask=CAUSAL).chosen == "blockwise"
    assert explain(*(given[0],) * 3, mask=CAUSAL).chosen == "blockwise"


# What it computes, with a stand-in for the kernel.


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(cudnn.Cudnn, "_call", flash.cudnn_call)
    with jax.enable_x64(True):
        yield


COMPUTED = {name: mask for name, (mask, *_) in CALLS.items()} | {
    "nothing": Lengths(np.asarray([0, 13]), q=np.asarray([11, 0])),
    "causal of few keys": CAUSAL & Lengths(np.asarray([3, 13])),
}


WANTED = [(True, False), (False, True), (True, True)]  # the output, the lse
PAIRS = [(name, WANTED[i % 3]) for i, name in enumerate(COMPUTED)]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "wanted"), [*PAIRS, *(("all", w) for w in WANTED)], ids=str)
def test_cudnn_equals_the_plain_formula(stand_in, name, wanted):
    """Output, lse and gradients for each requested combination, with and without sinks."""
    q, k, v = arrays(jnp.float64)
    sinks = normal(5, N) if len(name) % 2 else None
    rules = Rules(COMPUTED[name], scale=0.4, sinks=sinks)
    want = outcome(reference.forward, q, k, v, rules, wanted)
    check_same(outcome(cudnn.forward, q, k, v, rules, wanted), want)


BEFORE = ~Lengths(np.asarray([3, 0]))
MOVED = {
    "causal": CAUSAL & BEFORE,
    "window": Window(4, 0) & BEFORE & Lengths(np.asarray([9, 13])),
    "all": BEFORE & Prefix(12),
    "no token": CAUSAL & ~Lengths(np.asarray([13, 20])),
}


@pytest.mark.parametrize("name", with_nightly(MOVED, commit=["window"]))
def test_padding_before_the_tokens_is_moved(stand_in, name):
    q, k, v = arrays(jnp.float64, T=S)
    rules = Rules(MOVED[name], sinks=normal(5, N))
    want = outcome(reference.forward, q, k, v, rules)
    with assume_platform("gpu"):
        assert verdict("cudnn", *arrays(T=S), mask=MOVED[name]).refusal is None
    check_same(outcome(cudnn.forward, q, k, v, rules), want)


@pytest.mark.nightly
def test_masked_values_affect_no_output_or_gradient(stand_in):
    q, k, v = arrays(jnp.float64)
    rules = Rules(LENGTHS, sinks=normal(5, N))
    want = outcome(cudnn.forward, q, k, v, rules)
    q = q.at[1, 7:].set(jnp.nan)
    k, v = (x.at[0, 9:].set(jnp.nan).at[1, 4:].set(jnp.inf) for x in (k, v))
    check_same(outcome(cudnn.forward, q, k, v, rules), want)
    assert all(np.isfinite(x).all() for x in (want[0], *want[2:]))


@pytest.mark.nightly
def test_cudnn_under_vmap_equals_a_batch(stand_in):
    q, k, v = arrays(jnp.float64)
    rules = Rules(CAUSAL).bind(flash.sizes_of(q, k), H)
    want = cudnn.forward(q, k, v, rules)[0]
    vmap_leading = jax.vmap(lambda *x: cudnn.forward(*(y[None] for y in x), rules)[0][0])(q, k, v)
    check_same([np.asarray(vmap_leading)], [np.asarray(want)])


# On a GPU, where there is one.


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", COMPUTED)
def test_cudnn_on_a_gpu_equals_the_plain_formula(name, dtype):
    q, k, v = arrays(dtype, H=64)
    for sinks in (None, normal(5, N).astype(jnp.float32)):
        check_precision(cudnn.forward, q, k, v, Rules(COMPUTED[name], sinks=sinks))
