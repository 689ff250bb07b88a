"""The laws of ranges: which keys a row or a block of queries may see at all, by loops."""

import jax
import jax.numpy as jnp

from flax_attn import masks
from flax_attn._internal.types import Sizes

from .test_laws_masks import KV, QL, SHAPES, B, N, chequered, is_static, leaves


def blocks(T):
    return [(lo, hi) for lo in range(T) for hi in range(lo + 1, T + 1)]


def test_key_ranges_of_simple_masks_are_as_narrow_as_can_be():
    names = ("full", "end", "causal", "window", "left", "right", "open", "prefix", "chunked")
    for T, S in SHAPES:
        sizes = Sizes((B,), N, T, S)
        for name, (mask, says) in leaves(T, S).items():
            bound = mask.bind(sizes)
            for b in range(B):
                for lo, hi in blocks(T):
                    rows = [k for k in range(S) if any(says(b, 0, q, k) for q in range(lo, hi))]
                    first, last = bound.key_range(b, 0, (lo, hi), sizes)
                    if is_static(name):
                        assert type(first) is int and type(last) is int
                    assert 0 <= first <= S and 0 <= last <= S
                    if not rows:
                        assert first >= last or not name.startswith(names), name
                    elif name.startswith(names):
                        assert (first, last) == (rows[0], rows[-1] + 1), name
                    else:
                        assert first <= rows[0] and rows[-1] < last


def test_key_ranges_of_the_other_masks():
    T, S = 4, 7
    sizes = Sizes((B,), N, T, S)
    found = leaves(T, S)
    for name in ("segments", "dense", "fn"):
        assert found[name][0].bind(sizes).key_range(1, 2, (1, 3), sizes) == (0, 7)
    assert (~masks.Causal()).bind(sizes).key_range(0, 0, (1, 3), sizes) == (2, 7)
    for b in range(B):
        for mask in (masks.Lengths(KV), masks.Lengths(KV, q=QL), masks.Prefix(KV)):
            assert mask.bind(sizes).key_range(b, 0, (1, 3), sizes) == (0, KV[b])
    assert masks.Lengths([9, -1]).bind(sizes).key_range(0, 0, (0, 1), sizes) == (0, 7)
    assert masks.Lengths([9, -1]).bind(sizes).key_range(1, 0, (0, 1), sizes) == (0, 0)


def test_key_ranges_of_traced_blocks():
    """As a backend asks for them inside a kernel."""
    sizes, static = (
        Sizes((B,), N, 6, 7),
        (masks.Causal(1), masks.Window(1, 2, -1), masks.Chunked(2)),
    )
    for mask in (*static, masks.Prefix(3), masks.Prefix(-1), static[0] & static[1] | static[2]):

        def ranges(q, mask=mask):
            return jnp.asarray(mask.key_range(0, 0, (q, q + 2), sizes))

        for q in (0, 3):
            assert jax.vmap(ranges)(jnp.asarray([q])).tolist() == [
                list(mask.key_range(0, 0, (q, q + 2), sizes))
            ]
    for mask in (masks.Prefix(KV), masks.Lengths(KV)):
        bound = mask.bind(sizes)
        ends = jax.vmap(lambda b, bound=bound: bound.key_range(b, 0, (0, 1), sizes)[1])
        assert ends(jnp.arange(2)).tolist() == [3, 6]
    assert masks.Prefix(-1).key_range(0, 0, (0, 1), sizes) == (0, 0)
    assert jax.vmap(masks.MaskFn(chequered), (0, None, None, None))(
        jnp.arange(2), 0, 0, 1
    ).shape == (2,)
