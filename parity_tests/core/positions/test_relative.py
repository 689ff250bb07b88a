"""Relative tables and indices, against loops over pairs and the code of transformers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.parity.sides.torch.float64 import lifted
from flax_attn.positions.relative import (
    deberta_buckets,
    deberta_rows,
    decomposed_bias,
    relative_shift,
    resized_rows,
    sinusoids,
    t5_buckets,
    window_coordinates,
    window_rows,
)

RANDOM = np.random.RandomState(0)
DISTANCES = np.arange(-700, 701)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def published(module):
    pytest.importorskip("torch", reason="the witness is torch's")
    found = pytest.importorskip(f"transformers.models.{module}", reason="the witness")
    return found


def t5_by_hand(distance, buckets, longest, both):
    rows = buckets // 2 if both else buckets
    far = abs(distance) if both else max(-distance, 0)
    row, single = far, rows // 2
    if far >= single:  # a bit more, so that a power that is whole is not missed
        grown = math.log(far / single) / math.log(longest / single) * (rows - single) + 1e-9
        row = min(single + math.floor(grown), rows - 1)
    return row + rows * (both and distance > 0)


T5 = [(32, 128), (32, 256), (64, 128), (128, 512), (16, 64), (8, 20), (4, 16), (6, 9), (7, 30)]


@pytest.mark.nightly
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), T5)
def test_t5s_buckets(buckets, longest, both):
    sizes = dict(buckets=buckets, max_distance=longest, bidirectional=both)
    got = t5_buckets(DISTANCES, **sizes)
    assert got.tolist() == [t5_by_hand(d, buckets, longest, both) for d in DISTANCES]
    assert jax.jit(lambda d: t5_buckets(d, **sizes))(DISTANCES.astype(np.int32)).tolist() == [*got]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), T5)
def test_t5s_buckets_are_transformers(buckets, longest, both):
    t5 = published("t5.modeling_t5")
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    want = t5.T5Attention._relative_position_bucket(
        torch.tensor(DISTANCES), both, buckets, longest
    )  # in float32
    got = t5_buckets(DISTANCES, buckets=buckets, max_distance=longest, bidirectional=both)
    assert got.tolist() == want.tolist()


DEBERTA = [(256, 512), (4, 16), (8, 16), (32, 64), (256, 1024), (10, 40), (64, 128), (6, 300)]


def deberta_by_hand(distance, buckets, longest):
    mid, far = buckets // 2, abs(distance)
    if far <= mid:
        return distance
    grown = math.log(far / mid) / math.log((longest - 1) / mid) * (mid - 1)
    return math.copysign(min(math.ceil(grown - 1e-9) + mid, buckets), distance)


@pytest.mark.nightly
@pytest.mark.parametrize(("buckets", "longest"), DEBERTA)
def test_debertas_buckets(buckets, longest):
    sizes = dict(buckets=buckets, max_distance=longest)
    got = deberta_buckets(DISTANCES, **sizes)
    assert got.tolist() == [deberta_by_hand(d, buckets, longest) for d in DISTANCES]
    narrow = DISTANCES.astype(np.int32)
    assert jax.jit(lambda d: deberta_buckets(d, **sizes))(narrow).tolist() == [*got]


@pytest.mark.nightly
@pytest.mark.parametrize(("buckets", "longest"), DEBERTA)
def test_debertas_rows_are_transformers(buckets, longest):
    deberta = published("deberta_v2.modeling_deberta_v2")
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    q, k = torch.zeros(1, 640, 1), torch.zeros(1, 599, 1)
    found = deberta.build_relative_position(q, k, buckets, longest)[0]
    want = torch.clamp(found + buckets, 0, 2 * buckets - 1)  # as c2p_pos of the class
    assert deberta_rows(640, 599, buckets=buckets, max_distance=longest).tolist() == want.tolist()
    back = deberta.build_relative_position(k, q, buckets, longest)[0]
    p2c = torch.clamp(-back + buckets, 0, 2 * buckets - 1).T
    assert p2c.tolist() == want.tolist()


@pytest.mark.parametrize("sides", [(2, 3), (1, 4), (5, 5), (1, 1)])
def test_rows_of_a_window_are_one_for_each_pair_of_distances(sides):
    (height, width), seen = sides, {}
    rows = window_rows(*sides)
    tokens = [(y, x) for y in range(height) for x in range(width)]
    for i, (y, x) in enumerate(tokens):
        for j, (v, u) in enumerate(tokens):
            place = (y - v + height - 1, x - u + width - 1)
            assert np.unravel_index(rows[i, j], (2 * height - 1, 2 * width - 1)) == place
            seen[place] = True
    assert len(seen) == (2 * height - 1) * (2 * width - 1)


@pytest.mark.parametrize("sides", [(2, 3), (1, 4), (5, 5)])
def test_rows_of_a_window_are_swins(sides):
    found = published("swin.modeling_swin").SwinRelativePositionBias(4, sides)
    assert window_rows(*sides).tolist() == found._create_relative_position_index().tolist()


@pytest.mark.parametrize("pretrained", [(0, 0), (7, 5)])
@pytest.mark.parametrize("sides", [(2, 3), (5, 5)])
def test_coordinates_of_a_window_are_swin_v2s(sides, pretrained):
    swin = published("swinv2.modeling_swinv2")
    config = published("swinv2.configuration_swinv2").Swinv2Config()
    with lifted():
        made = swin.Swinv2SelfAttention(config, 4, 2, [*sides], [*pretrained]).double()
        coordinates, rows = made.create_coords_table_and_index()
    given = {"pretrained": pretrained} if any(pretrained) else {}
    assert judge.same_function(window_coordinates(*sides, **given), coordinates[0].numpy()).ok
    assert window_rows(*sides).tolist() == rows.tolist()


@pytest.mark.parametrize("given", [{}, {"pretrained": (7, 5)}])
def test_coordinates_of_a_window(given):
    got, sides = window_coordinates(2, 4, **given), given.get("pretrained", (2, 4))
    for y in range(-1, 2):
        for x in range(-3, 4):
            for i, (d, side) in enumerate(zip((y, x), sides, strict=True)):
                want = math.copysign(math.log2(1 + 8 * abs(d) / (side - 1)) / 3, d)
                assert judge.same_function(got[y + 1, x + 3, i : i + 1], np.asarray([want])).ok or (
                    d == 0 and got[y + 1, x + 3, i] == 0
                )
    assert window_coordinates(1, 1).tolist() == [[[0.0, 0.0]]]


def sam(table_h, table_w, x, queries, keys):
    module, torch = published("sam.modeling_sam"), pytest.importorskip("torch", reason="torch")
    sizes = dict(hidden_size=6, num_attention_heads=2, image_size=32)
    config = published("sam.configuration_sam").SamVisionConfig(**sizes)
    with lifted():
        layer = module.SamVisionAttention(config, window_size=2)
        tensors = [torch.tensor(t, requires_grad=True) for t in (x, table_h, table_w)]
        out = layer.get_decomposed_rel_pos(*tensors, queries, keys)
        gradients = torch.autograd.grad((out**2).sum(), tensors)
    return out.detach().numpy(), [g.numpy() for g in gradients]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [7, 5, 12])  # as many as distances, and tables of other sizes
@pytest.mark.parametrize(
    ("queries", "keys"), [((4, 3), (4, 3)), ((4, 3), (2, 6)), ((3, 1), (4, 5))]
)
def test_decomposed_terms_are_sams(rows, queries, keys):
    x = RANDOM.standard_normal((2, math.prod(queries), 3))
    tables = RANDOM.standard_normal((rows, 3)), RANDOM.standard_normal((rows + 2, 3))

    def bias(x, high, wide):
        entries = [
            resized_rows(t, q, k) for t, q, k in zip((high, wide), queries, keys, strict=True)
        ]
        return decomposed_bias(x[:, :, None], *entries)[:, 0]  # B T S

    @jax.jit
    def both_ways(*given):
        got, back = jax.vjp(bias, *given)
        return got, back(2 * got)

    got, back = both_ways(x, *tables)
    want, gradients = sam(*tables, x, queries, keys)
    assert judge.same_function(got, want.reshape(got.shape)).ok
    for found, of in zip(back, gradients, strict=True):
        assert judge.same_function(found, of).ok


@pytest.mark.nightly
@pytest.mark.parametrize("queries", [1, 2, 5, 9])
@pytest.mark.parametrize("keys", [1, 3, 5, 7])
def test_rows_of_sides_that_differ_are_sams(queries, keys):
    module, torch = published("sam.modeling_sam"), pytest.importorskip("torch", reason="torch")
    table = RANDOM.standard_normal((6, 2))
    with lifted():
        want = module.SamVisionAttention.get_rel_pos(None, queries, keys, torch.tensor(table))
    got = jax.jit(lambda table: resized_rows(table, queries, keys))(table)
    assert judge.same_function(got, want.numpy()).ok


@pytest.mark.nightly
def test_a_table_is_read_linearly_between_rows():
    table = jnp.asarray(RANDOM.standard_normal((7, 2)))
    assert judge.exact(resized_rows(table, 4, 4)[0], table[3::-1]).ok
    grown = resized_rows(table, 7, 7)  # 13 places, the middle one the middle row
    assert judge.same_function(grown[2, 2], table[3]).ok
    place = 0.5 * 7 / 13 - 0.5  # below 0, so the first row
    assert place < 0 and judge.same_function(grown[0, 6], table[0]).ok
    place = 1.5 * 7 / 13 - 0.5
    assert judge.same_function(grown[0, 5], (1 - place) * table[0] + place * table[1]).ok


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_sinusoids(layout):
    positions = np.asarray([[5, 0, -3], [1, 2, 700]])
    got = sinusoids(jnp.asarray(positions), 8, base=100.0, layout=layout, dtype=jnp.float64)
    for i in range(4):
        angle = positions * 100.0 ** (-2 * i / 8)
        one, two = (i, i + 4) if layout == "half" else (2 * i, 2 * i + 1)
        assert judge.same_function(got[..., one], np.sin(angle)).ok
        assert judge.same_function(got[..., two], np.cos(angle)).ok


@pytest.mark.nightly
def test_sinusoids_and_the_shift_are_xlnets():
    xlnet, torch = published("xlnet.modeling_xlnet"), pytest.importorskip("torch", reason="torch")
    config = published("xlnet.configuration_xlnet").XLNetConfig(d_model=8, n_head=2, n_layer=1)
    with lifted():
        want = xlnet.XLNetModel(config).relative_positional_encoding(3, 5)[:, 0]
    distances = jnp.arange(5, -3, -1)
    assert judge.same_function(sinusoids(distances, 8, dtype=jnp.float64), want.numpy()).ok
    scores = RANDOM.standard_normal((2, 4, 3, 8))
    want = xlnet.XLNetRelativeAttention.rel_shift_bnij(torch.tensor(scores), klen=5)
    assert judge.exact(relative_shift(jnp.asarray(scores), 5), want.numpy()).ok


@pytest.mark.nightly
def test_the_padded_shift_is_the_conformers():
    module = published("wav2vec2_conformer.modeling_wav2vec2_conformer")
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    configs = published("wav2vec2_conformer.configuration_wav2vec2_conformer")
    sizes = dict(hidden_size=8, num_attention_heads=2, position_embeddings_type="relative")
    layer = module.Wav2Vec2ConformerSelfAttention(configs.Wav2Vec2ConformerConfig(**sizes)).double()
    query = torch.tensor(RANDOM.standard_normal((3, 2, 5, 4)))
    table = torch.tensor(RANDOM.standard_normal((1, 9, 8)))
    with torch.no_grad():
        _, want = module._apply_relative_position_encoding(layer, query, query, table)
        far = layer.linear_pos(table).view(1, 9, 2, 4).permute(0, 2, 3, 1)
        scores = (query + layer.pos_bias_v[:, None]) @ far
    shifted = relative_shift(jnp.asarray(scores.numpy()), 5, pad=True)
    assert judge.same_function(shifted * layer.scaling, want.numpy()).ok


@pytest.mark.nightly
@pytest.mark.parametrize("pad", [False, True])
def test_the_shift_puts_distances_at_their_keys(pad):
    scores = RANDOM.standard_normal((2, 3, 7))
    got, back = jax.vjp(lambda x: relative_shift(x, 4, pad=pad), jnp.asarray(scores))
    cotangent, want = RANDOM.standard_normal((2, 3, 4)), np.zeros((2, 3, 7))
    for i in range(3):
        for j in range(4):
            assert judge.exact(got[:, i, j], scores[:, i, j + 3 - i - pad]).ok
            want[:, i, j + 3 - i - pad] += cotangent[:, i, j]
    assert judge.exact(back(jnp.asarray(cotangent))[0], want).ok


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: t5_buckets(DISTANCES, buckets=3), "4 buckets or more .*; got buckets=3, max"),
        (lambda: t5_buckets(DISTANCES, max_distance=8), "beyond their rows.*max_distance=8"),
        (lambda: deberta_buckets(DISTANCES, buckets=5, max_distance=9), "even number.*buckets=5"),
        (lambda: deberta_buckets(DISTANCES, buckets=8, max_distance=5), "beyond.*max_distance=5"),
        (lambda: window_rows(0, 2), "sides of a window must be whole numbers.*; got 0, 2"),
        (lambda: window_coordinates(1, 2), r"divided by side - 1; got a window of \(1, 2\)"),
        (lambda: window_coordinates(3, 2, pretrained=(2, 0)), "sides of a pretrained .* got 2, 0"),
        (lambda: resized_rows(jnp.ones((0, 2)), 2, 2), r"\(rows, width\); got \(0, 2\)"),
        (lambda: resized_rows(jnp.ones((3, 2)), 2, 0), "The sides of an image must .* got 2, 0"),
        (
            lambda: decomposed_bias(jnp.ones((5, 1, 2)), jnp.ones((2, 2, 2)), jnp.ones((3, 3, 2))),
            "each of 2 x 3 places; got 5",
        ),
        (lambda: sinusoids(jnp.arange(3), 5), "even count of components; got 5"),
        (lambda: sinusoids(jnp.arange(3), 4, layout="paired"), "layout must be one of .*'paired'"),
        (lambda: relative_shift(jnp.ones((3, 4)), 4), "3 distances are left .* got keys=4"),
    ],
)
def test_wrong_shapes_are_named_in_the_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()
