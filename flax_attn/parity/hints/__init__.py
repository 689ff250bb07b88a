"""Hints: after a failure, known faults are tried on the culprit, and the one that fits is named."""


def hint(row, run, truth, names) -> str:
    return ""
