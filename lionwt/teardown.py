"""End a lease: remove what was leased, by what a look finds, and write the record once.

The outcome is durable before anything is removed, so that a crash in here can
only ever be finished, never decided anew. What a worker still wrote after its
freeze is saved as evidence first; a worktree that cannot be saved whole stays
(ADR-0091 D5, design section 7).
"""

from __future__ import annotations

import os
import time

from lionwt import evidence, late, names, processes, repository, worktree
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.records import Intent, LeaseFile, Outcome, Record, WorkerTerminalStatus
from lionwt.session import Run


def end_unstarted(run: Run, file: LeaseFile) -> LeaseFile:
    """allocated → terminal: the worker never started; what lies in its worktree is evidence all the same."""
    outcome = Outcome(
        status="discarded",
        policy=file.policy.completion,
        code="worker_failed",
        message=f"worker {file.worker_id!r} was ended before it had started; nothing was landed",
    )
    return finish(run, decide(run, file, outcome))


def decide(run: Run, file: LeaseFile, outcome: Outcome) -> LeaseFile:
    """Make an outcome durable, before anything is removed."""
    written = run.store.write(file.having(outcome=outcome, intent=Intent(kind="teardown", at=time.time())))
    point("teardown.intended")
    return written


def expire(run: Run, file: LeaseFile) -> LeaseFile:
    """Tear down a retained worktree whose time has come; what it needed a person for still stands."""
    return finish(run, decide(run, file, _outcome(file).having(status="needs_resolution")))


def has_expired(file: LeaseFile, now: float) -> bool:
    """Whether a lease's worktree is retained and its time has come; raises ``clock_wrong`` where nobody can tell."""
    record = file.record
    if record is None or record.status != "retained":
        return False
    if now < file.lease.created_at:
        raise clock_is_wrong(file, now)
    return record.retention_until is not None and now >= record.retention_until


def clock_is_wrong(file: LeaseFile, now: float) -> LionwtError:
    """The error of a clock that stands before the lease was made: nothing is deleted by it."""
    return LionwtError(
        "clock_wrong",
        f"the clock says {now:.0f}, but {file.worker_id!r} was leased at {file.lease.created_at:.0f}; "
        "it was left as it is",
        hint="set the clock, then run the same command again",
    )


def finish(run: Run, file: LeaseFile) -> LeaseFile:
    """Carry out a decided outcome and write the record. Call with the lease's lock held.

    What was removed lies in the trash then: the caller empties that when it holds no lock.
    """
    file, unrecovered = _recover_patch(run, file)
    if _outcome(file).status == "retained":
        retained = _retain(run, file)
        if retained is not None:
            return retained
        outcome = _outcome(file).having(status="needs_resolution")
        why = "the worktree or branch was gone, or the time of its retention had passed, so nothing was retained"
        file = file.noting("retention_refused", why)
        file = run.store.write(file.having(outcome=outcome))
    _require_nobody_inside(run, file)
    file, errors = late.save(run, file)
    errors = [*unrecovered, *errors]
    if errors:
        removal = worktree.Removal(not os.path.lexists(file.lease.worktree_path), False, tuple(errors))
    else:
        tip = file.evidence.branch_tip if file.evidence else run.file.base_sha
        with run.registration():
            removal = worktree.remove(run.file, file, tip)
    written = write_if_new(run, file, _recorded(run, file, removal))
    point("teardown.recorded")
    clean(run, written)
    return written


def write_if_new(run: Run, file: LeaseFile, ending: LeaseFile) -> LeaseFile:
    """Write ``ending``; a retry that finds what the record says already changes nothing."""
    if file.record is not None and ending.record is not None:
        record = ending.record.having(completed_at=file.record.completed_at)
        if ending.having(record=record) == file:
            return file
    return run.store.write(ending)


def _require_nobody_inside(run: Run, file: LeaseFile) -> None:
    """What a process writes between the look for late work and the removal would be lost with its directory."""
    path = file.lease.worktree_path
    if os.path.lexists(path):
        left = f"the outcome ({_outcome(file).status}) stands, the worktree was left as it is"
        processes.require_none(run.paths, file.worker_id, path, left)


