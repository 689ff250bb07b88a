"""docs/kernels.md shows what `explain` says now, and says what is known of some requests."""

import os
import subprocess
import sys

import pytest

from flax_attn._internal.markdown import cells
from parity_tests.core.pages.kernels import (
    H100,
    KERNELS,
    chosen,
    matrix,
    requests,
    said,
    tokamax_is_there,
)
from parity_tests.core.pages.pages import text_of

PAGE = "docs/kernels.md"
BY_CODE = {request.code: request for request in requests()}
CHOSEN = [
    ("CAUSAL", {"CPU": "blockwise", "A100": "cudnn", H100: "cudnn", "TPU": "splash"}),
    ("CAUSAL & Documents(lengths)", {"A100": "blockwise", H100: "tokamax", "TPU": "splash"}),
    ("CAUSAL & Segments(ids)", {H100: "blockwise", "TPU": "splash"}),
    ("MaskFn(fn)", dict.fromkeys(("CPU", "A100", H100, "TPU"), "blockwise")),
    ("Softcap(50.0)", {"A100": "blockwise", H100: "tokamax", "TPU": "splash"}),
    ("Additive(x)", {H100: "tokamax", "TPU": "blockwise"}),
    ("T = S = 64", dict.fromkeys(("CPU", "A100", H100, "TPU"), "reference")),
]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_page_is_what_the_generator_writes(backend):
    """Also where somebody asks for a backend: the page is about the automatic choice."""
    command = [sys.executable, "-m", "parity_tests.core.pages.kernels"]
    asked = {} if backend is None else {"FLAX_ATTN_BACKEND": backend}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(PAGE), (
        "python -m parity_tests.core.pages.kernels --write renews it"
    )


@pytest.mark.nightly(but=["CAUSAL & Segments(ids)", "Softcap(50.0)", "T = S = 64"])
@pytest.mark.parametrize("code, wanted", CHOSEN, ids=[code for code, _ in CHOSEN])
def test_it_names_the_backend_that_is_known_to_serve(code, wanted):
    with tokamax_is_there():
        assert {device: chosen(BY_CODE[code], device) for device in wanted} == wanted


@pytest.mark.nightly
def test_without_tokamax_the_row_falls_to_blockwise():
    packed = BY_CODE["CAUSAL & Documents(lengths)"]
    with tokamax_is_there(False):
        assert chosen(packed, H100) == "blockwise"
        assert said(packed, "tokamax").startswith("tokamax is not installed")


@pytest.mark.nightly
def test_a_chosen_kernel_gives_no_reason_against_itself():
    with tokamax_is_there():
        for request in requests():
            for kernel, device in KERNELS.items():
                if chosen(request, device) == kernel:
                    assert said(request, kernel) == "serves", request


@pytest.mark.nightly
def test_no_two_requests_look_alike_and_no_cell_is_cut():
    rows = cells(matrix().partition("\n\n")[0])
    assert len(rows) == len(requests()) + 1 and {len(row) for row in rows[1:]} == {6}
    assert len(BY_CODE) == len({request.words for request in requests()})


def test_its_sentences_are_no_longer_than_a_screen_is_wide():
    lines = [line for line in text_of(PAGE).splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 115
