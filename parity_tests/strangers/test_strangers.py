"""Every stranger's port is its original: outputs and the gradients of all inputs and weights."""

import pytest

from flax_attn.parity import ParityError

torch = pytest.importorskip("torch", reason="compares with torch")
pytest.importorskip("transformers", reason="holds most of the originals")

from parity_tests.strangers import (  # noqa: E402
    fused,
    images,
    long,
    outputs,
    relative,
    x_options,
)
from parity_tests.tables import with_nightly  # noqa: E402

STRANGERS = {
    name: port
    for file in (fused, x_options, relative, images, long, outputs)
    for name, port in file.STRANGERS.items()
}
# The cheapest that differ most: split weights, mixed heads, places, images, fills, nests.
SLICE = ("gpt_neox", "x_talking_heads", "deberta_v2", "cvt", "bros", "x_cache")


@pytest.mark.parametrize("name", with_nightly(STRANGERS, commit=SLICE))
def test_a_port_equals_its_original(name):
    if name.startswith("x_"):
        pytest.importorskip("x_transformers", reason="holds the original")
    port = STRANGERS[name]
    report = port.report(title=name)
    if not report.ok:
        raise ParityError(str(report), report)
    shown = {(row.kind, row.dtype) for row in report.rows}
    assert {(k, d) for k in ("output", "gradient") for d in port.options["dtypes"]} <= shown
