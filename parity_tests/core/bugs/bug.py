"""A planted bug, and the lists of all of them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Bug:
    """A patch of one file, and what a user would get from it.

    Attributes:
      id: stays when the code is rewritten and the patch is renewed.
      room: the part of the library, which is the name of the list.
      behaviour: one sentence about what goes wrong.
      file: of flax_attn, from the root of the checkout.
      old: text that stands exactly once in the file.
      new: text that takes its place.
    """

    id: str
    room: str
    behaviour: str
    file: str
    old: str
    new: str

    def patched(self, text: str) -> str:
        """The text of the file with the bug in it.

        Raises:
          ValueError: unless `old` stands exactly once in the text and `new` is another text.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"The old text of bug {self.id} must stand once in {self.file}; it stands there "
                f"{count} times."
            )
        if self.old == self.new:
            raise ValueError(f"The new text of bug {self.id} is its old text.")
        return text.replace(self.old, self.new)


FIELDS = tuple(field.name for field in fields(Bug) if field.name not in ("id", "room"))


def bugs(folder: Path = HERE) -> list[Bug]:
    """All bugs of all lists, by room and then as they are listed.

    Raises:
      ValueError: for a list that is no TOML, or whose entries have other fields than a bug has.
    """
    return [bug for path in sorted(folder.glob("*.toml")) for bug in _listed(path)]


def _listed(path: Path) -> Iterator[Bug]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name} is not TOML: {error}.") from error
    for id, entry in table.items():
        if not isinstance(entry, dict) or entry.keys() != {*FIELDS}:
            raise ValueError(f"{id} of {path.name} must have {', '.join(FIELDS)} and no more.")
        wrong = [name for name, value in entry.items() if not isinstance(value, str)]
        if wrong:
            raise ValueError(f"{id} of {path.name} must have text for {', '.join(wrong)}.")
        yield Bug(id=id, room=path.stem, **entry)
