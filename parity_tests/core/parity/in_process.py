"""The command in this process, which has imported already what its workers would import anew."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_attn.parity.cases.workers import Workers, attempt


class Here(Workers):
    """Works in this process."""

    def start(self, count: int) -> None:
        """Starts nobody."""

    def look_in(self, folder: str) -> None:
        sys.path.insert(0, folder)

    def map(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        return (attempt(work, item) for item in items)


def forget(*packages: str) -> None:
    """Modules of these packages are imported anew when they are wanted again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
