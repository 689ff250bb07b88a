"""Float8 weights with scales: `w = w8 * scale`, a scale per tensor, per row or per 128 x 128 block.

`weight_scale_inv`, the name in DeepSeek's files, is multiplied as `weight_scale` is.

Source: `weight_dequant` in https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py
and the format "float-quantized" of https://github.com/vllm-project/compressed-tensors.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx

from .._internal.caller import warn_once
from ..errors import CheckpointError
from .buffers import names_of_params
from .checkpoint import Checkpoint
from .dtypes import DTYPES, overflows
from .entry import Entry
from .rule import Rule

FLOAT8 = "F8_E4M3"
BLOCK = 128  # rows and columns of a block
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATION_SCALES = ("activation_scale", "input_scale")
CHUNK = 1 << 18  # elements multiplied at a time
# Names of tensors of formats that are not read, and what they are of.
OTHER_FORMATS = {
    r"weight_packed": "compressed-tensors' packed weights of 4 bits",
    r"qweight|qzeros|g_idx": "GPTQ or AWQ",
    r"SCB|weight_format|weight\.(absmax|quant_map|nested_\w+|quant_state\..+)": "bitsandbytes",
    r"\w+_proj_blocks": "MXFP4",
}
REMEDY = "Dequantise the checkpoint first: float8 e4m3 alone is read, with one scale."


def without_scales(
    entries: Mapping[str, Entry], module: nnx.Module, rules: Sequence[Rule], layers: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors except the scales of float8 weights, and these by the weight's name.

    Scales that fill a Param of the layer, by their own name or by a rule, stay tensors. Scales of
    activations are left out, with one warning that counts those of all `layers`.
    """
    weights = {name for name, entry in entries.items() if entry.dtype == FLOAT8}
    params = names_of_params(list(entries), module, rules) if weights else set[str]()
    scales: dict[str, str] = {}
    for name in entries:
        weight = _weight_of(name, SCALES)
        if weight in weights and name not in params:
            scales.setdefault(weight, name)
    unused = [name for name in entries if _weight_of(name, ACTIVATION_SCALES) in scales]
    if unused:
        warn_once(
            "Layers compute in their own dtype, so the scales of float8 activations are not used: "
            f"{unused[0]}, {layers * len(unused)} in all."
        )
    consumed = {*scales.values(), *unused}
    return {name: x for name, x in entries.items() if name not in consumed}, scales


def _weight_of(name: str, ends: Sequence[str]) -> str:
    """Returns the name of the weight that a tensor with one of these names belongs to, or ""."""
    owner, dot, end = name.rpartition(".")
    return f"{owner}{dot}weight" if end in ends else ""


def block_shape(checkpoint: Checkpoint, weight: str, scale: str) -> tuple[int, int]:
    """Returns how many rows and columns of a weight have one scale.

    Raises:
      CheckpointError: for a scale of another dtype, and a shape that does not fit the weight's.
    """
    shape, entry = checkpoint.entries[weight].shape, checkpoint.entries[scale]
    if entry.dtype not in ("F32", "BF16", "F16"):
        why = f"A scale is F32, BF16 or F16; it is {entry.dtype}."
        raise CheckpointError(checkpoint.path, scale, why)
    if len(shape) == 2:
        rows, columns = shape
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        if entry.shape in ((), (1,)):
            return max(rows, 1), max(columns, 1)
        if entry.shape in ((rows,), (rows, 1)):
            return 1, max(columns, 1)
        if entry.shape == blocks:
            return BLOCK, BLOCK
        fits = f"[], [1], [{rows}], [{rows}, 1] and, for blocks of {BLOCK}, {[*blocks]} fit"
    else:
        fits = "a weight with a scale must have two axes"
    why = f"Its shape is {[*entry.shape]} and the weight's {[*shape]}; {fits}."
    raise CheckpointError(checkpoint.path, scale, why)


def dequantized(checkpoint: Checkpoint, weight: str, scale: str, dtype: np.dtype) -> np.ndarray:
    """Reads `weight * scale`, multiplied in float32 and rounded once to `dtype`.

    Needs little more memory than the result: the float8 values are read into the result's last
    bytes, and each chunk of rows is overwritten after it was copied.

    Raises:
      CheckpointError: as `Checkpoint.read`; for a scale that is negative, NaN or Inf, or zero where
        the weight is not; and for a product that overflows `dtype`.
    """
    height, width = block_shape(checkpoint, weight, scale)
    shape = rows, columns = checkpoint.entries[weight].shape
    factors = checkpoint.read(scale).astype(np.float32).reshape(max(-(-rows // height), 1), -1)
    if not (np.isfinite(factors) & (factors >= 0)).all():
        raise CheckpointError(checkpoint.path, scale, "A scale must be finite and not negative.")
    result = np.empty(shape, dtype)
    narrow = checkpoint.read(weight, result.reshape(-1).view(np.uint8)[-rows * columns :])
    step = max(CHUNK // max(columns, 1), 1)
    for i in range(0, rows, step):
        values = narrow[i : i + step].astype(np.float32)
        blocks = np.arange(i, i + len(values)) // height
        factor = factors[blocks].repeat(width, axis=1)[:, :columns]
        if ((factor == 0) & (values != 0)).any():
            why = "It is zero for a part of the weight that is not."
            raise CheckpointError(checkpoint.path, scale, why)
        with np.errstate(all="ignore"):
            result[i : i + step] = (values * factor).astype(dtype)
        if overflows(values, result[i : i + step]):
            why, hint = f"A value times its scale overflows {dtype.name}.", "Build a wider layer."
            raise CheckpointError(checkpoint.path, weight, why, hint)
    return result


def unread_format(path: object, entries: Mapping[str, Entry], dot: str) -> CheckpointError | None:
    """Returns the error to raise if tensors that fit no layer are of a quantised format."""
    for name in entries:
        weight = _weight_of(name, SCALES)
        if weight in entries:
            why = f"It scales a weight of {DTYPES[entries[weight].dtype].name}."
            return CheckpointError(path, dot + name, why, REMEDY)
        for end, kind in OTHER_FORMATS.items():
            if re.fullmatch(rf"(.*\.)?({end})", name):
                return CheckpointError(path, dot + name, f"It is of {kind}.", REMEDY)
    return None
