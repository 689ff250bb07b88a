"""Layers of transformers without what follows their attention."""


def siglip_pooling_attention(config):
    """`SiglipMultiheadAttentionPoolingHead` without the norm and the MLP that are added."""
    from torch.nn import Identity, Module
    from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

    class Nothing(Module):
        def forward(self, x):
            return 0 * x

    head = SiglipMultiheadAttentionPoolingHead(config)
    head.layernorm, head.mlp = Identity(), Nothing()
    return head


def xlnet_attention(config):
    """`XLNetRelativeAttention` without its norm; the residual stays."""
    from torch.nn import Identity
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    layer = XLNetRelativeAttention(config)
    layer.layer_norm = Identity()
    return layer
