"""The corpus runs, its options differ, and what can be seen from outside is as its truth says."""

import itertools

import numpy as np
import pytest

from flax_attn import masks, positions
from flax_attn._internal.types import Sizes
from parity_tests.tables import each

torch = pytest.importorskip("torch", reason="the corpus is of torch's modules")

from parity_tests.core.identify import ATTENTION, OTHERS, SUBJECTS  # noqa: E402
from parity_tests.core.identify.subject import (  # noqa: E402
    BATCH,
    KEYS,
    NORM_KEYS,
    ROTARY_KEYS,
    as_torch,
    randomised,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

LENGTHS = (7, 11)
SEEDS = range(10)
NAMES = [subject.name for subject in SUBJECTS]
BY_NAME = dict(zip(NAMES, SUBJECTS, strict=True))
of_all = each("name", NAMES)
NAMES_OF_ATTENTION = [subject.name for subject in ATTENTION]
of_attention = each("name", NAMES_OF_ATTENTION)


def output(module, args, kwargs):
    """The first output, if there are several."""
    with torch.no_grad():
        result = module(*as_torch(args), **as_torch(kwargs))
    return result[0] if isinstance(result, tuple) else result


def made(name, seed=0):
    rng = np.random.RandomState(seed)
    return BY_NAME[name].make(rng), rng


def truths(name):
    return [BY_NAME[name].truth(made(name, seed)[0]) for seed in SEEDS]


def test_the_corpus_is_large_and_its_names_are_unique():
    assert len(ATTENTION) >= 40 and len(OTHERS) >= 20
    assert len(set(NAMES)) == len(NAMES)
    assert all(subject.style for subject in SUBJECTS)


@pytest.mark.nightly
@of_all
def test_modules_run_in_float64(name):
    for seed, length in itertools.product((0, 1), LENGTHS):
        module, rng = made(name, seed)
        args, kwargs = BY_NAME[name].inputs(module, rng, length)
        y = output(module, args, kwargs)
        assert not module.training and y.dtype == torch.float64
        assert torch.isfinite(y).all() and y.numel() >= args[0].shape[0] * length


@pytest.mark.nightly
@of_all
def test_parameters_are_random(name):
    first, second = ([*made(name, seed)[0].parameters()] for seed in (0, 1))
    again = [*made(name)[0].parameters()]
    assert first and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in zip(first, second, strict=False):
        assert a.shape != b.shape or not (a == b).any()
        assert (a != 0).all() and (a != 1).all()


def test_gains_stay_around_one():
    norm = randomised(torch.nn.LayerNorm(1000), np.random.RandomState(0))
    assert 0.9 < norm.weight.mean() < 1.1 and abs(norm.bias.mean()) < 0.1


@pytest.mark.nightly
@of_attention
def test_options_differ_and_truths_have_all_keys(name):
    drawn = truths(name)
    assert any(truth != drawn[0] for truth in drawn[1:])
    for truth in drawn:
        assert truth.keys() == KEYS and truth["biases"] <= set("qkvo")
        assert truth["rotary"] is None or truth["rotary"].keys() == ROTARY_KEYS
        for norm in (truth["q_norm"], truth["k_norm"]):
            assert norm is None or norm.keys() == NORM_KEYS
        assert truth["bias"] in (None, "alibi", "t5", "given")
        assert truth["gate"] in (None, "sigmoid")


@pytest.mark.nightly
@of_attention
def test_sizes_are_unlike(name):
    for truth in truths(name):
        sizes = {"batch": BATCH, "length": LENGTHS[0], "longer": LENGTHS[1]}
        sizes |= {key: truth[key] for key in ("width", "heads", "head_dim")}
        if 1 < truth["kv_heads"] < truth["heads"]:
            sizes["kv_heads"] = truth["kv_heads"]
        assert len({*sizes.values()}) == len(sizes), sizes


@each("name", [subject.name for subject in OTHERS])
def test_others_are_nothing_of_ours(name):
    assert BY_NAME[name].truth(made(name)[0]) is None


def token_axis(x, length):
    return next(axis for axis, size in enumerate(x.shape) if size == length)


def with_tokens(args, tokens):
    """The arguments with other tokens wherever the first one is an argument."""
    return tuple(tokens if x is args[0] else x for x in args)


@pytest.mark.nightly
@each("name", NAMES_OF_ATTENTION[::6])
def test_masks_are_what_the_truth_says(name):
    check_mask(name)


@pytest.mark.nightly
@of_attention
def test_all_masks_are_what_the_truth_says(name):
    check_mask(name)


def check_mask(name):
    """An output depends on the tokens that its query may attend to, and on no others."""
    length = LENGTHS[1]
    for seed in range(2):
        module, rng = made(name, seed)
        truth = BY_NAME[name].truth(module)
        if truth["mask"] == "given" or truth["cross"]:
            continue
        args, kwargs = BY_NAME[name].inputs(module, rng, length)
        x, axis = 0.2 * args[0], token_axis(args[0], length)
        plain = output(module, with_tokens(args, x), kwargs)
        got = np.zeros((length, length), bool)
        for key in range(length):
            other = x.copy()
            np.moveaxis(other, axis, 0)[key] *= -1.5
            change = (output(module, with_tokens(args, other), kwargs) - plain).movedim(axis, 0)
            got[:, key] = (change != 0).flatten(1).any(1)
        mask = eval(truth["mask"], dict(vars(masks)))
        np.testing.assert_array_equal(got, mask.static(Sizes((), 1, length, length)))


@of_attention
def test_only_positions_break_the_symmetry_of_tokens(name):
    for seed in range(2):
        module, rng = made(name, seed)
        truth = BY_NAME[name].truth(module)
        if truth["mask"] != "FULL" or truth["cross"]:
            continue
        args, kwargs = BY_NAME[name].inputs(module, rng, LENGTHS[1])
        axis = token_axis(args[0], LENGTHS[1])
        plain = output(module, args, kwargs)
        rolled = output(module, with_tokens(args, np.roll(args[0], 3, axis)), kwargs)
        symmetric = torch.allclose(rolled.roll(-3, axis), plain)
        assert symmetric == (truth["rotary"] is None and truth["bias"] is None)


@pytest.mark.nightly
@of_attention
def test_dropout_is_what_the_truth_says(name):
    for seed in range(2):
        module, rng = made(name, seed)
        args, kwargs = BY_NAME[name].inputs(module, rng, LENGTHS[0])
        module.train()
        torch.manual_seed(0)
        first = output(module, args, kwargs)
        second = output(module, args, kwargs)
        assert torch.equal(first, second) == (BY_NAME[name].truth(module)["dropout"] == 0)


@pytest.mark.nightly
@of_attention
def test_rates_are_what_the_truth_says(name):
    for seed in SEEDS:
        module, _ = made(name, seed)
        rotary = BY_NAME[name].truth(module)["rotary"]
        rates = [x for key, x in module.named_buffers() if key.endswith("inv_freq")]
        if rotary is None or not rates:
            continue
        scaling = eval(rotary["scaling"] or "LinearScaling(1.0)", dict(vars(positions)))
        want = scaling.rates(rotary["base"], rotary["width"])
        np.testing.assert_allclose(rates[0].numpy(), want)
        if hasattr(module, "rotary_emb"):
            np.testing.assert_allclose(module.rotary_emb.magnitude, scaling.magnitude)
