"""All attention modules of the corpus."""

from .biases import BIASES
from .cached import CACHED
from .functional import FUNCTIONAL
from .fused import FUSED
from .handed_in import HANDED_IN
from .norms import NORMS
from .options import OPTIONS
from .positions import POSITIONS
from .ranges import RANGES
from .raw import RAW

ATTENTION = (
    *FUSED,
    *FUNCTIONAL,
    *HANDED_IN,
    *CACHED,
    *POSITIONS,
    *BIASES,
    *NORMS,
    *RAW,
    *OPTIONS,
    *RANGES,
)
