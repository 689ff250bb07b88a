"""What the harness raises."""


class ParityError(AssertionError):
    """Two modules are not the same function, or one cannot be carried into the other.

    `report` is the full report where a comparison was made, else None.

    >>> raise ParityError("output differs")
    Traceback (most recent call last):
    flax_attn.errors.ParityError: output differs
    """

    def __init__(self, text: str, report: object = None):
        super().__init__(text)
        self.report = report
