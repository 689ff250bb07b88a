"""The kernel of this library's own, interpreted: any mask, any score, any length and width.

Held against the plain formula in float64, with the blockwise backend's error in the same dtype as
the measure. Blocks are small, so that every case has several of them and a last one that is short.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Chunked,
    Dense,
    Documents,
    Dropout,
    Lengths,
    Mask,
    MaskFn,
    Prefix,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    Window,
    attend,
    frozen,
    reference,
)
from flax_attn.backends import blockwise, pallas
from flax_attn.backends.pallas.contract import ELEMENTWISE
from flax_attn.parity import judge
from flax_attn.rules import bind_rules, rules_of
from flax_attn.where import assume_platform
from parity_tests.requests import runs
from parity_tests.requests.programs import program
from parity_tests.tables import each, with_nightly

B, N, K, T, S = 2, 4, 2, 65, 65
BLOCKS = pallas.Blocks(32, 16, 4, 2)
draw = np.random.RandomState(0)
IDS = draw.randint(0, 3, (B, T))
BIAS = draw.standard_normal((1, N, T, S)).astype("float32")
BY_HEAD, BY_KEY = (jnp.asarray(draw.rand(*shape), "float32") for shape in ((N,), (B, S)))


def learnt(params, x, b, n, q, k):
    """Of arrays that are computed first, by functions with derivatives of their own too."""
    return jnp.tanh(x * jax.nn.relu(params["head"])[n]) + params["key"][b, k]


def every_index(params, x, b, n, q, k):
    """Arrays read by what is one for all, by the query, by the key, by both, and twice."""
    near = params["near"][jnp.clip(q - k, -9, 9) + 9, n]
    scaled = x * params["head"][n] * params["one"] + params["key"][b, k] * params["query"][n, q]
    return scaled + near * params["key"][b, q] + params["head"][n]


@frozen
class EveryOther(Mask):
    """Every second query sees all keys: one range by row, of which the call hides the others."""

    whole: jax.Array

    def __call__(self, b, n, q, k):
        q = jnp.asarray(q)
        late = (q[..., None] >= self.whole.reshape((1,) * q.ndim + (-1,))).any(-1)
        return late & (q % 2 == 0) & (k >= 0)

    def as_runs(self, q):
        return None, None


REQUESTS = {  # what the random programs below do not draw, and one of each kind for a commit
    "a window and a cap": {"mask": CAUSAL & Window(20, 0), "score": Softcap(3.0)},
    "documents of some queries": {
        "mask": Documents(np.asarray([[20, 30], [40, 25]])) & Lengths(q=np.asarray([60, 33]), kv=65)
    },
    "a class of a user": {"mask": EveryOther(jnp.asarray([0, 1, 2]))},
    "segments": {"mask": Segments(q_ids=IDS, kv_ids=draw.randint(0, 3, (B, S)))},
    "documents": {"mask": Documents(np.asarray([[20, 30], [40, 25]]))},
    "an array by head": {"mask": Dense(draw.rand(1, N, T, S) > 0.5), "score": Additive(BIAS)},
    "a function of arrays": {
        "mask": MaskFn(lambda b, n, q, k: jnp.asarray(IDS)[b, q] != k % 3),
        "score": ScoreFn(learnt, {"head": BY_HEAD, "key": BY_KEY}),
    },
    "positions": {
        "mask": CAUSAL & Window(30, 0),
        "score": Alibi(BY_HEAD),
        "q_positions": np.arange(T) * 2,
        "kv_positions": np.arange(S) * 2 + 1,
    },
    "dropout": {"mask": CAUSAL, "dropout": Dropout(0.3, jax.random.key(3))},
}
BY_INDEX = {
    "head": BY_HEAD,
    "one": jnp.asarray(0.7),
    "key": BY_KEY,
    "query": jnp.asarray(draw.standard_normal((N, T)), "bfloat16"),
    "near": jnp.asarray(draw.standard_normal((19, N)), "float32"),
}
COMMIT = ("a window and a cap", "documents", "an array by head", "a function of arrays", "dropout")


@jax.custom_jvp
def straight_through(x):
    """Rounded, with the derivative of what is not."""
    return jnp.floor(x)


straight_through.defjvp(lambda primals, tangents: (jnp.floor(primals[0]), tangents[0]))


def arrays(dtype="float32", T=T, S=S, H=20, h=24):
    draw = np.random.RandomState(7)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    return [jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes]


def results(forward, q, k, v, how, **options):
    """The output and the log-sum-exp, in float64."""
    rules = bind_rules(q, k, rules_of(**how))
    o, stats = forward(q, k, v, rules, **options)
    return [np.asarray(x).astype("float64") for x in (o, stats.lse)]


def check(how, dtype="float32", blocks=BLOCKS, **sizes):
    qkv = arrays(dtype, **sizes)
    with jax.enable_x64(True):
        wide = (x.astype("float64") for x in qkv)
        truth = results(reference.attention, *wide, how)
    got = results(pallas.attention, *qkv, how, blocks=blocks)
    others = results(blockwise.attention, *qkv, how)
    for name, *sides in zip(("output", "lse"), got, others, truth, strict=True):
        verdict = judge.no_worse(*sides, dtype if name == "output" else "float32", zero=True)
        assert verdict.ok, (name, verdict)


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(REQUESTS, commit=COMMIT))
def test_a_kernel_gives_what_the_formula_gives(name):
    check(REQUESTS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("length", with_nightly([1, 63, 65, 129, 160], commit=[1]))
def test_any_length_has_a_last_block_that_is_masked(length):
    check({"mask": CAUSAL | Prefix(3)}, T=length, S=160)
    check({"mask": ~CAUSAL}, T=160, S=length)


@pytest.mark.nightly
@pytest.mark.parametrize("width", with_nightly([8, 48, 80, 96, 112, 192, 256], commit=[48]))
def test_any_width_is_padded_to_a_power_of_two(width):
    check({"mask": CAUSAL}, T=40, S=40, H=width, h=width // 2)


def gradients(backend, how, dtype="float32", T=40):
    """Of q, k, v and the arrays of a score, by cotangents of the output and the log-sum-exp."""
    q, k, v = (x.astype(dtype) for x in arrays(T=T, S=T))
    draw = np.random.RandomState(8)
    do = jnp.asarray(draw.standard_normal((B, T, N, 24)), dtype)
    dlse = jnp.asarray(draw.standard_normal((B, T, N)), dtype)

    def loss(q, k, v, learnt):
        o, lse = attend(q, k, v, **{**how, **learnt}, backend=backend, return_lse=True)
        return (o * do).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum()

    trained = {name: how[name] for name in ("sinks", "score", "scale") if name in how}
    trained = {name: x for name, x in trained.items() if jax.tree.leaves(x)}
    return jax.tree.leaves(jax.grad(loss, range(4))(q, k, v, trained))


PASSES = {
    "functions": {
        "mask": MaskFn(lambda b, n, q, k: (q + n - k) % 3 == 0),
        "score": ScoreFn(lambda x, b, n, q, k: jnp.tanh(x) - 0.1 * jnp.abs(q - k)),
    },
    "a window, a cap and sinks": {
        "mask": CAUSAL & Window(20, 0),
        "score": Softcap(1.0),
        "sinks": BY_HEAD,
    },
    "documents and dropout": {
        "mask": Documents(np.asarray([[20, 15], [30, 5]])),
        "dropout": Dropout(0.3, jax.random.key(3)),
    },
    "arrays of a score": {
        "mask": CAUSAL,
        "score": ScoreFn(learnt, {"head": BY_HEAD, "key": BY_KEY}),
    },
    "buckets": {"mask": CAUSAL, "score": T5Bias(draw.standard_normal((32, N)).astype("float32"))},
    "every index": {"mask": CAUSAL & Window(25, 0), "score": ScoreFn(every_index, BY_INDEX)},
    "an array of all pairs": {"score": Additive(BIAS[..., :40, :40])},
    "its own derivative": {"score": ScoreFn(lambda x, b, n, q, k: straight_through(x))},
    "no derivative": {"score": ScoreFn(lambda x, *at: x + jax.lax.stop_gradient(x) ** 2)},
    "a scale": {"scale": jnp.asarray(0.3)},
    "slopes": {"mask": Chunked(16) | Prefix(5), "score": Alibi(BY_HEAD)},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", with_nightly(PASSES, commit=["documents and dropout", "arrays of a score"])
)
def test_gradients_are_those_of_the_formula(name):
    got, others = (gradients(backend, PASSES[name]) for backend in ("pallas", "blockwise"))
    with jax.enable_x64(True):
        truth = gradients("reference", PASSES[name], "float64")
    for sides in zip(got, others, truth, strict=True):
        verdict = judge.no_worse(*(np.asarray(x).astype("float64") for x in sides), "float32")
        assert verdict.ok, verdict


BY_THE_KERNEL = ("functions", "arrays of a score", "buckets", "every index", "slopes", "a scale")
BY_BLOCKWISE = ("an array of all pairs", "its own derivative")


@pytest.mark.nightly(but=["an array of all pairs", "buckets"])
@pytest.mark.parametrize("name", [*BY_THE_KERNEL, *BY_BLOCKWISE])
def test_which_gradients_are_those_of_blockwise(name, monkeypatch):
    """Each request is only traced: those that the page assigns to the kernel, and others."""
    calls = []
    passed = blockwise.backward_pass
    monkeypatch.setattr(blockwise, "backward_pass", lambda *x: calls.append(x) or passed(*x))
    jax.clear_caches()  # or what was traced before is not traced again
    jax.eval_shape(lambda: gradients("pallas", PASSES[name]))
    assert bool(calls) == (name in BY_BLOCKWISE)


@pytest.mark.nightly
def test_two_runs_give_the_same_bits():
    for a, b in zip(*(gradients("pallas", PASSES["slopes"]) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.nightly
def test_padding_may_hold_nan():
    q, k, v = arrays()
    k, v = (x.at[:, 50:].set(jnp.nan) for x in (k, v))
    how = {"mask": Lengths(50)}
    o, lse = results(pallas.attention, q, k, v, how, blocks=BLOCKS)
    assert np.isfinite(o).all() and np.isfinite(lse).all()
    hidden = results(pallas.attention, q, k, v, {"mask": Lengths(0)}, blocks=BLOCKS)
    assert not hidden[0].any() and (hidden[1] == -np.inf).all()


@pytest.mark.nightly
def test_fully_masked_queries_may_hold_nan():
    """Those beyond the last one, which a block has too, see no key either."""
    q, k, v = (x.at[:, -3:].set(jnp.nan) for x in arrays(T=45, S=45))

    def loss(q, k, v):
        return attend(q, k, v, mask=CAUSAL & Lengths(q=42, kv=42), backend="pallas").sum()

    for gradient in jax.grad(loss, range(3))(q, k, v):
        assert np.isfinite(gradient).all()


@frozen
class Near(Mask):
    """A window of a user, whose ranges are numbers of Python: they need a static mask."""

    reach: int
    is_static = True

    def __call__(self, b, n, q, k):
        return abs(q - k) <= self.reach

    def key_range(self, b, n, q, sizes):
        return max(q[0] - self.reach, 0), min(q[1] + self.reach, sizes.S)


@pytest.mark.nightly
def test_a_static_mask_may_return_its_ranges_as_python_numbers():
    check({"mask": Near(9)})


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(31_000, 35_000, 500))
def test_random_programs_are_equal_or_refused(first, monkeypatch):
    """Some 150 in all, of which at most three in ten of each fifty seeds are refused."""
    monkeypatch.setattr(runs, "BACKENDS", ("pallas",))
    words = {seed: program(seed).words() for seed in range(first, first + 50)}
    served = [x for x in words if words[x]["dtype"] != "float64" and words[x]["plan"] != "gpu"]
    refused = []
    for seed in served:
        for fault in runs.run(seed, requests=1).faults[:1]:
            assert "cannot serve this request" in fault["note"], (seed, fault)
            refused.append(seed)
    print(f"{len(refused)} of {len(served)} refused")
    assert len(refused) <= 0.3 * len(served)
    jax.clear_caches()


def equations(jaxpr):
    """Every equation of a program, in kernels too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def dots(jaxpr):
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")


