"""`flax-attn identify`: what it prints runs, and what it cannot do is one sentence."""

import json
import sys

import numpy as np
import pytest

import flax_attn
from flax_attn.command import cli
from flax_attn.command import identify_command as command
from flax_attn.identify.by_hand import NAMES
from flax_attn.parity import judge

torch = pytest.importorskip("torch", reason="identify needs it")

THEIRS = """
import torch
from torch import nn
from torch.nn import functional


class Grouped(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.heads, self.groups = config.heads.query, config.heads.key
        self.size = config.hidden_size // self.heads
        sizes = self.heads + 2 * self.groups
        self.qkv = nn.Linear(config.hidden_size, sizes * self.size)
        self.proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x, scale=None):
        parts = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = self.qkv(x).split(parts, -1)
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in (q, k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(heads.transpose(1, 2).flatten(2))


class SizedConfig:
    def __init__(self, width, scale=None):
        self.heads = self
        self.query, self.key, self.hidden_size = 6, 2, width


class SizedAttention(Grouped):
    pass


class Squared(Grouped):
    def forward(self, x):
        parts = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = self.qkv(x).split(parts, -1)
        return self.proj((q.unflatten(-1, (-1, self.size)) ** 2).flatten(2))


class Keywords(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        if width > 99:
            raise ValueError("width is at most 99.\\nReally.")
        self.inner = nn.Linear(width, width, bias)

    def forward(self, x):
        return self.inner(x)


class Silent(nn.Module):
    def forward(self, x):
        raise ValueError("never")


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.inner = 3, nn.Linear(4, 3)

    def forward(self, query, key, value):
        return self.inner(query) @ self.inner(key).mT @ value


def Function():
    pass
"""
CONFIG = {"heads": {"query": 6, "key": 2}, "hidden_size": 24, "layer_idx": 0, "dim": 5}


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """The command on a class of `somebodys.py`, with a config: exit status, stdout and stderr."""
    (tmp_path / "somebodys.py").write_text(THEIRS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder

    def run(name, *arguments, config=None):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            arguments = ("--config", "config.json", *arguments)
        try:
            status = cli.main(["identify", name, *arguments])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    yield run
    sys.modules.pop("somebodys", None)


def made(name, config):
    """A class of `somebodys.py`, built as the command builds it."""
    return command._built(command._class_of(f"somebodys.{name}"), config)


@pytest.mark.nightly
def test_what_it_prints_builds_the_layer_and_loads_the_weights(main):
    status, out, err = main("somebodys.Grouped", config=CONFIG)
    assert (status, err) == (0, "")
    assert "# equal       other weights and tokens" in out and "DIFFERENT" not in out
    assert "layer = GroupedQueryAttention(24, 6, 2, 4, " in out
    theirs = made("Grouped", CONFIG)
    names = {"torch_module": theirs}
    exec(out, names)
    assert "\nfrom flax_attn import CAUSAL, GroupedQueryAttention\n" in out
    x = np.random.RandomState(3).standard_normal((2, 5, 24)).astype(np.float32)
    want = theirs(torch.from_numpy(x)).detach().numpy()
    assert judge.error(np.asarray(names["layer"](x)), want) < 1e-5


def test_a_class_that_is_no_layer_is_refused_with_the_reason(main):
    status, out, err = main("somebodys.Keywords", "--shape", "3,5,24", config={"width": 24})
    assert (status, err) == (1, "")
    assert out.startswith("no layer: ") and "import" not in out


@pytest.mark.nightly
def test_a_config_is_of_the_class_that_its_module_has(main):
    status, out, _ = main("somebodys.SizedAttention", config={"width": 24, "layer_idx": 0})
    assert status == 0 and "layer = GroupedQueryAttention(24, 6, 2, 4, " in out
    status, _, err = main("somebodys.SizedAttention", config={"hidden_size": 24, "layer_idx": 0})
    assert status == 2 and "--config does not fit SizedConfig: TypeError: " in err


def test_every_name_that_a_layer_is_built_from_is_public():
    assert NAMES.keys() <= {*flax_attn.__all__}


# What is given to the class.


def test_each_argument_that_takes_tokens_gets_them_and_the_width_that_runs_is_taken(main):
    inputs = command._inputs(made("Cross", {}), None, {"dim": 9, "width": 4})
    assert [x.shape for x in inputs] == [(2, 7, 4)] * 3
    grouped = made("Grouped", CONFIG)
    assert [*command._widths(grouped, command._numbers(CONFIG))] == [24, 5, 6, 2, 4]


def test_objects_are_namespaces_at_every_depth(main):
    value = command._namespace({"a": {"b": [1, {"c": 2}]}})
    assert value.a.b[0] == 1 and value.a.b[1].c == 2


# What is refused.

ERRORS = [
    (["Grouped"], None, "a class is named package.module.Class; got 'Grouped'."),
    (["nowhere_at_all.A"], None, "nowhere_at_all cannot be imported: ModuleNotFoundError: "),
    (["broken.A"], None, "broken cannot be imported: ModuleNotFoundError: No module named 'noth"),
    (["somebodys.Groupd"], None, "and there is no Groupd in somebodys: did you mean Grouped?"),
    (
        ["somebodys.Function"],
        None,
        "takes a class of torch.nn.Module, and somebodys.Function is none: ",
    ),
    (["somebodys.Grouped"], None, "Grouped needs config, layer_idx: give them in the JSON object"),
    (["somebodys.Keywords"], {"widht": 4}, "no argument 'widht': did you mean width?"),
    (["somebodys.Keywords"], {"width": 100}, "cannot be built: ValueError: width is at most 99."),
    (["somebodys.Keywords"], [4], "takes a JSON object of keywords; config.json holds a list."),
    (["somebodys.Keywords", "--config", "no.json"], None, "no.json cannot be read: no such file"),
    (["somebodys.Keywords", "--config", "broken.py"], None, "broken.py is no JSON: Expecting "),
    (["somebodys.Keywords", "--shape", "2,7"], None, "takes batch, tokens and width, such as 2,"),
    (["somebodys.Keywords", "--shape", "2,7,0"], None, "such as 2,7,64; got '2,7,0'."),
    (["somebodys.Keywords", "--shape", "2,7,5"], {"width": 4}, "does not run on --shape 2,7,5: "),
    (["somebodys.Silent"], None, "Silent shows no width of its tokens: give --shape B,T,D"),
    (["somebodys.Silent"], {}, "Silent shows no width of its tokens"),
    (["somebodys.Silent", "--shape", "1,2,3"], None, "on --shape 1,2,3: ValueError: never."),
    (["somebodys.Grouped", "--shap", "1"], None, "no option --shap: did you mean --shape?"),
]


@pytest.mark.parametrize("arguments, config, said", ERRORS)
def test_bad_arguments_are_refused_in_one_sentence(arguments, config, said, main):
    status, out, err = main(*arguments, config=config)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("flax-attn identify: ") and said in err and err.endswith((".\n", "?\n"))


def test_a_width_that_never_runs_is_told_with_what_was_tried(main):
    with pytest.raises(
        ValueError, match=r"2,7,D with D of 9, 3: ValueError: never. If it takes tokens alone"
    ):
        command._inputs(made("Silent", {}), None, {"depth": 3, "dim": 9})


def test_it_needs_torch(main, monkeypatch):
    monkeypatch.setattr("flax_attn.parity.cases.home.has_torch", lambda: False)
    status, _, err = main("somebodys.Grouped")
    assert status == 2 and "identify needs torch: pip install 'flax-attn[torch]'." in err
