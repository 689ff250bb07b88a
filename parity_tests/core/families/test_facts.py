"""What `published.json` says of model types is what their classes in transformers say."""

import json
from dataclasses import replace

import pytest

from flax_attn.families._published import ALIASES, FACTS, KNOWN, VERSION, facts_of
from flax_attn.families._table import FAMILIES, TYPES
from flax_attn.weights.buffers import _may_be_buffer
from parity_tests.families import facts
from parity_tests.families.configs import CONFIGS, SIZES
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly


@pytest.mark.nightly
def test_the_file_is_what_the_command_would_write(transformers):
    """It fails on a newer transformers, and says what that would change."""
    made = facts.text(facts.contents(TYPES))
    assert not [*facts.changes(made)] and made == facts.FILE.read_text("utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", with_nightly(TYPES, commit=("qwen3", "gemma3_text", "mamba2", "t5", "dots1", "swin"))
)
def test_the_defaults_of_a_type_are_those_of_its_class(name, transformers):
    made = json.loads(facts.text(facts.contents([name])))["types"][name]
    assert made == json.loads(facts.FILE.read_text("utf-8"))["types"][name]


def test_every_type_has_a_row_facts_and_small_configs():
    assert {*FACTS} == {*TYPES} == {*FAMILIES, *ALIASES} and not {*TYPES} & KNOWN
    proven = {small.name for small in (*CONFIGS, *PARTS)}
    assert proven == {*FAMILIES} and {*SIZES} - {""} <= proven


def test_the_version_is_that_of_the_library_that_is_tested(transformers):
    assert facts.version() == VERSION


def test_saved_buffers_of_attentions_are_skipped_by_load():
    saved = {name: facts_of(name).buffers for name in TYPES}
    assert any(saved.values())
    for name, buffers in saved.items():
        shapes = ((1, 2, 3), (1, 2, 3, 3), (4,), (1, 1, 3, 3))
        for buffer in buffers:
            assert any(_may_be_buffer(buffer, shape) for shape in shapes), (name, buffer)


def test_changes_of_a_newer_transformers_are_listed_by_type_and_field():
    before = json.loads(facts.FILE.read_text("utf-8"))
    after = json.loads(facts.FILE.read_text("utf-8"))
    after["types"]["qwen3"]["defaults"]["max_window_layers"] = 30
    after["types"]["llama"]["path"] = "blocks.{}.attn"
    after["others"] = [*before["others"][1:], "newer"]
    assert [*facts.changes(json.dumps(after))] == [
        "llama, path: None -> 'blocks.{}.attn'",
        "qwen3, defaults: max_window_layers 28 -> 30",
        "new in transformers: newer",
        f"gone in transformers: {before['others'][0]}",
    ]


def test_the_command_takes_types_that_have_a_row(capsys):
    with pytest.raises(SystemExit):
        facts.main(["lama"])
    assert "no row of flax_attn/families is for lama" in capsys.readouterr().err


def test_fields_read_raises_if_a_small_config_is_refused(transformers, monkeypatch):
    """A compared layer that is refused raises; its fields would be missing from the file."""
    small = next(x for x in CONFIGS if x.name == "qwen3")
    wrong = replace(small, fields={**small.fields, "num_key_value_heads": 5})
    monkeypatch.setattr(facts, "smalls", lambda name: [wrong])
    with pytest.raises(ValueError, match="num_key_value_heads must divide"):
        facts.fields_read.__wrapped__("qwen3")
