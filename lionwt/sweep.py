"""Remove what dead commands left in lionwt's own directories.

Temporary files and scratch directories carry the name of what they are for, so
each is removed under the lock of whoever would use it: if that lock cannot be
had at once, somebody lives, and what is his stays.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lionwt import locks, mounts
from lionwt.errors import LionwtError
from lionwt.session import Run, promotion_lock, registration_lock

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


def sweep(run: Run) -> None:
    """Look through the run's directories once; free where there is nothing."""
    for path, lock, what in list(_leftovers(run)):
        with contextlib.suppress(LionwtError, OSError), locks.held(lock, what, 0.0):
            mounts.remove_tree(path)


def _leftovers(run: Run) -> Iterator[tuple[Path, Path, str]]:
    """Every leftover, with the lock under which it may be removed."""
    paths = run.paths
    promotion = (promotion_lock(run.common_dir), "promotion")
    for path in _entries(paths.git_dir / "lionwt"):
        owner, separator, _ = path.name.partition("~")
        if separator:
            yield (path, *(promotion if owner.startswith(".") else _lease(run, owner)))
    for directory in _entries(paths.artifact_root / ".lionwt"):
        for path in _entries(directory):
            if _TEMPORARY.fullmatch(path.name):
                yield (path, *_lease(run, directory.name))
    for directory, suffix in ((paths.workspaces, ".json"), (paths.state_root, ".json"), (run.common_dir / "info", "")):
        for path in _entries(directory):
            found = _TEMPORARY.fullmatch(path.name)
            if not found or not found["name"].endswith(suffix):
                continue
            if directory == paths.workspaces:
                yield (path, *_lease(run, found["name"][:-5]))
            elif path.name.startswith(".workspaces.json."):
                yield path, paths.run_lock, "run"
            elif path.name.startswith(".exclude."):
                yield path, registration_lock(run.common_dir), "registration"


def _lease(run: Run, worker_id: str) -> tuple[Path, str]:
    return run.paths.lease_lock(worker_id), f"lease {worker_id!r}"


def _entries(directory: Path) -> list[Path]:
    try:
        return [directory / entry for entry in os.listdir(directory)]
    except OSError:
        return []
