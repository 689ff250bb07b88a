"""The table of model types beside a cache is what their traced layers say."""

import pytest

from .decoding_kernels import MARKS, PAGE, layers, page, served

STEPS = {
    "llama": ("A100", "H100, H200", "TPU"),
    "gpt_oss": ("A100", "H100, H200", "TPU"),
    "gemma3_text": ("H100, H200", "TPU"),
}


def test_a_step_of_these_has_a_kernel():
    for name, devices in STEPS.items():
        for _, layer in layers(name):
            for device in devices:
                ((kernel, reason),) = served(layer, device, 1)
                assert kernel is not None, (name, device, reason)


@pytest.mark.nightly
def test_the_table_is_what_is_traced():
    assert MARKS.search(PAGE.read_text("utf-8"))[0].count(page().strip()) == 1
