"""The parity harness: shows that a Flax module is its PyTorch original, or where it is not.

It knows jax, flax, numpy and (imported late) torch, and of this library only the taps: it serves
anybody's port.
"""

from ..errors import ParityError as ParityError
from ..weights.plan import Plan as Plan
from ..weights.rule import Rule as Rule
from . import judge as judge
from .cases.case import Case as Case
from .compare import assert_parity as assert_parity
from .compare import compare as compare
from .port import plan as plan
from .port import port as port
from .port import suggest as suggest
from .report import Divergence as Divergence
from .report import Report as Report
from .report import Row as Row
