"""Attention in JAX that can be trusted: every variant a Flax module, proven equal to PyTorch."""

from .attend import attend as attend
from .attend import attention_weights as attention_weights
from .attend import explain as explain
from .dropout import Dropout as Dropout
from .dropout import Keep as Keep
from .masks import CAUSAL as CAUSAL
from .masks import FULL as FULL
from .masks import Causal as Causal
from .masks import Chunked as Chunked
from .masks import Dense as Dense
from .masks import Fn as Fn
from .masks import Full as Full
from .masks import Lengths as Lengths
from .masks import Mask as Mask
from .masks import Prefix as Prefix
from .masks import Segments as Segments
from .masks import Window as Window
from .positions import Rotary as Rotary
from .positions import alibi_slopes as alibi_slopes
from .rules import Rules as Rules
from .scores import IDENTITY as IDENTITY
from .scores import additive as additive
from .scores import alibi as alibi
from .scores import modify as modify
from .scores import softcap as softcap
