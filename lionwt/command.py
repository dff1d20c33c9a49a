"""One command, from its first step to its answer: where its warnings go, and what it opens only once.

Whatever a verb opens for the length of a command is kept here and closed at its
end. Imports next to nothing, since every start pays for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol


class Closable(Protocol):
    """Something that is opened once for a command."""

    def close(self) -> None:
        """Give it back."""


class Command:
    """A command that runs; ``warn`` takes what its answer does not depend on."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.opened: dict[type, Closable] = {}


_current: ContextVar[Command | None] = ContextVar("lionwt_command", default=None)


@contextlib.contextmanager
def running(warn: Callable[[str], None] = lambda text: None) -> Iterator[Command]:
    """The command that runs here, or a new one; one inside another belongs to the outer one."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    command = Command(warn)
    token = _current.set(command)
    try:
        yield command
    finally:
        _current.reset(token)
        for opened in command.opened.values():
            opened.close()
