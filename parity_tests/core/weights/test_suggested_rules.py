"""What `suggest` proposes, `plan` accepts: random pairs of layers of known kinds."""

import random

import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, compare, plan, suggest
from flax_attn.parity.torch_module import describe
from flax_attn.weights.mapping import Draft
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

torch = pytest.importorskip("torch", reason="rules are from torch")

RNGS = nnx.Rngs(0)
SIZES = (1, 2, 3, 4, 6)
NAMES = ("proj", "mix", "up", "head", "norm", "first", "second")

THEIRS = [
    lambda i, o: torch.nn.Linear(i, o),
    lambda i, o: torch.nn.Linear(i, o, bias=False),
    lambda i, o: torch.nn.Conv1d(i, o, 1),
    lambda i, o: torch.nn.Conv2d(i, o, 1),
    lambda i, o: torch.nn.Conv1d(i, o, 3, bias=False),
    lambda i, o: torch.nn.Conv2d(i, o, (3, 2)),
    lambda i, o: torch.nn.Conv2d(i, i, (1, 3), groups=i),
    lambda i, o: torch.nn.ConvTranspose1d(i, o, 1),
    lambda i, o: torch.nn.ConvTranspose2d(i, o, 2),
    lambda i, o: torch.nn.Embedding(i, o),
    lambda i, o: torch.nn.Bilinear(i, i, o),
    lambda i, o: torch.nn.LayerNorm(o),
    lambda i, o: torch.nn.RMSNorm(o),
    lambda i, o: torch.nn.GroupNorm(1, o),
    lambda i, o: torch.nn.BatchNorm1d(o),
    lambda i, o: torch.nn.PReLU(),
]
MINE = [
    lambda i, o: nnx.Linear(i, o, rngs=RNGS),
    lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=RNGS),
    lambda i, o: nnx.Conv(i, o, (1,), rngs=RNGS),
    lambda i, o: nnx.Conv(i, o, (1, 1), rngs=RNGS),
    lambda i, o: nnx.Conv(i, o, (3,), use_bias=False, rngs=RNGS),
    lambda i, o: nnx.Conv(i, o, (3, 2), rngs=RNGS),
    lambda i, o: nnx.Conv(i, i, (1, 3), feature_group_count=i, rngs=RNGS),
    lambda i, o: nnx.ConvTranspose(i, o, (1,), transpose_kernel=True, rngs=RNGS),
    lambda i, o: nnx.ConvTranspose(i, o, (2, 2), transpose_kernel=True, rngs=RNGS),
    lambda i, o: nnx.LinearGeneral(i, (2, o), rngs=RNGS),
    lambda i, o: nnx.LinearGeneral((i, 2), o, axis=(-2, -1), rngs=RNGS),
    lambda i, o: nnx.Einsum("bi,io->bo", (i, o), rngs=RNGS),
    lambda i, o: nnx.Embed(i, o, rngs=RNGS),
    lambda i, o: nnx.LayerNorm(o, rngs=RNGS),
    lambda i, o: nnx.RMSNorm(o, rngs=RNGS),
    lambda i, o: nnx.GroupNorm(o, num_groups=1, rngs=RNGS),
    lambda i, o: nnx.BatchNorm(o, rngs=RNGS),
    lambda i, o: nnx.PReLU(),
]


# Layers that compute the same function of the same weights, by index in THEIRS and MINE.
SAME = [
    (0, 0),
    (0, 2),
    (0, 3),
    (1, 1),
    (2, 0),
    (2, 2),
    (3, 0),
    (3, 2),
    (3, 3),
    (4, 4),
    (5, 5),
    (6, 6),
]
SAME += [(7, 0), (9, 12), (11, 13), (12, 14), (13, 15), (14, 16)]


class Mine(nnx.Module):
    """Holds layers by name."""


def drawn(seed, same):
    """Up to three layers a side, of random sizes and names; of kinds that fit, or of any."""
    chance = random.Random(seed)
    theirs, mine = torch.nn.Module(), Mine()
    for name in chance.sample(NAMES, chance.randint(1, 3)):
        i, o = chance.choice(SIZES), chance.choice(SIZES)
        any_kinds = chance.randrange(len(THEIRS)), chance.randrange(len(MINE))
        one, other = chance.choice(SAME) if same else any_kinds
        setattr(theirs, name, THEIRS[one](i, o))
        setattr(mine, name + chance.choice(("", "_a", "_layer")), MINE[other](i, o))
    return theirs, mine


def suggested(theirs, mine):
    """The proposed rules; of two with the same names, which are two orders, one."""
    return list({rule.names: rule for rule in suggest(theirs, mine)}.values())


def is_refused(theirs, mine, rules=()):
    try:
        plan(theirs, mine, rules=rules)
    except ParityError:
        return True
    return False


@pytest.mark.parametrize("part", with_nightly(range(12), commit=4))
def test_a_set_of_rules_for_the_same_layers_is_accepted(part):
    asked = 0
    for seed in range(40 * part, 40 * part + 40):
        theirs, mine = drawn(seed, same=True)
        rules = suggested(theirs, mine) if is_refused(theirs, mine) else []
        assert not rules or not is_refused(theirs, mine, rules), (seed, rules)
        asked += bool(rules)
    assert asked > 20, asked


@pytest.mark.parametrize("part", with_nightly(range(12), commit=4))
def test_a_rule_places_all_that_it_names_whatever_the_layers_are(part):
    """It may solve a part; of what it does not name, problems may remain."""
    asked = 0
    for seed in range(40 * part, 40 * part + 40):
        theirs, mine = drawn(seed, same=False)
        rules = suggested(theirs, mine) if is_refused(theirs, mine) else []
        draft = Draft(describe(theirs), mine, rules)
        left = {
            name for rule in rules for names, _ in rule.groups(draft.unplaced) for name in names
        }
        assert not left, (seed, left, rules, draft.problems)
        asked += bool(rules)
    assert asked > 10, asked


POINTWISE = {
    "2-D to Linear": (THEIRS[3], MINE[0], "o i 1 1 -> i o"),
    "1-D to Linear": (THEIRS[2], MINE[0], "o i 1 -> i o"),
    "Linear to 2-D": (THEIRS[0], MINE[3], "o i -> 1 1 i o"),
    "2-D to heads": (lambda i, o: THEIRS[3](i, 2 * o), MINE[9], "(h k) i 1 1 -> i h k"),
}


@pytest.mark.parametrize("sizes", [(3, 5), (4, 4), (1, 3)])
@pytest.mark.parametrize("pair", POINTWISE)
def test_a_convolution_of_one_place_is_a_product(pair, sizes):
    theirs, mine, layout = POINTWISE[pair]
    module, port = torch.nn.Module(), Mine()
    module.mix, port.dense = theirs(*sizes), mine(*sizes)
    rules = {rule.sides[1]: rule for rule in suggested(module, port)}
    assert rules["dense.kernel"].layout == layout and not is_refused(module, port, rules.values())


def test_the_values_are_right():
    class Convolves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Conv1d(4, 4, 1)

        def forward(self, x):
            return self.mix(x.mT).mT

    class Dense(nnx.Module):
        def __init__(self):
            self.mix = nnx.Linear(4, 4, rngs=RNGS)

        def __call__(self, x):
            return self.mix(x)

    x = np.random.RandomState(0).standard_normal((2, 5, 4))
    rules = suggested(Convolves(), Dense())
    assert compare(Convolves(), Dense(), x, rules=rules, dtypes=("float64",), eager=False).certain
