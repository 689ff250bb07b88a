"""Laws of whole models with any weights: generated text, scans, precision, older files."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.errors import CheckpointError
from flax_attn.parity import judge
from flax_attn.parity.torch_module import describe, read
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.known_layers import flax_values
from flax_attn.weights.plan import make_plan
from parity_tests.core.drawing import float64 as float64
from parity_tests.families.whole import SMALLS, Whole
from parity_tests.tables import with_nightly

from .folders import drawn, opened, write

NEW = 6
LLAMA, GEMMA = Whole("llama").fields, Whole("gemma3_text").fields
GPT2, LONG = Whole("gpt2", 1).fields, Whole("phi3", 1).fields
TEXTS = [(config, seed) for config in (GEMMA, GPT2, LONG) for seed in range(3)]


def padded(rows, length, left):
    """Rows of different lengths with padding on one side, and which tokens are real."""
    x, real = np.full((len(rows), length), 3), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        where = slice(length - len(row), None) if left else slice(len(row))
        x[i, where], real[i, where] = row, True
    return x, real


@pytest.mark.parametrize(
    ("config", "seed"),
    with_nightly(TEXTS, commit=[(GEMMA, 0)]),
    ids=[f"{config['model_type']}-{seed}" for config, seed in TEXTS],
)
def test_generated_text_of_a_row_does_not_depend_on_other_rows(config, seed):
    """Greedy and sampled text of a row equals that of the row alone, for any padding."""
    model, random = drawn(config, seed, np.float64), np.random.RandomState(seed)
    rows = [random.randint(0, config["vocab_size"], n) for n in random.permutation([3, 4, 5, 7])]
    keys, order = jax.random.split(jax.random.key(seed), 4), random.permutation(4)

    def text(rows, length=7, left=True, **how):
        x, real = padded(rows, length, left)
        return np.asarray(families.generate(model, x, NEW, valid=real, **how))

    for how in ({}, {"keys": keys, "temperature": 0.9}):
        mixed = {k: v[order] if k == "keys" else v for k, v in how.items()}
        want = text(rows, **how)
        assert judge.exact(text(rows, **how), want).ok
        assert judge.exact(text(rows, left=False, **how), want).ok
        if how:
            assert judge.exact(text(rows, 9, **how), want).ok
        assert judge.exact(text([rows[i] for i in order], **mixed), want[order]).ok
        others = [rows[0], *(row[::-1] for row in rows[1:])]
        assert judge.exact(text(others, **how)[0], want[0]).ok
        assert len({*want.ravel()}) >= 4
    assert not judge.exact(text(rows, keys=keys[::-1], temperature=0.9), want).ok

    # Greedy tokens are the likeliest of a forward over all, and the first end fills the rest.
    greedy, end = text(rows), int(text(rows)[0, 2])
    if config is not LONG:  # whose keys in a cache keep the rates that they came with
        whole = [np.concatenate(pair) for pair in zip(rows, greedy, strict=True)]
        x, real = padded(whole, 7 + NEW, True)
        logits = nnx.jit(lambda model: model(x, valid=real))(model)
        best = np.asarray(logits.argmax(-1))[:, 6:-1]
        assert judge.same_values(best, greedy).ok
    ended = np.maximum.accumulate(greedy == end, axis=1)
    assert judge.same_values(text(rows, end=end), np.where(ended, end, greedy)).ok


def equations(jaxpr):
    """How many equations a program has, with those of the programs in it."""
    inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(eqn.params, is_leaf=is_program)]
    inner = [x.jaxpr if hasattr(x, "jaxpr") else x for x in inner if is_program(x)]
    return len(jaxpr.eqns) + sum(map(equations, inner))


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize(("name", "depths"), [("llama", (4, 32)), ("gemma3_text", (6, 18))])
def test_the_program_of_a_scan_does_not_grow_with_depth(name, depths):
    """The program of a scan and of its gradient has one length for any depth."""
    fields = {"model_type": name, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 11}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8}
    lengths = {}
    for depth in depths:
        config = {**fields, "num_hidden_layers": depth}
        model = nnx.eval_shape(lambda: families.model(config, rngs=nnx.Rngs(0), scan=True))  # noqa: B023
        assert len(model.stack) == {"llama": 1, "gemma3_text": 6}[name] and not model.layers
        graph, state = nnx.split(model)

        def loss(state):
            return nnx.merge(graph, state)(jnp.zeros((2, 5), int)).sum()  # noqa: B023

        programs = (jax.make_jaxpr(f)(state).jaxpr for f in (loss, jax.grad(loss)))
        lengths[depth] = [equations(program) for program in programs]
    few, many = lengths.values()
    assert few == many and few[0] > 20, lengths


def loss_and_gradients(model, x):
    """A loss of the logits, and its gradients."""
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @jax.value_and_grad
    def run(weights):
        logits = nnx.merge(graph, weights, rest)(x)
        slots = jnp.arange(logits.size, dtype=logits.dtype).reshape(logits.shape)
        return (logits * jnp.cos(slots)).sum()

    return run(weights)


@pytest.mark.parametrize(
    "name", with_nightly(["gemma3_text", "llama", "gpt2"], commit=["gemma3_text"])
)
def test_a_scan_over_layers_gives_the_same_loss_and_gradients(name, tmp_path):
    """Gemma 3 here has a period of two layers, and one layer left over."""
    config = Whole(name).fields
    if name == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        config |= {"num_hidden_layers": 5, "layer_types": [*kinds, *kinds, kinds[0]]}
    x = np.random.RandomState(0).randint(0, config["vocab_size"], (3, 7))
    model = write(tmp_path, config, dtype=np.float64)
    scanned = opened(tmp_path, param_dtype=np.float64, scan=True, remat=True)
    value, gradients = loss_and_gradients(model, x)
    got, other = loss_and_gradients(scanned, x)
    assert judge.same_function(np.asarray(got), np.asarray(value)).ok
    # The gradients of a stack lie as its weights do, so both are written alike.
    for whole, state in ((model, gradients), (scanned, other)):
        nnx.update(whole, state)
    families.save(scanned, tmp_path / "scan")
    families.save(model, tmp_path / "layers")
    found, want = (tensors_of(tmp_path / side) for side in ("scan", "layers"))
    assert found.keys() == want.keys()
    for path, x in found.items():
        scale = judge.gradient_scale([*want.values()], want[path])
        assert judge.same_function(x, want[path], scale).ok, path
    shape = (2, 1) if name == "gemma3_text" else (config["num_hidden_layers"], 0)
    assert (scanned.periods, len(scanned.layers)) == shape


def tensors_of(folder):
    checkpoint = Checkpoint(folder, False, False)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


@pytest.mark.parametrize("scan", with_nightly([True, False], commit=[True]))
def test_dropout_advances_its_keys_only_in_training(scan):
    """Each layer of a scan advances its key, and the gradient uses the same dropout mask."""
    x = np.random.RandomState(0).randint(0, GPT2["vocab_size"], (3, 7))

    def run(remat):
        model = drawn(GPT2, dtype=np.float64, scan=scan, remat=remat)
        graph, weights, rest = nnx.split(model, nnx.Param, ...)

        def loss(weights):
            copied = nnx.merge(graph, weights, rest, copy=True)
            first, second = (copied(x, deterministic=False) for _ in range(2))
            counts = nnx.state(copied, nnx.RngCount)
            copied(x, deterministic=True)
            still = nnx.state(copied, nnx.RngCount)
            return (first**2).sum(), (jnp.abs(first - second).max(), counts, still)

        (value, more), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
        return [value, *jax.tree.leaves(gradients)], more

    every = []
    for remat in (True, False):
        values, (change, counts, still) = run(remat)
        counts, still = (np.stack([n.max() for n in jax.tree.leaves(x)]) for x in (counts, still))
        assert change > 0 and (counts > 0).all() and judge.exact(counts, still).ok
        every.append([np.asarray(y) for y in values])
    for got, want in zip(*every, strict=True):
        assert judge.same_function(got, want, judge.gradient_scale(every[1][1:], want)).ok


@pytest.mark.parametrize(
    "small", with_nightly(SMALLS, commit=[Whole("bert"), Whole("vit"), Whole("granite")]), ids=str
)
def test_a_computation_in_bfloat16_stays_there(small):
    shape = (2, *np.broadcast_to(small.fields.get("image_size", 0), 2), 7)
    x = jnp.zeros(shape) if shape[1] else jnp.zeros((2, 7), int)
    for options in ({"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}):
        x = x.astype(jnp.bfloat16) if "param_dtype" in options and shape[1] else x
        model = lambda o=options: families.model(small.fields, rngs=nnx.Rngs(0), **o)  # noqa: E731
        out = nnx.eval_shape(lambda: model()(x, deterministic=False))  # noqa: B023
        assert {y.dtype for y in jax.tree.leaves(out)} == {jnp.dtype("bfloat16")}


def test_generate_in_bfloat16_gives_several_tokens():
    model = drawn(LLAMA, dtype=jnp.bfloat16)
    words = families.generate(model, jnp.ones((2, 3), int), NEW)
    assert len({*np.ravel(words).tolist()}) > 1


def without(prefix, tensors):
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


def in_old_words(tensors):
    """As BERT's first files name the gain and the bias of a norm."""
    words = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    for new, old in words:
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    return tensors


