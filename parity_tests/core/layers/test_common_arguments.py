"""Arguments of every layer: initialisers of kernels and biases, and `deterministic=`."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import judge, port
from flax_attn.parity.cases.case import has_torch
from flax_attn.weights.known_layers import flax_state
from parity_tests.core.layers.test_rngs import (
    SHARES,
    VARIANTS,
    called,
    config_of,
    first_cases,
    inputs_of,
    of_a_third,
    takes,
)
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

MORE = {"luong": {"score": "concat", "units": 6}}  # of its scores the one with most weights


def build(variant, rate=0.0, **given):
    """The layer of a variant's first case, with every bias that it may have."""
    case, config = first_cases()[variant], config_of(first_cases()[variant], rate)
    config |= MORE.get(variant, {})
    config |= {name: True for name in ("bias", "qkv_bias", "out_bias") if takes(case, name)}
    return case.flax_class(**{"rngs": nnx.Rngs(0), **config, **given})


def recorded(made):
    """An initialiser that appends each array it returns to `made`."""

    def init(key, shape, dtype=jnp.float32):
        drawn = np.random.RandomState(len(made)).standard_normal(shape)
        made.append(jnp.asarray(drawn).astype(dtype))
        return made[-1]

    return init


def is_kernel(name, value):
    """Whether a parameter is a matrix, of heads or a convolution; N x 1 x 1 starts from ones.

    Mamba's A_log is a matrix that starts from its own numbers.
    """
    whole = value.ndim in (2, 4) or name.endswith(("conv1d.kernel", "conv_1d.kernel"))
    kept = is_bias(name) or name.endswith("A_log")
    return not kept and (whole or name.endswith(("conv.kernel", "gate_weight")))


def is_bias(name):
    """Whether a parameter is a projection's bias; a sink or a norm's bias is not initialised."""
    of, _, last = name.rpartition(".")
    return (last.startswith("b") and not of.endswith("norm")) or last.endswith("gate_bias")


@of_a_third
def test_initialisers_reach_every_kernel_and_bias(variant):
    kernels, biases = [], []
    given = {"kernel_init": recorded(kernels), "bias_init": recorded(biases)}
    params = flax_state(build(variant, param_dtype=jnp.bfloat16, **given))
    plain = flax_state(nnx.eval_shape(lambda: build(variant)))
    assert {k: x.shape for k, x in params.items()} == {k: x.shape for k, x in plain.items()}
    of_kernels = {name for name, x in params.items() if is_kernel(name, x.get_value())}
    of_biases = {name for name in params if is_bias(name)}
    assert (len(kernels), len(biases)) == (len(of_kernels), len(of_biases))
    for name in of_kernels | of_biases:
        value = params[name].get_value()
        made = kernels if name in of_kernels else biases
        same = [x.shape == value.shape and judge.exact(x, value).ok for x in made]
        assert value.dtype == jnp.bfloat16 and sum(same) == 1, name


def partitioned(variant):
    """A layer whose kernels and biases say over which mesh axes they lie."""
    kernel, bias = nnx.initializers.normal(), nnx.initializers.ones
    return build(
        variant,
        kernel_init=nnx.with_partitioning(kernel, ("embed", "heads"), eager_sharding=False),
        bias_init=nnx.with_partitioning(bias, ("heads",), eager_sharding=False),
    )


def axes(layer):
    """The mesh axes that each Param names."""
    params = flax_state(layer)
    named = {name for name, x in params.items() if is_kernel(name, x.get_value()) or is_bias(name)}
    return {name: params[name].get_metadata("out_sharding") for name in params if name in named}


def wanted(layer):
    return {
        name: ("embed", "heads") if is_kernel(name, param.get_value()) else ("heads",)
        for name, param in flax_state(layer).items()
        if is_kernel(name, param.get_value()) or is_bias(name)
    }


@of_a_third
def test_initialisers_bring_their_partitioning(variant):
    layer = nnx.eval_shape(lambda: partitioned(variant))
    assert axes(layer) == wanted(layer)


@pytest.mark.skipif(not has_torch(), reason="the weights come from torch")
@pytest.mark.parametrize("variant", ["grouped_query", "multi_head", "multi_head_einsum"])
def test_port_keeps_the_partitioning(variant):
    case, layer = first_cases()[variant], partitioned(variant)
    more = {k: True for k in ("qkv_bias", "out_bias") if takes(case, k)}
    package = __import__(f"torch_ref.{variant}", fromlist=["torch_ref"])
    twin = getattr(package, case.flax_class.__name__)(**config_of(case, 0.0), **more)
    before = {name: np.asarray(x.get_value()) for name, x in flax_state(layer).items()}
    ported = port(twin, layer)
    assert axes(ported) == wanted(ported)
    for name, param in flax_state(ported).items():
        assert not judge.exact(np.asarray(param.get_value()), before[name]).ok, name


CHEAP = ["attention_pool", "causal_attention", "differential", "multi_head", "rg_lru", "sigmoid"]


@pytest.mark.parametrize("variant", with_nightly(VARIANTS, commit=CHEAP))
def test_deterministic_does_what_train_and_eval_do(variant):
    case = first_cases()[variant]
    inputs, drops = inputs_of(case), takes(case, "dropout")

    def run(mode, **given):
        layer = build(variant, rate=0.5)
        getattr(layer, mode)()
        return np.asarray(nnx.jit(lambda layer, x: layer(**called(x), **given))(layer, inputs))

    plain, noisy = run("eval"), run("train")
    assert judge.exact(run("train", deterministic=True), plain).ok
    assert judge.exact(run("eval", deterministic=False), noisy).ok
    assert judge.exact(noisy, plain).ok != drops
    assert drops == any(takes(case, share) for share in SHARES)


@pytest.mark.parametrize("variant", [x for x in VARIANTS if x != "cross_layer"])  # called otherwise
def test_tabulate_has_a_row_for_each_submodule(variant):
    """flax calls what each public method takes and returns through `jax.jit`."""
    case = first_cases()[variant]
    layer = case.flax_module()
    table = nnx.tabulate(layer, *(jnp.asarray(x) for x in case.arrays().values()))
    assert type(layer).__name__ in table
    assert all(name in table for name, x in vars(layer).items() if isinstance(x, nnx.Linear))
