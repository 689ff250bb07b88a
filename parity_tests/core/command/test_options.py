"""What is said of a command, an option or a name that does not exist: one sentence, ten names."""

import errno
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from flax_attn._internal.nearest import did_you_mean, listed
from flax_attn.command import cli
from flax_attn.command import options as _options
from flax_attn.parity.cases.case import has_torch


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["prity"], "flax-attn: there is no command 'prity': did you mean parity?"),
        (
            ["xyzzy"],
            "flax-attn: there is no command 'xyzzy': the commands are parity, record, identify, "
            "explain, check-device, bench.",
        ),
        (
            [],
            "flax-attn: which command? It takes parity, record, identify, explain, check-device, "
            "bench.",
        ),
        (
            ["parity", "--family"],
            "flax-attn parity: there is no option --family: did you mean --families?",
        ),
        (
            ["bench", "--bakend=x"],
            "flax-attn bench: there is no option --bakend: did you mean --backend?",
        ),
        (
            ["record", "x", "--nosuch", "3"],
            "flax-attn record: there is no option --nosuch: its options are -h, --help, --to.",
        ),
        (
            ["explain", "--q", "1", "2", "3", "4", "--mask", "Causl"],
            "flax-attn explain: --mask 'Causl': Causl is no mask: did you mean Causal?",
        ),
    ],
)
def test_an_unknown_word_is_answered_by_the_nearest(arguments, said, capsys):
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert capsys.readouterr() == ("", f"{said}\n")


def test_packages_that_are_missing_are_named_before_anything_else(monkeypatch, capsys):
    text = (Path(cli.__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    wanted = tomllib.loads(text)["project"]["dependencies"]
    assert {re.split("[<>=]", name)[0] for name in wanted} == {*_options.REQUIRED}
    monkeypatch.setattr(
        _options, "find_spec", lambda name: None if name in ("einops", "rich") else 1
    )
    assert cli.main(["check-device", "--out", "nowhere"]) == 2
    assert capsys.readouterr().err.endswith("not installed: pip install einops rich\n")


OUTPUTS = {  # every option that names what is written, and its command
    "--json": ["parity"],
    "--html": ["parity"],
    "--markdown": ["parity"],
    "--to": ["record", "cross"],
    "--json=": ["bench"],
    "--markdown=": ["bench"],
    "--png": ["bench"],
    "--out": ["bench"],
}


@pytest.mark.skipif(not has_torch(), reason="record needs it")
@pytest.mark.parametrize("option", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    option, tmp_path, monkeypatch, capsys
):
    """Nobody is kept out of a folder who may do all; so the system itself is made to refuse."""
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    name = option.rstrip("=")
    given = tmp_path if name in ("--to", "--out") else tmp_path / "file"
    assert cli.main([*OUTPUTS[option], name, str(given)]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"{name} {given} cannot be " in err and "read-only" in err
    assert not out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["parity", "bench"])
def test_a_file_that_cannot_be_opened_is_named(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "old.json").write_text("kept")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "does_not_fit", str)  # which opens files too
        patch.setattr(Path, "open", refused)
        assert cli.main([command, "--json", str(tmp_path / "old.json")]) == 2
    assert capsys.readouterr().err.endswith("old.json cannot be written: read-only file system.\n")
    assert (tmp_path / "old.json").read_text() == "kept"


def refused(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.nightly
def test_the_module_of_the_command_runs_it():
    command = [sys.executable, "-m", "flax_attn.command.cli", "parity", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "flax-attn parity: " in done.stderr


def test_at_most_ten_names_are_listed():
    names = [f"variant_{i}" for i in range(48)]
    assert listed(names) == f"{', '.join(names[:10])} and 38 more"
    assert listed(names[:10]) == ", ".join(names[:10])
    assert did_you_mean("xyz", names, "they are").count("variant_") == 10


@pytest.mark.nightly
def test_an_unknown_variant_is_answered_by_ten_at_most(capsys):
    assert cli.main(["parity", "nosuch"]) == 2
    text = capsys.readouterr().err
    assert "the names are attention_pool, " in " ".join(text.split()) and " more." in text
    assert text.count(",") < 14


def test_the_same_word_in_other_letters_is_found():
    assert did_you_mean("ALIBI", ["Alibi", "Window"], "-") == "did you mean Alibi?"
    assert did_you_mean("causl", ["Causal", "Window"], "-") == "did you mean Causal?"
