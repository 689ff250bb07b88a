"""The nine torch implementations from the book; torch is imported when one is built."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..weights.plan import Plan
from .program import device
from .weights import NOTEBOOK, combined, einsum, separate, wrapper
from .workload import BOTH, Workload

REF = "torch_ref"  # package of the PyTorch reference implementations


def config(w: Workload) -> dict[str, Any]:
    """Constructor arguments of the book's layers."""
    shape = {"d_in": w.features, "d_out": w.features, "context_length": w.length}
    return {**shape, "dropout": 0.0, "num_heads": w.heads, "qkv_bias": True}


def _book(file: str, name: str) -> Callable[[Workload], Any]:
    return lambda w: getattr(import_module(f"{REF}.{file}"), name)(**config(w))


def _wrapped(w: Workload) -> Any:
    nn = import_module("torch").nn
    kind = import_module(f"{REF}.multi_head_wrapper").MultiHeadAttentionWrapper
    heads = kind(**{**config(w), "d_out": w.width})
    return nn.Sequential(heads, nn.Linear(w.features, w.features))


def _fused(w: Workload, kernel: Any) -> Any:
    """One qkv projection, then `kernel(q, k, v)` on B N T H, then an output projection."""
    nn = import_module("torch").nn

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(w.features, 3 * w.features)
            self.proj = nn.Linear(w.features, w.features)

        def forward(self, x):
            qkv = self.qkv(x).view(*x.shape[:2], 3, w.heads, w.width)  # B T 3 N H
            context = kernel(*qkv.permute(2, 0, 3, 1, 4))  # B N T H
            return self.proj(context.transpose(1, 2).reshape(x.shape))  # B T D

    return Fused()


def _sdpa(w: Workload) -> Any:
    sdpa = import_module("torch").nn.functional.scaled_dot_product_attention
    return _fused(w, lambda q, k, v: sdpa(q, k, v, is_causal=True))


def _sdpa_masked(w: Workload) -> Any:
    torch = import_module("torch")
    past = torch.ones(w.length, w.length, dtype=torch.bool, device=device()).tril()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return _fused(w, lambda q, k, v: sdpa(q, k, v, attn_mask=past))


def _multihead_attention(w: Workload, **options: Any) -> Any:
    torch = import_module("torch")

    class SelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(w.features, w.heads, batch_first=True)
            future = torch.ones(w.length, w.length, dtype=torch.bool).triu(1)
            self.register_buffer("future", future)

        def forward(self, x):
            return self.attention(x, x, x, attn_mask=self.future, **options)[0]

    return SelfAttention()


def _flex(w: Workload) -> Any:
    torch = import_module("torch")
    flex = import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention)
    past = flex.create_block_mask(
        lambda b, n, t, s: t >= s, None, None, w.length, w.length, device=device()
    )
    return _fused(w, lambda q, k, v: compiled(q, k, v, block_mask=past))


def no_backward_of_flex(w: Workload, which: str) -> str | None:
    """Returns why FlexAttention cannot run, or None."""
    if which == BOTH and device() == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    return None


def _of_fused(w: Workload) -> Plan:
    return combined("qkv.weight", "qkv.bias", "proj", "weight", True)


def _of_packed(w: Workload) -> Plan:
    names = ("attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj")
    return combined(*names, "weight", True)


EAGER, OWN = "torch.eager", "nn.MultiheadAttention"
BOOK_LAYERS = (  # name, family, module, plan, `Competitor.quadratic`
    (
        "wrapper of causal heads",
        EAGER,
        _wrapped,
        lambda w: wrapper(w.heads, "0", "1", "weight", True),
        (3, 5),
    ),
    (
        "weight splits",
        EAGER,
        _book("multi_head", "MultiHeadAttention"),
        lambda w: separate(NOTEBOOK, "weight", True),
        (3, 5),
    ),
    (
        "combined qkv",
        EAGER,
        _book("multi_head_combined", "MultiHeadAttentionCombined"),
        lambda w: combined("qkv.weight", "qkv.bias", "out_proj", "weight", True),
        (3, 5),
    ),
    (
        "einsum",
        EAGER,
        _book("multi_head_einsum", "MultiHeadAttentionEinsum"),
        lambda w: einsum("out_proj", "weight", True),
        (3, 5),
    ),
    ("SDPA with flash", "torch", _sdpa, _of_fused, (0, 0)),
    ("SDPA with a mask", "torch", _sdpa_masked, _of_fused, (0, 0)),
    ("nn.MultiheadAttention", OWN, _multihead_attention, _of_packed, (3, 5)),
    (
        "nn.MultiheadAttention, need_weights=False",
        OWN,
        lambda w: _multihead_attention(w, need_weights=False),
        _of_packed,
        (0, 0),
    ),
    ("FlexAttention", "torch.compile", _flex, _of_fused, (0, 0)),
)


def with_weights(module: Any, weights: Mapping[str, Any], like: Any) -> Any:
    """Loads weights into a module, in eval mode and with the device and dtype of `like`."""
    torch = import_module("torch")
    module = module.to(device=like.device, dtype=like.dtype).eval()
    named = dict(module.named_parameters())
    if named.keys() != weights.keys():
        raise ValueError(f"weights {sorted(weights)} do not fit {sorted(named)}.")
    with torch.no_grad():
        for path, parameter in named.items():
            parameter.copy_(torch.from_numpy(weights[path].copy()))
    return module
