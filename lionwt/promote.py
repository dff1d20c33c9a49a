"""``promote``: keep a frozen candidate as a patch, or land it on the run's branch (ADR-0091 D4).

Candidates are completed in dependency order, one at a time. Each landing holds
the repository's promotion lock (A1.1) from the verification of the evidence to
the record. The six conditions are looked at in this order: how the worker
ended, its validations, its evidence, its predecessors, the target's head, and
last the checkout, because only the last can be cleared by the operator: then
the candidate stays frozen and everything is as it was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from lionwt import (
    checks,
    evidence,
    indexlock,
    landing,
    locks,
    names,
    processes,
    repository,
    settle,
    snapshot,
    teardown,
    trash,
    words,
)
from lionwt.checkout import Checkout
from lionwt.errors import LionwtError, as_told, having_left, worst
from lionwt.records import CompletionPolicy, LeaseFile, Outcome, Record
from lionwt.session import Run, promotion_lock
from lionwt.values import State, Value


class Pending(Value, frozen=True):
    """A lease that stays as it is, and why."""

    worker_id: str
    error: LionwtError


class Completion(State):
    """What became of every candidate that was asked for."""

    records: list[Record] = []
    files: list[LeaseFile] = []
    pending: list[Pending] = []
    not_ready: list[Pending] = []

    def exit_code(self, asked: CompletionPolicy) -> int:
        """The one exit code that tells how it went (design section 5)."""
        codes = [exit_of(file, asked) for file in self.files]
        codes += [pending.error.exit_code for pending in self.pending]
        # Where nothing was completed at all, a script must not take it for done.
        return worst(codes or [pending.error.exit_code for pending in self.not_ready])


def exit_of(file: LeaseFile, asked: CompletionPolicy) -> int:
    """The exit code of one terminal lease, the same however often it is asked."""
    record, outcome = file.record, file.outcome
    assert record is not None
    if record.status == "teardown_failed":
        return 5
    if outcome is None:
        return 3 if asked == "merge_validated" else 0
    if outcome.status == "promoted":
        return 4 if outcome.code else 0
    if outcome.status == "discarded":
        landing_asked = asked == outcome.policy == "merge_validated" and not outcome.empty
        return 3 if landing_asked else 0
    if outcome.code == "predecessor_failed":
        return 3
    return 4


def promote(
    run: Run,
    workers: Sequence[str] = (),
    policy: CompletionPolicy | None = None,
    lock_timeout: float = locks.DEFAULT_WAIT,
) -> tuple[CompletionPolicy, Completion]:
    """Complete the named candidates, or every frozen one, in dependency order.

    Raises ``policy_mismatch`` for a policy that is neither the pinned one nor
    narrower, ``lease_unknown``; what happens to a single candidate is in the
    answer.
    """
    asked = asked_policy(run, policy)
    files, ambiguous = run.store.leases(run.file)
    known = {file.worker_id: file for file in files}
    for worker_id in workers:
        run.lease(worker_id)
    completion = Completion()
    if not workers:
        completion.pending += [Pending(entry.worker_id, entry.error) for entry in ambiguous]
    chosen = list(dict.fromkeys(workers)) or list(known)
    alive = processes.of_run(run.paths) if any(known[name].lease.state == "frozen" for name in chosen) else {}
    for worker_id in in_order(known, chosen):
        try:
            if worker_id in alive and known[worker_id].lease.state == "frozen":
                raise processes.alive(worker_id, alive[worker_id], "runs again in the lease")
            _complete_one(run, worker_id, asked, policy, lock_timeout, completion, bool(workers))
        except (LionwtError, OSError) as refused:  # one that cannot be completed keeps no other
            error = as_told(refused, f"completing {worker_id!r}")
            completion.pending.append(Pending(worker_id, _still_frozen(run, error, worker_id)))
            if error.code == "lock_timeout":
                lock_timeout = 0.0  # the wait is for the command, not for each worker
    trash.clear(run)
    return asked, completion


def _still_frozen(run: Run, error: LionwtError, worker_id: str) -> LionwtError:
    """The error, which says that nothing has come of the completion where the lease's file shows that."""
    with contextlib.suppress(LionwtError):
        file = run.lease(worker_id)
        if file.lease.state == "frozen" and file.intent is None and file.outcome is None:
            return having_left(error, "the candidate stays frozen")
    return error


