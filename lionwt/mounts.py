"""What is mounted inside a directory that is about to be removed.

A removal that walks into a mount empties somebody else's directory. The device
number alone does not tell: a directory of the same file system that is
bind-mounted has the same one. So the kernel's own list counts, and device
numbers only where there is no such list.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

from lionwt import git, trees, words

_MOUNTINFO: Final = Path("/proc/self/mountinfo")


def below(path: Path) -> list[str]:
    """The mount points at or below ``path``, the outermost first."""
    top = os.fsencode(os.path.realpath(path))
    try:
        listed = _MOUNTINFO.read_bytes()
    except OSError:
        return [git.text(found) for found in _other_devices(top)]
    points = {_unescaped(line.split(b" ")[4]) for line in listed.splitlines()}
    return [git.text(point) for point in sorted(points) if point == top or point.startswith(top + b"/")]


def refusal(path: Path) -> str | None:
    """Why ``path`` must not be removed, and what to type; None when nothing is mounted there."""
    found = below(path)
    if not found:
        return None
    detach = words.command("umount", found[0])
    return f"{found[0]} is a mount point, so {path} was left as it is; detach it first: {detach}"


def remove_tree(path: Path, identity: tuple[int, int] | None = None, *, unlock: bool = False) -> None:
    """Remove what lies at ``path``: a link itself, a directory with everything below it.

    Every recursive removal of lionwt's is this one. Raises ``OSError`` with
    nothing removed where something is mounted there, or where it is not the
    directory of that ``identity`` (device and inode). With ``unlock`` also read-only directories go.
    """
    seen = os.lstat(path)
    if not stat.S_ISDIR(seen.st_mode):
        os.unlink(path)
        return
    if identity is not None and (seen.st_dev, seen.st_ino) != identity:
        raise OSError(errno.ESTALE, "another directory has taken its place, and was left as it is", str(path))
    if mounted := refusal(path):
        raise OSError(errno.EBUSY, mounted)
    trees.remove(path, unlock=unlock)


def _unescaped(field: bytes) -> bytes:
    """A path as mountinfo writes it: blanks and backslashes are octal there."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def _other_devices(top: bytes) -> list[bytes]:
    found: list[bytes] = []
    device = os.lstat(top).st_dev
    for parent, directories, _ in trees.walk(top):
        for name in list(directories):
            path = os.path.join(parent, name)
            if os.lstat(path).st_dev != device:
                directories.remove(name)
                found.append(path)
    return sorted(found)
