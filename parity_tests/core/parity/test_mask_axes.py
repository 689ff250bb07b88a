"""Dropout masks of channels-first torch code and of its channels-last port."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Recording, compare, record
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

ONCE = {"dtypes": ("float64",), "eager": False, "train": True}
B, C = 2, 6


class Theirs(torch.nn.Module):
    """Two convolutions on B C T or B C H W, each with dropout, by a module or a function."""

    def __init__(self, axes, rate=0.5, function=False):
        super().__init__()
        kind = torch.nn.Conv1d if axes == 1 else torch.nn.Conv2d
        self.first, self.second = kind(C, C, 1), kind(C, C, 1)
        drop = lambda x: torch.nn.functional.dropout(x, rate, self.training)  # noqa: E731
        self.drop, self.drop_more = (
            (drop, drop) if function else (torch.nn.Dropout(rate), torch.nn.Dropout(rate))
        )

    def forward(self, x):
        x = x.movedim(-1, 1)
        x = self.drop_more(torch.tanh(self.second(self.drop(torch.tanh(self.first(x))))))
        return x.movedim(1, -1)


class Mine(nnx.Module):
    def __init__(self, axes, rate=0.5):
        rngs = nnx.Rngs(0)
        kernel = (1,) * axes
        self.first, self.second = (nnx.Conv(C, C, kernel, rngs=rngs) for _ in range(2))
        self.drop, self.drop_more = (nnx.Dropout(rate, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.drop_more(jnp.tanh(self.second(self.drop(jnp.tanh(self.first(x))))))


def inputs(*lengths):
    return np.random.RandomState(0).standard_normal((B, *lengths, C))


SIZES = {
    "sequence": (7,),
    "sequence as long as channels": (C,),
    "sequence as long as the batch": (B,),
    "image": (3, 5),
    "square image": (5, 5),
    "image with all sizes alike": (C, C),
}


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mask_is_carried_by_its_axes(sizes, function):
    x = inputs(*SIZES[sizes])
    theirs, mine = Theirs(x.ndim - 2, function=function), Mine(x.ndim - 2)
    report = compare(theirs, mine, x, **ONCE)
    assert report.certain, str(report)
    drops = [row.verdict.ok for row in report.rows if "drop" in row.name and row.kind == "exact"]
    assert drops == [True, True]


def test_in_every_dtype_and_mode_and_along_steps():
    x = inputs(C)
    report = compare(Theirs(1), Mine(1), x, train=True)
    assert report.certain, str(report)
    report = compare(Theirs(1), Mine(1), x, **ONCE, optimizer=("sgd", {"lr": 0.1}), steps=2)
    assert report.certain, str(report)


@pytest.mark.parametrize("sizes", with_nightly(SIZES, commit=3))
def test_a_recording_repeats_its_masks_by_axes(sizes, tmp_path):
    x, file = inputs(*SIZES[sizes]), tmp_path / "channels.safetensors"
    record(Theirs(x.ndim - 2), (x,), file, dtypes=("float64",), train=True)
    report = compare(Recording(file), Mine(x.ndim - 2), eager=False)
    assert report.certain, str(report)


class Misplaced(Mine):
    """Drops the input of the first layer, in which the channels have another number."""

    def __call__(self, x):
        y = self.drop(jnp.concatenate([x, x], -1))[..., :C]
        return self.drop_more(jnp.tanh(self.second(jnp.tanh(self.first(y)))))


class Before(Mine):
    """Drops before the tanh, in the same shape."""

    def __call__(self, x):
        return self.drop_more(jnp.tanh(self.second(jnp.tanh(self.drop(self.first(x))))))


class Dropped(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5, self.training)


class Alone(nnx.Module):
    def __init__(self, reshape):
        self.drop, self.reshape = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), reshape

    def __call__(self, x):
        return self.reshape(self.drop(self.reshape(x, (B, C, 7))), (B, 7, C))


def test_a_mask_of_permuted_axes_needs_a_sign_of_them():
    """A mask on reshaped elements has the same shape as one on transposed ones."""
    x = inputs(7)
    transposed = Alone(lambda y, _: y.swapaxes(1, 2))
    assert compare(Dropped(), transposed, x, **ONCE).certain
    with pytest.raises(ParityError, match="stands in another place"):
        compare(Dropped(), Alone(lambda y, shape: y.reshape(shape)), x, **ONCE)


@pytest.mark.parametrize("change", [lambda y: 1.1 * y, lambda y: y + 0.1])
def test_a_fault_before_or_behind_a_dropout_is_placed(change):
    class Before(Mine):
        def __call__(self, x):
            return super().__call__(change(x))

    class Behind(Mine):
        def __call__(self, x):
            return change(super().__call__(x))

    for kind, function in ((Before, False), (Behind, False), (Behind, True)):
        report = compare(Theirs(1, function=function), kind(1), inputs(7), **ONCE)
        assert report.verdict == "DIFFERENT", report
        assert report.first.tap == ("output" if kind is Behind else "between the input and first")


@pytest.mark.parametrize("sizes", with_nightly(SIZES, commit=2))
def test_a_dropout_in_another_place_is_refused_or_different(sizes):
    x = inputs(*SIZES[sizes])
    with pytest.raises(ParityError, match="stands in another place"):
        compare(Theirs(x.ndim - 2), Misplaced(x.ndim - 2), x, **ONCE)
    report = compare(Theirs(x.ndim - 2), Before(x.ndim - 2), x, **ONCE)
    assert report.verdict == "DIFFERENT", report
