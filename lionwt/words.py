"""Words that are put together the same way everywhere: counts, lists that have an end, commands to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import Final

#: So many names are listed whole.
FEW: Final = 8


def count(number: int, what: str, several: str | None = None) -> str:
    """``1 file``, ``2 files``; ``several`` where the plural is not made with an s."""
    return f"{number} {what if number == 1 else several or what + 's'}"


def command(*words: str | os.PathLike[str]) -> str:
    """A command as one types it into a shell: a path or a branch in it may be whatever a worker made of it."""
    return shlex.join(os.fspath(word) for word in words)


def did_you_mean(given: str, known: Iterable[str], what: str) -> str:
    """What somebody who mistyped ``given`` may have meant, and what there is where that is little; may be empty."""
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(given, names, 3, 0.6)
    said = f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    return said + (f"{what}: {', '.join(names)}; " if 0 < len(names) <= FEW else "")


def short(name: str, most: int = 200) -> str:
    """A name as it is, or its beginning and end: a worker's may fill screens."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"


def some(items: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """The first ``most`` of ``items``, and how many more there are: nothing is left out in silence."""
    listed = list(items)
    more = len(listed) - most
    return separator.join(listed[:most]) + (f" and {more} more" if more > 0 else "")
