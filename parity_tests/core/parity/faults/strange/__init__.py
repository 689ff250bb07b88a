"""Strange faults: small pairs with what the old trial's transformer does not have."""

from . import axes, between, dropout, fills, fused, norms, outputs, process, rotary, state
from .fault import GROUPS as GROUPS
from .fault import Strange as Strange
from .rewrites import REWRITES as REWRITES
from .rewrites import Rewrite as Rewrite
from .table import run_all as run_all
from .table import text as text

__all__ = ["FAULTS", "GROUPS", "REWRITES", "Rewrite", "Strange", "run_all", "text"]

MODULES = (fills, outputs, dropout, state, axes, fused, between, norms, rotary, process)
FAULTS = sorted(
    [fault for module in MODULES for fault in module.FAULTS],
    key=lambda fault: GROUPS.index(fault.group),
)
