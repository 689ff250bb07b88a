"""Latent attention over few keys, which an indexer chooses, as on a whiteboard."""

from torch_ref._indexer import Indexer
from torch_ref.latent import LatentAttention


class IndexedSparseAttention(LatentAttention):
    """Latent attention whose mask is narrowed to top_k keys a query."""

    def __init__(
        self,
        in_features,
        num_heads,
        kv_rank,
        nope_dim,
        rotary_dim,
        value_dim,
        *,
        index_heads,
        index_dim,
        top_k,
        index_rotary=None,
        **latent,
    ):
        sizes = (in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim)
        super().__init__(*sizes, **latent)
        width = latent.get("q_rank") or in_features
        index = (index_heads, index_dim, rotary_dim, top_k)
        self.indexer, self.index_rotary = Indexer(width, in_features, *index), index_rotary

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
        seen = self.seen(mask, valid, x.shape[-2])  # *B 1 T T, or T T
        few = self.indexer(x, self.q_latent(x), seen, self.index_rotary, positions)  # *B T T
        return super().forward(x, few.unsqueeze(-3), positions, valid, empty)  # *B T D
