"""Whole models: published configs are built with the right shapes, other types are refused."""

import re
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.errors import CheckpointError
from flax_attn.families._choose import resolved
from flax_attn.parity.torch_module import describe
from flax_attn.weights.plan import make_plan
from parity_tests.families import facts, parts, witness
from parity_tests.families.whole import Whole, model_of
from parity_tests.tables import each, with_nightly

from .folders import drawn, write
from .texts import PUBLISHED

HAVE_NONE = "clip_text_model clip_vision_model dinov2 distilbert opt roberta".split()
HAVE_NONE += ["siglip_text_model", "starcoder2"]
REASONS = {
    "experts": "its feed-forward part has experts",
    "two": "it has an encoder and a decoder",
    "crosses": "some of its layers attend to images",
    "recurrent": "it has layers that are recurrences or convolutions",
    "staged": "its image is reduced or cut into windows between its layers",
    "": "no row says what its norms, its feed-forward part and its embeddings are",
}
DENSE = "first_k_dense_replace"  # layers without experts, as many as a small model has
OTHERS = [name for name in families.TYPES if name not in families.WHOLE]


def published():
    """Published configs of these types and their parts; the class's own where none is published."""
    for name, config in PUBLISHED.items():
        for part in (None, "text", "vision"):
            fields = config if part is None else config.get(f"{part}_config") or {}
            if fields.get("model_type") in families.WHOLE:
                yield name, part
    yield from ((name, None) for name in HAVE_NONE)


def abstract(config, **options):
    return nnx.eval_shape(lambda: families.model(config, rngs=nnx.Rngs(0), **options))


def on_meta(make):
    """A model of torch without numbers."""
    import torch

    with torch.device("meta"):
        return make()


ROWS = [*published()]


@pytest.mark.parametrize(
    ("name", "part"),
    with_nightly(
        ROWS, commit=[("gpt2", None), ("gemma-3-4b (4.50 file)", "vision"), ("opt", None)]
    ),
)
def test_a_published_model_has_the_weights_of_transformers(name, part, transformers):
    """Names and shapes: each tensor has its place by the rules, and each place its tensor."""
    config = PUBLISHED.get(name, {"model_type": name})
    fields, _ = resolved(config, part)
    made = witness.config_of(dict(fields), fields["model_type"])
    theirs = on_meta(lambda: model_of(made, None))
    mine = abstract(config, part=part)
    assert make_plan(describe(theirs), mine, families.rules_of(mine)).moves


def test_every_type_has_a_published_config():
    types = {
        resolved(PUBLISHED.get(name, {"model_type": name}), part)[0]["model_type"]
        for name, part in ROWS
    }
    assert types == {*families.WHOLE}


def sentence(config):
    with pytest.raises(ValueError) as caught:
        families.model(config, rngs=nnx.Rngs(0))
    return str(caught.value)


@each("name", OTHERS)
def test_types_that_are_not_built_whole_are_refused_with_the_reason(name):
    text = sentence({"model_type": name})
    why = re.fullmatch(rf"model_type '{name}' is not built whole, since (.*?)\. (.*)", text)
    assert why and why[1] in REASONS.values() and "built whole are bert, " in why[2], text


