"""Whole models equal their originals: loss, logits, every gradient, and three steps of AdamW.

The originals are classes of `transformers`, built small from their configurations, with padding
and their default activations. Faults planted in the ports are found in the module they lie in.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn import IDENTITY, Rotary
from flax_attn.parity import ParityError, Report, Rule, compare, judge
from flax_attn.taps import tap
from parity_tests.models import bert, gpt2, llama, parts, t5
from parity_tests.tables import with_nightly

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

B, T, VOCABULARY = 2, 7, 29
REAL = np.arange(T) < np.array([[T], [4]])  # B T, the second sequence ends in padding
IDS = np.where(REAL, np.random.RandomState(0).randint(1, VOCABULARY, (B, T)), 0)
TYPES = np.random.RandomState(1).randint(0, 5, (B, T))
LABELS = np.where(REAL, IDS, parts.IGNORED)
MASKED = np.where(REAL & (np.arange(T) % 3 == 1), IDS, parts.IGNORED)
ENCODER, LAYER = "transformer.encoder", "bert.encoder.layer"
STEPS = ("adamw", {"lr": 1e-3, "weight_decay": 1e-2})


@dataclass(frozen=True)
class Model:
    """An original's classes and the port's, their common sizes, and the way of the weights."""

    original: str
    port: type[nnx.Module]
    config: type
    sizes: dict[str, Any]
    rules: tuple[Rule, ...] = ()
    of_original: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)

    def torch_module(self) -> Any:
        kind = getattr(transformers, self.original)
        config = kind.config_class(**self.sizes, **self.of_original, attn_implementation="eager")
        model = kind(config).eval()
        for name, constant in model.named_buffers():
            if name.endswith("inv_freq"):  # rounded to float32 where it was built
                constant.data = 1 / config.rope_parameters["rope_theta"] ** (
                    torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
                )
        return model

    def flax_module(self) -> Any:
        return self.port(self.config(**self.sizes), rngs=nnx.Rngs(0))

    def compared(self, flax_module: Any = None, **options: Any) -> Report:
        """The comparison with the original, of the port or of another module."""
        given = {"ids": IDS, "real": REAL, "labels": LABELS, **self.inputs}
        return compare(
            self.torch_module(),
            flax_module or self.flax_module(),
            kwargs=given,
            rules=self.rules,
            torch_call=torch_call,
            eager=False,
            **{"dtypes": ("float64",), **options},
        )


def torch_call(model, ids, real, labels, types=None):
    """The original as its users call it; it takes integers and builds its masks from them."""
    more = {} if types is None else {"token_type_ids": types}
    out = model(input_ids=ids, attention_mask=real.long(), labels=labels, **more)
    return {"loss": out.loss, "logits": out.logits}


MODELS = {
    "llama": Model(
        "LlamaForCausalLM",
        llama.LlamaForCausalLM,
        llama.Config,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 18,
            "intermediate_size": 17,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 4,
        },
        of_original={"use_cache": False},
    ),
    "gpt2": Model(
        "GPT2LMHeadModel",
        gpt2.GPT2LMHeadModel,
        gpt2.Config,
        {
            "vocab_size": VOCABULARY,
            "n_positions": 11,
            "n_embd": 15,
            "n_inner": 17,
            "n_layer": 2,
            "n_head": 3,
        },
        (
            Rule("transformer.h.*.*.*.weight -> transformer.h.*.*.*.kernel"),
            Rule.tied("lm_head.weight -> transformer.wte.weight"),
        ),
        of_original={"use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": Model(
        "BertForMaskedLM",
        bert.BertForMaskedLM,
        bert.Config,
        {
            "vocab_size": VOCABULARY,
            "type_vocab_size": 5,
            "max_position_embeddings": 11,
            "hidden_size": 12,
            "intermediate_size": 17,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        },
        (
            Rule("bert.embeddings.*_embeddings -> embeddings.*_embeddings"),
            Rule("bert.embeddings.LayerNorm -> embeddings.LayerNorm"),
            Rule(f"{LAYER}.*.attention.self -> layer.*.attention"),
            Rule(f"{LAYER}.*.attention.output -> layer.*.attention_output"),
            Rule(f"{LAYER}.*.intermediate.dense -> layer.*.up"),
            Rule(f"{LAYER} -> layer"),
            Rule.tied("cls.predictions.decoder.weight -> bert.embeddings.word_embeddings.weight"),
            Rule.tied("cls.predictions.decoder.bias -> cls.predictions.bias"),
            Rule("cls.predictions.transform -> transform"),
            Rule("cls.predictions.bias -> bias"),
        ),
        inputs={"types": TYPES, "labels": MASKED},
    ),
    "t5": Model(
        "T5ForTokenClassification",
        t5.T5ForTokenClassification,
        t5.Config,
        {
            "vocab_size": VOCABULARY,
            "num_labels": 5,
            "d_model": 14,
            "d_kv": 4,
            "d_ff": 17,
            "num_layers": 2,
            "num_heads": 3,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 6,
        },
        (
            Rule("transformer.shared -> embed_tokens"),
            Rule(f"{ENCODER}.embed_tokens -> embed_tokens"),
            Rule(f"{ENCODER}.block.*.layer.0.SelfAttention -> block.*.attention"),
            Rule(f"{ENCODER}.block.*.layer.0.layer_norm.weight -> block.*.attention_norm.scale"),
            Rule(f"{ENCODER}.block.*.layer.1.DenseReluDense -> block.*.mlp"),
            Rule(f"{ENCODER}.block.*.layer.1.layer_norm.weight -> block.*.mlp_norm.scale"),
            Rule(f"{ENCODER}.final_layer_norm.weight -> final_layer_norm.scale"),
        ),
        of_original={"feed_forward_proj": "gated-gelu"},
        inputs={"labels": np.where(REAL, IDS % 5, parts.IGNORED)},
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(MODELS, commit=4))
def test_loss_logits_gradients_and_three_steps_of_adamw_are_the_originals(name):
    report = MODELS[name].compared(optimizer=STEPS, steps=3)
    assert report.ok, str(report)
    seen = {row.kind for row in report.rows}
    assert {"output", "tap", "gradient", "step"} <= seen
    assert {"output.loss", "output.logits"} <= {row.name for row in report.rows}


@pytest.mark.nightly
def test_float32_is_as_near_to_the_truth_as_the_original():
    report = MODELS["llama"].compared(dtypes=("float32",), taps=False)
    assert report.ok, str(report)
    assert report.ratio("float32") is not None


def test_every_bucket_of_a_relative_position_is_the_originals():
    attention = transformers.models.t5.modeling_t5.T5Attention
    distance = np.arange(-300, 301)
    for buckets, longest in ((32, 128), (8, 6), (10, 13)):
        want = attention._relative_position_bucket(torch.tensor(distance), True, buckets, longest)
        got = t5.bucket(distance, buckets, longest).astype(np.int64)
        assert judge.exact(got, want.numpy()).ok


def rotary_pairs_swapped(model):
    model.model.layers[1].self_attn.rotary = Rotary(layout="interleaved")


class ExactGelu(gpt2.Mlp):
    def __call__(self, x):
        return self.c_proj(tap("act", jax.nn.gelu(self.c_fc(x), approximate=False)))


def exact_gelu(model):
    model.transformer.h[1].mlp.__class__ = ExactGelu


def norm_eps_of_another_model(model):
    model.layer[1].attention_output.LayerNorm.epsilon = 1e-5


class OwnBias(t5.SelfAttention):
    def __call__(self, x, mask, bias):
        return super().__call__(x, mask, IDENTITY)


def bias_in_the_first_layer_alone(model):
    model.block[1].attention.__class__ = OwnBias


FAULTS = [
    (rotary_pairs_swapped, "llama", "model.layers.1.self_attn"),
    (exact_gelu, "gpt2", "transformer.h.1.mlp.act"),
    (norm_eps_of_another_model, "bert", "layer.1.attention_output.LayerNorm"),
    (bias_in_the_first_layer_alone, "t5", "block.1.attention.scores"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "name", "place"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_is_found_in_its_module(fault, name, place):
    model = MODELS[name].flax_module()
    fault(model)
    report = MODELS[name].compared(model, grads=False)
    assert not report.ok
    assert report.first.kind == "value"
    assert report.first.tap.startswith(place)


@pytest.mark.nightly
def test_a_trained_padding_row_is_found_by_its_gradient():
    model = MODELS["bert"].flax_module()
    model.embeddings.word_embeddings.padding = None
    report = MODELS["bert"].compared(model)
    assert {row.kind for row in report.rows if not row.verdict.ok} == {"gradient"}
    assert report.first.kind == "gradient"
    assert report.first.tap.startswith("embeddings.word_embeddings")


class Untied(gpt2.GPT2LMHeadModel):
    def __init__(self, c, *, rngs):
        super().__init__(c, rngs=rngs)
        self.lm_head = nnx.Linear(c.n_embd, c.vocab_size, use_bias=False, rngs=rngs)


@pytest.mark.nightly
def test_a_head_that_is_no_longer_tied_is_refused():
    model = MODELS["gpt2"]
    rules = model.rules[:1]
    untied = Untied(model.config(**model.sizes), rngs=nnx.Rngs(0))
    with pytest.raises(ParityError, match=r"wte\.weight is tied in torch"):
        replace(model, rules=rules).compared(untied)
