"""Hints about settings of layers, indices, rows of padding, stopped gradients, masks, and parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, compare, record
from flax_attn.parity.recording.recording import Recording

torch = pytest.importorskip("torch", reason="the harness compares with torch")

X = np.random.RandomState(0).standard_normal((3, 8, 4))
QUICK: dict[str, Any] = {"dtypes": ("float64",), "jit": False, "grads": False}
GRADED = {**QUICK, "grads": True}


class Layered(torch.nn.Module):
    """One layer of torch's, channels last."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.mT).mT if isinstance(self.layer, CHANNELS_FIRST) else self.layer(x)


CHANNELS_FIRST = (torch.nn.Conv1d, torch.nn.ConvTranspose1d, torch.nn.GroupNorm)


class Port(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def nnx_conv(**options):
    return nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0), **options)


LAYERS = {
    "stride": (
        lambda: torch.nn.Conv1d(4, 4, 3, stride=2, padding=1),
        lambda: nnx_conv(strides=2, padding=1),
        lambda: nnx_conv(strides=2),
        "another padding: SAME, here (0, 1), torch (1, 1)",
    ),
    "dilation": (
        lambda: torch.nn.Conv1d(4, 4, 3, padding=2, dilation=2),
        lambda: nnx_conv(kernel_dilation=2),
        lambda: nnx_conv(padding=1),
        "another dilation: 1, torch 2; another padding: (1, 1), torch (2, 2)",
    ),
    "epsilon": (
        lambda: torch.nn.LayerNorm(4, eps=1e-4),
        lambda: nnx.LayerNorm(4, epsilon=1e-4, rngs=nnx.Rngs(0)),
        lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
        "another epsilon: 1e-06, not 0.0001",
    ),
    "groups": (
        lambda: torch.nn.GroupNorm(2, 4),
        lambda: nnx.GroupNorm(4, 2, epsilon=1e-5, rngs=nnx.Rngs(0)),
        lambda: nnx.GroupNorm(4, 1, epsilon=1e-5, rngs=nnx.Rngs(0)),
        "another number of groups: 1, torch 2",
    ),
    "mirrored": (
        lambda: torch.nn.ConvTranspose1d(4, 4, 3, padding=1),
        lambda: nnx.ConvTranspose(
            4, 4, (3,), padding=[(1, 1)], transpose_kernel=True, rngs=nnx.Rngs(0)
        ),
        lambda: nnx.ConvTranspose(4, 4, (3,), padding=[(1, 1)], rngs=nnx.Rngs(0)),
        "the kernel mirrored: transpose_kernel=False",
    ),
}
MIRRORED = (Rule("layer.weight -> layer.kernel", "i o k -> k i o"),)


@pytest.mark.nightly(but=["groups-True", "mirrored-True", "stride-True"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_settings_of_a_layer(name, recorded, tmp_path):
    """They need no torch: a recording has them too."""
    theirs, right, wrong, said = LAYERS[name]
    made = torchs = Layered(theirs())
    if recorded:
        file = record(made, (X,), tmp_path / "layer.safetensors", dtypes=("float64",))
        torchs = Recording(file)
    assert compare(torchs, Port(right()), X, **QUICK).ok
    rules = MIRRORED if name == "mirrored" else ()
    report = compare(torchs, Port(wrong()), X, rules=rules, **QUICK)
    assert report.first is not None and report.first.tap == "layer", report
    said_there = report.first.hint or report.first.note  # a note where nothing proves it
    assert said_there.startswith(said), report.first


@pytest.mark.nightly
def test_momentum_is_the_share_of_the_new():
    def port(momentum):
        return Port(nnx.BatchNorm(4, momentum=momentum, epsilon=1e-5, rngs=nnx.Rngs(0)))

    theirs, x = Layered(torch.nn.BatchNorm1d(4)), X[:, 0]
    assert compare(theirs, port(0.9), x, train=True, **QUICK).ok
    report = compare(theirs, port(0.1), x, train=True, **QUICK)
    assert report.first is not None and report.first.kind == "state", report
    assert report.first.hint.startswith("another momentum: nnx keeps 0.1 of the old statistics")


IDS = np.asarray([[2, 3, 0, 4], [5, 0, 0, 1]])


class Looks(torch.nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.table = torch.nn.Embedding(9, 4, padding_idx=padding_idx)

    def forward(self, ids):
        return self.table(ids + 1)


class LooksUp(nnx.Module):
    def __init__(self, by, stops=False):
        self.table, self.by, self.stops = nnx.Embed(9, 4, rngs=nnx.Rngs(0)), by, stops

    def __call__(self, ids):
        rows, kept = self.table(ids + self.by), (ids + self.by == 3)[..., None]
        return jnp.where(kept, jax.lax.stop_gradient(rows), rows) if self.stops else rows


def test_indices_that_are_shifted():
    assert compare(Looks(), LooksUp(1), IDS, **QUICK).ok
    report = compare(Looks(), LooksUp(3), IDS, **QUICK)
    assert report.first is not None and report.first.tap == "table"
    assert "2 higher than torch's in all; [0, 0] is 5, torch 3" in report.first.hint


@pytest.mark.nightly
def test_a_row_of_padding_that_is_trained():
    assert compare(Looks(3), LooksUp(1, stops=True), IDS, **GRADED).ok
    report = compare(Looks(3), LooksUp(1), IDS, **GRADED)
    said = "row 3, torch's padding_idx, is trained in Flax, and is not in torch: padding"
    assert report.first is not None and report.first.hint == said, report


@pytest.mark.nightly
def test_a_mask_of_another_place_names_both():
    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.drop = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.up(x))

    class DropsBefore(nnx.Module):
        def __init__(self):
            self.up, self.lost = (
                nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
                nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
            )

        def __call__(self, x):
            return self.up(self.lost(x))

    said = r"\[3, 8, 4\] in Flax, drawn in lost, and \[3, 8, 8\] in drop of torch"
    with pytest.raises(ParityError, match=said):
        compare(Drops(), DropsBefore(), X, train=True, **QUICK)


@pytest.mark.nightly(but=["-1"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_part_of_a_sum_that_is_left_out_is_named(sign):
    class Less(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.all = torch.nn.Tanh(), Sum(sign)

        def forward(self, x):
            return self.all(x.flip(1), self.drop(x))

    class Sum(torch.nn.Module):
        def __init__(self, sign):
            super().__init__()
            self.sign = sign

        def forward(self, x, y):
            return x * 0.1 + self.sign * y

    class Add(nnx.Module):
        def __init__(self, sign):
            self.sign = sign

        def __call__(self, x, y):
            return x * 0.1 + self.sign * y

    class Tanh(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

    class More(nnx.Module):
        def __init__(self, sign):
            self.drop, self.all = Tanh(), Add(sign)

        def __call__(self, x):
            return self.all(jnp.flip(x, 1), self.drop(x))

    assert compare(Less(), More(sign), X, **QUICK).ok
    report = compare(Less(), More(0), X, **QUICK)
    assert report.first is not None and "not added, where torch adds it" in report.first.hint
