"""ANARCII: nn.MultiheadAttention with trained weights - self, causal and cross, with key padding.

A small encoder and decoder that numbers the residues of antibodies (Greenshields-Watson et al.,
2025). Its steps are written out here in plain torch, after the published model and with its
weights; it numbers four real antibody chains, and every attention in it is compared on the hidden
states that it met on the way.

The model with one layer is taken. In the cross-attention of those with two, all logits of a row
share an offset of up to 96,000: there torch is 1.2e-12 away from torch in float64 as soon as it
scales the logits instead of the queries, so that no port could be within 1e-12.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from flax_attn import CAUSAL, FULL, Dense
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.parity import Report, compare

from .fetch import ANARCII, read
from .proof import Proofs, Say, need, prove

MEMBER = "anarcii/models/antibody/antibody_4_1_128_512.pt"
WIDTH, HEADS, LAYERS = 128, 4, 1
PAD, START, END, SKIP = range(4)
RESIDUES = "ACDEFGHIKLMNPQRSTVWXY"  # tokens 4, 5, ... in this order
NAMES = tuple(
    f"{stack}.layers.{i}.{kind}"
    for stack, kinds in (
        ("encoder", ("self_attention",)),
        ("decoder", ("self_attention", "encoder_attention")),
    )
    for i in range(LAYERS)
    for kind in kinds
)
# Variable domains of trastuzumab (heavy, light) and adalimumab (light, heavy).
CHAINS = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYC"
    "SRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPP"
    "TFGQGTKVEIK",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPY"
    "TFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYC"
    "AKVSYLSTASSLDYWGQGTLVTVSS",
)


def proofs(say: Say, wheel: Path | None = None) -> Proofs:
    """Its three attentions: of the encoder, causal in the decoder, from decoder to encoder.

    Args:
      say: told what is about to be done.
      wheel: a file to read instead of fetching it.

    Raises:
      RealError: if torch is missing or the wheel cannot be had.
    """
    need(ANARCII, "torch")
    say(f"{ANARCII.model}: fetch, load and number {len(CHAINS)} chains")
    model = Model(load(wheel))
    model.number(tokens())
    for name in NAMES:
        say(title(name))
        report = compare_attention(model, name)
        yield prove(ANARCII, f"torch.nn.MultiheadAttention, {title(name)}", report)


def title(name: str) -> str:
    """What an attention is called in a table."""
    role = name.partition(".")[0] if name.endswith("self_attention") else "cross"
    return f"{ANARCII.model} {role}"


def load(wheel: Path | None = None) -> dict[str, Any]:
    """The published tensors by name; only tensors are unpickled."""
    import torch

    data = io.BytesIO(read(ANARCII, MEMBER, wheel))
    return torch.load(data, map_location="cpu", weights_only=True)


def tokens(chains: tuple[str, ...] = CHAINS) -> np.ndarray:
    """Start, residues, end, padding: B S."""
    rows = [[START, *(SKIP + 1 + RESIDUES.index(x) for x in chain), END] for chain in chains]
    longest = max(map(len, rows))
    return np.array([row + [PAD] * (longest - len(row)) for row in rows], np.int64)


class Model:
    """The encoder and decoder, step by step; it remembers what each attention last met.

    Attributes:
      attentions: torch.nn.MultiheadAttention by name, with the trained weights.
      met: by the same names, query, memory and which keys are real, as numpy arrays.
    """

    def __init__(self, tensors: dict[str, Any]):
        import torch

        self.tensors, self.met = tensors, {}
        self.attentions = {
            name: torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for name in NAMES
        }
        for name, attention in self.attentions.items():
            start = f"{name}.multihead_attn."
            own = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            attention.eval().load_state_dict(own, strict=True)

    def number(self, ids: np.ndarray) -> np.ndarray:
        """What the model writes for these chains, greedily; padding after the end: B T."""
        import torch

        ids = torch.from_numpy(ids)
        with torch.no_grad():
            memory = self.encode(ids)
            written = ids[:, :1]
            for _ in range(ids.shape[1]):
                scores = self.decode(written, memory, ids)[:, -1]  # B, vocabulary
                over = (written == END).any(1)
                step = scores.argmax(-1).masked_fill(over, PAD)
                written = torch.cat([written, step[:, None]], 1)
            self.decode(written, memory, ids)
        return written.numpy()

    def encode(self, ids: Any) -> Any:
        x = self._embed(ids, "encoder")  # B S D
        for i in range(LAYERS):
            at = f"encoder.layers.{i}"
            new = self._attend(f"{at}.self_attention", x, x, ids)
            x = self._norm(x + new, f"{at}.self_attn_layer_norm")
            x = self._norm(x + self._feed(x, at), f"{at}.ff_layer_norm")
        return x

    def decode(self, written: Any, memory: Any, ids: Any) -> Any:
        x = self._embed(written, "decoder")  # B T D
        for i in range(LAYERS):
            at = f"decoder.layers.{i}"
            new = self._attend(f"{at}.self_attention", x, x, written)
            x = self._norm(x + new, f"{at}.self_attn_layer_norm")
            new = self._attend(f"{at}.encoder_attention", x, memory, ids)
            x = self._norm(x + new, f"{at}.enc_attn_layer_norm")
            x = self._norm(x + self._feed(x, at), f"{at}.ff_layer_norm")
        return self._linear(x, "decoder.fc_out")  # B T, vocabulary

    def _attend(self, name: str, query: Any, memory: Any, keys: Any) -> Any:
        real = keys != PAD
        self.met[name] = {"query": query.numpy(), "memory": memory.numpy(), "real": real.numpy()}
        return torch_call(name)(self.attentions[name], query, memory, real)

    def _embed(self, ids: Any, stack: str) -> Any:
        words = self.tensors[f"{stack}.tok_embedding.weight"][ids] * WIDTH**0.5
        return words + self.tensors[f"{stack}.pos_embedding.weight"][: ids.shape[1]]

    def _norm(self, x: Any, name: str) -> Any:
        from torch.nn.functional import layer_norm

        return layer_norm(x, (WIDTH,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _feed(self, x: Any, at: str) -> Any:
        inner = self._linear(x, f"{at}.positionwise_feedforward.fc_1").relu()
        return self._linear(inner, f"{at}.positionwise_feedforward.fc_2")

    def _linear(self, x: Any, name: str) -> Any:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]


def is_causal(name: str) -> bool:
    """Whether an attention of the model may not look ahead."""
    return name.startswith("decoder") and name.endswith("self_attention")


def torch_call(name: str) -> Any:
    """How the model calls nn.MultiheadAttention: True hides a key. `memory=None` is the query."""
    import torch

    def call(attention, query, memory=None, real=None):
        memory = query if memory is None else memory
        ahead = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).triu(1)
        masks = {"attn_mask": ahead, "is_causal": True} if is_causal(name) else {}
        return attention(query, memory, memory, key_padding_mask=~real, **masks)[0]

    return call


def flax_call(name: str) -> Any:
    """The same call of TransformerMultiHeadAttention: True may look."""
    ahead = CAUSAL if is_causal(name) else FULL

    def call(layer, query, memory=None, real=None):
        return layer(query, memory, mask=ahead & Dense(real[:, None, None, :]))

    return call


def inputs(model: Model, name: str) -> dict[str, np.ndarray]:
    """What an attention met, without `memory` where that is the query itself."""
    met = model.met[name]
    return met if name.endswith("encoder_attention") else {k: met[k] for k in ("query", "real")}


def compare_attention(model: Model, name: str) -> Report:
    """One attention with its trained weights, on what it met."""
    return compare(
        model.attentions[name],
        TransformerMultiHeadAttention(WIDTH, HEADS, rngs=nnx.Rngs(0)),
        weights="given",
        kwargs=inputs(model, name),
        torch_call=torch_call(name),
        flax_call=flax_call(name),
        title=title(name),
        reproduce="flax-attn parity --real",
    )
