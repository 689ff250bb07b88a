"""The harness on trial: every planted fault is found, placed and named; no rewrite is flagged."""

import importlib
import pkgutil

import pytest

import parity_tests

torch = pytest.importorskip("torch", reason="the harness compares with torch")

from flax_attn.parity import Case, ParityError  # noqa: E402

from .faults import FAULTS, GROUPS, REWRITES  # noqa: E402
from .faults.table import BLAMED, DETECTED, NAMED, missed, outcomes, share, text  # noqa: E402
