"""The attention of each family, read from a file as transformers' models are saved."""

import numpy as np
import pytest
from flax import nnx

from flax_attn import families, weights
from flax_attn.parity import judge, port
from parity_tests.families import witness
from parity_tests.families.configs import CONFIGS, NAMES, titled
from parity_tests.tables import with_nightly

FIRST = [next(small for small in CONFIGS if small.name == name) for name in NAMES[::5]]


@pytest.mark.nightly(
    but=["cwm-0", "deberta-0", "exaone_moe-0", "gemma3n_text-0", "mpt-0", "persimmon-0"]
)
@pytest.mark.parametrize("small", with_nightly(CONFIGS, commit=FIRST), ids=titled)
def test_a_saved_layer_is_read_by_its_rules_and_names(small, tmp_path, transformers):
    given, index = small.spelt("old"), small.index
    theirs = witness.attention(witness.config_of(given, small.name), small.name, index)
    random, prefix = np.random.RandomState(0), f"model.layers.{index}.self_attn."
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    for param in theirs.parameters():
        param.data = torch.tensor(random.standard_normal(param.shape), dtype=torch.float32)
    files = pytest.importorskip("safetensors.torch", reason="it writes the file")
    tensors = {prefix + name: x.contiguous() for name, x in theirs.state_dict().items()}
    files.save_file(tensors, tmp_path / "model.safetensors")

    read, ported = (families.attention(given, index, rngs=nnx.Rngs(i)) for i in (0, 1))
    rules = families.rules(given, index)
    weights.load(read, tmp_path / "model.safetensors", prefix=prefix[:-1], rules=rules)
    want = nnx.to_pure_dict(nnx.state(port(theirs, ported, rules), nnx.Param))
    got = nnx.to_pure_dict(nnx.state(read, nnx.Param))
    assert flat(got).keys() == flat(want).keys()
    assert len(flat(got)) >= (4 if hasattr(read, "mask") else 3)  # a short convolution has three
    assert all(judge.exact(x, flat(want)[name]).ok for name, x in flat(got).items())


def flat(tree, above=()):
    if not isinstance(tree, dict):
        return {above: np.asarray(tree)}
    parts = (flat(part, (*above, name)) for name, part in tree.items())
    return {name: x for part in parts for name, x in part.items()}
