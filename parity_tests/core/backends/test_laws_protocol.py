"""The laws of the kernel protocol: small requests, and visible rows and keys."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import taps
from flax_attn._internal.types import Sizes, frozen
from flax_attn.backends import cudnn, protocol, splash, tokamax
from flax_attn.backends.protocol import (
    bytes_of,
    is_number,
    of_lse,
    of_mesh,
    passed_over,
    visible_in_band,
    visible_rows_and_keys,
)
from flax_attn.masks import (
    CAUSAL,
    FULL,
    Band,
    Causal,
    Chunked,
    Dense,
    Lengths,
    Mask,
    MaskFn,
    Prefix,
    Segments,
    Window,
)
from flax_attn.masks.ranges import as_known_band, runs_of
from flax_attn.rules import Request, Rules
from flax_attn.where import Where

from .law_cases import drawn_masks

B, N, T, S, H, h = 2, 2, 3, 4, 3, 5
SIZES = Sizes((B,), N, T, S)


# Small requests.


def shapes(queries: int, keys: int, width: int = 4, dtype: str = "float32") -> Request:
    sizes = (queries, keys, keys)
    return Request(*(jax.ShapeDtypeStruct((1, n, 2, width), dtype) for n in sizes), Rules())


def test_small_requests_and_listeners_are_left_to_the_plain_formula():
    few, many, long = [(1, 1000), (16, 4096)], [(256, 257), (257, 256)], [(1, 2000)]
    for by_blocks, small, large, wide in (
        (False, [*few, (256, 256)], many, 128),
        (True, [(1, 100), (128, 127), (127, 128)], [*many, (128, 128)], 64),
    ):
        ask = partial(passed_over, by_blocks=by_blocks)
        for queries, keys in small:
            told = f"the plain formula is as fast for {queries} x {keys} weights"
            assert ask(shapes(queries, keys)) == told
        assert not any(ask(shapes(*x)) for x in large)
        assert not any(ask(shapes(*x, width=wide)) for x in long)
        with taps.listen():
            assert ask(shapes(*large[0])) == "listen() needs the weights"


def test_a_cache_is_long_from_a_mebibyte_a_query_on():
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        places = 2**20 // (2 * 2 * 4 * size)
        assert passed_over(shapes(1, places, dtype=dtype))
        assert not passed_over(shapes(1, places + 1, dtype=dtype))
        assert bytes_of(shapes(3, places, dtype=dtype).k) == 2**19
    assert bytes_of(SimpleNamespace(shape=("open", 9, 2, 64), dtype=np.dtype("f4"))) == 9 * 512


def test_is_number_holds_for_known_scalars_only():
    for x in (1, 2.0, np.float32(3), np.int64(4)):
        assert is_number(x)
    for x in (np.ones(1), jnp.ones(()), None, "1"):
        assert not is_number(x)


def lying(size: int, *types: Any) -> SimpleNamespace:
    """A request on a mesh of so many devices, with axes of these types."""
    mesh = SimpleNamespace(size=size, axis_types=types)
    return SimpleNamespace(q=jnp.ones(2), where=Where(None, mesh, "cpu", None))


def test_pallas_kernels_need_axes_that_are_not_auto():
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for size, types in ((1, (auto,)), (2, (explicit,)), (0, ())):
        assert of_mesh(lying(size, *types)) is None
    for types in ((auto,), (explicit, auto)):
        told = of_mesh(lying(2, *types))
        assert told.startswith("cannot be cut along mesh axes of type")
        assert "jax.make_mesh" in told and told.endswith("inside a jax.shard_map")
    with mock.patch.object(protocol, "named_for", lambda _: "batch"):  # the library cuts these
        assert of_mesh(lying(2, auto)) is None
    mesh = jax.make_mesh((1,), ("x",), axis_types=(auto,))
    heard = []
    for check in (True, False):
        P = jax.sharding.PartitionSpec("x")
        ask = jax.shard_map(
            lambda x: (heard.append(of_mesh(Request(x, x, x, Rules()))), x)[1],
            mesh=mesh,
            in_specs=P,
            out_specs=P,
            check_vma=check,
        )
        jax.eval_shape(ask, jnp.ones(2))
    assert heard == ["needs check_vma=False in the shard_map around it", None]


def test_a_log_sum_exp_alone_is_the_largest_score_of_one_key():
    lse = jnp.asarray([[0.5, -3.0]])
    m, l = of_lse(lse)
    assert m is lse and l.tolist() == [[1.0, 1.0]] and l.dtype == lse.dtype


def test_the_refusal_of_positions_names_backends_that_support_them():
    assert protocol.NO_POSITIONS.endswith("; blockwise and reference do")


# Who is alive.


def check_alive(mask: Mask, seen: np.ndarray, sizes: Sizes) -> None:
    """By the public half: B T and B S, whole."""
    rows, keys = jax.jit(lambda: visible_rows_and_keys(mask.bind(sizes), sizes))()
    rows = np.ones((1, sizes.T), bool) if rows is None else np.asarray(rows)
    keys = np.ones((1, sizes.S), bool) if keys is None else np.asarray(keys)
    assert rows.dtype == keys.dtype == bool
    assert np.array_equal(np.broadcast_to(rows, (sizes.B, sizes.T)), seen.any((1, 3))), mask
    assert np.array_equal(np.broadcast_to(keys, (sizes.B, sizes.S)), seen.any((1, 2))), mask


def test_visible_rows_and_keys_under_random_masks():
    for mask, seen, sizes in drawn_masks(8, (6, 8), seed=900):
        if (seen == seen[:, :1]).all():
            check_alive(mask, seen, sizes)


BANDS = (
    Band(),
    Band(None, 0),
    Band(-2, 1),
    Band(2, None),
    Band(3, 2),
    Band(None, -2),
    Band(9, None),
    Band(None, -9),
    Band(kv=3),
    Band(kv=np.int64(30), rows=20),
    Band(-1, 1, 2, 4),
    Band(1, 2, np.asarray([3, 0])),
    Band(-3, -1, np.asarray([5, 2]), np.asarray([4, 0])),
    Band(None, None, None, np.asarray([9, -3])),
    Band(0, None, np.asarray([-1, 50]), np.asarray([2, 3])),
    Band(-2, None, 4, np.asarray([6, 5])),
    Band(None, 1, np.asarray([6, 1]), 5),
)


def test_visible_rows_and_keys_in_a_band():
    for T, S in ((6, 8), (7, 5), (1, 4)):
        sizes = Sizes((2,), 2, T, S)
        q, k = np.arange(T)[:, None], np.arange(S)
        for lo, hi, kv, rows in BANDS:
            seen = np.ones((2, T, S), bool)
            seen &= (k - q >= (-99 if lo is None else lo)) & (k - q <= (99 if hi is None else hi))
            for entry in range(2):
                limits = [99 if x is None else np.broadcast_to(x, 2)[entry] for x in (kv, rows)]
                seen[entry] &= (k < limits[0]) & (q < limits[1])
            given = Band(lo, hi, *(jnp.asarray(x) if np.ndim(x) else x for x in (kv, rows)))
            found = visible_in_band(given, sizes)
            for got, want in zip(found, (seen.any(2), seen.any(1)), strict=True):
                assert np.array_equal(np.broadcast_to(got, want.shape), want), (T, S, given)
            if kv is None and rows is None:
                assert all(type(x) is np.ndarray for x in found)


def in_runs(draw: np.random.RandomState) -> Mask:
    """A mask of one range of keys a query: before the first key and behind the last ones too."""

    def each(low: int, high: int) -> jax.Array:
        return jnp.asarray(draw.randint(low, high, 2))

    base = (
        lambda: Chunked(int(draw.randint(1, 6))),
        lambda: Causal(each(-3, 9)) | Prefix(each(0, 9)),
        lambda: Causal(int(draw.randint(-2, 3))) | Prefix(int(draw.randint(1, 9))),
        lambda: Window(*map(int, draw.randint(0, 4, 2)), each(-6, 12)),
    )
    beside = (
        lambda: FULL,
        lambda: Lengths(each(0, 9), q=each(0, 7)),
        lambda: Window(*map(int, draw.randint(0, 4, 2)), int(draw.randint(-6, 9))),
    )
    return base[draw.randint(4)]() & beside[draw.randint(3)]()


def test_visible_rows_and_keys_where_each_query_sees_one_range():
    met = 0
    for seed in range(8):
        sizes = Sizes((2,), 1, *((6, 8), (7, 5), (1, 4))[seed % 3])
        mask = in_runs(np.random.RandomState(seed)).bind(sizes)
        queries = np.arange(sizes.T, dtype=np.int32)[None]
        ask = jax.jit(lambda mask: (mask(*sizes.iotas()), runs_of(mask, queries)))  # noqa: B023
        seen, ranges = ask(mask)
        seen = np.broadcast_to(seen, sizes.shape)
        met += as_known_band(mask) is None and ranges is not None
        check_alive(mask, seen, sizes._replace(N=3))
    assert 2 * met > 8, met


@frozen
class Everything(Mask):
    """A user's mask of one range, whose answer has no axes."""

    def __call__(self, b, n, q, k):
        return np.True_

    def as_runs(self, q):
        return None, None


