"""Faults between the rotated queries and keys and the softmax: scale, score, mask."""

import jax.numpy as jnp
import numpy as np

from . import trial_flax as right
from .fault import A, Fault, part
from .setup import first_row, mixed, one
from .sizes import CAP

SCORES = f"{A}scores"


def scaled(by, at="", low=mixed):
    """Scores divided by `by(sizes)`."""
    return part("scale", lambda scores, z: scores / by(z), at, low)


def _narrow_root(z):
    return float(np.sqrt(np.float32(z.h)))


def _first_hidden(there, z):
    return right.mask(there, z) & ~_first(z) | (right.distance(z) == 0)


def _rows(right_part, wrong):
    return lambda *args: first_row(right_part(*args), wrong(*args))


def masked(wrong, pair="apart"):
    """Another mask; at low amplitude in the first row where it differs."""
    return part("mask", wrong, low=_rows, pair=pair)


def alibi_by(slope):
    return part(
        "alibi",
        lambda x, z: x - slope(z.N, x.dtype)[:, None, None] * right.distance(z).astype(x.dtype),
    )


def _powers_of_two(heads, dtype):
    """The paper's way where N is no power of two: slopes of 4 heads, then every other of 8."""
    return jnp.concatenate([right.slopes(4, dtype), right.slopes(8, dtype)[::2][: heads - 4]])


def _hide_then_cap(scores, visible):
    return right.softcap(jnp.where(visible, scores, -jnp.inf))


def _low_row(right_part, wrong):
    def low(scores, visible):
        good, bad = right_part(scores, visible), wrong(scores, visible)
        return first_row(good, bad)

    return low


def hidden(wrong):
    """Another way to hide; at low amplitude in the first row where it differs."""
    return part("hide", wrong, low=_low_row)


def causal(shift):
    return lambda there, z: (right.distance(z) >= shift) & there[:, None, None]


def _top_left(there, z):
    return (jnp.arange(z.T)[:, None] >= jnp.arange(z.S)) & there[:, None, None] | _first(z)


def _first(z):
    return jnp.arange(z.S) == 0


def _future_only(there, z):
    return (right.distance(z) <= 0) & there[:, None, None] | _first(z)


def _queries_padded(there, z):
    return (right.distance(z) >= 0) & there[:, None, :, None] | _first(z)


def _length_plus_one(there, z):
    longer = there | jnp.roll(there, 1, axis=-1)
    return right.mask(longer, z)


S = "scale"
SCALE = [
    Fault("not scaled", S, scaled(lambda z: 1.0), SCORES, "scale"),
    Fault("by h, not its root", S, scaled(lambda z: z.h), SCORES, "scale"),
    Fault("by the root of D", S, scaled(lambda z: z.D**0.5), SCORES, "scale"),
    Fault("by the root of N h", S, scaled(lambda z: (z.N * z.h) ** 0.5), SCORES, "scale"),
    Fault("by the root of N", S, scaled(lambda z: z.N**0.5), SCORES, "scale"),
    Fault("by the root of S", S, scaled(lambda z: z.S**0.5), SCORES, "scale"),
    Fault("times the root of h", S, scaled(lambda z: z.h**-0.5), SCORES, "scale"),
    Fault("the root of h in float32", S, scaled(_narrow_root, low=one), SCORES, "scale"),
    Fault(
        "not scaled in the second layer",
        S,
        scaled(lambda z: 1.0, "layers.1."),
        "layers.1.attn.scores",
        "scale",
    ),
    Fault(
        "scaled twice, on queries too",
        S,
        part("product", lambda q, k: right.product(q / q.shape[-1] ** 0.5, k)),
        SCORES,
        "scale",
    ),
]

