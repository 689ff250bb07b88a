"""`flax-attn explain`: a request on the command line, and the table that `explain` gives of it."""

import jax
import jax.numpy as jnp
import pytest

from flax_attn import CAUSAL, Alibi, Causal, Lengths, Softcap, Window, assume_platform, explain
from flax_attn.command import cli
from flax_attn.command.explain_command import read

SHAPES = "--q 2 5 6 8 --kv 2 9 3 8".split()


def said(capsys, *arguments):
    status = cli.main(["explain", *arguments])
    found = capsys.readouterr()
    return status, found.out + found.err


def table(
    mask, dtype="float32", on="cpu", capability=None, q=(2, 5, 6, 8), kv=(2, 9, 3, 8), **more
):
    q, kv = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (q, kv))
    with assume_platform(on, capability):
        return f"{explain(q, kv, kv, mask=mask, **more)}\n"


@pytest.mark.nightly
def test_the_table_is_that_of_explain(capsys):
    """Below a line that says how the shapes were read."""
    sizes = "q: B 2, T 5, N 6, H 8; k: B 2, S 9, K 3, H 8; v: B 2, S 9, K 3, h 8\n"
    mask = "Causal() & Window(3, 0)"
    wanted = table(Causal() & Window(3, 0), "bfloat16", "tpu")
    more = ["--dtype", "bfloat16", "--mask", mask, "--on", "tpu"]
    assert said(capsys, *SHAPES, *more) == (0, sizes + wanted) and "chosen" in wanted
    wanted = table(Causal(), "bfloat16", "gpu", (9, 0))
    more = ["--dtype", "bfloat16", "--mask", "CAUSAL", "--on", "gpu", "--capability", "9.0"]
    assert said(capsys, *SHAPES, *more) == (0, sizes + wanted)
    sizes = "q: T 4096, N 8, H 64; k: S 4096, K 8, H 64; v: S 4096, K 8, h 64"
    long = table(None, q=(4096, 8, 64), kv=(4096, 8, 64))
    assert said(capsys, "--q", "4096", "8", "64", "--on", "cpu") == (0, f"{sizes}\n{long}")
    assert "blockwise  chosen" in long


def test_a_capability_is_read_whole(capsys):
    more = ["--dtype", "bfloat16", "--on", "gpu", "--capability"]
    for capability in ("7.5", "6.1"):
        text = said(capsys, *SHAPES, *more, capability)[1]
        assert f"capability 8.0 or later; this one has {capability}\n" in text


def test_explain_command_takes_sinks_and_dropout(capsys):
    status, text = said(capsys, *SHAPES, "--sinks", "--dropout", "0.1", "--on", "gpu")
    assert status == 0 and "reference" in text
    refusal = "has no dropout; blockwise and reference do"
    assert refusal in said(capsys, *SHAPES, "--dropout", "0.1", "--on", "tpu")[1]
    assert refusal not in said(capsys, *SHAPES, "--on", "tpu")[1]


WORK = {  # as docs/scale.md counts it
    ("contiguous", "ring"): "36 to 484 of 512 blocks of 128 x 128 a device; the busiest has 1.86",
    ("zigzag", "ring"): "260 of 512 blocks of 128 x 128 a device, on each as many",
    ("striped", "all_gather"): "288 of 512 blocks of 128 x 128 a device, on each as many",
    ("contiguous", "ulysses"): "2080 of 4096 blocks of 128 x 128 a device, on each as many",
}


@pytest.mark.nightly(but=["contiguous ring", "contiguous ulysses"])
@pytest.mark.parametrize("how", WORK, ids=" ".join)
def test_a_sharded_length_and_what_each_device_does(how, capsys):
    layout, strategy = how
    shapes = ["--q", "8192", "8", "64", "--mask", "CAUSAL", "--shards", "8"]
    status, text = said(capsys, *shapes, "--layout", layout, "--strategy", strategy)
    assert status == 0 and f"{strategy} over 'length' (8 shards), {layout}" in text
    assert f"blocks     {WORK[how]}" in text


