"""Fuzzing of `attend`: random programs, each backend against the oracle in numpy.

`run(seed)` runs one program; `python -m parity_tests.core.fuzz` runs many.
"""

from .runs import BACKENDS as BACKENDS
from .runs import Outcome as Outcome
from .runs import run as run
