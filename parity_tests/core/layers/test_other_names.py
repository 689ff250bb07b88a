"""Arguments under names of other libraries: the error names a replacement, and it works."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn._internal.checks import signature_of
from flax_attn._internal.other_names import CALLS, CONSTRUCTORS, RENAMED
from flax_attn.parity import judge
from parity_tests.core.layers.test_rngs import called, config_of, first_cases, inputs_of
from parity_tests.tables import with_nightly

FIRST = {case.flax_class: case for case in first_cases().values()}
AT_COMMIT = [
    "GroupedQueryAttention",
    "TransformerMultiHeadAttention",
    "SelectiveAttention",
    "Mamba2",
]
of_a_few = pytest.mark.parametrize(
    "kind", with_nightly(FIRST, commit=[getattr(fa, name) for name in AT_COMMIT])
)
# Codes that do not fit a layer's first case, for a reason that the layer's own error says.
UNFIT = {
    "RelativeShiftAttention": ["segments=segment_ids", "segments=query_segment_ids"],
    "ClassAttention": ["attn_mask", "src_mask", "tgt_mask", "Segments"],  # one query
    "SpatialReductionAttention": ["mask=Dense", "Segments", "Lengths"],  # fewer keys than pixels
    "CrossLayerAttention": ["k_norm="],
    "CrossAttention": ["Segments", "cache="],  # the memory has another length; no cache beside it
    "PerceiverAttention": ["Segments"],
    "T5Attention": ["Segments", "cache=", "memory="],
    "LuongAttention": ["attn_mask"],
}
CODE = re.compile("`([^`]*)`")
TOKENS, KEYS, PAIRS = (
    {"attention_mask", "padding_mask", "encoder_attention_mask"},
    {"key_padding_mask", "src_key_padding_mask", "valid"},
    {"attn_mask", "src_mask", "tgt_mask"},
)
FUNCTIONS = [fa.attend, fa.attention_weights, fa.attend_by_weights]
Q, KV = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8))


def build(kind, **more):
    return kind(**{**config_of(FIRST[kind], 0.0), "rngs": nnx.Rngs(0), **more})


def arguments(kind):
    """Inputs of a layer's call by name, those of its first case."""
    return called(inputs_of(FIRST[kind]))


def value_of(name, code, queries, keys):
    """An argument of another name, as other libraries take it; `queries`, `keys` as `*B T`."""
    shape = queries if code.startswith("valid=") else keys
    if name in TOKENS:
        return np.ones(shape, np.int64)
    if name in KEYS:
        return np.zeros(shape, bool)
    if name in PAIRS and "Additive" not in code:
        return np.tri(queries[-1], keys[-1]) > 0
    if name == "score" or "Fn" in code:
        return (
            fa.Softcap(3.0)
            if name == "score"
            else (lambda *x: x[-1] >= 0 if "Mask" in code else x[0])
        )
    if "Alibi" in code:
        return jnp.ones(4)
    if "Lengths" in code:
        return jnp.full(keys[:-1], keys[-1])
    if "ositions" in code or "egments" in code:
        return jnp.zeros(queries, int)
    return jnp.zeros((queries[-1], keys[-1]))


def evaluated(code, **names):
    """The keyword arguments that a piece of code in an error message stands for."""
    public = {name: getattr(fa, name) for name in fa.__all__}
    return eval(f"dict({code})", {**public, "jax": jax, "jnp": jnp, "nnx": nnx, **names})


def refusal(call, *args, **kwargs):
    with pytest.raises(TypeError) as error:
        call(*args, **kwargs)
    return str(error.value)


def codes_of(text, kind):
    """The codes of a message that fit the layer's first case, without those for 4-D masks."""
    codes = CODE.findall(re.sub("; for zeros at pairs.*", "", text))
    unfit = UNFIT.get(kind.__name__, ())
    return [code for code in codes if not any(part in code for part in unfit)]


def parameters(function):
    return set(signature_of(function.__wrapped__).names)


