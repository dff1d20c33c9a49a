"""Bring the rows of one run to what its lease files say (design section 9).

What has ended is written without a lock: a row never gives way to an older
serial, and such a file stays. What has not ended may be retired or undone at
any moment, so its row is written under the lease's lock; whoever holds that now
writes the row himself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lionwt import locks, readmodel
from lionwt.errors import LionwtError
from lionwt.readmodel import Row
from lionwt.records import LeaseFile
from lionwt.session import Run


def repair(run: Run, files: Sequence[LeaseFile]) -> None:
    """Write missing and stale rows of ``files``, drop rows of leases that have no file."""
    with readmodel.used() as model:
        try:
            digest = readmodel.digest_of(run.paths.run_file)
        except OSError as error:
            model.give_up(f"{run.paths.run_file}: {error.strerror or error}")
            return
        rows = model.rows(digest)
        if rows is None and not model.missing:
            return
        there = {row.worker_id: row for row in rows or ()}
        ended = []
        for file in files:
            row, wanted = there.get(file.worker_id), Row.of(digest, run.paths, file)
            if row is not None and row.says_the_same(wanted):
                continue
            if wanted.state == "terminal" and (row is None or row.serial < wanted.serial):
                ended.append(wanted)
            else:
                _rewrite(run, model, digest, file.worker_id)
        model.put(ended)
        model.drop([row for name, row in there.items() if not run.paths.lease_file(name).exists()])


def _rewrite(run: Run, model: readmodel.ReadModel, digest: str, worker_id: str) -> None:
    """Write one row as the file stands under its lock, whatever stands in the database."""
    with (
        contextlib.suppress(LionwtError),
        locks.held(run.paths.lease_lock(worker_id), f"lease {worker_id!r}", 0.0),
    ):
        now = Row.of(digest, run.paths, run.lease(worker_id))
        model.put([now], instead=[now])
