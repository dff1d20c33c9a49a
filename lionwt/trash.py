"""The trash: removed trees lie there until they are deleted.

A worktree is renamed into it under the registration lock, which is quick;
deleting the files is not, so it follows without the lock. Whatever a crash
leaves there belongs to no lease any more and may be deleted by anybody.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Final

from lionwt import mounts, names, places, processes
from lionwt.errors import LionwtError
from lionwt.faults import point
from lionwt.session import Run

#: Seconds in which a process that still writes into a removed tree may come to its end.
PATIENCE: Final = 10.0
_STILL_WRITTEN_TO: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)


def clear(run: Run) -> list[str]:
    """Empty the trash and drop what is empty then; returns what could not be deleted, and why.

    What is listed under the lock has been looked at by whoever moved it there.
    """
    root = names.worktrees_root(run.main_worktree)
    if not os.path.lexists(root):
        return []
    for place in (root, root / ".trash"):
        if place.is_symlink():
            return [f"{place} is a symbolic link; it was left as it is"]
    try:
        with run.registration():
            entries = _listed(root / ".trash")
        errors = _delete(entries)
        point("trash.emptied")
        with run.registration():
            _tidy(run.main_worktree, run.file.run_id)
            point("trash.tidied")
    except OSError as error:
        return [f"{root / '.trash'}: {error.strerror}; it was left as it is"]
    except LionwtError as error:
        return [error.message]  # another time then
    return errors


def waiting(run: Run) -> list[Path]:
    """The removed trees that :func:`clear` would delete; only looks."""
    place = names.worktrees_root(run.main_worktree) / ".trash"
    try:
        return [] if place.is_symlink() or place.parent.is_symlink() else sorted(_listed(place))
    except OSError:
        return []


def _listed(trash: Path) -> list[Path]:
    """The removed trees; whatever else somebody keeps there is not lionwt's."""
    try:
        return [trash / entry for entry in os.listdir(trash) if names.is_trash(entry)]
    except FileNotFoundError:
        return []


def _delete(entries: list[Path]) -> list[str]:
    errors: list[str] = []
    deadline = time.monotonic() + PATIENCE
    for entry in entries:
        try:
            _delete_to_the_end(entry, deadline)
        except FileNotFoundError:
            pass  # another lionwt was quicker
        except OSError as error:
            errors.append(str(error.strerror) if error.errno == errno.EBUSY else f"{entry}: {error.strerror}")
    return errors


def _delete_to_the_end(entry: Path, deadline: float) -> None:
    """Delete a tree into which the git of a dead lionwt may still be writing what it was told to."""
    while True:
        try:
            _delete_tree(entry)
            return
        except OSError as error:
            if error.errno not in _STILL_WRITTEN_TO or not os.path.lexists(entry):
                raise
            if time.monotonic() >= deadline or not processes.standing_in(entry):
                # Whoever stood there may have ended since the attempt.
                _delete_tree(entry)
                return
        time.sleep(0.05)


def _tidy(main_worktree: Path, run_id: str) -> None:
    """Drop the directories of lionwt's own that have become empty. Call under the registration lock."""
    root = names.worktrees_root(main_worktree)
    for directory in (root / ".trash", root / "lionagi" / run_id, root / "lionagi", root):
        if os.path.realpath(directory) != str(directory):
            continue  # nothing is removed through a symbolic link
        is_ours = directory == root and places.is_own_ignore(root / ".gitignore")
        if is_ours and not any(os.path.lexists(root / name) for name in ("lionagi", ".trash")):
            (root / ".gitignore").unlink()
        try:
            os.rmdir(directory)
        except OSError:
            continue


def _delete_tree(path: Path) -> None:
    seen = os.lstat(path)
    identity = (seen.st_dev, seen.st_ino)
    try:
        mounts.remove_tree(path, identity)  # a mount may have come since the tree was moved here
    except PermissionError:  # a worker's tool left read-only directories
        if path.is_symlink() or not path.is_dir():
            raise
        mounts.remove_tree(path, identity, unlock=True)