def test_a_mask_without_axes_broadcasts_to_all_rows_and_keys():
    rows, keys = jax.jit(lambda: visible_rows_and_keys(Everything().bind(SIZES), SIZES))()
    assert rows.shape == (B, T) and keys.shape == (B, S) and rows.all() and keys.all()


def test_none_means_that_all_rows_or_keys_are_visible():
    assert visible_rows_and_keys(FULL, SIZES) == (None, None)
    rows, keys = visible_rows_and_keys(CAUSAL, SIZES)
    assert rows is None and isinstance(keys, jax.Array) and keys.tolist() == [[True] * 3 + [False]]
    rows, keys = visible_rows_and_keys(Causal(-1), SIZES)
    assert rows.tolist() == [[False, True, True]] and keys.tolist() == [[True, True, False, False]]
    rows, keys = visible_rows_and_keys(Lengths(jnp.asarray([9, 9])), SIZES)
    assert rows.all() and keys.all()


def odd(b, n, q, k):
    return (k - 2 * q) % 601 == 3 + b


def test_long_masks_are_evaluated_a_few_queries_at_a_time():
    for length in (256, 300, 512, 700, 1024):
        sizes = Sizes((2,), 3, length, 150)
        q, k = np.arange(length)[:, None], np.arange(150)
        seen = np.stack([odd(b, 0, q, k) for b in range(2)])[:, None]
        check_alive(MaskFn(odd), seen, sizes)
    one = np.arange(150)[None, None, None] % 601 == 3
    check_alive(MaskFn(odd), one, Sizes((1,), 3, 1, 150))
    with jax.enable_x64(True):
        check_alive(MaskFn(odd), seen, sizes)


