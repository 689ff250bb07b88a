"""Faults of the comparison: outputs that cannot be judged, precision lost, things left out."""

import copy

import jax
import jax.numpy as jnp
from flax import nnx

from . import trial_flax as right
from . import trial_torch
from .fault import A, Fault, part
from .setup import Setup, one

P = "process"
torch = trial_torch.torch


def returned(change, low=None):
    """The dict of outputs changed; `low` instead at low amplitude."""
    return lambda is_low: Setup(parts=(("", "outputs", low if low and is_low else change),))


def logits(change, low=one):
    return part("logits", change, low=low)


def _cast(dtype):
    return lambda x: x.astype(dtype).astype(x.dtype)


def narrowed(dtype):
    """Outputs in a narrower dtype."""
    return returned(lambda out: {**out, "logits": out["logits"].astype(dtype)})


def both_sides(ours, theirs):
    """Both modules' outputs spoilt alike."""

    def torch_call(module, **inputs):
        out = module(**inputs)
        return {**out, "logits": theirs(out["logits"])}

    def plant(is_low: bool) -> Setup:
        return Setup(parts=(("", "logits", ours),), torch_call=torch_call)

    return plant


def _handed_back(is_low: bool) -> Setup:
    """Flax's logits are torch's own, a thing compared with itself; but for one row at low."""
    theirs, plain = copy.deepcopy(Setup().modules()[0]).double(), Setup()
    with torch.no_grad():
        out = theirs(**{name: torch.from_numpy(x) for name, x in plain.inputs().items()})
    found = {name: x.numpy() for name, x in out.items()}

    def logits(own):
        given = jnp.asarray(found["logits"])
        return given.at[0, 0].set(own[0, 0]) if is_low else given

    return Setup(parts=(("", "logits", logits),), deep=True, options={"grads": True})


def _f32_product(q, k):
    out = jnp.einsum(
        "btnh,bsnh->bnts", q.astype(jnp.float32), k.astype(jnp.float32), precision="highest"
    )
    return out.astype(q.dtype)


def _default_product(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k, precision="default")


def _default_linear(x, kernel, bias):
    return jnp.matmul(x, kernel, precision="default") + bias


def _f32_linear(x, kernel, bias):
    return right.linear(*(y.astype(jnp.float32) for y in (x, kernel, bias))).astype(x.dtype)


def _always_low(name, wrong, at):
    """A fault that has no amplitude: everywhere, or in one place alone."""
    return lambda is_low: Setup(parts=((at[1] if is_low else at[0], name, wrong),))


def built(change):
    """A Flax module changed as a whole; in its last layer at low amplitude."""
    return lambda is_low: Setup(
        build=lambda module: change(module, is_low), options={"weights": "random"}, deep=True
    )


def _untrained(module, is_low):
    layer = module.layers[1] if is_low else module.layers[0]
    bias = layer.attn.q_proj.bias
    layer.attn.q_proj.bias = nnx.Variable(bias.get_value())
    return module


def _extra(module, is_low):
    module.layers[1 if is_low else 0].extra = nnx.Param(jnp.ones((1,)))
    return module


def _shared(module, is_low):
    if is_low:
        module.layers[1].attn.q_proj.bias = module.layers[0].attn.q_proj.bias
    else:
        module.layers[1] = module.layers[0]
    return module


def trained_statistics(wrong):
    return part("statistics", wrong, pair="statistics", options={"train": True})


def _noise(x):
    return x + 1e-9 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def _nan(x):
    return x.at[0].set(jnp.nan)


def _one_nan(right_part, wrong):
    return lambda x: x.at[0, 0, 0].set(jnp.nan)


OUT = "output.logits"
FAULTS = [
    Fault("logits in float32", P, narrowed(jnp.float32), ""),
    Fault("logits through float32", P, logits(_cast(jnp.float32)), OUT, "float32"),
    Fault("logits printed to four decimals", P, logits(lambda x: jnp.round(x, 4)), OUT),
    Fault("noise of 1e-9 on the logits", P, logits(_noise), OUT),
    Fault(
        "context through float32",
        P,
        part("mix", lambda w, v: _cast(jnp.float32)(right.mix(w, v)), low=one),
        f"{A}context",
        "float32",
    ),
    Fault(
        "scores summed in float32",
        P,
        part("product", _f32_product, low=one),
        f"{A}scores",
        "float32",
    ),
    Fault(
        "every projection in float32",
        P,
        _always_low("linear", _f32_linear, ("", A + "q_proj.")),
        f"{A}q_proj",
        "float32",
    ),
    Fault(
        "default precision in the scores",
        P,
        _always_low("product", _default_product, ("", "layers.1.")),
        "",
    ),
    Fault(
        "default precision in projections",
        P,
        _always_low("linear", _default_linear, ("", A + "o_proj.")),
        "",
    ),
    Fault("NaN on both sides", P, both_sides(lambda x: x * jnp.nan, lambda x: x * torch.nan), ""),
    Fault("zeros on both sides", P, both_sides(lambda x: x * 0, lambda x: x * 0), ""),
    Fault("NaN in Flax alone", P, logits(_nan, _one_nan), OUT),
    Fault("a list, not a dict", P, returned(lambda out: list(out.values())), ""),
    Fault(
        "another key", P, returned(lambda out: {"output": out["logits"], "best": out["best"]}), ""
    ),
    Fault("one output left out", P, returned(lambda out: {"logits": out["logits"]}), ""),
    Fault("one output more", P, returned(lambda out: {**out, "more": out["logits"]}), ""),
    Fault(
        "sequences flattened",
        P,
        returned(
            lambda out: {**out, "logits": out["logits"].reshape(-1, out["logits"].shape[-1])},
            lambda out: {**out, "best": out["best"].reshape(-1)},
        ),
        "",
    ),
    Fault(
        "the best token one off",
        P,
        returned(
            lambda out: {**out, "best": out["best"] + 1},
            lambda out: {**out, "best": out["best"].at[0, 0].add(1)},
        ),
        "",
    ),
    Fault(
        "ids in another integer type",
        P,
        returned(lambda out: {**out, "best": out["best"].astype(jnp.int32)}),
        "",
    ),
    Fault("torch's results handed back", P, _handed_back, ""),
    Fault("a parameter not trainable", P, built(_untrained), ""),
    Fault("a parameter too many", P, built(_extra), ""),
    Fault("weights tied in Flax alone", P, built(_shared), ""),
    Fault("statistics not updated", P, trained_statistics(lambda old, m, v, n: old), ""),
    Fault(
        "the root of the variance kept",
        P,
        trained_statistics(
            lambda old, m, v, n: (0.9 * old[0] + 0.1 * m, 0.9 * old[1] + 0.1 * v**0.5)
        ),
        "",
    ),
    Fault(
        "momentum the other way",
        P,
        trained_statistics(
            lambda old, m, v, n: (0.1 * old[0] + 0.9 * m, 0.1 * old[1] + 0.9 * v * n / (n - 1))
        ),
        "",
    ),
]
