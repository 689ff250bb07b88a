"""The nine torch implementations from the book; torch is imported when one is built."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..weights.plan import Plan
from .program import device, tensor
from .task import BOTH, Task
from .weights import NOTEBOOK, combined, einsum, separate, wrapper

REF = "torch_ref"  # package of the PyTorch reference implementations


def config(task: Task) -> dict[str, Any]:
    """Constructor arguments of the book's layers."""
    shape = {"d_in": task.features, "d_out": task.features, "context_length": task.length}
    return {**shape, "dropout": 0.0, "num_heads": task.heads, "qkv_bias": True}


def _book(file: str, name: str) -> Callable[[Any], Any]:
    return lambda task: getattr(import_module(f"{REF}.{file}"), name)(**config(task))


def _wrapped(task: Task) -> Any:
    nn = import_module("torch").nn
    kind = import_module(f"{REF}.multi_head_wrapper").MultiHeadAttentionWrapper
    heads = kind(**{**config(task), "d_out": task.width})
    return nn.Sequential(heads, nn.Linear(task.features, task.features))


def _fused(task: Task, kernel: Any) -> Any:
    """One qkv projection, then `kernel(q, k, v)` on B N T H, then an output projection."""
    nn = import_module("torch").nn

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(task.features, 3 * task.features)
            self.proj = nn.Linear(task.features, task.features)

        def forward(self, x):
            qkv = self.qkv(x).view(*x.shape[:2], 3, task.heads, task.width)  # B T 3 N H
            context = kernel(*qkv.permute(2, 0, 3, 1, 4))  # B N T H
            return self.proj(context.transpose(1, 2).reshape(x.shape))  # B T D

    return Fused()


def _sdpa(task: Task) -> Any:
    sdpa = import_module("torch").nn.functional.scaled_dot_product_attention
    return _fused(task, lambda q, k, v: sdpa(q, k, v, is_causal=True))


def _sdpa_masked(task: Task) -> Any:
    torch = import_module("torch")
    past = torch.ones(task.length, task.length, dtype=torch.bool, device=device()).tril()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return _fused(task, lambda q, k, v: sdpa(q, k, v, attn_mask=past))


def _multihead_attention(task: Task, **options: Any) -> Any:
    torch = import_module("torch")

    class SelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(
                task.features, task.heads, batch_first=True
            )
            future = torch.ones(task.length, task.length, dtype=torch.bool).triu(1)
            self.register_buffer("future", future)

        def forward(self, x):
            return self.attention(x, x, x, attn_mask=self.future, **options)[0]

    return SelfAttention()


def _flex(task: Task) -> Any:
    torch = import_module("torch")
    flex = import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention)
    past = flex.create_block_mask(
        lambda b, n, t, s: t >= s, None, None, task.length, task.length, device=device()
    )
    return _fused(task, lambda q, k, v: compiled(q, k, v, block_mask=past))


def no_backward_of_flex(task: Task) -> str | None:
    """Returns why FlexAttention cannot run, or None."""
    if task.which == BOTH and device() == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    return None


def _of_fused(task: Task) -> Plan:
    return combined("qkv.weight", "qkv.bias", "proj", "weight", True)


def _of_packed(task: Task) -> Plan:
    names = ("attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj")
    return combined(*names, "weight", True)


EAGER, OWN = "torch.eager", "nn.MultiheadAttention"
BOOK_LAYERS = (  # name, family, module, plan, `Competitor.quadratic`
    (
        "wrapper of causal heads",
        EAGER,
        _wrapped,
        lambda task: wrapper(task.heads, "0", "1", "weight", True),
        (3, 5),
    ),
    (
        "weight splits",
        EAGER,
        _book("multi_head", "MultiHeadAttention"),
        lambda task: separate(NOTEBOOK, "weight", True),
        (3, 5),
    ),
    (
        "combined qkv",
        EAGER,
        _book("multi_head_combined", "MultiHeadAttentionCombined"),
        lambda task: combined("qkv.weight", "qkv.bias", "out_proj", "weight", True),
        (3, 5),
    ),
    (
        "einsum",
        EAGER,
        _book("multi_head_einsum", "MultiHeadAttentionEinsum"),
        lambda task: einsum("out_proj", "weight", True),
        (3, 5),
    ),
    ("SDPA with flash", "torch", _sdpa, _of_fused, (0, 0)),
    ("SDPA with a mask", "torch", _sdpa_masked, _of_fused, (0, 0)),
    ("nn.MultiheadAttention", OWN, _multihead_attention, _of_packed, (3, 5)),
    (
        "nn.MultiheadAttention, need_weights=False",
        OWN,
        lambda task: _multihead_attention(task, need_weights=False),
        _of_packed,
        (0, 0),
    ),
    ("FlexAttention", "torch.compile", _flex, _of_fused, (0, 0)),
)


def with_weights(module: Any, weights: Mapping[str, Any], dtype: str) -> Any:
    """Loads weights into a module, in eval mode, in a dtype and on the device of the run."""
    torch = import_module("torch")
    module = module.to(device=device(), dtype=getattr(torch, dtype)).eval()
    named = dict(module.named_parameters())
    if named.keys() != weights.keys():
        raise ValueError(f"weights {sorted(weights)} do not fit {sorted(named)}.")
    with torch.no_grad():
        for path, parameter in named.items():
            parameter.copy_(tensor(weights[path]))
    return module
