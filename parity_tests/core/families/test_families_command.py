"""`flax-attn parity --families`: the table, its options, and what it says without transformers."""

import re
from dataclasses import replace
from functools import partial

import pytest

from flax_attn.command import cli, proving
from flax_attn.families import ALIASES
from flax_attn.families._table import FAMILIES
from parity_tests import families
from parity_tests.families.configs import CONFIGS
from parity_tests.families.parts import PARTS
from parity_tests.families.witness import attention


def command(capsys, *options):
    status = cli.main(["parity", "--families", *options])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.nightly
def test_a_row_names_the_class_the_layer_and_the_aliases(capsys, monkeypatch, transformers):
    few = [x for x in CONFIGS if x.name in ("mistral", "vit")][1:3]
    monkeypatch.setattr(families, "CONFIGS", few)
    monkeypatch.setattr(families, "PARTS", [])
    status, out, _ = command(capsys)
    assert status == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "MistralAttention" in rows["mistral"] and "GroupedQueryAttention" in rows["mistral"]
    assert "equal" in rows["mistral"] and "mixtral" in rows["mistral"]
    assert "ViTAttention" in rows["vit"] and "deit" in rows["vit"]
    assert "2 families, 2 cases, 0 different" in out
    assert re.search(r"^2 of \d+: vit, GroupedQueryAttention: equal, \S+e-1\d$", out, re.MULTILINE)


def test_every_config_is_proven(monkeypatch):
    monkeypatch.setattr(families, "prove", lambda small: small)
    monkeypatch.setattr(families, "prove_part", lambda small: small)
    found = [*families.rows(families.chosen())]
    assert found == [*CONFIGS, *PARTS]
    assert {x.name for x in found} == {*FAMILIES} and {*ALIASES.values()} <= {*FAMILIES}


def test_a_family_that_differs_is_printed_and_exits_with_1(capsys, monkeypatch, transformers):
    gpt2 = next(x for x in CONFIGS if x.name == "gpt2")  # each of its layers has another scale
    monkeypatch.setattr(families, "CONFIGS", [replace(gpt2, index=0)])
    monkeypatch.setattr(families, "PARTS", [])
    monkeypatch.setattr(families.witness, "attention", partial(of_another_layer, attention))
    status, out, _ = command(capsys)
    assert status == 1 and "DIFFERENT" in out and "1 different" in out


def of_another_layer(attention, config, name, index):
    return attention(config, name, index + 1)


def test_without_transformers_one_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(proving, "find_spec", lambda name: None)
    status, out, err = command(capsys)
    assert status == 2 and not out
    assert "missing: torch, transformers. pip install torch 'transformers==5.24.*'" in err


@pytest.mark.parametrize("more", [["--all"], ["--real"], ["--replay"], ["--seed", "1"]])
def test_options_that_contradict_each_other_are_refused(more, capsys):
    status, out, err = command(capsys, *more)
    assert status == 2 and not out
    assert "takes names of model types, and no --all, --record, --replay, --real, --seed or" in err


@pytest.mark.nightly
def test_names_choose_model_types_and_their_aliases(capsys, transformers):
    status, out, _ = command(capsys, "granitemoe", "solar_open")
    assert status == 0 and "2 families, 4 cases, 0 different" in out
    rows = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {"granitemoe", "solar_open"} <= rows


def test_a_name_of_no_model_type_is_refused(capsys, transformers):
    status, out, err = command(capsys, "lamma")
    assert status == 2 and not out
    assert "takes model types, which `flax_attn.families.TYPES` lists; got lamma. Did you" in err
