"""A parser of options that says which command or option may have been meant."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ._nearest import did_you_mean

CHOICE = re.compile(r"argument command: invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """As argparse's; an error is one sentence, and names what is nearest.

    Attributes:
      commands: the parsers of the commands, by name; none for a command's own.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, but what nobody reads is told by the command that was asked for."""
        options, unread = self.parse_known_args(args, namespace)
        if unread:
            parser = self.commands.get(getattr(options, "command", ""), self)
            parser.error(f"unrecognized arguments: {' '.join(unread)}")
        return options

    def error(self, message: str) -> NoReturn:
        """One sentence on stderr, and exit code 2."""
        choice = CHOICE.match(message)
        if choice is not None:
            near = did_you_mean(choice[1], self.commands, "the commands are")
            message = f"there is no command {choice[1]!r}: {near}"
        elif message.startswith("unrecognized arguments: -"):
            option = message.split()[2].partition("=")[0]
            near = did_you_mean(option, self._options(), "its options are")
            message = f"there is no option {option}: {near}"
        elif message.endswith("are required: command"):
            message = f"which command? It takes {', '.join(self.commands)}."
        self.exit(2, f"{self.prog}: {message}\n")

    def _options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]
