"""What must not be left behind: directories, locks, temporary files, processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.crash.leases import runs_of

_TEMPORARY = re.compile(r"(^\.git\.[0-9a-f]+\.tmp$)|(\.tmp$)|(^lionwt-)|(\.index\.new$)")


def directories(checkout: Path, common: Path) -> Iterator[str]:
    for path in (checkout / ".worktrees", common / "worktrees"):
        if os.path.lexists(path):
            yield f"left: {path}: {[str(inner.relative_to(path)) for inner in path.rglob('*')][:5]}"


def files(checkout: Path, common: Path, git_dir: Path, home: Path) -> Iterator[str]:
    """No lock, temporary file or scratch directory anywhere."""
    trash = checkout / ".worktrees" / ".trash"
    if trash.is_dir():
        yield f"left: {trash}: {os.listdir(trash)[:3]}"
    for top in dict.fromkeys((common, git_dir)):
        for parent, inner, names in os.walk(top):
            relative = os.path.relpath(parent, top)
            if relative == "objects":
                inner.clear()  # what git's own writers left there is git's to collect
                continue
            for name in (*names, *inner):
                own = relative == "lionwt" and name in ("registration.lock", "promotion.lock")
                litter = name.endswith(".lock") or _TEMPORARY.search(name) or relative == "lionwt"
                if litter and not own:
                    yield f"left: {os.path.join(parent, name)}"
    for state in runs_of(home):
        for parent, _, names in os.walk(state):
            for name in names:
                locked = name.endswith(".lock") and os.path.basename(parent) != "workspaces"
                if _TEMPORARY.search(name) or locked:
                    yield f"left: {os.path.join(parent, name)}"
        scratch = state / "git" / "lionwt"
        for entry in sorted(scratch.iterdir()) if scratch.is_dir() else []:
            if not entry.name.endswith(".index"):
                yield f"left: {entry}"


def processes(common: Path, home: Path) -> Iterator[str]:
    """No process of lionwt's or of its git lives on: none has this repository in its environment."""
    marks = [os.fsencode(common), os.fsencode(home) + b"/runs"]
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environ = Path("/proc", entry, "environ").read_bytes()
            state = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and b"GIT_" in environ and any(mark in environ for mark in marks):
            yield f"left: process {entry}: {Path('/proc', entry, 'cmdline').read_bytes()[:200]!r}"
