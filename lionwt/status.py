"""``status``: every lease as it stands, what blocks it, and what to type next. Only reads.

A lease of this machine is told from its file. What another machine has
reported to a shared database is told as its report, and marked so: nobody here
can look at those files (design section 9).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lionwt import names, processes, runs, session
from lionwt.errors import LionwtError, as_told
from lionwt.readmodel import Row
from lionwt.records import LeaseFile
from lionwt.session import Run
from lionwt.values import State, Value


class Standing(Value, frozen=True):
    """One lease, for a table or a program. ``age`` in seconds since it was leased."""

    run_id: str
    worker_id: str
    state: str
    status: str | None
    age: float
    blocked_by: str | None
    next: str | None
    file: LeaseFile | None = None


class Everywhere(State):
    """Every run: what its files say, which cannot be read, rows without files, and what other machines report."""

    standings: list[Standing] = []
    unreadable: list[tuple[str, LionwtError]] = []
    gone: list[Row] = []
    reported: list[Row] = []


def status_everywhere(home: Path) -> Everywhere:
    """The leases of every run that the read-model or the directories under ``home`` know of."""
    known = runs.find(home)
    found = Everywhere(gone=known.gone, reported=known.elsewhere)
    for root in known.roots:
        try:
            found.standings += status(session.load(names.run_paths(root, os.environ)))
        except (LionwtError, OSError) as error:  # one run that is gone must not hide the others
            found.unreadable.append((os.path.basename(root), as_told(error, "reading it")))
    return found


def status(run: Run) -> list[Standing]:
    """Every lease of a run, in the order they were leased; ambiguous files last."""
    files, ambiguous = run.store.leases(run.file)
    now = time.time()
    by_id = {file.worker_id: file for file in files}
    rows = [_standing(run, file, by_id, now) for file in sorted(files, key=lambda file: file.lease.created_at)]
    for entry in ambiguous:
        rows.append(
            Standing(run.file.run_id, entry.worker_id, "ambiguous", None, 0.0, entry.error.message, entry.error.hint)
        )
    return rows


def _finishing(run: Run, file: LeaseFile) -> str:
    """What finishes an interrupted verb: the owner's own verb where it has one, since a takeover ends the whole run."""
    abandoned = file.owner is not None and not processes.owner_alive(file.owner)
    if file.lease.state == "frozen" and not abandoned:
        return f"lionwt promote {run.argument} {file.worker_id}"
    return f"lionwt reconcile {run.argument}"  # where it is refused it says what a takeover would end


def _standing(run: Run, file: LeaseFile, by_id: dict[str, LeaseFile], now: float) -> Standing:
    run_id, worker_id, record = run.file.run_id, file.worker_id, file.record
    blocked: str | None = None
    following: str | None = None
    if record is not None:
        if record.status == "teardown_failed":
            blocked = "; ".join(record.teardown_errors) or "something was left"
            following = f"lionwt reconcile {run.argument}"
        elif record.status in ("needs_resolution", "retained"):
            blocked = file.outcome.message if file.outcome else None
            following = file.outcome.hint if file.outcome else None
        if record.status == "retained" and (file.intent is not None or not os.path.lexists(file.lease.worktree_path)):
            blocked = "what was retained is gone or was moved, or a command died while it removed it"
            following = f"lionwt reconcile {run.argument}"
    elif file.intent is not None:
        blocked = f"a command died in the middle of its {file.intent.kind}, or still works"
        if file.intent.kind == "promote":
            blocked += (
                f"; until that is finished do not commit in {run.file.checkout.path}, "
                "and leave its index.lock: its files may be behind the branch"
            )
        following = _finishing(run, file)
    elif file.lease.state != "frozen" and file.owner is not None and not processes.owner_alive(file.owner):
        blocked = f"its owner (pid {file.owner.pid}) is dead, so nobody watches this worker"
        following = f"lionwt reconcile {run.argument}"
    elif file.lease.state == "allocated":
        following = f"lionwt start {run.argument} {worker_id}"
    elif file.lease.state == "running":
        following = run.freeze_command(file)
    else:
        waiting = [name for name in file.predecessors if name not in by_id or by_id[name].record is None]
        blocked = f"comes after {', '.join(waiting)}" if waiting else None
        following = f"lionwt promote {run.argument} {waiting[0] if waiting else worker_id}"
    return Standing(
        run_id,
        worker_id,
        file.lease.state,
        record.status if record else None,
        now - file.lease.created_at,
        blocked,
        following,
        file,
    )
