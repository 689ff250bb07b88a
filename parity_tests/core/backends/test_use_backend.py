"""`use_backend`: one backend for all calls inside, which are retraced for it."""

import os
import subprocess
import sys
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import attend, explain, taps, use_backend
from flax_attn.parity.cases.case import has_torch
from parity_tests import test_grouped_query, test_transformer_multi_head
from parity_tests.core.backends.refusal import told
from parity_tests.tables import with_nightly

SUITE = [*test_grouped_query.CASES, *test_transformer_multi_head.CASES]
JITTED = [(case, False) for case in SUITE[12::12]]
QKV = [jnp.asarray(np.random.RandomState(i).standard_normal((5, 2, 4))) for i in range(3)]


@pytest.mark.nightly
@pytest.mark.skipif(not has_torch(), reason="a record names weights, which blocks never hold")
@pytest.mark.parametrize(
    ("case", "eager"),
    with_nightly(product(SUITE[::6], (False, True)), commit=[(SUITE[0], True), *JITTED]),
    ids=str,
)
def test_the_parity_suite_holds_in_blocks(case, eager):
    """A sample here; `FLAX_ATTN_BACKEND=blockwise flax-attn parity` takes all."""
    with use_backend("blockwise"):
        report = case.report(live=True, eager=eager)
    assert report.ok, report
    assert not any(row.name.endswith("weights") for row in report.rows)


def heard(**options):
    with taps.listen() as points:
        attend(*QKV, **options)
    return dict(points)


@pytest.mark.nightly
def test_use_backend_holds_only_inside_its_block():
    assert "weights" in heard()
    with use_backend("blockwise"):
        assert explain(*QKV).chosen == "blockwise" and "weights" not in heard()
        with use_backend("auto"):
            assert explain(*QKV).chosen == "reference"
    assert explain(*QKV).chosen == "reference" and "weights" in heard()


@pytest.mark.nightly
def test_the_backend_argument_overrides_use_backend():
    with use_backend("blockwise"):
        assert "weights" in heard(backend="reference")


def test_a_jitted_function_is_retraced_for_another_backend():
    found = []

    @jax.jit
    def run(*qkv):
        found.append(explain(*qkv).chosen)
        return attend(*qkv)

    for backend in ("auto", "blockwise", "auto"):
        with use_backend(backend):
            run(*QKV)
    assert found == ["reference", "blockwise"]


def test_a_chosen_backend_that_refuses_raises_its_reason():
    with use_backend("cudnn"):
        assert explain(*QKV).chosen is None
        with told(NotImplementedError, "backend 'cudnn' cannot serve this request: "):
            attend(*QKV)


def test_an_unknown_backend_name_raises():
    with told(ValueError, "blockwise", "got 'flash'"):
        use_backend("flash")


SAID = [("blockwise", "blockwise  chosen"), ("flash", "got 'flash'")]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "said"), with_nightly(SAID, commit=SAID[:1]))
def test_the_environment_variable_sets_the_backend_of_a_process(name, said):
    code = "import jax, flax_attn as f; x = jax.numpy.ones((3, 1, 2)); print(f.explain(x, x, x))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLAX_ATTN_BACKEND": name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in run.stdout + run.stderr
