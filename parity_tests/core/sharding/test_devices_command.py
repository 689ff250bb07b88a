"""`flax-attn parity --devices`: cases with their inputs sharded, against torch on one device."""

import os
import subprocess
import sys

import numpy as np
import pytest

from flax_attn.command.cli import main
from flax_attn.parity.cases.home import has_torch
from flax_attn.parity.cases.sharded import Split, splits
from parity_tests import test_value_residual
from parity_tests.tables import with_nightly

DROPPED = [str(case) for case in test_value_residual.CASES if case.train]
LISTED = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
PACKAGE = f"""
import jax
import torch
from flax import nnx
from jax import P

from flax_attn import attend
from flax_attn.parity import Case


class Theirs(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def over_itself(x):
    x = x[..., None, :]
    return attend(x, x, x)[..., 0, :]


class Mine(nnx.Module):
    def __call__(self, x):
        return over_itself(x)


class Local(nnx.Module):
    def __call__(self, x):  # each device sees its own keys alone
        if jax.typeof(x).sharding.mesh.empty:
            return over_itself(x)
        where = P("batch", "length")
        return jax.shard_map(over_itself, in_specs=where, out_specs=where)(x)


class ByBatch(nnx.Module):
    def __call__(self, x):
        if any(jax.typeof(x).sharding.spec[1:]):
            raise ValueError("the length has to be whole")
        return over_itself(x)


given = dict(reference="somebody.Theirs", x=(2, 12, 5), dtypes=("float64",))
{LISTED} = [Case(of, name=of.__name__, config={{}}, **given) for of in (Mine, Local, ByBatch)]
"""


@pytest.mark.nightly
@pytest.mark.skipif(not has_torch(), reason="compares with torch")
def test_a_layer_wrong_only_on_several_devices_fails(tmp_path):
    (tmp_path / "somebody.py").write_text(PACKAGE)
    found = {name: _run(tmp_path, "somebody", name) for name in ("Mine", "Local", "ByBatch")}
    assert found["Mine"][0] == found["ByBatch"][0] == 0
    assert found["Local"][0] == 1 and "DIFFERENT" in found["Local"][1]
    assert "2 x 4" in found["Mine"][1] and "2 x 4" in found["Local"][1]
    assert "2 x 1" in found["ByBatch"][1]  # the split that it takes
    assert all("cpu, 8 devices" in text for _, text in found.values())


@pytest.mark.nightly
@pytest.mark.skipif(not has_torch(), reason="compares with torch")
@pytest.mark.parametrize(
    "name", with_nightly(["value_residual", *DROPPED], commit=DROPPED), ids=["all", "dropped"]
)
def test_a_layer_of_the_library_and_its_dropout(name, tmp_path):
    code, text = _run(tmp_path, name)
    assert code == 0 and "1 x 7" in text and "0 different" in text, text


@pytest.mark.parametrize(
    "given, said",
    [
        (["--devices", "1"], "--devices takes two or more; got 1."),
        (["--devices", "4", "--real"], "it takes no --real."),
        (["--devices", "4", "--markdown", "x.md"], "it takes no --markdown."),
    ],
)
def test_devices_refuses_unsupported_options(given, said, capsys):
    assert main(["parity", *given]) == 2
    assert said in capsys.readouterr().err


def test_splits_divide_batch_and_length_over_the_devices():
    assert splits({"x": np.ones((2, 4, 5, 6))}, 8) == [Split(2, 1)]  # an image has no length
    assert splits({"q": np.ones((3, 6, 5)), "kv": np.ones((3, 9, 5))}, 8) == [(1, 3), (3, 1)]
    assert splits({"x": np.ones((1, 7, 5))}, 5) == []
    assert splits({"x": np.ones((7, 5))}, 8) == []
    assert splits({"x": np.ones((16, 32, 5))}, 8)[0] == (2, 4)


def _run(folder, *names):
    """The command's exit status and what it prints."""
    run = subprocess.run(
        [sys.executable, "-m", "flax_attn", "parity", "--devices", "8", *names],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        check=False,
    )
    return run.returncode, run.stdout + run.stderr
