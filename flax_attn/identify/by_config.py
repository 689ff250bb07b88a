"""What a torch module may be by its config or its class."""

from collections.abc import Iterator, Mapping
from typing import Any

from .. import families
from ..layers.transformer_multi_head import TransformerMultiHeadAttention
from .call import BATCH_FIRST, TOKENS_FIRST
from .candidate import Candidate

UNNUMBERED = 3  # layers that are tried where a module does not say which it is


def of_config(module: Any) -> Iterator[Candidate]:
    """The attention of a model type, where a module of transformers has the config."""
    parts = ((name, part) for name, part in module.named_modules() if hasattr(part, "config"))
    for name, part in parts:
        if not hasattr(part.config, "to_dict") or not hasattr(part.config, "model_type"):
            continue
        path = f"torch_module.{name}.config" if name else "torch_module.config"
        config = part.config.to_dict()
        names = {"families": families, "torch_module": module}
        for index, which in _indices(module, config):
            more = f", part={which!r}" if which else ""
            try:
                rules = families.rules(config, index, part=which)
            except ValueError:  # a type that is not served, a layer that the config lacks
                continue
            text = f"families.attention({path}.to_dict(), {index}{more})"
            yield Candidate(text, names, rules)
        return


def _indices(module: Any, config: Mapping[str, Any]) -> Iterator[tuple[int, str | None]]:
    """The layers and parts of a model that a module of it may be."""
    numbers = [
        getattr(x, name, None) for x in module.modules() for name in ("layer_idx", "layer_id")
    ]
    index = next((x for x in numbers if isinstance(x, int)), None)
    try:
        parts = families.parts(config) or {None: UNNUMBERED}
    except ValueError:
        return
    for part, depth in parts.items():
        for i in range(min(depth, UNNUMBERED)) if index is None else [index]:
            yield i, part


def of_class(module: Any) -> Iterator[Candidate]:
    """The layer that is torch's own multi-head attention, with its options."""
    import torch

    if not isinstance(module, torch.nn.MultiheadAttention):
        return
    sizes = {"kdim": module.kdim, "vdim": module.vdim}
    more = {name: size for name, size in sizes.items() if size != module.embed_dim}
    more |= {} if module.in_proj_bias is not None else {"bias": False}
    more |= {"dropout": module.dropout} if module.dropout else {}
    options = "".join(f", {name}={value!r}" for name, value in more.items())
    kind = TransformerMultiHeadAttention
    text = f"{kind.__name__}({module.embed_dim}, {module.num_heads}{options})"
    order = BATCH_FIRST if module.batch_first else TOKENS_FIRST
    yield Candidate(text, {kind.__name__: kind}, order=order)
