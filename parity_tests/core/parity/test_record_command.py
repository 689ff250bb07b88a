"""`flax-attn record`: a file for each case, by which it is proven without torch."""

import pytest

from flax_attn.command import cli, record_command
from flax_attn.parity import Recording
from flax_attn.parity.cases.collect import collect

from .in_process import Here, forget
from .test_cli import somewhere

pytest.importorskip("torch", reason="torch records")
__all__ = ["somewhere"]


@pytest.fixture
def main(somewhere, monkeypatch, capsys):
    """The command in this process: its exit status, and what it says on both channels."""
    monkeypatch.syspath_prepend(somewhere)
    monkeypatch.setattr(record_command, "Workers", Here)

    def run(*arguments):
        status = cli.main(["record", *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.mark.nightly(but=["somebody.Half"])
@pytest.mark.parametrize("name", ["somebody", "somebody.Half"])
def test_cases_are_recorded_each_in_its_file(name, main, somewhere):
    status, out, err = main(name, "--to", "to")
    files = sorted((somewhere / "to").iterdir())
    assert status == 0 and [file.name for file in files] == [
        "mine-width=4-x=3x4-somebody.theirs.Half.safetensors",
        "mine-width=6-x=3x6-somebody.theirs.Half.safetensors",
    ], err
    assert out.count("recorded to/mine-width=") == 2
    narrow, wide = collect("somebody")
    assert wide.report(recording=Recording(files[1]), eager=False).ok
    wrong = narrow.report(recording=Recording(files[0]), eager=False)
    assert wrong.first.tap == "output" and not wrong.ok
    forget("somebody")


def test_a_case_that_cannot_be_recorded_is_named(main, somewhere):
    (somewhere / "somebody" / "theirs.py").write_text("Half = None")
    status, out, _ = main("somebody")
    assert status == 1 and out.count("not recorded: NoneType of torch fails") == 2
    (somewhere / "file").write_text("")
    status, _, err = main("somebody", "--to", "file/below")
    assert status == 2 and "--to file/below cannot be made a folder: not a directory." in err
    status, _, err = main("crosss", "--to", "unmade")
    assert status == 2 and "cross" in err and not (somewhere / "unmade").exists()
