"""Attention in JAX that can be trusted: every variant a Flax module, proven equal to PyTorch."""

import sys

from ._internal.lazy import Lazy

TYPE_CHECKING = False  # what type checkers take for true; typing itself is not imported
if TYPE_CHECKING:
    from . import families as families
    from . import taps as taps
    from ._internal.types import frozen as frozen
    from ._internal.version import __version__ as __version__
    from .attend import attend as attend
    from .attend import attention_weights as attention_weights
    from .attend import explain as explain
    from .attend import use_backend as use_backend
    from .backends.device_file import use_device_file as use_device_file
    from .by_weights import attend_by_weights as attend_by_weights
    from .cache import Cache as Cache
    from .cache import Memory as Memory
    from .cache import PagedCache as PagedCache
    from .cache import State as State
    from .cache import attend_cached as attend_cached
    from .cache import attend_memory as attend_memory
    from .drop_in import dot_product_attention as dot_product_attention
    from .drop_in import flax_attention as flax_attention
    from .dropout import Dropout as Dropout
    from .dropout import DropoutMask as DropoutMask
    from .layers import RGLRU as RGLRU
    from .layers import AttentionPool as AttentionPool
    from .layers import AxialAttention as AxialAttention
    from .layers import BahdanauAttention as BahdanauAttention
    from .layers import CausalAttention as CausalAttention
    from .layers import CausalRenormalisedAttention as CausalRenormalisedAttention
    from .layers import ClassAttention as ClassAttention
    from .layers import CrossAttention as CrossAttention
    from .layers import CrossCovarianceAttention as CrossCovarianceAttention
    from .layers import CrossLayerAttention as CrossLayerAttention
    from .layers import DecomposedRelativeAttention as DecomposedRelativeAttention
    from .layers import DifferentialAttention as DifferentialAttention
    from .layers import DisentangledAttention as DisentangledAttention
    from .layers import EntmaxAttention as EntmaxAttention
    from .layers import ExclusiveAttention as ExclusiveAttention
    from .layers import GatedDeltaAttention as GatedDeltaAttention
    from .layers import GatedQueryAttention as GatedQueryAttention
    from .layers import GatedShortConvolution as GatedShortConvolution
    from .layers import GroupedQueryAttention as GroupedQueryAttention
    from .layers import IndexedSparseAttention as IndexedSparseAttention
    from .layers import KimiDeltaAttention as KimiDeltaAttention
    from .layers import LatentAttention as LatentAttention
    from .layers import LightningAttention as LightningAttention
    from .layers import LinearAttention as LinearAttention
    from .layers import LongformerAttention as LongformerAttention
    from .layers import LuongAttention as LuongAttention
    from .layers import Mamba as Mamba
    from .layers import Mamba2 as Mamba2
    from .layers import MultiHeadAttention as MultiHeadAttention
    from .layers import MultiHeadAttentionCombined as MultiHeadAttentionCombined
    from .layers import MultiHeadAttentionEinsum as MultiHeadAttentionEinsum
    from .layers import MultiHeadAttentionWrapper as MultiHeadAttentionWrapper
    from .layers import PerceiverAttention as PerceiverAttention
    from .layers import RelativeShiftAttention as RelativeShiftAttention
    from .layers import SelectiveAttention as SelectiveAttention
    from .layers import SelfAttentionV1 as SelfAttentionV1
    from .layers import SelfAttentionV2 as SelfAttentionV2
    from .layers import SharedKeyValueAttention as SharedKeyValueAttention
    from .layers import SigmoidAttention as SigmoidAttention
    from .layers import SimplifiedSelfAttention as SimplifiedSelfAttention
    from .layers import SingleHeadAttention as SingleHeadAttention
    from .layers import SpatialReductionAttention as SpatialReductionAttention
    from .layers import T5Attention as T5Attention
    from .layers import TalkingHeadsAttention as TalkingHeadsAttention
    from .layers import TransformerMultiHeadAttention as TransformerMultiHeadAttention
    from .layers import UniformCausalAverage as UniformCausalAverage
    from .layers import ValueResidualAttention as ValueResidualAttention
    from .layers import WindowAttention as WindowAttention
    from .layers._common import merge_heads as merge_heads
    from .layers._common import split_heads as split_heads
    from .masks import CAUSAL as CAUSAL
    from .masks import FULL as FULL
    from .masks import Band as Band
    from .masks import Causal as Causal
    from .masks import Chunked as Chunked
    from .masks import Dense as Dense
    from .masks import Documents as Documents
    from .masks import Full as Full
    from .masks import Lengths as Lengths
    from .masks import Mask as Mask
    from .masks import MaskFn as MaskFn
    from .masks import Prefix as Prefix
    from .masks import Segments as Segments
    from .masks import Window as Window
    from .normalisers import entmax as entmax
    from .normalisers import sigmoid as sigmoid
    from .norms import LayerNorm as LayerNorm
    from .norms import RMSNorm as RMSNorm
    from .places import Places as Places
    from .positions import Axial as Axial
    from .positions import DynamicScaling as DynamicScaling
    from .positions import Frequencies as Frequencies
    from .positions import LinearScaling as LinearScaling
    from .positions import Llama3Scaling as Llama3Scaling
    from .positions import LongRope as LongRope
    from .positions import Proportional as Proportional
    from .positions import Rotary as Rotary
    from .positions import Sections as Sections
    from .positions import Yarn as Yarn
    from .positions import alibi_slopes as alibi_slopes
    from .positions import rotary_angles as rotary_angles
    from .positions import rotate as rotate
    from .quantized import Float8 as Float8
    from .quantized import Int8 as Int8
    from .quantized import Quantized as Quantized
    from .reference import softmax as softmax
    from .rules import Rules as Rules
    from .scores import IDENTITY as IDENTITY
    from .scores import Additive as Additive
    from .scores import Alibi as Alibi
    from .scores import Score as Score
    from .scores import ScoreFn as ScoreFn
    from .scores import Softcap as Softcap
    from .scores import T5Bias as T5Bias
    from .where import assume_platform as assume_platform

