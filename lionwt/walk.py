"""Name everything that lies in a worktree, and tell later whether that still is all.

Every entry of the file system is named, whatever git would say of it; a
repository inside is named and not entered. A directory bears the time of its
last new, renamed or removed entry, so a second look reads only the directories
whose time has moved, or was too fresh to tell two changes apart.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Final, NamedTuple

from lionwt import git, words
from lionwt.errors import LionwtError
from lionwt.values import State

#: A directory changed less than this (ns) before it was read may change again without a new time.
_FRESH_NS: Final = 2_500_000_000


class _Read(NamedTuple):
    """A directory as it was before it was read; ``held`` are its entries where its time was fresh."""

    stamp: tuple[int, ...]
    held: frozenset[tuple[bytes, int]] | None


class Walk(State):
    """Everything that lies in a worktree, apart from its own ``.git``."""

    root: bytes
    files: set[bytes] = set()
    special: dict[bytes, str] = {}
    empty_dirs: list[bytes] = []
    repositories: list[bytes] = []
    unreadable: list[bytes] = []
    _read: dict[bytes, _Read] = {}

    def is_current(self) -> bool:
        """Whether no entry has come, gone or been replaced since."""
        for directory, read in self._read.items():
            path = os.path.join(self.root, directory)
            try:
                if _stamp(path) != read.stamp:
                    return False
                if read.held is not None and _held(_listed(path)) != read.held:
                    return False
            except OSError:
                return False
        return True


def _stamp(path: bytes) -> tuple[int, ...]:
    seen = os.lstat(path)
    return seen.st_dev, seen.st_ino, seen.st_mode, seen.st_mtime_ns, seen.st_ctime_ns


def _listed(path: bytes) -> list[os.DirEntry[bytes]]:
    with os.scandir(path) as listing:
        return list(listing)


def _held(entries: list[os.DirEntry[bytes]]) -> frozenset[tuple[bytes, int]]:
    return frozenset((entry.name, entry.inode()) for entry in entries)


def walk_tree(root: Path) -> Walk:
    """Name everything that lies under ``root``; repositories inside are named, not entered."""
    walk = Walk(os.fsencode(root))
    pending = [b""]
    add = walk.files.add
    while pending:
        directory = pending.pop()
        path = os.path.join(walk.root, directory)
        try:
            stamp = _stamp(path)
            fresh = stamp[-1] > time.time_ns() - _FRESH_NS
            entries = _listed(path)
        except OSError:
            walk.unreadable.append(directory)
            continue
        walk._read[directory] = _Read(stamp, _held(entries) if fresh else None)
        if directory and _is_repository(path, entries):
            walk.repositories.append(directory)
            continue
        if directory and not entries:
            walk.empty_dirs.append(directory)
        prefix = directory + b"/" if directory else b""
        for entry in entries:
            name = prefix + entry.name
            if entry.is_file(follow_symlinks=False):
                add(name)
            elif entry.is_dir(follow_symlinks=False):
                if name == b".git":
                    walk.repositories.append(b"")
                else:
                    pending.append(name)
            elif entry.is_symlink():
                add(name)
            else:
                walk.special[name] = _kind(entry)
    walk.files.discard(b".git")
    walk.special.pop(b".git", None)
    return walk


def _is_repository(path: bytes, entries: list[os.DirEntry[bytes]]) -> bool:
    """Whether there is a ``.git`` in whatever spelling, where the file system takes it for one."""
    return any(entry.name.lower() == b".git" for entry in entries) and os.path.lexists(os.path.join(path, b".git"))


def require_readable_rules(root: Path, walk: Walk) -> None:
    """Raise ``patch_missing`` for a FIFO where git reads its rules: git would wait for it for ever."""
    for name, kind in walk.special.items():
        if name.rpartition(b"/")[2].lower() in (b".gitignore", b".gitattributes", b".gitmodules"):
            raise LionwtError(
                "patch_missing",
                f"{git.text(name)} is a {kind}, from which git would read its rules; "
                "the lease and the worktree are as they were",
                hint=f"remove it, then freeze again: {words.command('rm', root / git.text(name))}",
            )


def _kind(entry: os.DirEntry[bytes]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    for test, kind in ((stat.S_ISFIFO, "fifo"), (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "block device")):
        if test(mode):
            return kind
    return "character device"