def clean(run: Run, file: LeaseFile) -> None:
    """Drop what only a lease with a worktree needs; safe to repeat."""
    if file.record is not None and file.record.worktree_removed:
        run.paths.saved_index(file.worker_id).unlink(missing_ok=True)


def _retain(run: Run, file: LeaseFile) -> LeaseFile | None:
    """The record of a retained worktree, only after confirming that worktree and branch are there."""
    branch = names.HEADS + file.lease.branch_name
    if file.policy.retention_until is None or file.policy.retention_until <= time.time():
        return None
    if file.identity is not None and (moved := worktree.moved_elsewhere(file, file.identity)):
        raise moved  # it may come back, and is retained then
    stands = file.identity is not None and worktree.is_leased_directory(file.lease.worktree_path, file.identity)
    if not stands or repository.find_tip(str(run.common_dir), branch) is None:
        return None
    ending = file.to("terminal", "promote", intent=None)
    record = Record(
        lease=ending.lease,
        policy=_outcome(file).policy,
        status="retained",
        patch_ref=_patch_ref(run, file),
        promoted_commit=None,
        teardown_errors=[],
        worktree_removed=False,
        branch_deleted=False,
        retention_until=file.policy.retention_until,
        completed_at=time.time(),
    )
    return run.store.write(ending.having(record=record))


def _recorded(run: Run, file: LeaseFile, removal: worktree.Removal) -> LeaseFile:
    outcome = _outcome(file)
    complete = removal.worktree_removed and removal.branch_deleted
    status: WorkerTerminalStatus = outcome.status if complete else "teardown_failed"
    if file.lease.state == "terminal":
        ending = file.having(intent=None)
    else:
        ending = file.to("terminal", "teardown", intent=None)
    record = Record(
        lease=ending.lease,
        policy=outcome.policy,
        status=status,
        patch_ref=_patch_ref(run, file),
        promoted_commit=outcome.landing.merge if outcome.status == "promoted" and outcome.landing else None,
        teardown_errors=list(removal.errors),
        worktree_removed=removal.worktree_removed,
        branch_deleted=removal.branch_deleted,
        completed_at=time.time(),
    )
    return ending.having(record=record)


def _outcome(file: LeaseFile) -> Outcome:
    assert file.outcome is not None
    return file.outcome


def _recover_patch(run: Run, file: LeaseFile) -> tuple[LeaseFile, list[str]]:
    """Where the frozen evidence is broken, save the change from the object store, which is about to let go of it.

    Returns the file and the reasons why worktree, branch and anchors must stay.
    """
    if file.candidate is None or file.evidence is None:
        return file, []
    kept = f"what was frozen of {file.worker_id!r} was kept where it is"
    try:
        broken = evidence.broken(run.paths, file)
        if broken is None or _recovered_ref(run, file) is not None:
            return file, []
        with run.scratch(file.worker_id) as scratch:
            made = evidence.recover(run.paths, file, run.private(), scratch)
    except LionwtError as error:
        return file, [f"the frozen evidence is broken and the patch could not be made anew: {error.message}; {kept}"]
    except OSError as error:
        return file, [f"{from_os_error(error, 'making the broken patch anew')}; {kept}"]
    why = f"{broken.message.partition(';')[0]}; the change was saved anew from the object store"
    return run.store.write(file.noting("patch_recovered", why, run.paths.ref(made))), []


def _recovered_ref(run: Run, file: LeaseFile) -> str | None:
    refs = [note.ref for note in file.diagnostics if note.code == "patch_recovered"]
    return next((ref for ref in refs if ref and (run.paths.artifact_root / ref).is_file()), None)


def _patch_ref(run: Run, file: LeaseFile) -> str | None:
    """The patch that holds the change: the frozen one, or the one that was made anew in its place."""
    if file.candidate is None:
        return None
    try:
        whole = evidence.sha256_of(run.paths.artifact_root / file.candidate.patch_ref)[0] == file.candidate.patch_sha256
    except OSError:
        whole = False
    return file.candidate.patch_ref if whole else _recovered_ref(run, file) or file.candidate.patch_ref
