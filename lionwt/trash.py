"""The trash: removed trees lie there until they are deleted.

A worktree is renamed into it under the registration lock, which is quick;
deleting the files is not, so it follows without the lock. Whatever a crash
leaves there belongs to no lease any more and may be deleted by anybody.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from lionwt import names
from lionwt.session import Run


def clear(run: Run) -> list[str]:
    """Empty the trash and drop what is empty then; returns what could not be deleted."""
    errors = _empty(run.main_worktree)
    with run.registration():
        _tidy(run.main_worktree, run.file.run_id)
    return errors


def _empty(main_worktree: Path) -> list[str]:
    """Delete what lies in the trash; returns what could not be deleted, and why."""
    trash = names.worktrees_root(main_worktree) / ".trash"
    errors: list[str] = []
    for place in (trash.parent, trash):
        if place.is_symlink():
            return [f"{place} is a symbolic link; it was left as it is"]
    try:
        entries = os.listdir(trash)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{trash}: {error.strerror}; it was left as it is"]
    for entry in entries:
        try:
            _delete_tree(trash / entry)
        except FileNotFoundError:
            pass  # another lionwt was quicker
        except OSError as error:
            errors.append(f"{trash / entry}: {error.strerror}")
    return errors


def _tidy(main_worktree: Path, run_id: str) -> None:
    """Drop the directories of lionwt's own that have become empty. Call under the registration lock."""
    root = names.worktrees_root(main_worktree)
    for directory in (root / ".trash", root / "lionagi" / run_id, root / "lionagi", root):
        if os.path.realpath(directory) != str(directory):
            continue  # nothing is removed through a symbolic link
        try:
            os.rmdir(directory)
        except OSError:
            continue


def _delete_tree(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:  # a worker's tool left read-only directories
        os.chmod(path, stat.S_IRWXU)
        for root, directories, _ in os.walk(path):
            for directory in directories:
                inner = os.path.join(root, directory)
                if not os.path.islink(inner):
                    os.chmod(inner, stat.S_IRWXU)
        shutil.rmtree(path)
