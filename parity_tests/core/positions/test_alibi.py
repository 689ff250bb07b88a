"""The slopes of ALiBi against the paper's formula, Bloom's and MPT's."""

import numpy as np
import pytest

from flax_attn import alibi_slopes
from flax_attn.parity import judge
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.core.drawing import float64 as float64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: alibi_slopes(0), "1 or more; got 0"),
        (lambda: alibi_slopes(2.5), "1 or more; got 2.5"),
        (lambda: alibi_slopes(2, bias_max=0.0), "bias_max must be above zero; got 0.0"),
    ],
)
def test_head_counts_without_slopes_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def slopes_of_the_paper(n):
    if n & (n - 1) == 0:
        start = 2.0 ** (-(2.0 ** -(np.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]
    less = 2 ** int(np.floor(np.log2(n)))
    return slopes_of_the_paper(less) + slopes_of_the_paper(2 * less)[::2][: n - less]


@pytest.mark.parametrize("n", range(1, 18))
def test_alibi_slopes_are_the_papers(n):
    assert alibi_slopes(n).dtype == np.float64
    want = np.asarray(slopes_of_the_paper(n))
    assert judge.printed(alibi_slopes(n), want) and len(want) == n


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 16, 17])
def test_alibi_slopes_are_blooms(n):
    torch = pytest.importorskip("torch", reason="Bloom's slopes are torch's")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="Bloom's slopes")
    bias = bloom.build_alibi_tensor(torch.ones(1, 2), n, torch.float64)  # N 1 S
    assert judge.printed(bias[:, 0, 1].numpy(), alibi_slopes(n))  # Bloom takes powers in float32


@pytest.mark.nightly
@pytest.mark.parametrize("bias_max", [8, 6, 16])
@pytest.mark.parametrize("n", range(1, 18))
def test_alibi_slopes_are_mpts(n, bias_max):
    pytest.importorskip("torch", reason="MPT's slopes are torch's")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt", reason="MPT's slopes")
    with lifted():
        bias = -mpt.build_mpt_alibi_tensor(n, 2, bias_max).numpy()[:, 0, 0]  # N 1 S
    assert judge.same_function(alibi_slopes(n, bias_max=float(bias_max)), bias).ok