def names(jaxpr):
    return (eqn.primitive.name for eqn in equations(jaxpr))


@pytest.mark.nightly
@each("dtype", ["float32", "bfloat16"])
def test_every_product_sets_its_precision(dtype):
    """On Triton a float32 product without one is TF32, which interpretation does not show."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    found = [*dots(program_on_a_gpu(dtype))]
    # Each of three kernels has its loops for blocks that need a mask, none, and again a mask.
    assert len(found) == 3 * (2 + 3 + 4)
    for eqn in found:
        assert eqn.params["preferred_element_type"] == jnp.float32
        assert eqn.params["precision"] == (highest if dtype == "float32" else None)
    with jax.default_matmul_precision("tensorfloat32"):
        fewer = [*dots(program_on_a_gpu(dtype))]
        assert all(eqn.params["precision"] != highest for eqn in fewer)


def program_on_a_gpu(dtype):
    """Both passes, as they would be traced on a GPU."""

    def loss(q, k, v):
        rules = bind_rules(q, k, rules_of(mask=CAUSAL))
        return pallas.attention(q, k, v, rules)[0].sum()

    with assume_platform("gpu", (9, 0)):
        return jax.make_jaxpr(jax.grad(loss, range(3)))(*arrays(dtype)).jaxpr


ONE = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf_inv exp exp2 expm1 floor is_finite"
)
ONE += " log log1p logistic neg rsqrt sign sin sinh sqrt square stop_gradient tan tanh"
OF_FLOATS = {name: getattr(jax.lax, name) for name in ONE.split()}
OF_FLOATS |= {
    "clamp": lambda x: jax.lax.clamp(0.0, x, 1.0),
    "convert_element_type": lambda x: x.astype("bfloat16"),
    "copy": jnp.copy,
    "integer_pow": lambda x: jax.lax.integer_pow(x, 3),
}
TWO = "add atan2 div max min mul nextafter pow rem sub"
OF_INDICES = "eq ge gt le lt ne shift_left shift_right_arithmetic shift_right_logical"


def everything(x, b, n, q, k):
    """A score that uses each primitive that stands in the kernel's list."""
    for fn in OF_FLOATS.values():
        x = x + fn(x).astype(x.dtype)
    for name in TWO.split():
        x = x + getattr(jax.lax, name)(x, k.astype(x.dtype))
    for name in OF_INDICES.split():
        x = x + getattr(jax.lax, name)(q, k).astype(x.dtype)
    bits = (q & k) | (q ^ ~k) + jax.lax.population_count(q)
    return jnp.where(q > k, x, bits.astype(x.dtype))


