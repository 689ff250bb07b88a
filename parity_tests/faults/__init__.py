"""The harness on trial: ports made wrong on purpose, and what its reports say of them.

- `subjects/`: ports that are right, one `Port` each, by the file that they are in.
- `listed/*.toml`: faults that people made, a row each: the text of a subject's file, what takes its
  place, where the report must put the fault, and words of which it must say one. A row without a
  place is a rewrite: another text for the same function, which must be equal.
- `mutations.py`: faults that a generator makes in the same text; `drawn.py` draws them by a seed,
  `answer.py` shows what is said of them.
- `judge.py`: whether a report finds, places and names a fault; `table.py` counts.

To add a fault, add a row; to add something that faults are made in, add a `Port` to a file of
subjects. `python -m parity_tests.faults` prints what is said of each.
"""
