"""Complex inputs, outputs, parameters and gradients: JAX's conventions are brought to torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import assert_parity, compare

torch = pytest.importorskip("torch", reason="the harness compares with torch")
ONCE = {"dtypes": ("float64",), "eager": False}
X = np.random.RandomState(0).standard_normal((3, 5, 6))
Z = X + 1j * np.random.RandomState(1).standard_normal((3, 5, 6))


class Theirs(torch.nn.Module):
    """A complex linear map of a complex input, through a submodule."""

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.randn(6, 4, dtype=torch.complex64)
            self.weight, self.bias = (
                torch.nn.Parameter(weight),
                torch.nn.Parameter(torch.randn(4, dtype=torch.complex64)),
            )

        def forward(self, z):
            return z @ self.weight + self.bias

    def __init__(self):
        super().__init__()
        self.linear = self.Linear()

    def forward(self, z):
        return self.linear(z) * (1 + 2j)


class Mine(nnx.Module):
    """The same; each method is a place for a fault."""

    class Linear(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((6, 4), jnp.complex64))
            self.bias = nnx.Param(jnp.ones(4, jnp.complex64))

        def __call__(self, z):
            return z @ self.weight + self.bias[None, None]

    def __init__(self):
        self.linear = self.Linear()

    def __call__(self, z):
        return self.linear(z) * (1 + 2j)


class Conjugated(Mine):
    def __call__(self, z):
        return super().__call__(z).conj()


class WeightConjugated(Mine):
    def __call__(self, z):
        return (z @ self.linear.weight[...].conj() + self.linear.bias[None, None]) * (1 + 2j)


class WrongBackward(Mine):
    def __call__(self, z):
        out = super().__call__(z)
        return jax.lax.stop_gradient(out - out.conj()) + out.conj()


@pytest.mark.nightly
def test_a_complex_linear_is_equal_in_all_dtypes():
    report = assert_parity(Theirs(), Mine(), Z, dtypes=("float64", "float32", "bfloat16"))
    assert {r.name for r in report.rows if r.kind == "gradient"} == {
        *("input 0", "linear.weight", "linear.bias")
    }
    assert {r.name for r in report.rows if r.kind == "tap"} == {"linear"}


@pytest.mark.nightly(
    but=["WeightConjugated-float64", "WrongBackward-float32", "WrongBackward-float64"]
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fault", [Conjugated, WeightConjugated, WrongBackward])
def test_an_extra_conjugate_is_found(fault, dtype):
    report = compare(Theirs(), fault(), Z, dtypes=(dtype,), eager=False)
    assert not report.ok and str(report), report
    if fault is Conjugated and dtype == "float64":
        assert "the conjugate of the product" in report.first.hint
    kinds = {row.kind for row in report.failed}
    assert kinds == ({"gradient"} if fault is WrongBackward else {"output", "gradient"})


@pytest.mark.nightly
def test_the_imaginary_part_alone_is_compared():
    class Real(Mine):
        def __call__(self, z):
            out = super().__call__(z)
            return out.real + 0j * out

    assert not compare(Theirs(), Real(), Z, **ONCE).ok


@pytest.mark.nightly
def test_a_mixer_over_fft_frequencies_is_equal():
    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat))
            self.gain = torch.nn.Parameter(torch.randn(6))

        def forward(self, x):
            f = torch.fft.rfft(torch.cat([x, x[:, :1]], 1), dim=1)
            return torch.fft.irfft(f * self.filter, n=6, dim=1) * self.gain, f.conj() * self.filter

    class Port(nnx.Module):
        sign = 1

        def __init__(self):
            self.filter = nnx.Param(jnp.ones((4, 6), jnp.complex64))
            self.gain = nnx.Param(jnp.ones(6))

        def __call__(self, x):
            f = jnp.fft.rfft(jnp.concatenate([x, x[:, :1]], 1), axis=1)
            mixed = f * self.filter[None]
            mixed = mixed if self.sign == 1 else mixed.conj()
            return jnp.fft.irfft(mixed, n=6, axis=1) * self.gain[
                None, None
            ], f.conj() * self.filter[None]

    class Turned(Port):
        sign = -1

    assert_parity(Mixer(), Port(), X)
    assert not compare(Mixer(), Turned(), X, **ONCE).ok


@pytest.mark.nightly
def test_a_real_output_of_a_complex_input_is_equal():
    class Absolute(torch.nn.Module):
        def forward(self, z, w):
            return (z * w.conj()).abs(), (z * w).real

    class Port(nnx.Module):
        def __call__(self, z, w):
            return jnp.abs(z * w.conj()), (z * w).real

    assert_parity(Absolute(), Port(), Z, {"w": Z[::-1]}["w"])
    other = Z.astype(np.complex64)
    assert_parity(Absolute(), Port(), other, other[::-1], constants=("1",))