def asked_policy(run: Run, policy: CompletionPolicy | None) -> CompletionPolicy:
    """The pinned policy, or the narrower one; raises ``policy_mismatch`` for a wider one."""
    pinned = run.file.policy.completion
    if policy is None or policy == pinned:
        return pinned
    if policy == "patch_only":
        return policy
    raise LionwtError(
        "policy_mismatch",
        f"run {run.file.run_id!r} was opened with {pinned}; it cannot be widened to {policy}; nothing was changed",
        hint="open another run with --policy merge_validated",
    )


def in_order(known: dict[str, LeaseFile], chosen: Sequence[str]) -> list[str]:
    """``chosen`` with every predecessor before its dependents; otherwise as they were leased."""
    order: list[str] = []
    wanted = set(chosen)

    def place(worker_id: str, above: frozenset[str]) -> None:
        file = known[worker_id]
        for predecessor in file.predecessors:
            if predecessor in wanted and predecessor in known and predecessor not in above:
                place(predecessor, above | {worker_id})
        if worker_id not in order:
            order.append(worker_id)

    for worker_id in sorted(wanted, key=lambda name: (known[name].lease.created_at, chosen.index(name))):
        place(worker_id, frozenset())
    return order


def _complete_one(
    run: Run,
    worker_id: str,
    asked: CompletionPolicy,
    explicit: CompletionPolicy | None,
    lock_timeout: float,
    completion: Completion,
    named: bool,
) -> None:
    known = run.lease(worker_id)
    if known.record is not None:
        if named:
            _refuse_other_policy(known, explicit)
        teardown.clean(run, known)
        completion.files.append(known)
        completion.records.append(known.record)
        return
    if known.lease.state != "frozen":
        pending = Pending(worker_id, _not_frozen(run, known))
        (completion.pending if named else completion.not_ready).append(pending)
        return
    done = None
    tested: Tested = {}
    if asked == "patch_only":
        with run.locked(worker_id, lock_timeout) as file:
            begun = file.intent is not None and file.intent.kind == "promote"
            if not begun and not indexlock.is_held_for(Checkout(run), file.lease.state_path):
                done = _keep_patch(run, file)
    while done is None:  # a landing, also one that was begun and has to be settled first
        try:
            with (
                locks.held(promotion_lock(run.common_dir), "promotion", lock_timeout) as lock_fd,
                run.locked(worker_id, lock_timeout) as file,
            ):
                done = _land(run, file, asked, lock_fd, lock_timeout, tested)
        except _Untested as wanted:
            # Without the promotion lock: a check may take long. Another landing meanwhile makes
            # another tree, and that is checked anew; of those there are no more than leases.
            with run.locked(worker_id, lock_timeout) as file:
                if file.lease.state == "frozen" and file.outcome is None:
                    tested[wanted.expected, wanted.tree] = checks.on_merge(run, file, wanted.expected, wanted.tree)
    assert done.record is not None
    completion.files.append(done)
    completion.records.append(done.record)


#: What the merge checks said of a merge: of the target's head and the merged tree.
Tested = dict[tuple[str, str], tuple[checks.Ran, ...]]


class _Untested(Exception):
    """A merge that has to be checked before it may land."""

    def __init__(self, expected: str, tree: str) -> None:
        super().__init__(expected, tree)
        self.expected, self.tree = expected, tree


def _require_checked(run: Run, file: LeaseFile, expected: str, tree: str, tested: Tested) -> LeaseFile:
    """The file with what the checks said; raises ``validation_failed`` for red ones (design section 7, promote 4)."""
    if not run.file.merged_checks:
        return file
    ran = tested.get((expected, tree))
    if ran is None:
        Checkout(run).require_on_target()  # what is plainly in the way is said before a long check, not after it
        raise _Untested(expected, tree)
    for one in ran:
        file = file.noting("merge_checked", f"{one.check.name!r} {one.told} on the merged tree {tree}", one.log)
    if red := [one for one in ran if not one.passed]:
        raise _Red(
            file,
            f"worker {file.worker_id!r} merged into {names.short_branch(run.file.target)!r}: "
            f"{', '.join(f'{one.check.name} {one.told}' for one in red)}; nothing was landed",
            f"its patch is kept as evidence; what the check said: {run.paths.artifact_root / red[0].log}",
        )
    return file


class _Red(LionwtError):
    """A merge check that is red; ``file`` carries what the checks said."""

    def __init__(self, file: LeaseFile, message: str, hint: str) -> None:
        super().__init__("validation_failed", message, hint=hint)
        self.file = file


