"""``lease``: give workers a worktree each, all of them or none (ADR-0091 D1 to D3).

The order of the steps is the guarantee. Everything that can be refused is
refused before anything is made. The first call opens the run: policy first,
then target and base, then the settings snapshot, all pinned. Then every id is
reserved by a durable lease file with the intent to allocate, before git makes
the first thing; a nonce in it proves later whose a half-made worktree is. Only
when all worktrees stand is each lease recorded as allocated. Whatever fails in
between is undone: exactly what this call made, nothing else. Retained worktrees
of the run whose time has come go first.
"""

from __future__ import annotations

import contextlib
import os
import time

from lionwt import locks, names, places, processes, registration, repository, teardown, trash, words
from lionwt.allocation import Made, allocate, failed
from lionwt.errors import LionwtError, leaving
from lionwt.faults import point
from lionwt.opening import Request, check_artifact_paths, compare, open_run, prepare
from lionwt.records import (
    Intent,
    Lease,
    LeaseFile,
    Transition,
)
from lionwt.session import Run
from lionwt.store import Store


def lease(paths: names.RunPaths, request: Request) -> tuple[Run, list[LeaseFile]]:
    """Allocate a lease for every worker of ``request``, or none at all.

    Raises ``id_invalid``, ``id_reused``, ``name_taken``, ``target_invalid``,
    ``protected_target``, ``policy_mismatch``, ``run_mismatch``,
    ``repository_unsupported``, ``filter_untrusted`` and the failures of git and
    the system; after any of them nothing of this call is left.
    """
    _check_ids(paths, request)
    store = Store(paths)
    plan = prepare(paths, store, request)
    check_artifact_paths(paths, plan.run, request.workers)
    repository.verify_unmoved(plan.run)
    if not plan.opens:
        repository.require_safe_config(plan.run)
    run = Run(plan.run, store)
    _require_uninterrupted(run)
    _check_free(run, request)
    _check_predecessors(run, request)
    _tear_down_expired(run)
    point("lease.planned")
    with contextlib.ExitStack() as stack:
        for worker_id in sorted(request.workers):
            with leaving("nothing was made"):
                stack.enter_context(locks.held(paths.lease_lock(worker_id), f"lease {worker_id!r}"))
        made = Made()
        try:
            with locks.held(paths.run_lock, "run"):
                now = store.read_run()
                if now is None:
                    made.opened = True
                    open_run(paths, store, plan)
                elif now != plan.run:
                    # Another call opened the run meanwhile: its pins count.
                    run = Run(compare(now, paths, request).run, store)
                _reserve(run, request, made)
            return run, allocate(run, made)
        except BaseException as error:
            told = failed(run, error, made)
            if told is error:
                raise
            raise told from error


def _check_ids(paths: names.RunPaths, request: Request) -> None:
    names.check_id(paths.run_id, "run")
    for session_id in (request.session_id, request.default_session):
        if session_id is not None:
            names.check_session(session_id)
    if not request.workers:
        raise LionwtError("usage", "no worker was named; nothing was made", hint="name one with -w WORKER")
    seen: dict[str, str] = {}
    for worker_id in [*request.workers, *request.after]:
        names.check_id(worker_id, "worker")
    for worker_id in request.workers:
        other = seen.get(names.fold(worker_id))
        if other is not None:
            same = "is named twice" if other == worker_id else f"and {other!r} are the same name on some file systems"
            raise LionwtError(
                "id_reused",
                f"worker id {worker_id!r} {same}; nothing was made",
                hint="give every worker an id of its own",
            )
        seen[names.fold(worker_id)] = worker_id
    for worker_id in request.after:
        if worker_id in request.workers:
            raise LionwtError("usage", f"worker {worker_id!r} cannot come after itself; nothing was made")