# The module that defines each public name; "." for a submodule itself. Imported on first use.
_HOMES = {
    "__version__": "._internal.version",
    "families": ".",
    "taps": ".",
    "frozen": "._internal.types",
    "attend": ".attend",
    "attention_weights": ".attend",
    "explain": ".attend",
    "use_backend": ".attend",
    "use_device_file": ".backends.device_file",
    "assume_platform": ".where",
    "attend_by_weights": ".by_weights",
    "dot_product_attention": ".drop_in",
    "Dropout": ".dropout",
    "DropoutMask": ".dropout",
    "flax_attention": ".drop_in",
    "AttentionPool": ".layers",
    "Float8": ".quantized",
    "Int8": ".quantized",
    "Quantized": ".quantized",
    "Cache": ".cache",
    "Memory": ".cache",
    "PagedCache": ".cache",
    "attend_cached": ".cache",
    "attend_memory": ".cache",
    "AxialAttention": ".layers",
    "BahdanauAttention": ".layers",
    "CausalAttention": ".layers",
    "CausalRenormalisedAttention": ".layers",
    "ClassAttention": ".layers",
    "CrossAttention": ".layers",
    "CrossCovarianceAttention": ".layers",
    "CrossLayerAttention": ".layers",
    "DecomposedRelativeAttention": ".layers",
    "DifferentialAttention": ".layers",
    "DisentangledAttention": ".layers",
    "EntmaxAttention": ".layers",
    "ExclusiveAttention": ".layers",
    "GatedDeltaAttention": ".layers",
    "GatedQueryAttention": ".layers",
    "GatedShortConvolution": ".layers",
    "GroupedQueryAttention": ".layers",
    "IndexedSparseAttention": ".layers",
    "KimiDeltaAttention": ".layers",
    "LatentAttention": ".layers",
    "LightningAttention": ".layers",
    "LinearAttention": ".layers",
    "LongformerAttention": ".layers",
    "LuongAttention": ".layers",
    "Mamba": ".layers",
    "Mamba2": ".layers",
    "MultiHeadAttention": ".layers",
    "MultiHeadAttentionCombined": ".layers",
    "MultiHeadAttentionEinsum": ".layers",
    "MultiHeadAttentionWrapper": ".layers",
    "PerceiverAttention": ".layers",
    "RGLRU": ".layers",
    "RelativeShiftAttention": ".layers",
    "SelectiveAttention": ".layers",
    "SelfAttentionV1": ".layers",
    "SelfAttentionV2": ".layers",
    "SharedKeyValueAttention": ".layers",
    "SigmoidAttention": ".layers",
    "SimplifiedSelfAttention": ".layers",
    "SingleHeadAttention": ".layers",
    "SpatialReductionAttention": ".layers",
    "T5Attention": ".layers",
    "TalkingHeadsAttention": ".layers",
    "TransformerMultiHeadAttention": ".layers",
    "UniformCausalAverage": ".layers",
    "ValueResidualAttention": ".layers",
    "WindowAttention": ".layers",
    "merge_heads": ".layers._common",
    "split_heads": ".layers._common",
    "CAUSAL": ".masks",
    "FULL": ".masks",
    "Band": ".masks",
    "Causal": ".masks",
    "Chunked": ".masks",
    "Dense": ".masks",
    "Documents": ".masks",
    "Full": ".masks",
    "Lengths": ".masks",
    "Mask": ".masks",
    "MaskFn": ".masks",
    "Prefix": ".masks",
    "Segments": ".masks",
    "Window": ".masks",
    "LayerNorm": ".norms",
    "RMSNorm": ".norms",
    "entmax": ".normalisers",
    "sigmoid": ".normalisers",
    "Places": ".places",
    "Axial": ".positions",
    "DynamicScaling": ".positions",
    "Frequencies": ".positions",
    "LinearScaling": ".positions",
    "Llama3Scaling": ".positions",
    "LongRope": ".positions",
    "Proportional": ".positions",
    "Rotary": ".positions",
    "Sections": ".positions",
    "Yarn": ".positions",
    "alibi_slopes": ".positions",
    "rotary_angles": ".positions",
    "rotate": ".positions",
    "softmax": ".reference",
    "Rules": ".rules",
    "IDENTITY": ".scores",
    "Additive": ".scores",
    "Alibi": ".scores",
    "Score": ".scores",
    "ScoreFn": ".scores",
    "Softcap": ".scores",
    "T5Bias": ".scores",
    "State": ".cache",
}

__all__ = [name for name in _HOMES if name != "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
