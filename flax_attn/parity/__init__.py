"""The parity harness: shows that a Flax module is its PyTorch original, or where it is not.

It knows jax, flax, numpy and (imported late) torch, and of this library only the taps: it serves
anybody's port.
"""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # what type checkers take for true; typing itself is not imported
if TYPE_CHECKING:
    from ..errors import ParityError as ParityError
    from ..weights.plan import Plan as Plan
    from ..weights.rule import Rule as Rule
    from . import judge as judge
    from .cases.case import Case as Case
    from .compare import assert_parity as assert_parity
    from .compare import compare as compare
    from .decode import Decode as Decode
    from .port import plan as plan
    from .port import port as port
    from .port import suggest as suggest
    from .recording.record import record as record
    from .recording.recording import Recording as Recording
    from .report import Divergence as Divergence
    from .report import Report as Report
    from .report import Row as Row

# The module that defines each public name; "." for a submodule itself. Imported on first use.
_HOMES = {
    "ParityError": "..errors",
    "Plan": "..weights.plan",
    "Rule": "..weights.rule",
    "judge": ".",
    "Case": ".cases.case",
    "assert_parity": ".compare",
    "compare": ".compare",
    "Decode": ".decode",
    "plan": ".port",
    "port": ".port",
    "suggest": ".port",
    "record": ".recording.record",
    "Recording": ".recording.recording",
    "Divergence": ".report",
    "Report": ".report",
    "Row": ".report",
}
# Old public names, and what they are called now.
_RENAMED: dict[str, str] = {}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
