"""Whether a layer calls `attend` depends on its own code, not on the imports of its module."""

import pytest
from flax import nnx

from flax_attn import attend
from flax_attn.command import proving
from flax_attn.parity import Case
from flax_attn.parity.cases import markdown
from flax_attn.reference import softmax
from flax_attn.taps import tap
from parity_tests.core.cases import every_case
from parity_tests.core.test_house import certificate
from parity_tests.tables import each


class ByAttend(nnx.Module):
    def __call__(self, x):
        heads = x[..., None, :]
        return attend(heads, heads, heads)[..., 0, :]


class ByHand(nnx.Module):
    def __call__(self, x):
        x = tap("query", x)
        return tap("weights", softmax(x @ x.mT)) @ x


class Neither(nnx.Module):
    def __call__(self, x):
        return tap("context", x)


def attends(layer):
    return proving._attends(Case(layer, {}, reference="torch.nn.Identity", x=(2, 5, 3)))


def test_attends_is_true_only_for_layers_that_call_attend():
    assert attends(ByAttend)
    assert not attends(ByHand) and not attends(Neither)


FIRST = {case.variant: case for case in reversed(every_case())}


@pytest.mark.nightly
@each("case", [*FIRST.values()])
def test_the_certificate_says_which_layers_have_steps_of_their_own(case):
    row = next(
        x for name, x in certificate().items() if case.flax_class.__name__ in name.split(", ")
    )
    is_own = dict(zip(markdown.HEADINGS, row, strict=True))["backends"] == "own"
    assert proving._attends(case) != is_own, case.variant
