"""Reading whole a file that a worker can write, in bounded time and memory.

A FIFO in the place of a file would be waited for without end, and a sparse one
of terabytes would not fit: both are errors here, like a file that cannot be read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Final

#: What no file of git's or of a person's that is read whole exceeds (bytes).
LARGEST: Final = 64 << 20


def open_regular(path: str | bytes | Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, through a symlink only with ``follow``; raises ``OSError`` for all else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, limit: int = LARGEST, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; raises ``OSError`` for all else."""
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size <= limit:
            content = file.read(limit + 1)  # it may still grow
            if len(content) <= limit:
                return content
    raise OSError(errno.EFBIG, "too large to read", str(path))


def is_prefix(short: bytes, whole: bytes) -> bool:
    """Whether ``short`` is a regular file that holds the beginning of ``whole``."""
    try:
        with open_regular(short) as one, open(whole, "rb") as other:
            while block := one.read(1 << 20):
                if other.read(len(block)) != block:
                    return False
    except OSError:
        return False
    return True


def special_below(top: Path, skip: Collection[str] = ()) -> Path | None:
    """The first FIFO, socket or device at or below ``top``, also behind a symlink; None where there is none.

    A git that opens one waits or reads without end. Directories directly in ``top`` whose name is in ``skip``
    are not looked into; a symlink to a directory never is.
    """
    pending = [os.fspath(top)]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as listing:
                entries = list(listing)
        except OSError:
            continue  # what cannot be entered is found out by whoever wants something there
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in skip or directory != os.fspath(top):
                    pending.append(entry.path)
            elif not entry.is_file(follow_symlinks=False) and _is_special(entry.path):
                return Path(entry.path)
    return None


def _is_special(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a symlink to nowhere
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
