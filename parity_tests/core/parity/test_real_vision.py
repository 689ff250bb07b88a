"""What `--real` does with DINOv2's file, on a small one written by hand: no download."""

import numpy as np
import pytest

from flax_attn.parity import judge
from parity_tests.real import dinov2


def number(value):
    """A number of seven bits a byte."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + number(rest) if rest else bytes([low])


def field(at, value):
    if isinstance(value, int):
        return number(at << 3) + number(value)
    raw = value if isinstance(value, bytes) else value.encode()
    return number(at << 3 | 2) + number(len(raw)) + raw


def tensor(name, value):
    sizes = b"".join(field(1, size) for size in value.shape)
    kind = 1 if value.dtype == np.float32 else 7
    return field(5, sizes + field(2, kind) + field(8, name) + field(9, value.tobytes()))


def node(inputs, output):
    return field(1, b"".join(field(1, name) for name in inputs) + field(2, output))


def values(*shape):
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32)


MATRIX, BIAS, FIRST, REST = values(4, 3), values(3), values(1, 1, 5), values(1, 300, 5)
AT = "/backbone/encoder/layer.0/attention/attention/query/MatMul_output_0"
FILE = field(1, 7) + field(
    7,
    tensor("backbone.encoder.layer.0.attention.attention.query.bias", BIAS)
    + tensor("onnx::MatMul_9", MATRIX)
    + tensor("onnx::Reshape_8", REST)
    + tensor("onnx::Concat_7", FIRST)
    + tensor("onnx::Unsqueeze_6", np.zeros(1, np.int64))
    + tensor("decoder.bias", BIAS)
    + node(["x", "onnx::MatMul_9"], AT)
    + node(["onnx::Reshape_8"], "/backbone/embeddings/Reshape_output_0")
    + node(["y", "onnx::Concat_7"], "/backbone/embeddings/Concat_output_0"),
)


def test_tensors_get_the_names_of_the_products_that_read_them():
    found = dinov2.tensors(FILE)
    query = "encoder.layer.0.attention.q_proj"
    want = {f"{query}.weight": np.ascontiguousarray(MATRIX.T), f"{query}.bias": BIAS}
    want["embeddings.position_embeddings"] = np.concatenate([FIRST, REST], 1)
    assert found.keys() == want.keys()
    assert all(judge.exact(found[name], value).ok for name, value in want.items())
    assert all(value.flags.writeable for value in found.values())


def test_fields_of_all_kinds_are_passed_over():
    raw = field(3, 300) + number(2 << 3 | 5) + b"abcd" + number(4 << 3 | 1) + bytes(8)
    assert [(at, x if isinstance(x, int) else bytes(x)) for at, x in dinov2.fields(raw)] == [
        (3, 300),
        (2, b"abcd"),
        (4, bytes(8)),
    ]


@pytest.mark.nightly
def test_two_crops_of_a_photograph():
    pytest.importorskip("matplotlib", reason="has the photograph")
    pytest.importorskip("PIL", reason="opens it")
    crops = dinov2.pixels()
    assert crops.shape == (2, 3, 224, 224) and crops.dtype == np.float32
    assert len({float(x.mean()) for x in crops}) == 2 and crops.std() > 0.5