def _refuse_other_policy(file: LeaseFile, explicit: CompletionPolicy | None) -> None:
    asked = explicit or file.policy.completion
    if file.outcome is not None and file.outcome.policy != asked:
        raise LionwtError(
            "already_done",
            f"worker {file.worker_id!r} was completed as {file.outcome.policy}, so it cannot be completed as {asked} "
            "any more; nothing was changed",
            hint="its patch is kept as evidence",
        )


def _not_frozen(run: Run, file: LeaseFile) -> LionwtError:
    if file.intent is not None:
        hint = f"finish what was interrupted: lionwt reconcile {run.argument}"
    elif file.lease.state == "allocated":
        hint = f"when it has its paths: lionwt start {run.argument} {file.worker_id}"
    else:
        hint = f"when it has ended: {run.freeze_command(file)}"
    return LionwtError(
        "not_frozen", f"worker {file.worker_id!r} is {file.lease.state}, not frozen; nothing was changed", hint=hint
    )


def _keep_patch(run: Run, file: LeaseFile) -> LeaseFile:
    """patch_only: the evidence stays, the lease is torn down."""
    if file.record is not None:
        return file
    if file.outcome is None:
        outcome = Outcome(status="discarded", policy="patch_only", empty=_is_empty(file))
        broken = evidence.broken(run.paths, file)
        if broken is not None:
            outcome = _resolution(file, broken, "patch_only")
        file = teardown.decide(run, file, outcome)
    return teardown.finish(run, file)


def _is_empty(file: LeaseFile) -> bool:
    return file.candidate is not None and not file.candidate.files_changed


def _land(
    run: Run, file: LeaseFile, asked: CompletionPolicy, lock_fd: int, lock_timeout: float, tested: Tested
) -> LeaseFile:
    """merge_validated, under the promotion lock and the lease's."""
    settle.unresolved_landings(run, file.worker_id, lock_fd, lock_timeout)
    file = run.lease(file.worker_id)
    if file.record is not None:
        return file
    if file.outcome is None:
        if asked == "patch_only":
            return _keep_patch(run, file)
        file = _decide(run, file, lock_fd, tested)
    return teardown.finish(run, file)


def _decide(run: Run, file: LeaseFile, lock_fd: int, tested: Tested) -> LeaseFile:
    """Land the candidate, or make durable why it is not landed."""
    assert file.candidate is not None and file.evidence is not None
    try:
        _require_success(file)
        if broken := evidence.broken(run.paths, file):
            raise broken
        if _is_empty(file):
            return teardown.decide(run, file, Outcome(status="discarded", policy="merge_validated", empty=True))
        if file.evidence.blocker is not None:
            raise LionwtError(
                "worktree_unmerged",
                f"worker {file.worker_id!r} cannot be landed: {file.evidence.blocker}; nothing was landed",
                hint="its patch is kept; look at it and apply what belongs",
            )
        if reserved := [path for path in file.candidate.files_changed if names.is_reserved(path)]:
            raise LionwtError(
                "path_reserved",
                f"worker {file.worker_id!r} cannot be landed: its change has {words.some(reserved)}, which is where "
                "lionwt keeps worktrees; nothing was landed",
                hint="its patch is kept; apply it without those paths: "
                + words.command(
                    "git",
                    *("-C", run.file.checkout.path, "apply", "--3way", "--exclude=.worktrees*"),
                    run.paths.evidence(file.worker_id) / "candidate.patch",
                ),
            )
        repository.require_safe_config(run.file)
        _require_predecessors(run, file)
        _require_unprotected(run, file)
        expected = expected_head(run)
        if landing.target_head(run) != expected:
            raise landing.moved(run, expected)
        tree, conflict = landing.merge(run, file, expected, file.evidence.commit)
        if conflict is not None:
            file = file.noting("merge_conflict", f"conflict in {words.some(conflict.paths)}", conflict.ref)
            raise LionwtError(
                "merge_conflict",
                f"worker {file.worker_id!r} conflicts with {names.short_branch(run.file.target)!r} in "
                f"{words.some(conflict.paths)}; nothing was landed and the checkout was not touched",
                hint="merge it by hand: "
                + words.command(
                    "git",
                    *("-C", run.file.checkout.path, "apply", "--3way"),
                    run.paths.evidence(file.worker_id) / "candidate.patch",
                ),
            )
        file = _require_checked(run, file, expected, tree, tested)
        return landing.land(run, file, expected, tree, lock_fd)
    except LionwtError as error:
        if isinstance(error, _Red):
            file = error.file
        outcome = _outcome_of(file, error)
        if outcome is None:
            raise
        return teardown.decide(run, file, outcome)


