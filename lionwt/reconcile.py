"""``reconcile``: find the truth after a crash, and finish (ADR-0091 D5, design section 8).

Everything is decided from files, directories and refs that are read once, with
a number of git processes that does not depend on the number of leases; only
then is anything done, one lease at a time under its lock, by the same code that
would have done it before the crash. First match of the table wins; the
functions below stand in the table's order. What cannot be decided for sure is a
finding: it is named, and nothing of it is adopted or deleted.

Killed at any point, reconcile leaves a state that the next one finishes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lionwt import (
    allocation,
    freeze,
    gone,
    locks,
    names,
    processes,
    promote,
    registration,
    repository,
    settle,
    teardown,
    trash,
    words,
    worktree,
)
from lionwt.errors import LionwtError, as_told, leaving, worst
from lionwt.findings import Finding, clock_is_wrong, find_orphans, refs_of, trash_left
from lionwt.records import CompletionPolicy, LeaseFile, Record
from lionwt.repair import repair
from lionwt.session import Run, promotion_lock
from lionwt.sweep import sweep
from lionwt.values import State, Value


class Step(Value, frozen=True):
    """What is to be done about one lease, and why."""

    worker_id: str
    found: str
    action: str
    done: str  #: the action, once it has been done


_NEEDS_A_PERSON: Final = {"teardown_failed": 5, "needs_resolution": 4, "retained": 4}


class Reconciliation(State):
    """What was found, done, and left."""

    records: list[Record] = []
    pending: list[promote.Pending] = []
    findings: list[Finding] = []
    steps: list[Step] = []
    ended: list[LeaseFile] = []  # by this call
    standing: list[LeaseFile] = []  # what still needs a person
    open: list[str] = []  # the workers whose lease has not ended

    def exit_code(self) -> int:
        """The one exit code (design section 5): what a person must look at counts, a discarded worker does not."""
        codes = [finding.exit_code for finding in self.findings]
        codes += [entry.error.exit_code for entry in self.pending]
        codes += [_left_for_a_person(file) for file in self.standing]
        return worst(codes) if codes else 0


def _left_for_a_person(file: LeaseFile) -> int:
    """The exit code of an ended lease that somebody must look at; 0 of all others."""
    record, outcome = file.record, file.outcome
    if record is None:
        return 0
    if record.status == "promoted" and outcome is not None and outcome.code:  # files of the checkout stayed behind
        return 4
    return _NEEDS_A_PERSON.get(record.status, 0)


class Seen(Value, frozen=True):
    """One lease and what a look found of its resources."""

    file: LeaseFile
    directory: str  # "leased", "gone", "moved" or "foreign"
    registration: str  # "leased", "gone" or "foreign"
    branch: str | None

    @property
    def worker_id(self) -> str:
        return self.file.worker_id


def reconcile(
    run: Run, *, takeover: bool = False, dry_run: bool = False, completion: CompletionPolicy | None = None
) -> Reconciliation:
    """Bring every lease of a run to a truthful end.

    ``completion`` narrows the pinned policy for frozen candidates. Raises
    ``policy_mismatch`` where it would widen it, ``owner_alive`` and ``worker_alive`` unless ``takeover``;
    ``repository_moved`` came before. With ``dry_run`` nothing is changed and
    ``steps`` says what would be.
    """
    promote.asked_policy(run, completion)
    found = Reconciliation()
    files, ambiguous = run.store.leases(run.file)
    with leaving("nothing was changed"):
        refs = refs_of(run)
    found.findings += [Finding.of(torn.error, torn.worker_id) for torn in ambiguous]
    seen = [_look(run, file, refs) for file in files]
    known = {file.worker_id for file in files} | {torn.worker_id for torn in ambiguous}
    found.findings += find_orphans(run, known, refs)
    now = time.time()
    plan = [(entry, *_decide(run, entry, now, found.findings)) for entry in seen]
    work = [(entry, step, action) for entry, step, action in plan if step is not None]
    found.steps = [step for _, step, _ in work]
    if not dry_run:
        repair(run, files)
    try:
        _require_abandoned(run, [entry.file for entry, _, _ in work], takeover)
    except LionwtError as error:
        if not dry_run:
            raise
        found.findings.append(Finding.of(error))
    found.open = [torn.worker_id for torn in ambiguous]
    if dry_run:
        found.records = [entry.file.record for entry in seen if entry.file.record is not None]
        found.open += [entry.worker_id for entry in seen if entry.file.record is None]
        return found
    _carry_out(run, work, found, completion)
    worked_on = {step.worker_id for step in found.steps}
    for entry in seen:
        file = run.lease(entry.worker_id) if entry.worker_id in worked_on else entry.file
        if file.record is None:
            found.open.append(entry.worker_id)
            continue
        teardown.clean(run, file)  # whoever wrote the record may have died before this
        found.records.append(file.record)
        if entry.worker_id in worked_on:
            found.ended.append(file)
        if entry.file.record is None:  # somebody else ended what was waited for
            found.pending = [waiting for waiting in found.pending if waiting.worker_id != entry.worker_id]
        if _left_for_a_person(file):
            found.standing.append(file)
    there = f"{os.sep}.trash{os.sep}"  # removed trees of other runs are told by reap
    left = [why for why in trash.clear(run) if there not in why or f"{there}{run.file.run_id}." in why]
    found.findings += trash_left(run, left)
    sweep(run)
    return found


def _look(run: Run, file: LeaseFile, refs: dict[str, repository.Branch]) -> Seen:
    path, identity = file.lease.worktree_path, file.identity
    directory = "gone"
    if os.path.lexists(path):
        leased = identity is not None and worktree.is_leased_directory(path, identity)
        directory = "leased" if leased else "foreign"
    elif identity is not None and registration.moved_to(identity, path):
        directory = "moved"
    registered = "gone"
    if identity is not None and os.path.lexists(identity.admin_dir):
        leased = registration.read_nonce(Path(identity.admin_dir)) == identity.nonce
        registered = "leased" if leased else "foreign"
    branch = refs.get(names.HEADS + file.lease.branch_name)
    return Seen(file, directory, registered, branch.oid if branch else None)


Action = Callable[[Run, LeaseFile], LeaseFile]


def _decide(run: Run, seen: Seen, now: float, findings: list[Finding]) -> tuple[Step | None, Action | None]:
    """The row of design section 8 that this lease matches, or nothing to do."""
    file = seen.file
    intent, state = file.intent, file.lease.state

    def step(what: str, action: str, done: str, do: Action | None) -> tuple[Step, Action | None]:
        return Step(seen.worker_id, what, action, done), do

    if file.record is not None:
        return _decide_ended(seen, now, findings, step)
    if intent is not None and intent.kind == "allocate":
        return step(
            "its allocation was not finished",
            "undo what carries its nonce",
            "undid what carried its nonce",
            _undo_allocation,
        )
    if intent is not None and intent.kind == "promote":
        return step("a landing was begun", "finish it forward, or declare it", "settled it", None)
    if file.outcome is not None:
        return step(
            f"its outcome ({file.outcome.status}) was decided",
            "finish the teardown",
            "finished the teardown",
            teardown.finish,
        )
    if seen.directory == "moved" or "foreign" in (seen.directory, seen.registration):
        try:
            worktree.require_identity(file)
        except LionwtError as error:
            findings.append(Finding.of(error, seen.worker_id))
        return None, None
    if seen.directory == "gone":
        if seen.registration == "gone" and seen.branch is None:
            return step(
                "worktree, registration and branch are gone",
                "record it as discarded",
                "recorded it as discarded",
                gone.end,
            )
        return step(
            "its worktree is gone",
            "save its commits, retire what remains",
            "saved its commits, retired what remained",
            gone.end,
        )
    if seen.registration == "gone" and state != "frozen":
        return step(
            "its registration is gone",
            "freeze what is in its worktree for diagnostics, end it as failed",
            "froze what was in its worktree for diagnostics, ended it as failed",
            _freeze_failed,
        )
    if state == "allocated":
        return step("it was never started", "end it as failed", "ended it as failed", _freeze_failed)
    if state == "running":
        return step(
            "nothing proves that it finished",
            "freeze it for diagnostics, end it as failed",
            "froze it for diagnostics, ended it as failed",
            _freeze_failed,
        )
    return step(
        "it is frozen",
        f"complete it under {file.policy.completion}",
        f"completed it under {file.policy.completion}",
        None,
    )


def _decide_ended(
    seen: Seen, now: float, findings: list[Finding], step: Callable[..., tuple[Step, Action | None]]
) -> tuple[Step | None, Action | None]:
    record = seen.file.record
    assert record is not None
    if record.status == "teardown_failed":
        return step("something was left at its teardown", "try again", "tried again", retry_teardown)
    if record.status == "retained":
        if now < seen.file.lease.created_at:
            findings.append(clock_is_wrong(seen.file, now))
        elif (elsewhere := _moved(seen)) is not None:
            findings.append(Finding.of(elsewhere, seen.worker_id))
        elif seen.file.intent is not None:
            return step("its teardown was not finished", "finish it", "finished it", teardown.finish)
        elif record.retention_until is not None and now >= record.retention_until:
            return step("its retention has expired", "tear it down", "tore it down", teardown.expire)
        elif seen.directory == "gone" or seen.branch is None:
            return step("what was retained is gone", "end its retention", "ended its retention", teardown.expire)
    return None, None


def _moved(seen: Seen) -> LionwtError | None:
    identity = seen.file.identity
    return worktree.moved_elsewhere(seen.file, identity) if seen.directory == "moved" and identity else None


def _require_abandoned(run: Run, files: list[LeaseFile], takeover: bool) -> None:
    """Raise ``owner_alive`` or ``worker_alive`` while somebody still answers for what would be ended."""
    open_files = [file for file in files if file.record is None]
    if takeover or not open_files:
        return
    for file in open_files:
        if file.owner is None:
            raise LionwtError(
                "owner_alive",
                f"worker {file.worker_id!r} declares no owner, so nobody can tell that it was abandoned; "
                "nothing was changed",
                hint=f"if it was, end {_all(open_files)}: lionwt reconcile {run.argument} --takeover",
            )
        if processes.owner_alive(file.owner):
            raise LionwtError(
                "owner_alive",
                f"the owner of {file.worker_id!r} (pid {file.owner.pid} on {file.owner.host}) is alive; "
                "nothing was changed",
                hint=f"let it finish, or take the run from it and end {_all(open_files)}: "
                f"lionwt reconcile {run.argument} --takeover",
            )
    alive = processes.of_run(run.paths)
    for file in open_files:
        if file.worker_id in alive:
            raise processes.alive(
                file.worker_id,
                alive[file.worker_id],
                "still works in the lease",
                hint=f"let it end, or have it stopped: lionwt reconcile {run.argument} --takeover",
            )


def _all(files: list[LeaseFile]) -> str:
    """What a takeover ends: everything that has not ended, whoever works in it."""
    return f"every unfinished lease of the run ({words.some([file.worker_id for file in files])})"


def _carry_out(
    run: Run,
    work: list[tuple[Seen, Step, Action | None]],
    found: Reconciliation,
    completion_policy: CompletionPolicy | None,
) -> None:
    """Do the steps: ended leases and half-done verbs first, then landings, then completions in order."""
    if any(entry.file.intent is not None and entry.file.intent.kind == "promote" for entry, _, _ in work):
        _settle(run, work, found)
    for entry, _, action in work:
        if action is None:
            continue
        try:
            with run.locked(entry.worker_id) as file:
                if file.serial == entry.file.serial:  # somebody else was quicker otherwise
                    action(run, file)
        except (LionwtError, OSError) as error:  # one lease that cannot be ended keeps no other
            found.pending.append(promote.Pending(entry.worker_id, _told(error, entry.worker_id)))
    done = {entry.worker_id for entry in found.pending}
    frozen = [entry.worker_id for entry, _, action in work if action is None and entry.worker_id not in done]
    frozen = [worker_id for worker_id in frozen if run.lease(worker_id).record is None]
    if frozen:
        _, completion = promote.promote(run, frozen, completion_policy)
        found.pending += completion.pending


def _settle(run: Run, work: list[tuple[Seen, Step, Action | None]], found: Reconciliation) -> None:
    for entry, _, _ in work:
        if entry.file.intent is None or entry.file.intent.kind != "promote":
            continue
        try:
            with (
                locks.held(promotion_lock(run.common_dir), "promotion") as lock_fd,
                run.locked(entry.worker_id) as file,
            ):
                if file.intent is not None and file.intent.kind == "promote":
                    file = settle.one_landing(run, file, lock_fd)
                if file.outcome is not None and file.record is None:
                    teardown.finish(run, file)
        except (LionwtError, OSError) as error:
            found.pending.append(promote.Pending(entry.worker_id, _told(error, entry.worker_id)))


def _told(error: LionwtError | OSError, worker_id: str) -> LionwtError:
    return as_told(error, f"ending the lease of {worker_id!r}")


def _undo_allocation(run: Run, file: LeaseFile) -> LeaseFile:
    with run.registration():
        file, removal = allocation.undo_allocation(run, file)
    return run.store.write(allocation.ended(file, removal, "reconcile"))


def _freeze_failed(run: Run, file: LeaseFile) -> LeaseFile:
    """Freeze a lease whose worker nobody vouches for, and end it as failed. Never restarted."""
    verdict = freeze.Verdict(succeeded=False, accept_incomplete=True)
    frozen = freeze.freeze_locked(run, file, verdict)
    if frozen.record is not None:
        return frozen
    return teardown.finish(run, teardown.decide(run, frozen, gone.failed(frozen)))


def retry_teardown(run: Run, file: LeaseFile) -> LeaseFile:
    """Try a failed teardown again; a complete one takes the outcome."""
    if file.outcome is None:  # an allocation that could not be undone
        record = file.record
        assert record is not None
        with run.registration():
            removal = worktree.remove(run.file, file, run.file.base_sha)
        complete = removal.worktree_removed and removal.branch_deleted
        replaced = record.having(
            status="discarded" if complete else "teardown_failed",
            teardown_errors=list(removal.errors),
            worktree_removed=removal.worktree_removed,
            branch_deleted=removal.branch_deleted,
            completed_at=time.time(),
        )
        return teardown.write_if_new(run, file, file.having(record=replaced))
    return teardown.finish(run, file)
