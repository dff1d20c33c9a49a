"""Which runs there are: those whose files lie here, those that are gone, and what other machines report.

The read-model knows runs wherever their state root lies; the directories under
``$LIONAGI_HOME/runs`` are looked at as well, so that a database that is behind,
or gone, hides none. A row counts only where the run's own file is the one it
was derived from.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lionwt import readmodel
from lionwt.readmodel import Row
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
            if row.root not in known.roots:
                known.roots.append(row.root)
            if not os.path.lexists(os.path.join(row.root, "workspaces", f"{row.worker_id}.json")):
                known.gone.append(row)
        elif row.host == readmodel.this_host():
            known.gone.append(row)
        else:
            known.elsewhere.append(row)
    return known


def _digest(root: str) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return readmodel.digest_of(Path(root) / "workspaces.json")
    return None


def _directories(home: Path) -> list[str]:
    """The state roots under a home in which a run has been opened."""
    root = Path(os.path.realpath(home / "runs"))
    with contextlib.suppress(OSError):
        return [str(root / name) for name in sorted(os.listdir(root)) if (root / name / "workspaces.json").exists()]
    return []
