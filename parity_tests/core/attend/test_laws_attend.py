"""The laws of `attend`: arguments, choice of backend, refusals and results."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import taps
from flax_attn.attend import FORWARD_MODE, attend, attention_weights, explain, use_backend
from flax_attn.backends import choice
from flax_attn.dropout import Dropout, DropoutMask
from flax_attn.masks import CAUSAL, FULL, Lengths, MaskFn
from flax_attn.parity import judge
from flax_attn.places import Places
from flax_attn.scores import IDENTITY, Additive, ScoreFn, Softcap
from flax_attn.where import assume_platform
from parity_tests.requests.oracle import plain

from ..backends.law_cases import eager64, normal

B, T, S, N, K, H, h = 2, 4, 5, 6, 3, 4, 3
Q, KEYS, V = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, h)
BIAS, SINKS = normal(3, B, N, T, S), np.arange(N) / 3 - 1
TABLE = np.random.RandomState(4).rand(B, N, T, S) < 0.6
TABLE[1, 2, 3] = False
DIAGONAL = np.arange(S) <= np.arange(T)[:, None]
BACKENDS = ["cudnn", "tokamax", "splash", "pallas", "blockwise", "autodiff", "reference"]
jitted = jax.jit(attend, static_argnames=("empty", "return_lse", "backend"))


def truth(**rules):
    q, k, v = Q, KEYS, V
    found = plain(q, k, v, np.zeros((B, T, N, h)), **rules)
    return found["o"], found["lse"]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float64 and judge.same_function(a, b).ok


def by_every_way(q, k, v, **given):
    """With the lse, without, and the weights."""
    weights = None if "dropout" in given else attention_weights(q, k, **given)
    return attend(q, k, v, return_lse=True, **given), attend(q, k, v, **given), weights


@eager64
def test_every_argument_reaches_the_arithmetic():
    for given, rules in (
        ({}, {}),
        ({"mask": None, "score": None, "scale": None, "sinks": None, "dropout": None}, {}),
        ({"mask": FULL, "score": IDENTITY}, {}),
        ({"mask": CAUSAL}, {"seen": DIAGONAL}),
        ({"mask": TABLE}, {"seen": TABLE}),
        ({"mask": jnp.asarray(TABLE)}, {"seen": TABLE}),
        ({"score": Additive(BIAS)}, {"bias": BIAS}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"scale": jnp.asarray(0.3)}, {"scale": 0.3}),
        ({"scale": nnx.Param(jnp.asarray(0.3))}, {"scale": 0.3}),
        ({"scale": 2}, {"scale": 2.0}),
        ({"dropout": DropoutMask(np.ones((T, S), bool), 0.0)}, {}),
        (
            {"mask": TABLE, "score": Additive(BIAS), "scale": 0.5},
            {"seen": TABLE, "bias": BIAS, "scale": 0.5},
        ),
    ):
        both, alone, weights = jax.jit(partial(by_every_way, **given))(Q, KEYS, V)
        same(both, truth(**rules))
        assert judge.same_function(alone, truth(**rules)[0]).ok
        if "dropout" not in given:
            assert weights.shape == (B, N, T, S)
            found = np.einsum("bnts,bsnh->btnh", weights, np.repeat(V, N // K, axis=2))
            assert judge.same_function(found, truth(**rules)[0]).ok


@eager64
def test_sinks_and_dropout():
    _, lse = truth()
    share = np.exp(lse - np.logaddexp(lse, SINKS))[..., None]
    for sinks in (SINKS, jnp.asarray(SINKS), nnx.Param(jnp.asarray(SINKS))):
        got = jitted(Q, KEYS, V, sinks=sinks, return_lse=True)
        same(got, (truth()[0] * share, np.logaddexp(lse, SINKS)))
        weights = np.asarray(jax.jit(attention_weights)(Q, KEYS, sinks=sinks))
        assert judge.same_function(weights.sum(-1), np.swapaxes(share[..., 0], 1, 2)).ok
    none = jitted(Q, KEYS, V, dropout=DropoutMask(np.zeros((T, S), bool), 0.5))
    assert not np.asarray(none).any()
    twice = jitted(Q, KEYS, V, dropout=DropoutMask(np.ones((T, S), bool), 0.5))
    assert judge.same_function(twice, 2 * truth()[0]).ok


@eager64
def test_outputs_and_lse_of_fully_masked_rows():
    out, lse = truth(seen=TABLE)
    same(jitted(Q, KEYS, V, mask=TABLE, empty="zero", return_lse=True), (out, lse))
    out[1, 3, 2] = V[1, :, 2 * K // N].mean(0)
    same(jitted(Q, KEYS, V, mask=TABLE, empty="mean", return_lse=True), (out, lse))
    for mask in (FULL, CAUSAL):
        got, want = (jitted(Q, KEYS, V, mask=mask, empty=x) for x in ("mean", "zero"))
        assert judge.exact(got, want).ok


@eager64
def test_any_batch_axes():
    want = truth(seen=TABLE)
    lead = (1, B)
    got = jitted(Q[None], KEYS[None], V[None], mask=TABLE[None], return_lse=True)
    assert got[0].shape == (*lead, T, N, h) and got[1].shape == (*lead, T, N)
    same([np.asarray(x)[0] for x in got], want)
    assert attention_weights(Q[None], KEYS[None]).shape == (*lead, N, T, S)
    for i in range(B):
        got = jitted(Q[i], KEYS[i], V[i], mask=TABLE[i], return_lse=True)
        assert got[0].shape == (T, N, h)
        same(got, [x[i] for x in want])
        assert attention_weights(Q[i], KEYS[i]).shape == (N, T, S)


@eager64
def test_masked_values_affect_no_output_or_gradient():
    q, k, v = Q.copy(), KEYS.copy(), V.copy()
    q[1, 2:], k[0, 3:], v[0, 3:] = np.nan, np.nan, np.nan
    mask = Lengths(np.asarray([3, S]), q=np.asarray([T, 2]))
    clean = jitted(Q, KEYS, V, mask=mask, return_lse=True)
    for backend in ("auto", "reference"):
        got = jitted(q, k, v, mask=mask, return_lse=True, backend=backend)
        for a, b in zip(got, clean, strict=True):
            assert judge.exact(a, b).ok
    weights = jax.jit(partial(attention_weights, mask=mask))
    assert judge.exact(weights(q, k), weights(Q, KEYS)).ok


@eager64
def test_a_shard_gives_its_part_of_the_whole_output():
    drop, mask = Dropout(0.5, jax.random.key(1)), MaskFn(lambda b, n, q, k: (b + n + q + k) % 3 > 0)
    call = jax.jit(partial(attend, dropout=drop, mask=mask))
    whole = np.asarray(call(Q, KEYS, V))
    places = Places(b=np.asarray([1]), n=np.arange(2, 6))
    shard = Q[1:, :, 2:], KEYS[1:, :, 1:], V[1:, :, 1:]
    got = call(*shard, places=places)
    assert judge.same_function(got, whole[1:, :, 2:]).ok
    other = call(*shard)
    assert not judge.same_function(other, whole[1:, :, 2:]).ok
    with pytest.raises(ValueError, match=r"Places\.n must broadcast"):
        attend(*shard, places=Places(n=np.ones((4, 1), int)))


ONES = {
    name: np.ones(s, "float32")
    for name, s in zip("qkv", ((B, T, N, H), (B, S, K, H), (B, S, K, h)), strict=True)
}


def changed(**shapes):
    return {name: np.ones(shape, "float32") for name, shape in shapes.items()}


WRONG = [
    (changed(q=(T, H)), ValueError, "at least the axes (length, heads, width); got q (4, 4), k (2"),
    (changed(k=(S, H)), ValueError, "at least the axes"),
    (changed(v=(S, h)), ValueError, "at least the axes"),
    (changed(q=(1, T, N, H)), ValueError, "share their batch axes; got q (1, 4, 6, 4), k (2, 5"),
    (changed(k=(1, S, K, H)), ValueError, "share their batch axes"),
    (changed(v=(1, S, K, h)), ValueError, "share their batch axes"),
    (changed(v=(B, T, K, h)), ValueError, "k and v must share length and heads"),
    (changed(v=(B, S, N, h)), ValueError, "k and v must share length and heads"),
    (changed(q=(B, T, N, 5)), ValueError, "share a head width of at least 1; got q (2, 4, 6, 5)"),
    (changed(q=(B, T, N, 0), k=(B, S, K, 0)), ValueError, "share a head width of at least 1"),
    (changed(q=(B, T, 4, H)), ValueError, "The key/value heads must divide the query heads; got q"),
    (changed(q=(B, T, 0, H)), ValueError, "must divide the query heads"),
    (changed(k=(B, S, 0, H), v=(B, S, 0, h)), ValueError, "must divide the query heads"),
    (changed(q=(B, T, 1, H)), ValueError, "must divide the query heads"),
    ({"q": ONES["q"].astype(int)}, TypeError, "floating arrays; got q int32, k float32, v float32"),
    ({"k": ONES["k"] > 0}, TypeError, "attend works on floating arrays"),
    ({"v": ONES["v"].astype(complex)}, TypeError, "attend works on floating arrays"),
    ({"q": ONES["q"].astype("float16")}, TypeError, "share one dtype; got q float16, k float32"),
    ({"v": ONES["v"].astype("float16")}, TypeError, "share one dtype"),
    ({"mask": np.ones((T, S))}, TypeError, "True means 'may attend'"),
    ({"mask": [[True]]}, TypeError, "True means 'may attend'"),
    ({"mask": np.ones((S, T), bool)}, ValueError, "A mask must broadcast"),
    ({"score": np.ones((T, S))}, TypeError, "score must be one of flax_attn's scores; got ndarray"),
    ({"score": Additive(np.ones((S, T)))}, ValueError, "An additive score must broadcast"),
    ({"scale": "1"}, TypeError, "scale must be a number; got '1'"),
    ({"scale": True}, TypeError, "scale must be a number"),
    ({"scale": np.ones(N)}, ValueError, "scale must be one number for all heads"),
    ({"sinks": np.ones(K)}, ValueError, "sinks needs one logit a query head"),
    (
        {"dropout": 0.1},
        TypeError,
        "dropout must be Dropout(rate, key), DropoutMask(mask, rate) or None",
    ),
    ({"empty": "nan"}, ValueError, "empty must be one of 'zero', 'mean'; got 'nan'."),
    ({"empty": None}, ValueError, "empty must be one of 'zero', 'mean'; got None."),
    ({"backend": "flash"}, ValueError, f'must be "auto" or one of {", ".join(BACKENDS)}; got \'fl'),
    ({"backend": None}, ValueError, "got None"),
    # What is wrong twice is named once: empty, rules, then dtypes, shapes, then sizes, the backend.
    ({"empty": "nan", "mask": 1}, ValueError, "empty must be"),
    ({"mask": 1, "score": 1}, TypeError, "True means 'may attend'"),
    ({"score": 1, "dropout": 1}, TypeError, "score must be"),
    ({"dropout": 1, "scale": "1"}, TypeError, "dropout must be"),
    ({"scale": "1", "q": np.ones(3)}, TypeError, "scale must be"),
    ({"q": np.ones((1, 1), int)}, TypeError, "floating"),
    ({"q": np.ones((1, 1), "float32"), "sinks": np.ones(1)}, ValueError, "at least the axes"),
    ({"sinks": np.ones(1), "backend": "flash"}, ValueError, "sinks needs"),
]


def test_wrong_shapes_are_named_in_the_error():
    for given, kind, words in WRONG:
        with pytest.raises(kind, match=re.escape(words)):
            attend(**{**ONES, **given})
        if "backend" not in given:
            with pytest.raises(kind, match=re.escape(words)):
                explain(**{**ONES, **given})
        if not {"backend", "v", "dropout", "empty"} & given.keys():
            rest = {name: x for name, x in given.items() if name not in "qk"}
            arrays = {**ONES, **given}
            with pytest.raises(kind):
                attention_weights(arrays["q"], arrays["k"], **rest)
    explain(**{**ONES, "q": np.ones((B, T, K, H), "float32")})
    assert attend(**{**ONES, "q": np.ones((B, T, K, H), "float32")}).shape == (B, T, K, h)
    assert attend(**{**ONES, **changed(q=(B, T, 2, 1), k=(B, S, 1, 1), v=(B, S, 1, 0))}).size == 0


def shapes(length, batch=()):
    q, kv = (jax.ShapeDtypeStruct((*batch, length, n, 8), jnp.float32) for n in (2, 1))
    return q, kv, kv


def test_explain_gives_a_verdict_for_every_backend():
    for arrays in (shapes(7), shapes(7, (2, 3)), [jnp.ones(x.shape) for x in shapes(7)]):
        found = explain(*arrays)
        assert [v.backend for v in found] == BACKENDS and found.chosen == "reference"
        assert all(v.refusal for v in found[:3]) and not any(v.passed_over for v in found[:3])
        assert found[3].refusal is found[4].refusal is None
        assert found[3].passed_over.startswith("no device file is in use")
        assert found[4].passed_over.startswith("the plain formula is as fast")
        assert found[5].refusal is None and "asked for by name" in found[5].passed_over
        assert found[6] == ("reference", None, None)
    long = explain(*shapes(128))
    assert long.chosen == "blockwise" and long[4] == ("blockwise", None, None)
    assert explain(np.ones((3, 2, 4)), np.ones((3, 2, 4)), [[[1.0] * 4] * 2] * 3).chosen
    with taps.listen():
        assert explain(*shapes(128)).chosen == "reference"
    q = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    with assume_platform("gpu", (9, 0)):
        assert explain(q, q, q).chosen == "cudnn" and explain(q, q, q, scale=0.5).chosen == "cudnn"
        for refused in (
            {"score": Softcap(2.0)},
            {"sinks": jnp.ones(4)},
            {"dropout": Dropout(0.5, jax.random.key(0))},
            {"mask": MaskFn(lambda b, n, q, k: q > k)},
            {"scale": jnp.asarray(0.5)},
        ):
            before, after = explain(q, q, q)[0], explain(q, q, q, **refused)[0]
            assert before.refusal is None and (after.refusal or "sinks" in refused), refused


def test_parameters_of_numpy_are_explained_too():
    score = ScoreFn(lambda p, x, b, n, q, k: x + p[n], np.ones(N, "float32"))
    assert explain(*(jnp.asarray(ONES[name]) for name in "qkv"), score=score).chosen == "reference"


def test_a_backend_that_is_named_is_used():
    q, k, v = (jnp.asarray(ONES[name]) for name in "qkv")

    def tapped(**how):
        names = []
        with taps.listen(lambda name, value: names.append(name)):
            jax.eval_shape(lambda *given: attend(*given, **how), q, k, v)
        return "weights" in names

    assert tapped() and tapped(backend="reference") and not tapped(backend="blockwise")
    with use_backend("blockwise"):
        assert not tapped() and tapped(backend="reference")
        found = explain(q, k, v)
        assert found.chosen == "blockwise"
        assert {v.passed_over for v in found} == {None, "blockwise is asked for"}
        assert found[4] == ("blockwise", None, None) and found[5][2] is not None
        with use_backend("auto"):
            assert tapped() and explain(q, k, v).chosen == "reference"
    assert tapped()
    words = "backend 'cudnn' cannot serve this request: "
    with pytest.raises(NotImplementedError, match=words) as caught:
        attend(q, k, v, backend="cudnn")
    assert explain(q, k, v)[0].refusal in str(caught.value)
    with use_backend("cudnn"):
        assert explain(q, k, v).chosen is None
        with pytest.raises(NotImplementedError, match=words):
            attend(q, k, v)
        assert attend(q, k, v, backend="reference").shape == (B, T, N, h)
    with pytest.raises(ValueError, match=r"blockwise.*; got 'flash'"):
        use_backend("flash")


def test_a_name_that_the_environment_gives_is_checked_in_use():
    module = attend.__wrapped__.__globals__
    with module["_requested"]("flash"), pytest.raises(ValueError, match="got 'flash'"):
        explain(**ONES)
    with module["_requested"]("flash"), pytest.raises(ValueError, match="got 'flash'"):
        attend(**ONES)
    assert module["_requested"].value == "auto"


def test_a_slow_backend_warns_once():
    q = jax.ShapeDtypeStruct((512, 2, 8), jnp.float32)
    choice.warn_once.cache_clear()

    def run(**how):
        with assume_platform("gpu"):
            jax.eval_shape(lambda q: attend(q, q, q, **how), q)

    run(backend="blockwise")
    with pytest.warns(UserWarning, match="slow on a gpu"):
        run(score=ScoreFn(lambda x, *_: x))
    run(score=ScoreFn(lambda x, *_: x))
    choice.warn_once.cache_clear()


def test_the_forward_mode_error_names_what_would_work():
    x = jnp.asarray(normal(0, 3, 2, 4), "float32")

    def through(backend, error=None):
        def run(x):
            return attend(x, x, x, backend=backend)

        return jax.jvp(run, (x,), (x,))[1]

    assert through("reference").shape == x.shape
    with pytest.raises(TypeError, match=re.escape(FORWARD_MODE)):
        through("blockwise")
    with use_backend("blockwise"), pytest.raises(TypeError, match="Forward mode"):
        through("auto")

    def broken(x, b, n, q, k):
        raise TypeError("a custom_vjp of the user's" if words else "of the user's")

    for words, backend, told in (  # noqa: B007
        (True, "reference", "^a custom_vjp of"),
        (False, "reference", "^of the"),
        (False, "blockwise", "^of the"),
    ):
        with pytest.raises(TypeError, match=told):
            attend(x, x, x, score=ScoreFn(broken), backend=backend)