_DISCARDED = ("worker_failed", "validation_missing", "validation_failed")
_RESOLUTION = (
    "target_moved",
    "merge_conflict",
    "patch_missing",
    "patch_changed",
    "worktree_unmerged",
    "path_reserved",
    "predecessor_failed",
)


def _outcome_of(file: LeaseFile, error: LionwtError) -> Outcome | None:
    """The outcome that an error is, or None where the candidate stays frozen."""
    if error.code in _DISCARDED:
        return Outcome(
            status="discarded", policy="merge_validated", code=error.code, message=error.message, hint=error.hint
        )
    if error.code in _RESOLUTION:
        return _resolution(file, error, "merge_validated")
    return None


def _resolution(file: LeaseFile, error: LionwtError, policy: CompletionPolicy) -> Outcome:
    """needs_resolution, or retained where the policy says so and the expiry is still ahead."""
    until = file.policy.retention_until
    keeps = file.policy.retain_worktree_on_resolution and until is not None and until > time.time()
    return Outcome(
        status="retained" if keeps else "needs_resolution",
        policy=policy,
        code=error.code,
        message=error.message,
        hint=error.hint,
    )


def _require_success(file: LeaseFile) -> None:
    candidate = file.candidate
    assert candidate is not None
    if not candidate.worker_succeeded or candidate.cancelled:
        how = "was cancelled" if candidate.cancelled else "failed"
        raise LionwtError(
            "worker_failed",
            f"worker {file.worker_id!r} {how}; nothing was landed",
            hint="its patch is kept as evidence",
        )
    results = {result.name: result for result in candidate.validations}
    missing = [name for name in file.required_validations if name not in results]
    if missing:
        raise LionwtError(
            "validation_missing",
            f"worker {file.worker_id!r} has no result for {', '.join(missing)}; nothing was landed",
            hint="its patch is kept as evidence; give every declared validation at freeze",
        )
    red = [result.name for result in candidate.validations if not result.passed]
    if red:
        raise LionwtError(
            "validation_failed",
            f"worker {file.worker_id!r}: {', '.join(red)} failed; nothing was landed",
            hint="its patch is kept as evidence",
        )


def _require_unprotected(run: Run, file: LeaseFile) -> None:
    """The fence as it was pinned and as it stands today (ADR-0091 A1.3); the candidate stays frozen."""
    todays = snapshot.read_operator_config(names.lionagi_home(os.environ)).protected_branches
    fence = [*run.file.protected, *todays, *repository.default_branches(str(run.common_dir))]
    try:
        repository.require_unprotected(run.file.target, fence)
    except LionwtError as error:
        raise LionwtError(
            error.code,
            f"{names.short_branch(run.file.target)!r} has become a protected branch, which is never the target of a "
            "landing; nothing was changed and the candidate stays frozen",
            hint=f"keep it as a patch: lionwt promote {run.argument} {file.worker_id} --policy patch_only",
        ) from error


def _require_predecessors(run: Run, file: LeaseFile) -> None:
    """A dependent waits for its predecessors, and ends when one of them did not land."""
    for worker_id in file.predecessors:
        before = run.lease(worker_id)
        if before.record is None:
            raise LionwtError(
                "predecessor_pending",
                f"worker {file.worker_id!r} comes after {worker_id!r}, which is {before.lease.state}; "
                "nothing was changed",
                hint=f"complete it first: lionwt promote {run.argument} {worker_id}",
            )
        outcome = before.outcome
        succeeded = outcome is not None and (
            outcome.status == "promoted" or (outcome.status == "discarded" and outcome.empty and not outcome.code)
        )
        if not succeeded:
            raise LionwtError(
                "predecessor_failed",
                f"worker {file.worker_id!r} comes after {worker_id!r}, which ended as {before.record.status}; "
                "nothing was landed",
                hint="its patch is kept as evidence",
            )


def expected_head(run: Run) -> str:
    """Where this run left the target: the base, then each of its landings in order (ADR-0091 D2)."""
    files, ambiguous = run.store.leases(run.file)
    if ambiguous:
        # A landing may hide in a file that cannot be read.
        raise ambiguous[0].error
    steps = {
        file.outcome.landing.expected: file.outcome.landing.merge
        for file in files
        if file.outcome is not None and file.outcome.status == "promoted" and file.outcome.landing is not None
    }
    head = run.file.base_sha
    while head in steps:
        head = steps.pop(head)
    return head
