"""The layers that the benchmark compares are one function of one set of weights."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from flax_attn.bench import book, race, torch_layers, twins
from flax_attn.bench.book import Book
from flax_attn.bench.proof import Proof
from flax_attn.bench.task import BOTH
from flax_attn.bench.twins import Twin
from flax_attn.bench.weights import by_heads, combined, einsum, separate, wrapper
from flax_attn.parity import port
from flax_attn.parity.cases.case import has_torch

TINY = Book(length=5, width=4, heads=3, batch=2, which=BOTH)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        lambda turned: separate("abcd", "kernel", turned),
        lambda turned: combined("w", "b", "out", "kernel", turned),
        lambda turned: einsum("out", "kernel", turned),
        lambda turned: wrapper(3, "first", "out", "kernel", turned),
        lambda turned: by_heads(3),
    ],
    ids=["separate", "combined", "einsum", "wrapper", "by heads"],
)
def test_weights_round_trip_unchanged(layout, turned):
    arrays = TINY.weight_arrays()
    back = layout(turned).back(layout(turned).forward(arrays))
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def proven(competitor, task=TINY):
    """Its row in the pass that gives outputs and gradients; nothing is timed."""
    rows = []
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        race.Race([competitor], race.Settings(rounds=1)).run(task, rows)
    return rows[0]


def of(competitors):
    return pytest.mark.parametrize("competitor", competitors, ids=lambda c: c.name)


@pytest.mark.nightly(
    but=[
        "equinox.nn.MultiheadAttention",
        "flax.nnx.MultiHeadAttention",
        "flax_attn.TransformerMultiHeadAttention",
        "jax.nn.dot_product_attention",
    ]
)
@of([c for c in book.competitors(None) if c.name[0] not in "123456789"])
def test_layers_in_jax_are_equal(competitor):
    if reason := competitor.absent():
        pytest.skip(reason)
    row = proven(competitor)
    assert row.status == "timed", row.reason


@pytest.mark.skipif(not has_torch(), reason="they are torch's")
@of([c for c in book.competitors(None) if c.name[0] in "12345678"])
def test_layers_in_torch_are_equal(competitor):
    row = proven(competitor)
    assert row.status == "timed", row.reason


@pytest.mark.skipif(not has_torch(), reason="it is torch's")
def test_flex_attention_says_that_it_has_no_backward_pass():
    (flex,) = [c for c in book.competitors(None) if c.name.startswith("9")]
    row = proven(flex)
    assert row.status == "left out" and "no backward pass" in row.reason


def test_a_layer_with_two_weights_swapped_is_not_timed():
    right = book.OWN["multi_head"][1]

    def wrong(task):
        run, layout = right(task)
        names = {"query.weight": "key.weight", "key.weight": "query.weight"}
        moves = (
            replace(move, sources=tuple(names.get(name, name) for name in move.sources))
            for move in layout.moves
        )
        return run, replace(layout, moves=tuple(moves))

    competitor = replace(book.competitors(None)[0], build=lambda task: book._program(wrong, task))
    row = proven(competitor)
    assert row.status == "wrong" and not row.seconds


@pytest.mark.nightly(but=["luong"])
@pytest.mark.skipif(not has_torch(), reason="the twins are torch's")
@pytest.mark.parametrize("variant", twins.variants())
def test_every_variant_has_a_layer_and_a_twin_that_fit(variant):
    task = Twin(5, 4, 2, 2, layer=variant)
    port(task.flax(), task.torch())


@pytest.mark.skipif(not has_torch(), reason="the twins are torch's")
def test_a_variant_is_proven_and_timed():
    task = Twin(5, 4, 3, 2, which=BOTH, layer="luong")
    mine, theirs = twins.competitors("luong")[:2]
    rows = [proven(mine, task), proven(theirs, task)]
    assert [row.status for row in rows] == ["timed", "timed"] and rows[0].tflops is None
    wrong = replace(mine, prove=lambda task: Proof(1.0, 0.0, "different"))
    row = proven(wrong, task)
    assert row.status == "wrong" and row.reason == "different" and not row.seconds


def test_the_book_has_nine_layers():
    assert len(torch_layers.BOOK_LAYERS) == 9
