"""`attend` beside torch's own `scaled_dot_product_attention`: outputs and all gradients."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, FULL, IDENTITY, Additive, Dense, attend
from flax_attn.parity import judge
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

torch = pytest.importorskip("torch", reason="torch is the witness here")

LENGTHS = [(4, 7), (7, 7), (9, 5), (1, 6)]
MASKS = ["none", "causal", "boolean", "bias"]
HEADS = [(6, 1), (6, 3), (5, 5)]
# Every pair of lengths and mask, under two of the three groupings, once scaled by hand.
GRID = [
    (T, S, *HEADS[(i + j + turn) % 3], mask, (None, 0.7)[(i + turn) % 2])
    for (i, (T, S)), (j, mask), turn in product(enumerate(LENGTHS), enumerate(MASKS), range(2))
]


def draw(T, S, N, K, mask, *, B=2, H=8, h=10, size=1.0):
    """q, k, v, bias (or the mask, or None) and cotangent in float64; logits of deviation two."""
    drawn = np.random.RandomState(T + 10 * S + 100 * N)
    q, k, v, cotangent = (
        drawn.standard_normal((B, *rest)) for rest in ((T, N, H), (S, K, H), (S, K, h), (T, N, h))
    )
    extra = None
    if mask == "bias":
        extra = drawn.standard_normal((B, N, T, S))
    if mask == "boolean":
        extra = drawn.rand(B, N, T, S) < 0.6
        extra[1, 2, T // 2] = False  # a query that may look at nothing
        extra[0, 0, 0, S // 2] = True
    return {"q": 2 * size * q, "k": size * k, "v": size * v}, extra, cotangent


def by_flax(arrays, extra, cotangent, mask, scale, dtype):
    """Output and gradients of `attend`, by name."""

    def call(arrays):
        given = {"mask": FULL, "score": IDENTITY}
        if mask == "causal":
            given["mask"] = CAUSAL
        if mask == "boolean":
            given["mask"] = Dense(extra)
        if mask == "bias":
            given["score"] = Additive(arrays["bias"])
        return attend(arrays["q"], arrays["k"], arrays["v"], scale=scale, **given)

    @jax.jit
    def run(arrays, cotangent):
        out, back = jax.vjp(call, arrays)
        return {"out": out, **back(cotangent)[0]}

    with jax.enable_x64(dtype == "float64"):
        if mask == "bias":
            arrays = {**arrays, "bias": extra}
        arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
        got = run(arrays, jnp.asarray(cotangent, dtype))
        assert {x.dtype for x in got.values()} == {jnp.dtype(dtype)}
        return {name: np.asarray(x) for name, x in got.items()}


def by_torch(arrays, extra, cotangent, mask, scale, dtype):
    """The same by torch, which has heads before length; True means "may look" there too."""
    kind = getattr(torch, dtype)
    given = {name: torch.tensor(x, dtype=kind, requires_grad=True) for name, x in arrays.items()}
    if mask == "bias":
        given["bias"] = torch.tensor(extra, dtype=kind, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(given[name].transpose(1, 2) for name in "qkv"),
        attn_mask=given.get("bias") if extra is None or mask == "bias" else torch.tensor(extra),
        is_causal=mask == "causal",
        scale=scale,
        enable_gqa=arrays["q"].shape[2] != arrays["k"].shape[2],
    ).transpose(1, 2)
    out.backward(torch.tensor(cotangent, dtype=kind))
    found = {"out": out.detach(), **{name: x.grad for name, x in given.items()}}
    return {name: x.double().numpy() for name, x in found.items()}


def judged(drawn, mask, scale=None):
    """Asserts that both give the same function."""
    arrays, extra, cotangent = drawn
    got = by_flax(arrays, extra, cotangent, mask, scale, "float64")
    want = by_torch(arrays, extra, cotangent, mask, scale, "float64")
    assert got.keys() == want.keys()
    gradients = [x for name, x in want.items() if name != "out"]
    for name, x in want.items():
        # Who sees a single key has no gradient in q and k: there against all gradients.
        size = None if x.any() else judge.gradient_scale(gradients, x)
        verdict = judge.same_function(got[name], x, size)
        assert verdict.ok, (name, verdict)
    return got


# Each lengths with half of the masks, and each mask with half of the lengths.
AT_COMMIT = [GRID[8 * i + 2 * j] for i, j in product(range(4), repeat=2) if (i + j) % 2 == 0]


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "mask", "scale"), with_nightly(GRID, commit=AT_COMMIT)
)
def test_same_function(T, S, N, K, mask, scale):
    drawn = draw(T, S, N, K, mask)
    got = judged(drawn, mask, scale)
    if mask == "boolean":
        assert not got["out"][1, T // 2, 2].any() and not got["q"][1, T // 2, 2].any()


@pytest.mark.parametrize("mask", MASKS)
def test_where_no_wrong_axis_shows_in_a_shape(mask):
    judged(draw(4, 4, 4, 4, mask, B=4, H=4, h=4), mask)


@pytest.mark.parametrize("mask", MASKS)
def test_logits_over_a_thousand(mask):
    """Every third key is far below, the others are far above and close to one another."""
    drawn = draw(7, 9, 6, 3, mask)
    q, k = drawn[0]["q"], drawn[0]["k"]
    q[..., 0], k[..., 0] = 55.0, np.where(np.arange(9) % 3 == 1, -55.0, 55.0).reshape(9, 1)
    logits = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) / 8**0.5
    assert logits.min() < -1e3 and logits.max() > 1e3
    judged(drawn, mask)


@pytest.mark.parametrize("mask", MASKS)
def test_activations_of_a_thousandth(mask):
    judged(draw(7, 9, 6, 3, mask, size=1e-3), mask)


PRECISIONS = [("float32", 1.0, None), ("bfloat16", 3.0, 0.7)]
PRECISIONS += [("bfloat16", 1.0, None), ("float32", 3.0, 0.7)]


@pytest.mark.parametrize(
    ("dtype", "size", "scale"), with_nightly(PRECISIONS, commit=PRECISIONS[:2])
)
@pytest.mark.parametrize("mask", MASKS)
def test_same_precision(mask, size, scale, dtype):
    """Inputs are rounded first, so that the truth is the truth of the same numbers."""
    arrays, extra, cotangent = draw(34, 40, 6, 3, mask, size=size)
    arrays = {name: rounded(x, dtype) for name, x in arrays.items()}
    extra = rounded(extra, dtype) if mask == "bias" else extra
    given = arrays, extra, rounded(cotangent, dtype), mask, scale
    truth, own = (by_torch(*given, kind) for kind in ("float64", dtype))
    got = by_flax(*given, dtype)
    everything = judge.whole_gradient([x for name, x in truth.items() if name != "out"])
    for name, x in truth.items():
        size = None if name == "out" else everything
        verdict = judge.same_precision(got[name], own[name], x, dtype, size)
        assert verdict.ok, (name, verdict)


def rounded(x, dtype):
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)