def _check_free(run: Run, request: Request) -> None:
    """Refuse ids that were used before in any state, and branches or paths that are in the way."""
    places.check(run.common_dir, run.main_worktree, run.file.run_id)
    taken = {names.fold(worker_id): worker_id for worker_id in run.store.worker_ids()}
    for worker_id in request.workers:
        other = taken.get(names.fold(worker_id))
        if other is not None:
            raise LionwtError(
                "id_reused",
                f"worker {other!r} already has a lease in run {run.file.run_id!r}; nothing was made",
                hint="a pair of run and worker is used once: choose another worker id",
            )
    branches = repository.find_branches(
        str(run.common_dir),
        f"refs/heads/lionagi/{run.file.run_id}",
        f"refs/lionwt/{run.file.run_id}",
        "refs/heads/lionagi",
    )
    folded = {names.fold(worker_id): worker_id for worker_id in request.workers}
    for full in branches:
        parts = full.split("/")
        position = 4 if full.startswith(names.HEADS) else 3
        if full == "refs/heads/lionagi" or (len(parts) == position and parts[position - 1] == run.file.run_id):
            clash: str | None = ""
        elif len(parts) > position and parts[position - 1] == run.file.run_id:
            clash = folded.get(names.fold(parts[position]))
        else:
            clash = None
        if clash is not None:
            raise LionwtError(
                "name_taken",
                f"{full} is in the way of the branch of {clash or 'every worker'!r}; nothing was made",
                hint="choose another worker id, or look at that branch and rename it",
            )
    known = dict(registration.registered(run.common_dir))
    for worker_id in request.workers:
        path = names.worktree_path(run.main_worktree, run.file.run_id, worker_id)
        if path in known and not os.path.lexists(path):  # git would refuse it too, once the lease is written
            remove = words.command("git", "-C", run.main_worktree, "worktree", "remove", "-f", "-f", path)
            raise LionwtError(
                "name_taken",
                f"{path} is gone, but still registered as a worktree in {known[path]}; nothing was made",
                hint=f"choose another worker id; if nobody wants that registration, remove it: {remove}",
            )
        for path in (
            names.worktree_path(run.main_worktree, run.file.run_id, worker_id),
            run.paths.evidence(worker_id),
        ):
            if os.path.lexists(path):
                raise LionwtError(
                    "name_taken",
                    f"{path} is already there; nothing was made",
                    hint="choose another worker id, or look at that path and move it away",
                )


def _require_uninterrupted(run: Run) -> None:
    """Raise ``run_interrupted`` while the run has unfinished leases of a dead owner (ADR-0091 D5)."""
    files, _ = run.store.leases(run.file)
    for file in files:
        if file.record is None and file.owner is not None and not processes.owner_alive(file.owner):
            raise LionwtError(
                "run_interrupted",
                f"the owner of {file.worker_id!r} (pid {file.owner.pid}) is dead and its lease is unfinished; "
                "nothing was made",
                hint=f"finish it first: lionwt reconcile {run.argument}",
            )


def _tear_down_expired(run: Run) -> None:
    """Tear down retained worktrees whose time has come, before anything new is allocated (ADR-0091 D5).

    Their leases have ended, so that reconciles nothing. What cannot be removed is
    ``teardown_failed`` then, and stands in nobody's way; a process that still
    works there makes the call busy.
    """
    files, _ = run.store.leases(run.file)
    now = time.time()
    try:
        expired = [file.worker_id for file in files if teardown.has_expired(file, now)]
        for worker_id in expired:
            with run.locked(worker_id) as file:
                if teardown.has_expired(file, now):
                    teardown.expire(run, file)
    except LionwtError as error:
        raise LionwtError(
            error.code, f"{error.message}; nothing was made", hint=error.hint, diagnostics=error.diagnostics
        ) from error
    if expired:
        trash.clear(run)


def _check_predecessors(run: Run, request: Request) -> None:
    for worker_id in request.after:
        run.lease(worker_id)


def _reserve(run: Run, request: Request, made: Made) -> None:
    """Write every lease with the intent to allocate, under the run lock: now the ids are taken."""
    _check_free(run, request)
    pinned = run.file
    now = time.time()
    for position, worker_id in enumerate(request.workers):
        lease = Lease(
            run_id=pinned.run_id,
            session_id=pinned.session_id,
            worker_id=worker_id,
            target_branch=names.short_branch(pinned.target),
            base_sha=pinned.base_sha,
            expected_target_sha=pinned.base_sha,
            branch_name=names.worker_branch(pinned.run_id, worker_id),
            worktree_path=names.worktree_path(run.main_worktree, pinned.run_id, worker_id),
            artifact_path=run.paths.artifacts(worker_id),
            state_path=run.paths.lease_file(worker_id),
            # A microsecond apart, so that they are landed in the order in which they were named.
            created_at=now + position * 1e-6,
        )
        file = LeaseFile(
            lease=lease,
            policy=pinned.policy,
            required_validations=pinned.required_validations,
            predecessors=tuple(request.after),
            owner=request.owner,
            intent=Intent(kind="allocate", at=now, nonce=os.urandom(16).hex()),
            history=(Transition(at=now, state="allocated", by="lease"),),
        )
        made.files.append(file)
        made.files[-1] = run.store.write(file)
    point("lease.intended")
