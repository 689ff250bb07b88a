"""Whatever goes into a module and comes out of it is compared, in whatever it is wrapped."""

import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import judge
from flax_attn.parity.compare import make_pair
from flax_attn.parity.sides.run import Request

torch = pytest.importorskip("torch", reason="the harness compares with torch")
X = np.random.RandomState(0).standard_normal((3, 5, 6))


def call(module, *args, **kwargs):
    return module(*args, **kwargs)


def test_inputs_of_submodules_are_recorded_on_both_sides():
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(6, 4)

        def forward(self, x):
            return self.up(self.up(x + 1)[..., [0, 1, 2, 3, 0, 1]])

    class Mine(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.up(self.up(x + 1)[..., np.array([0, 1, 2, 3, 0, 1])])

    request = Request((X,), {}, seed=0, train=False, grads=True, taps=True)
    pair = make_pair(Theirs(), Mine(), (call, call), request, "random", ())
    for mode, (got, _, truth) in pair.run("float64", ["eager", "jit"]).items():
        assert set(got.inputs) == set(got.taps) == {"up", "up#2"}, mode
        for name, inputs in got.inputs.items():
            (want,) = truth.calls[name].inputs.values()
            assert judge.same_function(inputs[0], want).ok and len(inputs) == 1
