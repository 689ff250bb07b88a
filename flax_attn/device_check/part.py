"""Runs one part of the check: `python -m flax_attn.device_check.part NAME OUT UNTIL`."""

import sys
from importlib import import_module
from pathlib import Path

from .task import Task

# In order of execution: the name of a part's file, its module, and its share of the time.
PARTS = {
    "machine": ("facts", 0.05),
    "layers": ("replay", 0.25),
    "requests": ("requests", 0.20),
    "speed": ("speed", 0.42),
    "memory": ("memory", 0.08),
}


def main() -> None:
    """Runs the part named on the command line."""
    name, out, until, *small = sys.argv[1:]
    module = import_module(f".{PARTS[name][0]}", __package__)
    module.run(Task(Path(out), name, float(until), bool(small)))


if __name__ == "__main__":
    main()
