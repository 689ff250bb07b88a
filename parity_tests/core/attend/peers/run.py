"""How an input of another project is run through `attend` and judged; the names of the scores."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import flax_attn as fa
from flax_attn.parity import judge
from parity_tests.core.attend.peers import oracle

# One dialect for all files here, and one place to follow a change of names.
MaskFn, ScoreFn = fa.MaskFn, fa.ScoreFn
Softcap, Alibi, Additive = fa.Softcap, fa.Alibi, fa.Additive

BACKENDS = ("reference", "blockwise")
DTYPES = ("float64", "float32", "bfloat16")
GIVEN = ("out", "lse")


def rounded(tree, dtype):
    """All floating arrays rounded to `dtype`, as float64; others as they are."""

    def one(x):
        x = np.asarray(x)
        if not np.issubdtype(x.dtype, np.floating):
            return x
        with np.errstate(over="ignore"):
            return x.astype(jnp.dtype(dtype)).astype(np.float64)

    return jax.tree.map(one, tree)


@cache
def program(rules, backend):
    """Output, lse and the gradients of all that is learnt, compiled once a shape and dtype.

    `rules` makes the arguments of `attend` from all arrays by name.
    """

    def run(learnt, fixed, cotangents):
        def call(learnt):
            q, k, v = (learnt[name] for name in "qkv")
            how = rules({**learnt, **fixed})
            return fa.attend(q, k, v, backend=backend, return_lse=True, **how)

        found, back = jax.vjp(call, learnt)
        (gradients,) = back(
            tuple(c.astype(x.dtype) for c, x in zip(cotangents, found, strict=True))
        )
        return {**dict(zip(GIVEN, found, strict=True)), **gradients}

    return jax.jit(run)


def outcome(rules, backend, dtype, learnt, fixed, cotangents):
    """By name, in numpy arrays of `dtype`; `learnt` and cotangents are rounded to it before."""

    def to_jax(x):
        x = np.asarray(x)
        return jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else None)

    with jax.enable_x64(dtype == "float64"), np.errstate(over="ignore"):
        given = jax.tree.map(to_jax, (learnt, fixed, tuple(cotangents)))
        return jax.tree.map(np.asarray, program(rules, backend)(*given))


def truth(learnt, cotangents, wide=False, **how):
    """The oracle's answer, by numbers wider than float64 if the machine has them."""
    if wide:
        learnt, cotangents = jax.tree.map(np.longdouble, (learnt, tuple(cotangents)))
    with np.errstate(over="ignore"):
        return oracle.attention(learnt, cotangents, **how)


def sizes_of(want, dtype="float64"):
    """What each part is measured against, by name.

    The output against its size, each log-sum-exp against its own, since that of a row whose keys
    are all hidden by huge numbers is huge. A gradient against its own size, or a share of all
    gradients' if it is much smaller than they are. In float32 against the size of all gradients:
    do.v - rowsum(do * o) of a row that looks at one key only is zero by the plain formula, and by
    any that never sees a row as a whole it is a float32's eps.
    """
    parts = {name: np.asarray(x, np.float64) for name, x in want.items()}
    gradients = {name: x for name, x in parts.items() if name not in GIVEN}
    each = [*gradients.values()]
    sizes = {name: judge.gradient_scale(each, x) for name, x in gradients.items()}
    if dtype == "float32":
        sizes = dict.fromkeys(gradients, judge.whole_gradient(each))
    lse = np.where(np.isfinite(parts["lse"]), np.abs(parts["lse"]), 0)
    sizes["lse"] = np.maximum(lse, 1)
    sizes["out"] = judge.whole_gradient([parts["out"]])
    return {name: np.where(np.asarray(size) > 0, size, 1) for name, size in sizes.items()}


def sized(x, size):
    """`x` over its size, or over the size of each element; what is as large has a norm of one."""
    return np.asarray(x, np.float64) / size / np.size(size) ** 0.5


def same(got, want):
    """Asserts one function in float64."""
    assert got.keys() == want.keys()
    for name, size in sizes_of(want).items():
        assert got[name].dtype == np.float64, name
        parts = (sized(x[name], size) for x in (got, want))
        verdict = judge.same_function(*parts, scale=1.0)
        assert verdict.ok, (name, verdict)


def none_worse(samples, dtype):
    """Asserts that over all samples of (got, other, want) every part is as near to the truth.

    The first may be off by about twice what the other is off. Each sample is measured by its own
    size, so that one with small gradients counts as much as one with large ones, and all are judged
    together, since of a single number either way may happen to be nearer.
    """
    sizes = [sizes_of(want, dtype) for _, _, want in samples]
    for name in samples[0][2]:
        rows = []
        for parts, size in zip(samples, sizes, strict=True):
            assert parts[0].keys() == parts[1].keys() == parts[2].keys()
            assert parts[0][name].dtype == parts[1][name].dtype, name
            rows.append([sized(x[name], size[name]) for x in parts])
        got, others, want = (np.stack(x) for x in zip(*rows, strict=True))
        # As if every sample were of size one, whether its truth is or is all zeros.
        verdict = judge.no_worse(got, others, want, dtype, len(samples) ** 0.5)
        assert verdict.ok, (name, verdict)
