"""Masks: what may look at what, as data. `nodes` has the masks, `algebra` what combines them."""

from .algebra import FULL as FULL
from .algebra import And as And
from .algebra import Band as Band
from .algebra import Dense as Dense
from .algebra import Full as Full
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import Rows as Rows
from .algebra import as_mask as as_mask
from .nodes import CAUSAL as CAUSAL
from .nodes import Causal as Causal
from .nodes import Chunked as Chunked
from .nodes import Lengths as Lengths
from .nodes import MaskFn as MaskFn
from .nodes import Prefix as Prefix
from .nodes import Segments as Segments
from .nodes import Window as Window
