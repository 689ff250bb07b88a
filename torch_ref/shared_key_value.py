"""Grouped-query attention whose keys are its values too, or another layer's, on a whiteboard."""

from torch_ref.grouped_query import GroupedQueryAttention


class SharedKeyValueAttention(GroupedQueryAttention):
    """Values are the keys before norm and rotary, or their own; or both are handed in."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        v_norm=None,
        own_values=False,
        across_layers=False,
        **grouped,
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.v_norm, self.given = v_norm, None
        if not own_values:
            del self.v_proj
        if across_layers:
            del self.k_proj

    def keyed(self, x, positions):
        return super().keyed(x, positions) if self.given is None else self.given[0]  # *B T K H

    def valued(self, x):
        if self.given is not None:
            return self.given[1]  # *B T K H
        project = getattr(self, "v_proj", self.k_proj)
        v = project(x).unflatten(-1, (-1, self.head_dim))  # *B T K H
        return v if self.v_norm is None else self.v_norm(v)  # *B T K H

    def forward(self, x, keys_and_values=None, **given):
        self.given = keys_and_values
        if keys_and_values is not None and given.get("valid") is not None:
            absent = ~given["valid"][..., None, None]  # *B T 1 1
            self.given = [part.masked_fill(absent, 0.0) for part in keys_and_values]  # *B T K H
        return super().forward(x, **given)  # *B T D