def of_masked_words(tensors):
    """As a BertForMaskedLM saves them."""
    shown = {f"bert.{name}": x for name, x in tensors.items() if not name.startswith("pooler.")}
    return {**shown, "cls.predictions.bias": np.zeros(4, np.float32)}


HEAD = "model.embed_tokens.weight"
OLD = {
    "norms of gamma and beta": ("bert", 0, in_old_words),
    "an old BertForMaskedLM": ("bert", 0, lambda x: in_old_words(of_masked_words(x))),
    "positions as a buffer": (
        *("bert", 0),
        lambda x: {**x, "embeddings.position_ids": np.arange(4)[None]},
    ),
    "gpt2 without a prefix": (
        *("gpt2", 0),
        lambda x: {
            **without("transformer.", x),
            **{f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for i in range(2)},
        },
    ),
    "a head that is tied": ("llama", 1, lambda x: {**x, "lm_head.weight": x[HEAD].copy()}),
}


@pytest.mark.parametrize("title", OLD)
def test_older_names_of_tensors_are_opened(title, tmp_path):
    name, number, change = OLD[title]
    model = write(tmp_path, Whole(name, number).fields, change)
    got, want = flax_values(opened(tmp_path)), flax_values(model)
    if "Masked" in title:
        assert opened(tmp_path).pooler is None
        want = {path: x for path, x in want.items() if not path.startswith("pooler.")}
    assert got.keys() == want.keys()
    assert all(judge.exact(x, want[path]).ok for path, x in got.items())


