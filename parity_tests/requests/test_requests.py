"""Random attentions by every backend, beside an oracle in numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn as fa
from flax_attn.parity import judge
from parity_tests.requests import __main__ as command
from parity_tests.requests import backends, oracle, run
from parity_tests.requests.masks import Sizes, masks
from parity_tests.requests.programs import program, request
from parity_tests.tables import with_nightly

SEEDS = (*range(30), 87)  # the last with rows that give the mean of what they may not see
AT_COMMIT = (1, 2, 4, 14, 87)
REQUESTS = 12
SHORT = 3  # of the seeds with long sequences


@pytest.mark.parametrize("seed", with_nightly(SEEDS, commit=AT_COMMIT))
def test_every_backend_equals_the_oracle(seed):
    outcome = run(seed, SHORT if program(seed).is_long else REQUESTS)
    assert not outcome.faults, command.story(outcome.line())


@pytest.mark.nightly
def test_the_seeds_are_enough_and_show_something():
    programs = [program(seed) for seed in SEEDS]
    assert sum(SHORT if p.is_long else REQUESTS for p in programs) >= 300
    seen = [request(p, 0).truth.seen.mean() for p in programs if not p.is_long]
    assert sum(0 < share < 1 for share in seen) >= len(seen) / 3
    assert sum(share > 0 for share in seen) >= 2 * len(seen) / 3


def test_a_seed_is_one_program_and_one_request():
    one, two = (request(program(4), 2) for _ in range(2))
    assert program(4).words() == program(4).words()
    for name in "qkv":
        assert judge.exact(one.floats[name], two.floats[name]).ok
    other = request(program(4), 3)
    assert not judge.exact(one.floats["q"], other.floats["q"]).ok


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(16))
def test_masks_are_their_tables(seed):
    sizes = Sizes((2,), 3, 7, 9)
    mask, table = masks(seed, sizes)
    bound = mask.bind(fa.rules.Sizes(*sizes))
    got = np.broadcast_to(np.asarray(bound.grid(fa.rules.Sizes(*sizes))), table.shape)
    assert judge.exact(got, np.ascontiguousarray(table)).ok


def shifted(q, k, v, **how):
    """As if the diagonal stood elsewhere."""
    return fa.attend(q, k, v, **{**how, "mask": how["mask"] & fa.Causal(0)})


def unsunk(q, k, v, **how):
    return fa.attend(q, k, v, **{**how, "sinks": None})


def coarse(q, k, v, **how):
    """An output that is off by a little more than may be."""
    o, lse = fa.attend(q, k, v, **how)
    return o * (1 + jnp.asarray(4 * judge.SAME_FUNCTION, o.dtype)), lse


def forgetful(q, k, v, **how):
    """No gradient by way of the lse."""
    o, lse = fa.attend(q, k, v, **how)
    return o, fa.attend(*map(_constant, (q, k, v)), **how)[1] + 0 * lse


def _constant(x):
    return jax.lax.stop_gradient(x)


def first(wanted):
    """The first program in float64 of which `wanted` holds."""
    seeds = (seed for seed in range(200) if program(seed).dtype == "float64")
    return next(s for s in seeds if not program(s).is_long and wanted(program(s)))


def zeros(q, k, v, **how):
    """In place of a mean."""
    return fa.attend(q, k, v, **{**how, "empty": "zero"})


FAULTS = [shifted, unsunk, coarse, forgetful, zeros]


@cache
def clean(seed):
    """What one request of a seed shows without a fault."""
    return run(seed, 1).faults


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault", with_nightly(FAULTS, commit=[coarse, forgetful]), ids=lambda f: f.__name__
)
def test_a_planted_fault_is_found(fault, monkeypatch):
    def fits(given):
        seen = request(given, 0).truth.seen
        wanted = np.triu(seen, 1).any() and given.sinks == (fault is unsunk) and given.rate < 1
        return wanted and (fault is not zeros or (given.empty == "mean" and not seen.any(3).all()))

    seed = first(fits)
    assert not clean(seed)
    monkeypatch.setattr(backends, "attend", fault)
    assert {x["backend"] for x in run(seed, 1).faults} >= {"reference"}


def test_the_noise_is_small_and_the_verdict_strict():
    """What the noise forgives is a few units in the last place, not a fault."""
    given = request(program(first(lambda p: p.sizes.T > 5 and p.amplitude == 1.0)), 0).truth
    truth = oracle.attention(given)
    noisy = oracle.attention(given, oracle.noise(0, 2.0**-52))
    errors = [judge.error(noisy[name], truth[name]) for name in ("o", "q", "k", "v")]
    assert 0 < max(errors) < judge.SAME_FUNCTION


TORCH_SEEDS = (4, 12, 28, 33, 43, 47)


@pytest.mark.parametrize("seed", TORCH_SEEDS)
def test_the_oracle_equals_torch(seed):
    torch = pytest.importorskip("torch", reason="torch is the oracle's witness here")
    given = request(program(seed), 0).truth
    given = given._replace(steps=[], floats=[], ints=[], keep=None, scale=0.4, empty="zero")
    want = by_torch(torch, given)
    got = oracle.attention(given)
    grads = [want[name] for name in "qkv"]
    for name, x in want.items():
        scale = judge.gradient_scale(grads, x) if name in "qkv" else None
        verdict = judge.same_function(got[name], x, scale, zero=True)
        assert verdict.ok, (name, verdict)


def by_torch(torch, given):
    """Softmax, sinks and lse by torch's own operations and its autograd."""
    leaves = {name: torch.tensor(getattr(given, name), requires_grad=True) for name in "qkv"}
    G = given.q.shape[2] // given.k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    x = (given.scale * q @ k.mT).masked_fill(~torch.tensor(given.seen), -torch.inf)
    if given.sinks is not None:
        leaves["sinks"] = torch.tensor(given.sinks, requires_grad=True)
        sinks = leaves["sinks"].view(1, -1, 1, 1).expand(*x.shape[:3], 1)
        x = torch.cat([x, sinks], dim=-1)
    dead = torch.isneginf(x).all(-1, keepdim=True)
    p = torch.softmax(x.masked_fill(dead, 0), -1).masked_fill(dead, 0)
    lse = torch.logsumexp(x.masked_fill(dead, 0), -1).masked_fill(dead[..., 0], 0)
    o = (p[..., : k.shape[2]] @ v).transpose(1, 2)
    lse = lse.transpose(1, 2)
    torch.autograd.backward([o, lse], [torch.tensor(given.do), torch.tensor(given.dlse)])
    shown = lse.masked_fill(dead[..., 0].transpose(1, 2), -torch.inf)
    found = {"o": o, "lse": shown} | {name: x.grad for name, x in leaves.items()}
    return {name: x.detach().numpy() for name, x in found.items()}
