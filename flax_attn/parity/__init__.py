"""Parity harness: checks that a Flax module computes the same function as its PyTorch original.

Where the two differ, it locates the difference. torch is imported lazily. The harness does not
depend on the layers of this library, so it also works for other ports.
"""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # type checkers treat this name as True; avoids importing `typing`
if TYPE_CHECKING:
    from ..errors import ParityError as ParityError
    from ..identify.identify import Identified as Identified
    from ..identify.identify import identify as identify
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
    from .report import report_schema as report_schema

# The module that defines each public name ("." for a submodule). Imported on first use.
_HOMES = {
    "ParityError": "..errors",
    "Identified": "..identify.identify",
    "identify": "..identify.identify",
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
    "report_schema": ".report",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
