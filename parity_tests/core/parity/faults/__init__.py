"""The harness on trial: planted faults to be found, placed and named, rewrites to be let pass."""

from . import cache, converter, gradient, process, rotary_norm, score, weights
from .fault import GROUPS as GROUPS
from .fault import Fault as Fault
from .rewrites import REWRITES as REWRITES

FAULTS = sorted(
    [
        fault
        for module in (converter, score, weights, rotary_norm, gradient, cache, process)
        for fault in module.FAULTS
    ],
    key=lambda fault: GROUPS.index(fault.group),
)