def evidence(model):
    """Which reasons the modules of transformers' model show."""
    kinds = " ".join({type(x).__name__ for x in model.modules()})
    names = {part for name, _ in model.named_modules() for part in name.split(".")}
    return {
        "experts": any("expert" in name for name in names) or "MoE" in kinds,
        "two": {"encoder", "decoder"} <= names,
        "crosses": "CrossAttention" in kinds,
        "recurrent": re.search("Mamba|Conv1d|Delta|Lightning|Recurrent|Rglru", kinds) is not None,
        "staged": re.search("Stage|Window|Merging|Efficient|Neck", kinds) is not None,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_the_reason_holds_for_the_model_of_transformers(name, transformers):
    made = facts.smalls(name)[0]
    if name in parts.MODELS:
        config = parts.config_of(made.given, name)
        model = on_meta(lambda: parts.model_of(config, name))
    else:
        fields = {DENSE: 0} if DENSE in facts.class_fields(name) else {}
        config = witness.config_of({**made.spelt("new"), **fields}, name)
        model = on_meta(lambda: facts.model_of(config, name))
    text, shown = sentence({**config.to_dict(), "model_type": name}), evidence(model)
    (reason,) = (key for key, words in REASONS.items() if f"since {words}." in text)
    assert (
        shown[reason] if reason else not (shown["experts"] or shown["two"] or shown["crosses"])
    ), shown


def run(config, x, **call):
    """A call on shapes alone."""
    return nnx.eval_shape(lambda: families.model(config, rngs=nnx.Rngs(0))(x, **call))


IMAGE = np.zeros((2, 15, 15, 7), np.float32)
ROW = np.zeros((2, 7), np.int32)
REAL = np.ones((2, 7), bool)
EMBED = "embeddings.word_embeddings.weight"


@each(
    "name, fields, words",
    [
        ("bert", {"is_decoder": True}, "is_decoder=True is not built whole: the model is then one"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not built whole"),
        ("opt", {"layerdrop": 0.1}, "layerdrop=0.1 is not built: no layer is dropped here. Set"),
        ("dinov2", {"drop_path_rate": 0.1}, "drop_path_rate=0.1 is not built: no layer is dropp"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True is not built"),
        ("llama", {"hidden_act": "mish"}, "hidden_act must be one of gelu, .*; got 'mish'"),
        ("vit", {"image_size": [15]}, r"image_size must be one whole number or two; got \[15\]"),
    ],
)
def test_a_config_that_is_not_built_is_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        abstract({**Whole(name).fields, **fields})


@each(
    "name, x, call, words",
    [
        ("vit", IMAGE[:, :14], {}, "cut into patches of 5 x 5; got 14 x 15"),
        ("vit", IMAGE, {"valid": REAL}, "An encoder of images takes no valid=."),
        ("vit", IMAGE, {"positions": ROW}, "An encoder of images takes no positions=."),
        ("vit", IMAGE, {"masked": REAL}, "a model without a mask token takes no masked=."),
        ("bert", ROW, {"masked": REAL}, "An encoder of tokens takes no masked=."),
        ("distilbert", ROW, {"token_types": ROW}, "this model_type takes no token_types=."),
        ("llama", ROW[0, 0], {}, "Tokens have an axis of length"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(name, x, call, words):
    with pytest.raises(ValueError, match=words):
        run(Whole(name).fields, x, **call)


def test_a_cache_longer_than_the_learned_positions_is_refused():
    config = {**Whole("opt").fields, "max_position_embeddings": 52}
    model = drawn(config)
    with pytest.raises(ValueError, match="The model has 52 learned positions; got length=53"):
        model.init_cache(2, 53)
    assert len(nnx.eval_shape(lambda: model.init_cache(2, 52))) == config["num_hidden_layers"]


@each(
    "config, prompt, how, words",
    [
        ("bert", ROW, {}, "generate takes a decoder of families"),
        ("llama", ROW[0], {}, r"The prompts must have shape \(rows, length\); got \(7,\)"),
        ("llama", ROW, {"keys": ROW[:1]}, "keys are one for each of the 2 rows"),
        ("llama", ROW, {"new": 0}, "new must be"),
        ("llama", IMAGE[..., 0], {}, "Tokens are whole numbers, as a tokenizer gives"),
    ],
)
def test_bad_arguments_of_generate_are_refused(config, prompt, how, words):
    how = {"new": 3, **how}
    with pytest.raises((TypeError, ValueError), match=words):
        families.generate(drawn(Whole(config).fields), prompt, **how)


def test_rules_of_and_load_refuse_what_is_no_whole_model():
    with pytest.raises(TypeError, match=r"A model of families\.model is needed; got Dict"):
        families.rules_of(nnx.Dict())
    with pytest.raises(ValueError, match=r"load reads a folder with config\.json and"):
        families.load("nowhere")


@each(
    "change, words",
    [
        (lambda x: x | {f"other.{EMBED}": x[EMBED]}, "it has , other"),
        (lambda x: {k: v for k, v in x.items() if k != EMBED}, "it has none"),
        (lambda x: {k: v for k, v in x.items() if ".1.output" not in k}, "is filled by nothing"),
        (lambda x: x | {"new": x[EMBED]}, "new"),
    ],
)
def test_a_folder_with_other_tensors_is_refused(change, words):
    with TemporaryDirectory() as folder:
        write(folder, Whole("bert").fields, change)
        with pytest.raises(CheckpointError, match=words):
            families.load(folder)
