"""Which runs there are: those whose files lie here, those that are gone, and what other machines report.

The read-model knows runs wherever their state root lies; the directories under
``$LIONAGI_HOME/runs`` are looked at as well, so that a database that is behind,
or gone, hides none. A row counts only where the run's own file is the one it
was derived from. Files are gone only where a look proves it: a run that cannot
be looked at or understood keeps its rows, and who reads it says why.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lionwt import names, readmodel
from lionwt.errors import LionwtError
from lionwt.readmodel import Row
from lionwt.store import Store
from lionwt.values import State


class Known(State):
    """Runs by where they can be read. ``roots`` are state roots; the others are rows, which assert nothing here.

    ``gone`` are rows of this machine whose files are gone, the run's own or the lease's.
    """

    roots: list[str] = []
    gone: list[Row] = []
    elsewhere: list[Row] = []

    def forget_gone(self) -> None:
        """Drop the rows whose files are gone from this machine."""
        if self.gone:
            with readmodel.used() as model:
                model.drop(self.gone)


def find(home: Path) -> Known:
    """Every run: one query, then the runs' own files."""
    here = _directories(home)
    known = Known(roots=here)
    digests = {root: digest for root in here if (digest := _digest(root)) is not None}
    with readmodel.used() as model:
        rows = model.rows()
        if rows is None:
            if model.missing and here:
                model.give_up("it is missing")
            return known
    for row in rows:
        if row.root not in digests and (digest := _digest(row.root)) is not None:
            digests[row.root] = digest
        if digests.get(row.root) == row.run_digest:
            stands, gone = True, _is_missing(_lease_file(row), (FileNotFoundError,))
        elif row.host == readmodel.this_host():
            gone = _has_gone(row, digests.get(row.root))
            stands = not gone
        else:
            known.elsewhere.append(row)
            continue
        if stands and row.root not in known.roots:
            known.roots.append(row.root)
        if gone:
            known.gone.append(row)
    return known


def _digest(root: str) -> str | None:
    with contextlib.suppress(OSError):
        return readmodel.digest_of(Path(root) / "workspaces.json")
    return None


def _has_gone(row: Row, digest: str | None) -> bool:
    """Whether a row of this machine is of a run that provably lies no more where it lay."""
    if _is_missing(os.path.join(row.root, "workspaces.json")):
        return _is_missing(_lease_file(row))
    try:  # another run may stand there, which can be understood
        return digest is not None and Store(names.run_paths(row.root, os.environ)).read_run() is not None
    except LionwtError:
        return False


def _lease_file(row: Row) -> str:
    return os.path.join(row.root, "workspaces", f"{row.worker_id}.json")


def _is_missing(path: str, proof: tuple[type[OSError], ...] = (FileNotFoundError, NotADirectoryError)) -> bool:
    """Whether nothing is there for sure: what cannot be looked at may well be."""
    try:
        os.lstat(path)
    except proof:
        return True
    except OSError:
        pass
    return False


def _directories(home: Path) -> list[str]:
    """The state roots under a home in which a run has been opened, or may have been."""
    root = os.path.realpath(home / "runs")
    try:
        return [path for name in sorted(os.listdir(root)) if _may_be_opened(path := os.path.join(root, name))]
    except OSError:
        return []


def _may_be_opened(root: str) -> bool:
    if not _is_missing(os.path.join(root, "workspaces.json")):
        return True
    try:
        return bool(Store(names.RunPaths(os.path.basename(root), Path(root), Path(root))).worker_ids())
    except LionwtError:
        return True