def test_no_array_of_all_queries_and_keys():
    sizes = Sizes((2,), 4, 1000, 700)
    ids = np.arange(1000)[None] // 100, np.arange(700)[None] // 100
    made = jax.make_jaxpr(
        lambda: visible_rows_and_keys(
            Segments(q_ids=ids[0], kv_ids=ids[1]).bind(sizes) & MaskFn(odd), sizes
        )
    )()
    (scan,) = (e for e in made.eqns if str(e.primitive) == "scan")
    assert scan.params["length"] == 4
    largest = max(x.aval.size for e in scan.params["jaxpr"].eqns for x in e.outvars)
    assert largest <= 2 * 256 * 700


def test_visible_rows_and_keys_may_vary_over_devices():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    sizes = Sizes((2,), 1, 3, 4)
    ask = jax.shard_map(
        lambda table: visible_rows_and_keys(Dense(table).bind(sizes), sizes),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=(P("x"), P("x")),
    )
    rows, keys = jax.eval_shape(ask, jax.ShapeDtypeStruct((2, 1, 3, 4), bool))
    assert rows.shape == (2, 3) and keys.shape == (2, 4)


def test_every_kernel_implements_the_protocol():
    asked = {name for name in vars(protocol.Kernel) if not name.startswith("_")}
    assert asked == {"fully_masked", "run", "backward"}
    for kernel in (cudnn.Cudnn, splash.Splash, tokamax.Tokamax):
        assert asked <= {*dir(kernel)}, kernel.__name__
