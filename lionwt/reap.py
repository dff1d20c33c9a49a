"""``reap``: tear down retained worktrees whose time has come, and empty the trash.

It deletes nothing else. What has no lease file is listed with the reason why it
is kept; a clock that stands before a lease was made deletes nothing at all
(design section 8, last rows).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from lionwt import names, promote, session, teardown, trash
from lionwt.errors import LionwtError, as_told, worst
from lionwt.findings import Finding, clock_is_wrong, find_orphans, trash_left
from lionwt.readmodel import Row
from lionwt.reconcile import Step
from lionwt.records import LeaseFile, Record
from lionwt.session import Run
from lionwt.values import State


class Reaping(State):
    """What was torn down, what was found, what waits."""

    records: list[Record] = []
    findings: list[Finding] = []
    pending: list[promote.Pending] = []
    steps: list[Step] = []
    standing: list[tuple[Run, LeaseFile]] = []  # what still needs a person
    gone: list[Row] = []  # rows whose files are gone, which were dropped, or would be
    trash: list[str] = []  # the removed trees that were deleted, or would be

    def exit_code(self) -> int:
        """0 also with orphans listed: they are kept on purpose; 5 where a teardown failed."""
        codes = [finding.exit_code for finding in self.findings if finding.code != "orphan"]
        codes += [entry.error.exit_code for entry in self.pending]
        codes += [5 for record in self.records if record.status == "teardown_failed"]
        return worst(codes) if codes else 0


def reap(runs: Sequence[str | None], *, dry_run: bool = False) -> Reaping:
    """Reap the runs that the RUN arguments name; one that cannot be read is a finding and stops no other.

    Raises ``usage`` and ``id_invalid`` for an argument that is no name of a run.
    """
    done = Reaping()
    for argument in runs:
        try:
            _reap_run(session.load(names.run_paths(argument, os.environ)), done, dry_run)
        except (LionwtError, OSError) as failure:
            error = as_told(failure, "reaping it")
            if error.code == "usage" or (error.code == "id_invalid" and os.sep not in str(argument)):
                raise
            named = f"run {os.path.basename(argument)!r}: " if argument else ""
            told = f"{named}{error.message}"
            done.findings.append(Finding(error.code, told, hint=error.hint))
    return done


def _reap_run(run: Run, done: Reaping, dry_run: bool) -> None:
    files, ambiguous = run.store.leases(run.file)
    for entry in ambiguous:
        done.findings.append(Finding.of(entry.error, entry.worker_id))
    done.findings += find_orphans(run, {file.worker_id for file in files} | {entry.worker_id for entry in ambiguous})
    now = time.time()
    for known in files:
        record = known.record
        if record is None or record.status != "retained":
            continue
        if now < known.lease.created_at:
            done.findings.append(clock_is_wrong(known, now))
            continue
        if record.retention_until is None or now < record.retention_until:
            continue
        step = Step(known.worker_id, "its retention has expired", "tear it down", "tore it down")
        done.steps.append(step)
        if dry_run:
            done.records.append(record)
            continue
        try:
            with run.locked(known.worker_id) as file:
                if file.record is not None and file.record.status == "retained":
                    file = teardown.expire(run, file)
                if file.record is not None:
                    done.records.append(file.record)
                    if file.record.status == "teardown_failed":
                        done.steps[-1] = step.having(done="not all of it could be torn down")
                        done.standing.append((run, file))
        except LionwtError as error:
            done.pending.append(promote.Pending(known.worker_id, error))
    waiting = [str(tree) for tree in trash.waiting(run)]
    if not dry_run:
        done.findings += trash_left(run, trash.clear(run))
        waiting = [tree for tree in waiting if not os.path.lexists(tree)]
    done.trash += [tree for tree in waiting if tree not in done.trash]
