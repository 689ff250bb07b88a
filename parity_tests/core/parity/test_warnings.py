"""The warning that torch rounds is given only where torch's error is far larger than Flax's."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import compare, judge
from flax_attn.parity.report import Row
from flax_attn.parity.rows.warnings import warnings

torch = pytest.importorskip("torch", reason="the harness compares with torch")

X = np.random.RandomState(0).standard_normal((3, 5, 6))


class Rounds(torch.nn.Module):
    """Rounds its result to 16 bits, always or only where it runs in float32."""

    def __init__(self, always):
        super().__init__()
        self.up, self.always = torch.nn.Linear(6, 8), always

    def forward(self, x):
        y = self.up(x)
        return y.bfloat16().to(x.dtype) if self.always or x.dtype == torch.float32 else y


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 8)

    def forward(self, x):
        return self.up(x)


class Port(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)


def told(report):
    return [note for note in report.notes if "somebody rounds" in note]


@pytest.mark.nightly(but=["True-False"])
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_rounding_in_torch_alone_is_reported(always, grads):
    report = compare(Rounds(always), Port(), X, eager=False, grads=grads)
    assert report.ok is not always
    (note,) = told(report)
    assert note.startswith("somebody rounds in float32: in output ")


@pytest.mark.nightly
def test_a_right_port_gets_no_warning():
    report = compare(Plain(), Port(), X, dtypes=("float32", "bfloat16", "float16"), eager=False)
    assert report.ok and not told(report), report.notes
    few = compare(Plain(), Port(), X[:1, :1], dtypes=("float32", "bfloat16"), eager=False)
    assert few.ok and not told(few)


def row(kind, got, own, dtype="float32"):
    return Row(kind, kind, dtype, "jit", judge.Verdict("same precision", got, 2 * own, own))


@pytest.mark.parametrize(
    ("rows", "warns"),
    [
        ([row("output", 1e-7, 1e-3)], True),
        ([row("output", 1e-7, 1e-3), row("gradient", 1e-7, 1e-3)], True),
        ([row("output", 1e-7, 1e-3), row("gradient", 1e-3, 1e-3)], False),
        ([row("output", 1e-7, 1e-3), row("output", 1e-3, 1e-3)], True),
        ([row("output", 0.0, 3e-8)], False),  # the last digits of a number
        ([row("output", 0.0, 0.0)], False),
        ([row("gradient", 1e-7, 1e-3)], False),
        ([row("output", 1e-3, np.inf)], False),
        ([row("output", np.nan, 1e-3)], False),
        ([row("output", 4e-4, 1e-3)], False),
        ([row("output", 1e-4, 4e-3, "bfloat16")], False),
        ([row(kind, 1e-4, 4e-3, "bfloat16") for kind in ("output", "gradient")], True),
        ([row("output", 0.0, 4e-8), row("gradient", 4e-8, 4e-8)], False),
        ([row("output", 0.0, 4e-8), row("gradient", 0.0, 0.0)], False),
        ([row("output", 1e-3, 5e-2, "bfloat16")], True),
        ([Row("output", "output", "float64", "", judge.Verdict("same function", 0, 1))], False),
        ([], False),
    ],
)
def test_the_number_of_warnings_depends_on_the_rows(rows, warns):
    assert len(warnings(rows)) == warns


def test_numbers_that_are_pinned_to_float32_do_not_warn_of_what_both_round():
    class Both(Port):
        def __call__(self, x):
            y = super().__call__(x)
            return jnp.asarray(y, jnp.bfloat16).astype(x.dtype)

    report = compare(Rounds(True), Both(), X, dtypes=("float64",), eager=False)
    assert report.ok, report
