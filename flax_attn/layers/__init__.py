"""Every variant as a Flax module, one a file."""

from .bahdanau import BahdanauAttention as BahdanauAttention
from .causal_attention import CausalAttention as CausalAttention
from .causal_renormalised import CausalRenormalisedAttention as CausalRenormalisedAttention
from .cross import CrossAttention as CrossAttention
from .entmax import EntmaxAttention as EntmaxAttention
from .exclusive import ExclusiveAttention as ExclusiveAttention
from .grouped_query import GroupedQueryAttention as GroupedQueryAttention
from .latent import LatentAttention as LatentAttention
from .linear import LinearAttention as LinearAttention
from .luong import LuongAttention as LuongAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
from .multi_head_combined import MultiHeadAttentionCombined as MultiHeadAttentionCombined
from .multi_head_einsum import MultiHeadAttentionEinsum as MultiHeadAttentionEinsum
from .multi_head_wrapper import MultiHeadAttentionWrapper as MultiHeadAttentionWrapper
from .selective import SelectiveAttention as SelectiveAttention
from .self_attention_v1 import SelfAttentionV1 as SelfAttentionV1
from .self_attention_v2 import SelfAttentionV2 as SelfAttentionV2
from .sigmoid import SigmoidAttention as SigmoidAttention
from .simplified_self_attention import SimplifiedSelfAttention as SimplifiedSelfAttention
from .single_head import SingleHeadAttention as SingleHeadAttention
from .t5 import T5Attention as T5Attention
from .transformer_multi_head import TransformerMultiHeadAttention as TransformerMultiHeadAttention
from .uniform_causal_average import UniformCausalAverage as UniformCausalAverage
from .value_residual import ValueResidualAttention as ValueResidualAttention
