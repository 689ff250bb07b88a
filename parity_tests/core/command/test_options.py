"""What is said of a command, an option or a name that does not exist: one sentence, ten names."""

import pytest

from flax_attn import cli
from flax_attn._nearest import did_you_mean, listed


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["prity"], "flax-attn: there is no command 'prity': did you mean parity?"),
        (
            ["xyzzy"],
            "flax-attn: there is no command 'xyzzy': the commands are parity, record, explain, "
            "bench.",
        ),
        ([], "flax-attn: which command? It takes parity, record, explain, bench."),
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


def test_at_most_ten_names_are_listed():
    names = [f"variant_{i}" for i in range(48)]
    assert listed(names) == f"{', '.join(names[:10])} and 38 more"
    assert listed(names[:10]) == ", ".join(names[:10])
    assert did_you_mean("xyz", names, "they are").count("variant_") == 10


def test_an_unknown_variant_is_answered_by_ten_at_most(capsys):
    assert cli.main(["parity", "nosuch"]) == 2
    text = capsys.readouterr().err
    assert "the variants are: attention_pool, " in text and " more." in text
    assert text.count(",") < 12 + text.partition("the variants are")[0].count(",")


def test_the_same_word_in_other_letters_is_found():
    assert did_you_mean("ALIBI", ["Alibi", "Window"], "-") == "did you mean Alibi?"
    assert did_you_mean("causl", ["Causal", "Window"], "-") == "did you mean Causal?"
