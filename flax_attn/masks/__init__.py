"""Attention masks: frozen pytrees, combined with `&`, `|` and `~`.

True means that a query may attend to a key. A mask is a frozen pytree that hashes by value. It can
be evaluated at index arrays (`mask(b, n, q, k)`), for a whole attention (`mask.grid(sizes)`), and
for a block of queries (`mask.key_range(...)`, `mask.seen_range(...)`), so that a backend can skip
fully masked blocks. `runs` has the masks with one contiguous range of keys per query, `nodes` and
`documents` the others, `algebra` the operators, and `ranges` validates the results of masks.
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