@pytest.mark.nightly
@of_a_few
def test_the_code_in_an_error_of_a_call_works(kind):
    layer, inputs = build(kind), arguments(kind)
    first = inputs.get("x", next(iter(inputs.values())))
    keys = inputs.get("memory", inputs.get("key", inputs.get("h", first)))
    shapes = first.shape[:-1], keys.shape[:-1]
    for name in CALLS.keys() - parameters(kind.__call__):
        text = refusal(layer, **inputs, **{name: None})
        assert text.startswith(f"{kind.__name__}, when called, takes no {name}=; ")
        for code in codes_of(text, kind):
            if "given when the layer is built" in text:
                names = {name: value_of(name, code, *shapes)}
                nnx.eval_shape(lambda code=code, n=names: build(kind, **evaluated(code, **n)))
                continue
            if code.partition("=")[0] in inputs or "listen" in code:
                continue
            if code.startswith("cache=") and getattr(layer, "mask", fa.CAUSAL).shows_later:
                continue  # an encoder has no cache
            known = {"layer": layer, "batch": first.shape[:-2], "length": first.shape[-2]}
            more = evaluated(code, **known, **{name: value_of(name, code, *shapes)})
            jax.eval_shape(lambda more=more: layer(**inputs, **more))


@pytest.mark.nightly
@of_a_few
def test_need_weights_points_to_taps_and_taps_give_the_weights(kind):
    layer, inputs = build(kind), arguments(kind)
    assert "taps.listen() as values" in refusal(layer, **inputs, need_weights=True)
    with fa.taps.listen() as values:
        layer(**inputs)
    assert (
        "weights" in dict(values) or kind is fa.LinearAttention or layer.mask_is_of == "recurrence"
    )


@pytest.mark.nightly(but=["Mamba2"])
@of_a_few
def test_the_code_in_an_error_of_a_constructor_works(kind):
    for name in (RENAMED.keys() | CONSTRUCTORS.keys()) - parameters(kind.__init__):
        text = refusal(build, kind, **{name: None})
        assert text.startswith(f"{kind.__name__} takes no {name}=; ")
        here = re.search("called (.*) here", text)
        assert here is None or here[1] in parameters(kind.__init__)
        for code in codes_of(text, kind):
            names = {name: value_of(name, code, (2, 5), (2, 5))}
            nnx.eval_shape(lambda code=code, names=names: build(kind, **evaluated(code, **names)))


OF_CACHES = {"max_length": "length", "max_seq_len": "length", "batch_size": "batch"}


@pytest.mark.parametrize("kind", [kind for kind in FIRST if hasattr(kind, "init_cache")])
def test_init_cache_names_its_arguments_when_others_are_passed(kind):
    layer = nnx.eval_shape(lambda: build(kind))
    for name, here in OF_CACHES.items():
        text = refusal(layer.init_cache, **{name: 8})
        assert text == f"{kind.__name__}.init_cache takes no {name}=; it is called {here} here."
    assert refusal(layer.init_cache, 2).startswith(f"{kind.__name__}.init_cache needs length; ")


@pytest.mark.nightly(but=["Mamba2"])
@of_a_few
def test_missing_arguments_are_named(kind):
    config = config_of(FIRST[kind], 0.0)
    if "rngs" in signature_of(kind.__init__.__wrapped__).required:
        text = refusal(kind, **config)
        assert text.startswith(f"{kind.__name__} draws its weights from rngs=; pass rngs=nnx.Rng")
        text = refusal(kind, **config, rngs=jax.random.key(0))
        assert text.startswith("rngs must be random keys such as nnx.Rngs(0)")
    text = refusal(build(kind), *(1 for _ in range(9)))
    assert text.startswith(f"{kind.__name__}, when called, takes ") and "got 9 arguments" in text


@pytest.mark.nightly
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_code_in_an_error_of_a_function_works(function):
    arrays = (Q, KV, KV)[: 2 if function is fa.attention_weights else 3]
    for name in CALLS.keys() - parameters(function):
        text = refusal(function, *arrays, **{name: None})
        assert text.startswith(f"{function.__name__} takes no {name}=; ")
        for code in codes_of(text, function):
            if not code.startswith(("k=", "v=", "with ")):
                more = evaluated(code, **{name: value_of(name, code, (2, 5), (2, 5))})
                jax.eval_shape(lambda more=more: function(*arrays, **more))
    assert "mask=CAUSAL" in refusal(function, *arrays, is_causal=True)


@pytest.mark.nightly
def test_the_code_advised_for_attention_mask_masks_padding():
    """Outputs at real tokens do not depend on what padding holds."""
    layer, x = build(fa.GroupedQueryAttention), arguments(fa.GroupedQueryAttention)["x"]
    attention_mask = np.ones(x.shape[:2], int)
    attention_mask[:, -2:] = 0
    text = refusal(layer, x, attention_mask=attention_mask)
    more = evaluated(CODE.findall(text)[0], attention_mask=attention_mask)
    other = layer(x.at[:, -2:].set(7.0), **more, mask=fa.FULL)
    assert judge.exact(layer(x, **more, mask=fa.FULL), other).ok
    assert not other[:, -2:].any()
