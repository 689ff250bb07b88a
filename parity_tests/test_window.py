"""Window attention against its twin and the layers of Swin and Swin v2, shifted and not."""

import numpy as np

from flax_attn.layers.window import WindowAttention
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "window": (2, 3), "num_heads": 3}
MOVED = {**SIZES, "shift": (1, 2)}
SECOND = {**MOVED, "version": 2}
SQUARE = {**SIZES, "window": (2, 2)}
ONE = {"dtypes": ("float64",)}
VALID = np.random.RandomState(0).rand(2, 4, 9) < 0.7
VALID[1, :2, 3:6] = False  # of a window nothing is left


NAMES = {
    "self.query": "q_proj",
    "self.key": "k_proj",
    "self.value": "v_proj",
    "output.dense": "o_proj",
    "self.logit_scale": "logit_scale",
    "self.continuous_position_bias_mlp.0": "mlp_in",
    "self.continuous_position_bias_mlp.2": "mlp_out",
}
TABLE = "relative_position_bias_table"
RULES = {
    1: [Rule(f"relative_position_bias.{TABLE} -> {TABLE}")],
    2: [Rule(f"{one} -> {other}") for one, other in NAMES.items()],
}


def of(version, shift):
    """transformers' attention of a Swin, and the steps that its layer takes around it."""
    model = {1: "Swin", 2: "Swinv2"}[version]
    path = f"transformers.models.{model.lower()}.modeling_{model.lower()}"

    def config():
        import transformers

        given = getattr(transformers, f"{model}Config")(window_size=2, attn_implementation="eager")
        sizes = {1: {"hidden_size": 12, "num_attention_heads": 3}, 2: {"dim": 12, "num_heads": 3}}
        return {"config": given, **sizes[version], "window_size": 2}

    def call(layer, x):
        from importlib import import_module

        import torch

        module, given = import_module(path), config()["config"]
        around = getattr(module, f"{model}Layer")(given, 12, (5, 6), 3, shift_size=shift)
        padded, _ = around.maybe_pad(x, *x.shape[1:3])
        moved = torch.roll(padded, (-shift, -shift), (1, 2))
        windows = module.window_partition(moved, 2).view(-1, 4, 12)
        mask = around.get_attn_mask(*padded.shape[1:3], dtype=x.dtype, device=x.device)
        if version == 2:
            steps = torch.arange(-1, 2, dtype=torch.float64) * 8
            steps = torch.sign(steps) * torch.log2(steps.abs() + 1) / 3
            table = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)[None]
            layer.self.relative_coords_table = table.to(x.dtype)  # theirs is of float32
        out = module.window_reverse(
            layer(windows, mask)[0].view(-1, 2, 2, 12), 2, *padded.shape[1:3]
        )
        return torch.roll(out, (shift, shift), (1, 2))[:, : x.shape[1], : x.shape[2]]

    return {
        "reference": f"{path}.{model}Attention",
        "reference_config": config,
        "torch_call": call,
        "rules": RULES[version],
        **ONE,
    }


CASES = [
    Case(WindowAttention, SIZES, x=(2, 4, 9, 12)),
    Case(WindowAttention, MOVED, x=(5, 7, 12), **ONE),
    Case(WindowAttention, MOVED, x=(2, 4, 9, 12), valid=VALID, **ONE),
    Case(WindowAttention, SECOND, x=(2, 4, 9, 12)),
    Case(WindowAttention, {**SECOND, "pretrained": (3, 5)}, x=(2, 4, 9, 12), **ONE),
    Case(WindowAttention, {**SECOND, "qkv_bias": False}, x=(2, 4, 9, 12), valid=VALID, **ONE),
    Case(WindowAttention, {**MOVED, "dropout": 0.3}, x=(4, 6, 12), train=True, **ONE),
    Case(WindowAttention, SQUARE, x=(2, 5, 6, 12), **of(1, 0)),
    Case(WindowAttention, {**SQUARE, "shift": (1, 1)}, x=(2, 5, 6, 12), **of(1, 1)),
    Case(
        WindowAttention,
        {**SQUARE, "version": 2, "shift": (1, 1)},
        x=(2, 6, 8, 12),
        **of(2, 1),
    ),
]


def test_parity(case):
    case.check()
