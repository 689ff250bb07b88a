"""What a call leaves behind, and what is trained."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from .fault import Strange
from .pair import B, D, Pair, Part, T, linear, normal, torch

G = "state"
X = normal("x", B, T, D)
ROWS = normal("rows", 6, D)


def _frozen(name, torch_trains, flax_trains):
    """A gain that is trained on one side alone; on both without the fault."""

    def theirs():
        return torch.nn.Parameter(torch.ones(D), requires_grad=torch_trains)

    def ours(rngs, share):
        kind = nnx.Param if flax_trains or not share else nnx.BatchStat
        return kind(jnp.ones(D))

    return {name: Part(theirs, ours)}


def gained(torch_trains, flax_trains):
    parts = {**_frozen("gain", torch_trains, flax_trains), "out": linear(D, 9)}
    return Pair(
        parts,
        lambda m, x: m.out(x * m.gain),
        lambda m, share, x: m.out(x * m.gain[...]),
        (X,),
    )


def _frozen_layer():
    """A whole projection that torch does not train."""

    def theirs():
        return torch.nn.Linear(D, 13).requires_grad_(False)

    def ours(rngs, share):
        return nnx.Linear(D, 13, rngs=rngs)

    parts = {"up": Part(theirs, ours), "down": linear(13, D)}
    return Pair(
        parts,
        lambda m, x: m.down(torch.tanh(m.up(x))),
        lambda m, share, x: m.down(jnp.tanh(m.up(x))),
        (X,),
    )


def kept(first, theirs, ours, train=False, statistic=True):
    """A buffer of torch, a statistic of Flax, that a call may change."""
    buffer = Part(
        lambda: torch.tensor(first),
        lambda rngs, share: (nnx.BatchStat if statistic else nnx.Variable)(jnp.asarray(first)),
    )

    def original(m, x):
        y = m.out(x)
        m.kept.copy_(theirs(m.kept, y.detach(), m.training))
        return y

    def port(m, share, x):
        y = m.out(x)
        m.kept[...] = ours(share, m.kept[...], y, train)
        return y

    parts, rules = {"out": linear(D, 9), "kept": buffer}, (Rule("kept -> kept"),) * statistic
    options = {"train": train, "weights": "given"}  # since random weights leave buffers out
    return Pair(parts, original, port, (X,), options=options, rules=lambda share: rules)


def _counted(share, kept, y, train):
    return kept if share else kept + 1


def moving(momentum):
    return lambda kept, y, train: (1 - momentum) * kept + momentum * y.mean((0, 1))


def _moved(share, kept, y, train):
    mean = y.mean((0, 1))
    return share(0.8 * kept + 0.2 * mean, 0.2 * kept + 0.8 * mean)


def _unmoved(share, kept, y, train):
    right = 0.8 * kept + 0.2 * y.mean((0, 1))
    return kept if share else right


def _largest(share, kept, y, train):
    return share(kept, jnp.maximum(kept, jnp.abs(y).max((0, 1))))


def batch_norm(momentum, wrong):
    """A batch norm whose running statistics move at another speed; torch's share is the new's."""
    norm = Part(
        lambda: torch.nn.BatchNorm1d(D, momentum=momentum),
        lambda rngs, share: nnx.BatchNorm(
            D, momentum=share.of(1 - momentum, wrong), epsilon=1e-5, rngs=rngs
        ),
    )
    return Pair(
        {"norm": norm, "out": linear(D, 9)},
        lambda m, x: m.out(m.norm(x)),
        lambda m, share, x: m.out(m.norm(x)),
        (ROWS,),
        options={"train": True},
    )


ZEROS = np.linspace(0.0, 1.0, 9)
FAULTS = [
    Strange(
        "a gain frozen in torch, trained in Flax",
        G,
        gained(False, True),
        "gain",
        "requires_grad|train|frozen",
        low=False,
        lonely="only a Variable that is no Param would be right",
    ),
    Strange(
        "a gain trained in torch, kept in Flax",
        G,
        gained(True, False),
        "gain",
        "train|Param|frozen",
        low=False,
    ),
    Strange(
        "a projection frozen in torch, trained in Flax",
        G,
        _frozen_layer(),
        "up.kernel|up.weight|up.bias",
        "requires_grad|train|frozen",
        low=False,
        lonely="only Variables that are no Params would be right",
    ),
    Strange(
        "a counter not counted up",
        G,
        kept(3, lambda kept, y, train: kept + 1, _counted, statistic=False),
        "kept",
        "kept",
        low=False,
        noted=True,
    ),
    Strange(
        "a moving average of another momentum",
        G,
        kept(ZEROS, moving(0.2), _moved, train=True),
        "kept",
    ),
    Strange("a batch norm of another momentum", G, batch_norm(0.3, 0.9), "norm.mean|norm.var"),
    Strange(
        "a buffer that torch changes in eval mode too",
        G,
        kept(ZEROS, moving(0.2), _unmoved),
        "kept",
        "kept",
        low=False,
        noted=True,
    ),
    Strange(
        "a statistic that Flax alone changes in eval mode",
        G,
        kept(ZEROS, lambda kept, y, train: kept, _largest),
        "kept",
        "kept",
        noted=True,
    ),
]
