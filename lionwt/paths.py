"""What stands at a path below a root, seen without following a link there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def beyond_link(root: bytes, path: bytes) -> bool:
    """Whether a directory on the way from ``root`` to ``path`` is a symbolic link."""
    return any(os.path.islink(os.path.join(root, parent)) for parent in parents(path))


def first_existing(root: bytes, path: bytes) -> bytes | None:
    """The path itself if it is there, or a parent of it that is no directory."""
    parts = path.split(b"/")
    for count in range(1, len(parts)):
        parent = b"/".join(parts[:count])
        full = os.path.join(root, parent)
        if os.path.lexists(full) and (os.path.islink(full) or not os.path.isdir(full)):
            return parent
    return path if os.path.lexists(os.path.join(root, path)) else None


def parents(path: bytes) -> Iterator[bytes]:
    """The directories above ``path``, the nearest first."""
    while path := os.path.dirname(path):
        yield path


def is_free(root: bytes, path: bytes) -> bool:
    """Whether no file and no link stands at the path itself."""
    full = os.path.join(root, path)
    return not os.path.lexists(full) or (os.path.isdir(full) and not os.path.islink(full))


def file_above(root: bytes, path: bytes) -> bool:
    """Whether something that is no directory stands on the way from ``root`` to ``path``."""
    for parent in parents(path):
        full = os.path.join(root, parent)
        if os.path.lexists(full) and not os.path.isdir(full):
            return True
    return False


def drop_empty_dirs(root: bytes, path: bytes) -> None:
    """Remove the directories above ``path``, up to the first that is not empty."""
    for parent in parents(path):
        try:
            os.rmdir(os.path.join(root, parent))
        except OSError:
            return


def files_below(top: bytes, skip: bytes | None = None) -> Iterator[bytes]:
    """Every file and link below ``top``, by its path from there; not what is below the directory ``skip`` in it."""
    for parent, directories, files in os.walk(top):
        if parent == top and skip in directories:
            directories.remove(skip)
        links = (name for name in directories if os.path.islink(os.path.join(parent, name)))
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(parent, name), top)


def remove_empty(path: bytes) -> None:
    """Remove a directory that holds nothing but directories; any other stays as it is."""
    if any(files_below(path)):
        return
    for parent, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)