def test_explain_command_gives_an_upper_bound_for_an_unknown_mask(capsys):
    text = said(capsys, "--q", "2", "64", "4", "8", "--shards", "2", "--mask", "Lengths([9, 7])")[1]
    assert "at most 2 of 2 blocks of 32 x 32 a device" in text


MASKS = {
    "CAUSAL": CAUSAL,
    "Causal(offset=2) | Window(3, 0)": Causal(offset=2) | Window(3, 0),
    '~Window(3, 0, "end")': ~Window(3, 0, "end"),
    "Causal(-1)": Causal(-1),
}


@pytest.mark.parametrize("text", MASKS)
def test_a_mask_is_read_from_its_expression(text):
    assert repr(read("mask", text)) == repr(MASKS[text])


def test_explain_command_takes_a_score(capsys):
    more = ["--dtype", "bfloat16", "--on", "gpu", "--score", "Softcap(30.0) >> Alibi([0.5] * 6)"]
    assert "is no number, text or list" in said(capsys, *SHAPES, *more)[1]
    more[-1] = "Softcap(30.0) >> Alibi([1, 2, 3, 4, 5, 6])"
    with assume_platform("gpu"):
        q, k = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((2, 5, 6, 8), (2, 9, 3, 8)))
        score = Softcap(30.0) >> Alibi([1, 2, 3, 4, 5, 6])
        assert str(explain(q, k, k, score=score)) in said(capsys, *SHAPES, *more)[1]


def test_explain_command_reads_a_list_as_an_array():
    lengths = read("mask", "Lengths([9, 7])")
    assert isinstance(lengths, Lengths) and "9" in repr(lengths)


WRONG = {
    ("--mask", "Causl()"): "Causl is no mask: did you mean Causal?",
    ("--mask", "Window"): "Window takes arguments, as in Causal() & Window(3, 0)",
    ("--score", "Softcap(3.0) + 1"): "takes scores such as Softcap(30.0) >> Alibi(",
    ("--score", "Sofcap(3.0)"): "Sofcap is no score: did you mean Softcap?",
    ("--mask", "Causal() +"): "is no expression",
    ("--mask", "Causal() + Causal()"): "takes masks such as Causal() & Window(3, 0); got",
    ("--mask", "__import__('os').getcwd()"): "__import__ is no mask",
    ("--mask", "Causal(open('x'))"): "\"open('x')\" is no number, text or list.",
    ("--mask", "Window(1, 2, 3, 4, 5)"): "Window(1, 2, 3, 4, 5)",
    ("--mask", "jax"): "jax is no mask: ",
    ("--dtype", "float3"): "--dtype takes float64, float32, bfloat16 or float16; got 'float3'.",
    ("--dtype", "int32"): "attend works on floating arrays; got q int32",
    (
        "--shards",
        "3",
    ): 'layout "contiguous" needs a length that the 3 shards divide; q has 5 tokens',
    ("--strategy", "tree"): "strategy must be one of 'all_gather', 'ring', 'ulysses'; got 'tree'.",
    ("--on", "abacus"): "platform must be 'cpu', 'gpu' or 'tpu'; got 'abacus'.",
    ("--capability", "9.0"): "it goes with --on gpu.",
    ("--kv", "-5", "3", "8"): "--kv takes sizes of 0 or more; got -5 3 8.",
    ("--v", "2", "9", "5", "8"): "k and v must share length and heads; got q (2, 5, 6, 8)",
}


@pytest.mark.parametrize("more", WRONG, ids=" ".join)
def test_bad_requests_are_refused_in_one_line(more, capsys):
    status, text = said(capsys, *SHAPES, *more)
    assert status == 2 and text.startswith("flax-attn explain: ") and text.count("\n") == 1
    assert WRONG[more] in text
