"""Directories of any depth: looked through and removed without recursion.

A worker can nest directories deeper than Python calls, and deeper than the
longest path that the system takes. So nothing here calls itself once for each
level, and a removal goes by descriptors and names alone.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import AnyStr, Final

#: What lies deeper than so many levels is moved up before it is removed.
_DEEP: Final = 100


def walk(top: AnyStr) -> Iterator[tuple[AnyStr, list[AnyStr], list[AnyStr]]]:
    """Every directory at or below ``top``, parents first: its path, its directories, its other entries, sorted.

    No link is followed; what cannot be listed is left out; directories removed from the list are not entered.
    """
    pending = [top]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(parent) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            continue
        directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield parent, directories, [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        pending += [os.path.join(parent, name) for name in reversed(directories)]


def remove(path: Path, *, unlock: bool = False) -> None:
    """Remove a directory with everything below it, links as links; raises ``OSError``.

    By descriptors: a link that appears meanwhile is not followed. With ``unlock`` directories that
    their owner may not write are made writable first.
    """
    sys.audit("lionwt.trees.remove", os.fspath(path))  # what follows goes by names that say nothing alone
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = _enter(path.name, parent, unlock)
        try:
            while _empty(top, top, 0, unlock):
                pass
        finally:
            os.close(top)
        os.rmdir(path.name, dir_fd=parent)
    finally:
        os.close(parent)


def _enter(name: str, parent: int, unlock: bool) -> int:
    if unlock and stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _empty(fd: int, top: int, depth: int, unlock: bool) -> bool:
    """Remove what lies in a directory; True where something of it was moved to the top instead."""
    moved = False
    with os.scandir(fd) as listing:
        entries = list(listing)
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=fd)
        elif depth == _DEEP:
            if unlock:
                os.close(_enter(entry.name, fd, unlock))
            os.rename(entry.name, f"deep.{os.urandom(8).hex()}", src_dir_fd=fd, dst_dir_fd=top)
            moved = True
        else:
            inner = _enter(entry.name, fd, unlock)
            try:
                moved = _empty(inner, top, depth + 1, unlock) or moved
            finally:
                os.close(inner)
            os.rmdir(entry.name, dir_fd=fd)
    return moved
