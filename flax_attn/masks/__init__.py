"""Masks: which query may look at which key. Data, combined with `&`, `|` and `~`.

True means that a query may look at a key. A mask is a frozen pytree that hashes by value. You can
ask it for index arrays (`mask(b, n, q, k)`), for a whole attention (`mask.grid(sizes)`), and for a
block of queries (`mask.key_range(...)`, `mask.seen_range(...)`), so that a backend can skip fully
masked blocks. `runs` has the masks in which each query sees one run of keys, `nodes` the other
masks, `algebra` the operators, and `answers` the only code that reads a mask's answers.
"""

from .algebra import And as And
from .algebra import Dense as Dense
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import as_mask as as_mask
from .documents import Documents as Documents
from .nodes import MaskFn as MaskFn
from .nodes import Segments as Segments
from .ranges import Band as Band
from .ranges import Rows as Rows
from .runs import CAUSAL as CAUSAL
from .runs import FULL as FULL
from .runs import Causal as Causal
from .runs import Chunked as Chunked
from .runs import Full as Full
from .runs import Lengths as Lengths
from .runs import Prefix as Prefix
from .runs import Window as Window
