"""The whole models of docs/models.md against transformers': logits, and greedy tokens by caches."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families, weights
from flax_attn.parity import judge
from flax_attn.parity.draw import normal
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.pages.pages import blocks, sections, text_of
from parity_tests.families import witness

pytestmark = pytest.mark.nightly

PAGE = sections(text_of("docs/models.md"))
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
TURN = {"rope_type": "default", "rope_theta": 500.0}
HALF = {**TURN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 5}
DELTA |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 3}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
WHOLE = {
    "A whole model by hand": ("qwen3", {**SIZES, "head_dim": 6, "rope_parameters": TURN}),
    "A hybrid model": ("qwen3_5_text", {**SIZES, **DELTA, "head_dim": 8, "rope_parameters": HALF}),
}
NEW = 20


def classes(title):
    """What a recipe defines, without the example behind it."""
    (block,) = blocks(PAGE[title])
    found = {}
    exec(compile(block.partition("\nsizes = ")[0], title, "exec"), found)
    return found


def of_torch(name, fields):
    """The whole model of transformers, its words read and told by one table, in float64."""
    import torch

    config = witness.config_of({"model_type": name, **fields, "tie_word_embeddings": True}, name)
    model = witness.found(name, "ForCausalLM")(config).eval().double()
    model.tie_weights()
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            tensor.copy_(torch.tensor(normal(0, path, tuple(tensor.shape)) / 3))
    return config, model


def told(model, prompt):
    """Logits, and the tokens generated with the model's own cache."""
    import torch

    with torch.no_grad(), lifted():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # in float64, as here
        logits = model(torch.tensor(prompt)).logits.numpy()
        words = model.generate(
            torch.tensor(prompt), max_new_tokens=NEW, do_sample=False, use_cache=True
        )
    return logits, words[:, prompt.shape[1] :].numpy()


@pytest.mark.parametrize("title", WHOLE)
def test_a_whole_model_of_the_page_equals_transformers(title, transformers):
    name, fields = WHOLE[title]
    config, theirs = of_torch(name, fields)
    prompt = np.random.RandomState(0).randint(0, fields["vocab_size"], (2, 7))
    logits, words = told(theirs, prompt)
    found, given = classes(title), config.to_dict()
    mine = nnx.eval_shape(lambda: found["Model"](given, nnx.Rngs(0), np.float64))
    tensors = {key: value.numpy() for key, value in theirs.state_dict().items()}
    weights.load(mine, tensors, prefix="model", rules=families.rules(given))
    got, _ = mine(prompt, mine.init_cache(2, 7))
    assert judge.same_function(np.asarray(got), logits).ok
    assert judge.exact(np.asarray(found["greedy"](mine, prompt, new=NEW)), words).ok
    assert len({*map(tuple, words)}) == 2 and all(len({*row}) > 3 for row in words.tolist())
