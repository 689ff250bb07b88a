"""`identify` names the layer that a module is, and none for one that differs where it looked."""

import inspect
from importlib import import_module

import numpy as np
import pytest

from flax_attn.identify import tables
from flax_attn.parity import identify, judge
from parity_tests.families import parts, witness
from parity_tests.families.configs import CONFIGS
from parity_tests.families.parts import PARTS, Part

torch = pytest.importorskip("torch", reason="the modules are torch's")
modules = import_module("parity_tests.core.identify.modules")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def as_numpy(value):
    if isinstance(value, tuple | list):
        return type(value)(map(as_numpy, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


def published(small):
    """The attention of a small config of transformers, and what its whole model gives it."""
    rng, given = np.random.RandomState(0), small.spelt("new")
    if isinstance(small, Part):
        config = parts.config_of(given, small.model_type)
        layer = parts.attention(parts.model_of(config, small.model_type), small)
        x = rng.standard_normal((2, 7, parts.of_part(config, small.part).hidden_size))
        handed = parts.handed(config, small, torch.tensor(x))
        if small.part == "cross":
            handed = {"key_value_states": rng.standard_normal((2, 9, x.shape[-1]))}
    else:
        config = witness.config_of(given, small.model_type)
        layer = witness.attention(config, small.model_type, small.index)
        x = rng.standard_normal((2, 7, config.hidden_size))
        handed = witness.handed(config, small.model_type, small.index, torch.tensor(x))
    names = [*inspect.signature(layer.forward).parameters][1:]
    handed = {"residual": np.zeros_like(x), **handed}  # which Bloom's adds
    kwargs = {name: as_numpy(value) for name, value in handed.items() if name in names}
    return layer.eval(), x, kwargs


def is_called_by_tokens(small):
    """Whether a module has its config, and its output is that of the attention."""
    place = witness.PLACES[small.model_type]
    return isinstance(small, Part) or not (place.called or place.output or place.folder == "bert")


def equal_at(result):
    """The numbers of tokens at which a result says that its layer is equal."""
    return [proof.tokens for proof in result.proofs if proof.report is not None]


# The first of each name and part.
EACH = {f"{x.name}-{getattr(x, 'part', '')}": x for x in (*CONFIGS[::-1], *PARTS[::-1])}
# Modules that have no config of a served type, or more in them than the attention, or other inputs.
OTHERS = """albert bamba bert codegen falcon_h1-recurrent falcon_mamba gptj granitemoehybrid
jamba kimi_linear mamba mamba2 nemotron_h olmo_hybrid recurrent_gemma t5gemma""".split()
NAMED = [n for n, x in EACH.items() if is_called_by_tokens(x) and {n, x.name}.isdisjoint(OTHERS)]


@pytest.mark.nightly(but=["opt-"])
@pytest.mark.parametrize("name", NAMED)
def test_modules_of_transformers_are_named_by_their_config(name):
    pytest.importorskip("transformers", reason="the modules are those of transformers")
    module, x, kwargs = published(EACH[name])
    result = identify(module, x, kwargs=kwargs)
    assert result.layer is not None and 7 in equal_at(result), result
    if not isinstance(EACH[name], Part) and hasattr(module, "config"):
        assert result.text.startswith("families.attention(torch_module")


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float64).min])
def test_rows_of_a_mask_grow_by_no_even_steps(hidden):
    for row in ([0, hidden, hidden], [hidden, hidden, 0], [hidden, 0, hidden]):
        assert tables.even_steps(np.array(row), 0) is None


@pytest.mark.nightly
def test_tables_may_be_made_by_the_function_that_calls_the_module():
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="the module is that of transformers"
    )
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    config = import_module("transformers").LlamaConfig(**sizes, rope_theta=5e5)
    config._attn_implementation, x = "sdpa", np.random.RandomState(0).standard_normal((2, 7, 48))
    module, rotary = llama.LlamaAttention(config, 1), llama.LlamaRotaryEmbedding(config)
    rates = rotary.inv_freq.clone()

    def call(module, x):
        tables = rotary(x, torch.arange(x.shape[1])[None])
        return module(x, position_embeddings=tables, attention_mask=None)[0]

    result = identify(module, x, torch_call=call)
    assert result.layer is not None and equal_at(result) == [7, 23, 1024], result
    assert rotary.inv_freq.dtype == torch.float32 and torch.equal(rotary.inv_freq, rates)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_torch_attention_is_named_with_its_options(seed):
    module, inputs, kwargs = modules.attention_of_torch(np.random.RandomState(seed))
    result = identify(module, *inputs, kwargs=kwargs)
    assert result.text.startswith("TransformerMultiHeadAttention(") and result.layer, result
    names = [proof.name for proof in result.proofs if proof.report is not None]
    assert ("train mode" in names) == (module.dropout > 0)


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("seed", range(24))
def test_attention_by_hand_is_named_with_its_weights(seed):
    module, x = modules.with_tokens(modules.Plain(rng := np.random.RandomState(seed)), rng)
    result = identify(module, x)
    assert result.layer is not None and equal_at(result) == [7, 23, 1024], result
    assert result.limit == ["Equal at 7, 23 and 1,024 tokens"]
    assert ("Rotary(" in result.text) == (module.rotary != "none")
    want = module(torch.tensor(x, dtype=torch.float32)).detach().numpy()
    assert judge.error(np.asarray(result.layer(x.astype(np.float32))), want) < 1e-5


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("seed", range(100))
def test_no_layer_is_named_for_a_rule_that_begins_within_the_lengths(seed):
    module, x = modules.with_tokens(modules.Hidden(rng := np.random.RandomState(seed)), rng)
    result = identify(module, x)
    assert result.layer is None and result.why, (module.kind, module.limit, result)
    assert result.text == "" or "first at" in result.why


def test_a_module_that_cannot_be_identified_gives_one_sentence():
    x = np.ones((2, 5, 12))
    with pytest.raises(TypeError, match=r"an object of a .*; got MultiheadAttention"):
        identify(torch.nn.MultiheadAttention, x)
    with pytest.raises(ValueError, match="a floating array of three axes"):
        identify(torch.nn.Linear(12, 3), x[0, 0])
    with pytest.raises(ValueError, match="does not run on these inputs: RuntimeError"):
        identify(torch.nn.Linear(11, 3), x)
    result = identify(torch.nn.Linear(12, 3), torch.ones(2, 5, 12))
    assert result.layer is None and result.why.startswith("no guess has the module's weights")
