"""Finished mutants in a file of JSON lines, so that a long run can go on another day."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .operators import Mutant


class Record:
    """Fates by mutant, each with the digest of the code that it was found with.

    A line counts as long as no code that the laws of its file reach has changed since.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]):
        self.path, self.digests = path, digests
        self.lines: dict[tuple[str, ...], dict] = {}
        for text in path.read_text("utf-8").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # the run was ended in the middle of a line
                continue
            self.lines[line["file"], line["where"], line["change"], line["code"]] = line

    def finished(self, mutants: Iterable[Mutant]) -> dict[Mutant, str | None]:
        """The law that failed, or None, for those of the mutants that have been judged."""
        keys = {mutant: self._key(mutant) for mutant in mutants}
        return {m: self.lines[key]["law"] for m, key in keys.items() if key in self.lines}

    def seconds(self, mutant: Mutant) -> float:
        return self.lines[self._key(mutant)]["seconds"]

    def add(self, mutant: Mutant, law: str | None, seconds: float) -> None:
        names = ("file", "where", "change", "code")
        line = dict(zip(names, self._key(mutant), strict=True))
        text = json.dumps({**line, "law": law, "seconds": round(seconds, 3)}, ensure_ascii=False)
        with self.path.open("a+b") as file:
            file.seek(max(file.seek(0, 2) - 1, 0))
            torn = file.read(1) not in (b"", b"\n")
            file.write(("\n" * torn + text + "\n").encode())

    def _key(self, mutant: Mutant) -> tuple[str, ...]:
        return (*mutant.key, self.digests[mutant.file])
