"""Grouped-query attention whose keys are its values too, on a whiteboard."""

from torch_ref.grouped_query import GroupedQueryAttention


class SharedKeyValueAttention(GroupedQueryAttention):
    """Values are the keys before norm and rotary, or their own."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        v_norm=None,
        own_values=False,
        **grouped,
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.v_norm = v_norm
        if not own_values:
            del self.v_proj

    def valued(self, x):
        project = getattr(self, "v_proj", self.k_proj)
        v = project(x).unflatten(-1, (-1, self.head_dim))  # *B T K H
        return v if self.v_norm is None else self.v_norm(v)  # *B T K H
