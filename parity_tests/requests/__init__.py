"""Random requests to attention, drawn by a seed, and the numpy oracle that answers them.

- `masks.py`, `scores.py`, `users_masks.py`: nodes of drawn structure, each with its meaning written
  out in numpy beside flax_attn's.
- `programs.py`: whole attentions of them: sizes, dtypes, scale, sinks, dropout, plans.
- `oracle.py`: output, lse and all gradients in float64, and their rounding noise.
- `runs.py`, `verdict.py`, `backends.py`: a program by every backend beside the oracle.

`run(seed)` runs one program; `python -m parity_tests.requests` runs many. To test a new mask or
score with everything else, add a node.
"""

from .runs import run as run
