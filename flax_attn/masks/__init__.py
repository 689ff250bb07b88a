"""Masks: what may look at what. Data, combined with `&`, `|` and `~`; True means "may look".

A mask is a frozen pytree that hashes by value. It answers for index arrays (`mask(b, n, q, k)`),
for a whole attention (`mask.grid(sizes)`), and for a block of queries (`mask.key_range(...)`,
`mask.seen_range(...)`), so that a backend may skip what nobody sees. `runs` has the masks that are
one run of keys for each query, `nodes` those that are not, `algebra` what combines them, `answers`
the one place where what a mask says of itself is read.
"""

from .algebra import And as And
from .algebra import Dense as Dense
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import as_mask as as_mask
from .answers import Band as Band
from .answers import Rows as Rows
from .nodes import MaskFn as MaskFn
from .nodes import Segments as Segments
from .runs import CAUSAL as CAUSAL
from .runs import FULL as FULL
from .runs import Causal as Causal
from .runs import Chunked as Chunked
from .runs import Full as Full
from .runs import Lengths as Lengths
from .runs import Prefix as Prefix
from .runs import Window as Window
