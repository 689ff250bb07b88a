"""What `--real` does with SmolLM2, on a small file of the same kind: no download."""

import numpy as np
import pytest

from flax_attn import families
from flax_attn.weights import CheckpointError, Rule, gguf_config
from parity_tests.core.weights.test_gguf_load import LAYERS, V, model
from parity_tests.real import decoding, smollm2

pytestmark = pytest.mark.nightly

IDS = np.random.RandomState(0).randint(0, V, (2, 7))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    pytest.importorskip("gguf", reason="writes the file")
    pytest.importorskip("transformers", reason="the witness")
    path = model(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama")
    config = gguf_config(path)
    return path, config, smollm2.read_torch(path, config), smollm2.read_flax(path, config)


def test_every_tensor_is_read_as_transformers_reads_it(both):
    report = smollm2.compare_tensors(*both[2:])
    assert report.ok and len(report.rows) == 9 * LAYERS + 2


def test_a_layer_on_its_own_hidden_states(both):
    _, config, theirs, _ = both
    states = smollm2.hidden_states(theirs, IDS)
    assert len(states) == LAYERS and states[1].shape == (2, 7, config["hidden_size"])
    assert smollm2.compare_layer(theirs, config, 1, states[1]).ok


def test_the_whole_model_by_its_logits_and_next_tokens(both):
    report = smollm2.compare_logits(*both[2:], IDS)
    assert report.ok and [row.name for row in report.rows] == ["logits"] * 2 + ["next tokens"] * 2


def test_the_whole_model_generates_the_same_tokens(both):
    """However the prompt is cut, by two programs."""
    ids = np.random.RandomState(1).randint(0, V, (2, 21))
    report = smollm2.compare_decoding(*both[2:], ids)
    assert report.ok, report
    assert [row.name for row in report.rows][-2:] == ["64 tokens", "programs"]
    assert len({*decoding.cuts(21)}) == 5 and all(sum(cut) == 21 for cut in decoding.cuts(21))


def test_unpermuted_rotary_rows_are_found(both, monkeypatch):
    path, config, theirs, _ = both
    right = families.rules

    def plain(*args, **more):
        return [
            Rule(rule.names.replace(".weight", "").replace(".kernel", "")) if rule.layout else rule
            for rule in right(*args, **more)
        ]

    monkeypatch.setattr(families, "rules", plain)
    mine = smollm2.read_flax(path, config)
    failed = {row.name for row in smollm2.compare_tensors(theirs, mine).rows if not row.verdict.ok}
    turned = ("q_proj", "k_proj")
    want = {f"layers.{i}.self_attn.{x}.kernel" for i in range(LAYERS) for x in turned}
    assert failed == want
    assert not smollm2.compare_logits(theirs, mine, IDS).ok


def test_a_file_with_an_output_of_its_own_is_refused(tmp_path):
    pytest.importorskip("gguf", reason="writes the file")
    more = {"output.weight": np.zeros((V, 96), np.float32)}
    path = model(tmp_path / "m.gguf", "llama", more=more)
    with pytest.raises(CheckpointError, match="output"):
        smollm2.read_flax(path, gguf_config(path))
