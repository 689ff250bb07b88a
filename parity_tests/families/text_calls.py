"""Attentions of texts that take more than tokens, each as the layer of its whole model calls it."""

from typing import Any

import numpy as np

from .calls import drawn, with_distances
from .place import Called

CHOSEN = np.zeros((2, 24), bool)
CHOSEN[0, [0, 9]] = CHOSEN[1, 3] = True
SEGMENTS = np.asarray([[0] * 4 + [1] * 3, [2] * 2 + [0] * 5])


def deberta(attention: Any, config: Any, index: int, x: Any, rel_embeddings: Any) -> Any:
    """DeBERTa's, whose distances the encoder counts; all tokens are there."""
    import torch

    places = torch.arange(x.shape[1])
    there = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
    far = (places[:, None] - places)[None]
    return attention(x, there, relative_pos=far, rel_embeddings=rel_embeddings)[0]


def with_chosen(config: Any, index: int) -> dict[str, np.ndarray]:
    """Tokens, as many as windows of 4, 6, 8 and 12 divide, and which of them see all."""
    return {"x": drawn("x", 2, 24, config.hidden_size), "global_tokens": CHOSEN}


def longformer(attention: Any, config: Any, index: int, x: Any, global_tokens: Any) -> Any:
    """Longformer's, whose model marks such tokens by 10,000 in the mask."""
    import torch

    return attention(
        x,
        attention_mask=10_000.0 * global_tokens.to(x.dtype),
        is_index_masked=torch.zeros_like(global_tokens),
        is_index_global_attn=global_tokens,
        is_global_attn=True,
    )[0]


def with_segments(config: Any, index: int) -> dict[str, np.ndarray]:
    """Tokens, and the segment of each."""
    return {"x": drawn("x", 2, 7, config.hidden_size), "segments": SEGMENTS}


def xlnet(attention: Any, config: Any, index: int, x: Any, segments: Any) -> Any:
    """What XLNet's gives to the norm at its end, less the residual; given what its model makes."""
    import torch

    from .witness import found

    kept: list[dict[str, Any]] = []
    tokens = {"inputs_embeds": x.detach(), "token_type_ids": segments}
    with torch.no_grad():
        model = found("xlnet", "Model")(config).to(x.dtype).eval()
        last = model.layer[index].rel_attn
        last.register_forward_pre_hook(
            lambda module, args, given: kept.append({"args": args, **given}), with_kwargs=True
        )
        model(**tokens, use_mems=False)
    (_, *args), more = kept[0].pop("args"), kept[0]
    before: list[Any] = []
    norm = attention.layer_norm.register_forward_pre_hook(lambda module, y: before.append(y[0]))
    h = x.transpose(0, 1)
    attention(h, *args, **more)
    norm.remove()
    return (before[0] - h).transpose(0, 1)


DEBERTA = Called(with_distances, deberta)
LONGFORMER = Called(with_chosen, longformer)
XLNET = Called(with_segments, xlnet)