def test_an_output_head_that_differs_from_the_tied_one_is_refused(tmp_path):
    write(tmp_path, Whole("llama", 1).fields, lambda x: {**x, "lm_head.weight": x[HEAD] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        opened(tmp_path)


def two_towers(transformers):
    parts = {f"{x}_config": Whole(f"clip_{x}_model").fields for x in ("text", "vision")}
    model = transformers.CLIPModel(transformers.CLIPConfig(**parts))
    return model, {"text": model.text_model, "vision": model.vision_model}


def masked_words(transformers):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**Whole("bert").fields))
    return model, {None: model.bert}


def text_beside_images(transformers):
    fields = {"text": Whole("gemma3_text", 1).fields, "vision": Whole("siglip_vision_model").fields}
    parts = {f"{x}_config": value for x, value in fields.items()}
    config = transformers.Gemma3Config(**parts, mm_tokens_per_image=1)
    model = transformers.Gemma3ForConditionalGeneration(config)
    below = import_module("torch").nn.Module()  # which has a prefix, as a decoder with a head
    below.model = model.model.language_model
    return model, {"text": below}


@pytest.mark.nightly
@pytest.mark.parametrize("made", [two_towers, masked_words, text_beside_images])
def test_a_part_of_a_larger_model_is_opened(made, tmp_path, transformers):
    model, parts = made(transformers)
    model.save_pretrained(tmp_path)
    for part, theirs in parts.items():
        mine = opened(tmp_path, part=part)
        plan = make_plan(describe(theirs), mine, families.rules_of(mine))
        want, got = plan.forward(read(theirs)), flax_values(mine)
        assert got.keys() == want.keys()
        assert all(judge.exact(x, want[path]).ok for path, x in got.items())