F = "score"
SCORE = [
    Fault("softcap missing", F, part("softcap", right.same), SCORES, "softcap missing"),
    Fault(
        "softcap not multiplied back",
        F,
        part("softcap", lambda x: jnp.tanh(x / CAP)),
        SCORES,
        "softcap not multiplied back",
    ),
    Fault("clipped, not capped", F, part("softcap", lambda x: jnp.clip(x, -CAP, CAP)), SCORES),
    Fault("capped at 50", F, part("softcap", lambda x: 50 * jnp.tanh(x / 50)), SCORES),
    Fault(
        "capped twice",
        F,
        part("softcap", lambda x: right.softcap(right.softcap(x))),
        SCORES,
        "softcap done twice",
    ),
    Fault("capped after the mask", F, hidden(_hide_then_cap), SCORES, "after the mask"),
    Fault(
        "capped after ALiBi too",
        F,
        part("alibi", lambda x, z: right.softcap(right.alibi(x, z))),
        SCORES,
        "after the bias",
    ),
    Fault("ALiBi missing", F, part("alibi", lambda x, z: x), SCORES, "bias missing"),
    Fault(
        "ALiBi with the other sign",
        F,
        alibi_by(lambda n, t: -right.slopes(n, t)),
        SCORES,
        "other sign|bias missing, 0.0002",
    ),
    Fault(
        "ALiBi's heads reversed",
        F,
        alibi_by(lambda n, t: right.slopes(n, t)[::-1]),
        SCORES,
        "heads reversed",
    ),
    Fault(
        "ALiBi's slopes from zero",
        F,
        alibi_by(lambda n, t: 2 * right.slopes(n, t)),
        SCORES,
        "doubled|bias missing, -0.0001",
    ),
    Fault("ALiBi's slopes for powers of two", F, alibi_by(_powers_of_two), SCORES),
]

M = "mask"
MASK = [
    Fault(
        "causality missing",
        M,
        masked(lambda there, z: there[:, None, None] & (right.distance(z) >= -z.S)),
        SCORES,
        "without causality|shown and 0 hidden",
    ),
    Fault(
        "padding seen",
        M,
        masked(lambda there, z: (right.distance(z) >= 0) & (there | True)[:, None, None]),
        SCORES,
        "without padding|shown and 0 hidden",
    ),
    Fault(
        "one key of the future seen", M, masked(causal(-1)), SCORES, "shifted|shown and 0 hidden"
    ),
    Fault(
        "the diagonal hidden",
        M,
        masked(lambda there, z: causal(1)(there, z) | _first(z)),
        SCORES,
        "mask: 0 places shown",
    ),
    Fault(
        "causal from the top left", M, masked(_top_left), SCORES, "first key|mask: 0 places shown"
    ),
    Fault(
        "mask inverted", M, masked(lambda t, z: ~right.mask(t, z)), SCORES, "inverted|another mask"
    ),
    Fault(
        "padding inverted",
        M,
        masked(lambda t, z: right.mask(~t, z) | _first(z)),
        SCORES,
        "another mask",
    ),
    Fault("padding of queries", M, masked(_queries_padded, "square"), SCORES, "another mask"),
    Fault(
        "padding of the next sequence",
        M,
        masked(lambda t, z: right.mask(t[::-1], z)),
        SCORES,
        "another mask",
    ),
    Fault("padding one key late", M, masked(_length_plus_one), SCORES, "shown and 0 hidden"),
    Fault("only the future seen", M, masked(_future_only, "square"), SCORES, "another mask"),
    Fault(
        "a window of four",
        M,
        masked(lambda t, z: right.mask(t, z) & (right.distance(z) < 4) | _first(z)),
        SCORES,
        "mask: 0 places shown",
    ),
    Fault("the first key hidden", M, masked(_first_hidden), SCORES, "another mask"),
    Fault("hidden at zero", M, hidden(lambda s, v: jnp.where(v, s, 0.0)), SCORES, "fills with 0"),
    Fault(
        "hidden at -10", M, hidden(lambda s, v: jnp.where(v, s, -10.0)), SCORES, "fills with -10"
    ),
]
FAULTS = SCALE + SCORE + MASK
