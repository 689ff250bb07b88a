"""Exceptions of parity checks and of checkpoint loading."""


class ParityError(AssertionError):
    """Two modules are not the same function, or weights cannot be ported between them.

    Attributes:
      report: the full report of a comparison, or None.
      full: the whole text, of which the message of a long refusal shows the beginning.

    >>> raise ParityError("output differs")
    Traceback (most recent call last):
    flax_attn.errors.ParityError: output differs
    """

    def __init__(self, text: str, report: object = None, full: str = ""):
        super().__init__(text)
        self.report, self.full = report, full or text


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit the layer; nothing was changed.

    Attributes:
      path: the file or folder.
      tensor: name of the faulty tensor in the file; None if there is no single one.
      reason: what is wrong, a sentence.
      hint: what would work, a sentence, or "".

    >>> raise CheckpointError("m.safetensors", "w", "It ends early.", "Fetch it again.")
    Traceback (most recent call last):
    flax_attn.errors.CheckpointError: m.safetensors, tensor 'w': It ends early. Fetch it again.
    """

    def __init__(self, path: object, tensor: str | None, reason: str, hint: str = ""):
        super().__init__(str(path), tensor, reason, hint)
        self.path, self.tensor, self.reason, self.hint = str(path), tensor, reason, hint

    def __str__(self) -> str:
        where = "" if self.tensor is None else f", tensor {quoted(self.tensor)}"
        return f"{self.path}{where}: {self.reason} {self.hint}".rstrip()


def quoted(name: object) -> str:
    """A name from a file, quoted, in ASCII and truncated; the type name for non-strings.

    >>> quoted("a" * 90)[-12:], quoted("line\\nbreak")
    ("aaaaaaaa'...", "'line\\\\nbreak'")
    """
    if not isinstance(name, str):
        return type(name).__name__
    return ascii(name[:80]) + "..." * (len(name) > 80)
