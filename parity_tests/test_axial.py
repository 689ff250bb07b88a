"""Axial attention against its twin and the package axial-attention, summed and in sequence."""

import numpy as np

from flax_attn.layers.axial import AxialAttention
from flax_attn.parity import Case, Rule

IMAGE = {"dim": 12, "num_heads": 3, "axes": 2}
VOLUME = {**IMAGE, "axes": 3, "summed": False}
ONE = {"dtypes": ("float64",)}
VALID = np.random.RandomState(0).rand(2, 4, 5) < 0.6
VALID[1, 2] = False


def theirs(axes, summed):
    given = {"dim": 12, "num_dimensions": axes, "heads": 3, "sum_axial_out": summed}
    names = ("to_q", "to_kv", "to_out")
    return {
        "reference": "axial_attention.AxialAttention",
        "reference_config": given,
        "rules": [Rule(f"axial_attentions.*.fn.{name} -> {name}.*") for name in names],
        **ONE,
    }


CASES = [
    Case(AxialAttention, IMAGE, x=(2, 4, 5, 12)),
    Case(AxialAttention, {**IMAGE, "summed": False}, x=(2, 4, 5, 12), valid=VALID, **ONE),
    Case(AxialAttention, {**IMAGE, "head_dim": 5}, x=(2, 4, 5, 12), valid=VALID, **ONE),
    Case(AxialAttention, {**IMAGE, "dropout": 0.3}, x=(4, 5, 12), train=True, **ONE),
    Case(AxialAttention, IMAGE, x=(2, 4, 5, 12), **theirs(2, True)),
    Case(AxialAttention, VOLUME, x=(2, 4, 3, 5, 12), **theirs(3, False)),
]


def test_parity(case):
    case.check()