def test_triton_has_each_primitive_that_a_score_may_use():
    def call(q, k, v):
        return pallas.attention(q, k, v, bind_rules(q, k, rules_of(score=ScoreFn(everything))))

    with assume_platform("gpu", (9, 0)):
        traced = jax.jit(call).trace(*arrays())
    assert ELEMENTWISE - {*names(traced.jaxpr.jaxpr)} == {"add_any"}  # of derivatives
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


REFUSED = {
    "float64": (lambda: {}, "would round float64"),
    "wide": (lambda: {}, "at most 256; keys are 264"),
    "whole": (
        lambda: {"score": ScoreFn(lambda p, x, b, n, q, k: x + (p * k).sum(), jnp.ones(3))},
        "reads an array of shape",
    ),
    "round": (lambda: {"score": ScoreFn(lambda x, b, n, q, k: jnp.round(x))}, "uses round"),
    "sort": (
        lambda: {"mask": MaskFn(lambda b, n, q, k: jnp.sort(jnp.stack([q, k]))[0] == q)},
        "uses",
    ),
}


@each("name", REFUSED)
def test_unsupported_primitives_are_refused_by_name(name):
    how, words = REFUSED[name]
    with jax.enable_x64(name == "float64"):
        q, k, v = arrays(
            "float64" if name == "float64" else "float32", H=264 if name == "wide" else 8
        )
        with pytest.raises(NotImplementedError, match=words):
            attend(q, k, v, **how(), backend="pallas")


def test_programs_of_the_same_function_are_equal_whatever_they_close_over():
    def rules(slope):
        return bind_rules(*arrays()[:2], rules_of(score=ScoreFn(lambda x, *at: x * slope.sum())))

    q, k, _ = arrays()
    one, other, another = (
        pallas.programs(rules(jnp.asarray(x, "float32")), pallas.sizes_of(q, k))[1]
        for x in (2.0, 3.0, [4.0])
    )
    assert one == other and hash(one) == hash(other) and one != another
    assert [float(x) for x in one.arrays()] != [float(x) for x in other.arrays()]
