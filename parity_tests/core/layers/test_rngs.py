"""Layers need a "dropout" stream only if their rate is above zero and they are in training."""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CausalAttention, MultiHeadAttention, TransformerMultiHeadAttention
from flax_attn.parity import judge
from parity_tests.core.cases import every_case
from parity_tests.tables import with_nightly

SHARES = ("dropout", "context_dropout")


@cache
def first_cases():
    """One case of every layer, by its variant."""
    found = {}
    for case in every_case():
        if case.flax_class.__module__.startswith("flax_attn.layers"):
            found.setdefault(case.variant, case)
    return found


def takes(case, name):
    return name in inspect.signature(case.flax_class.__init__).parameters


def config_of(case, rate):
    """The arguments of the case's layer, which drops this share wherever it can."""
    config = dict(case.config() if callable(case.config) else case.config)
    return {**config, **{name: rate for name in SHARES if takes(case, name)}}


def inputs_of(case):
    return {
        name: jnp.asarray(x, jnp.float32) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)
        for name, x in case.arrays().items()
    }


def called(inputs):
    """The same by the names of the layer's call, where a case's two inputs may be one pair."""
    pair = {"keys_and_values": (inputs["k"], inputs["v"])} if "k" in inputs else {}
    return {**{name: x for name, x in inputs.items() if name not in ("k", "v")}, **pair}


VARIANTS = sorted(first_cases())
DROPPING = [name for name in VARIANTS if takes(first_cases()[name], "dropout")]
of_all_layers = pytest.mark.parametrize("variant", VARIANTS)
of_a_third = pytest.mark.parametrize("variant", with_nightly(VARIANTS, commit=3))
of_layers_that_drop = pytest.mark.parametrize("variant", DROPPING)
of_some_that_drop = pytest.mark.parametrize("variant", with_nightly(DROPPING, commit=4))


def test_every_layer_has_a_first_case():
    assert len(VARIANTS) >= 16 and len(DROPPING) >= 8


@pytest.mark.nightly(but=["differential", "longformer"])
@of_all_layers
def test_a_layer_without_dropout_needs_no_dropout_stream(variant):
    case = first_cases()[variant]

    def run(inputs):
        layer = case.flax_class(**config_of(case, 0.0), rngs=nnx.Rngs(params=0))
        return case.flax_call(layer, **inputs)  # in training, as a new layer is

    assert jax.eval_shape(run, inputs_of(case))


@pytest.mark.nightly(but=["linear", "mamba"])
@of_a_third
def test_a_linen_module_without_dropout_needs_one_key(variant):
    case = first_cases()[variant]
    module = nnx.bridge.to_linen(case.flax_class, **config_of(case, 0.0))

    def run(inputs):
        inputs = called(inputs)
        variables = module.init(jax.random.key(0), **inputs)
        return variables, module.apply(variables, **inputs)

    variables, out = jax.eval_shape(run, inputs_of(case))
    assert variables.keys() <= {"params"} and jax.tree.leaves(out)


@pytest.mark.nightly(but=["cross_covariance", "relative_shift"])
@of_layers_that_drop
def test_a_missing_dropout_stream_is_named_in_the_error(variant):
    case = first_cases()[variant]

    def run(inputs, **mode):
        layer = case.flax_class(**config_of(case, 0.1), rngs=nnx.Rngs(params=0))
        return case.flax_call(layer, **inputs, **mode)

    assert jax.eval_shape(lambda inputs: run(inputs, deterministic=True), inputs_of(case))
    message = r"dropout=0\.1 needs a random key .* rngs=nnx\.Rngs\(params=0, dropout=1\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, inputs_of(case))


@pytest.mark.nightly
@of_some_that_drop
def test_a_linen_module_that_drops_starts_without_a_dropout_key(variant):
    """With deterministic=True, as for the attention of Linen itself."""
    case = first_cases()[variant]
    module = nnx.bridge.to_linen(case.flax_class, **config_of(case, 0.1))

    def run(inputs):
        inputs = called(inputs)
        variables = module.init(jax.random.key(0), **inputs, deterministic=True)
        return module.apply(variables, **inputs, rngs={"dropout": jax.random.key(1)})

    assert jax.tree.leaves(jax.eval_shape(run, inputs_of(case)))
    with pytest.raises(ValueError, match=r"dropout=0\.1 needs a random key"):
        jax.eval_shape(
            lambda inputs: module.init(jax.random.key(0), **called(inputs)), inputs_of(case)
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (CausalAttention, {"d_in": 5, "d_out": 4, "context_length": 6}),
        (MultiHeadAttention, {"d_in": 5, "d_out": 4, "context_length": 6, "num_heads": 2}),
        (TransformerMultiHeadAttention, {"embed_dim": 4, "num_heads": 2}),
    ],
)
def test_dropout_uses_the_dropout_stream_before_the_default_one(kind, config):
    """ "dropout" before the default one; the weights come from "params" all the same."""
    x = jax.random.normal(jax.random.key(2), (2, 6, 4 if "embed_dim" in config else 5))

    @nnx.jit
    def both(layer, x):
        return layer(x), layer(x, deterministic=True)

    def run(**streams):
        layer = kind(**config, dropout=0.5, rngs=nnx.Rngs(**streams))
        return jax.tree.map(np.asarray, both(layer, x))

    noisy, plain = run(params=0, dropout=1)
    other, _ = run(params=0, dropout=2)
    default, same = run(params=0, default=1)
    assert judge.exact(default, noisy).ok and judge.exact(same, plain).ok
    assert not judge.exact(other, noisy).ok and not judge.exact(noisy, plain).ok
