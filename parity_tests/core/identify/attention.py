"""All attention modules of the corpus."""

from .functional import FUNCTIONAL
from .fused import FUSED
from .norms import NORMS
from .options import OPTIONS
from .positions import POSITIONS
from .ranges import RANGES
from .raw import RAW

ATTENTION = (
    *FUSED,
    *FUNCTIONAL,
    *POSITIONS,
    *NORMS,
    *RAW,
    *OPTIONS,
    *RANGES,
)
