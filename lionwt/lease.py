"""``lease``: give workers a worktree each, all of them or none (ADR-0091 D1 to D3).

The order of the steps is the guarantee. Everything that can be refused is
refused before anything is made. The first call opens the run: policy first,
then target and base, then the settings snapshot, all pinned. Then every id is
reserved by a durable lease file with the intent to allocate, before git makes
the first thing; a nonce in it proves later whose a half-made worktree is. Only
when all worktrees stand is each lease recorded as allocated. Whatever fails in
between is undone: exactly what this call made, nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from lionwt import git, locks, names, processes, repository, snapshot, trash, worktree
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.records import (
    STORED,
    Identity,
    Intent,
    LeaseFile,
    Owner,
    Place,
    RunFile,
    Transition,
    WorkerWorktreeLease,
    WorkerWorktreeRecord,
    WorkspacePolicy,
)
from lionwt.session import Run
from lionwt.store import Store, make_private_dir


@dataclass(frozen=True)
class Request:
    """One call of ``lease``. What is None was not given, and then the run's pinned value counts."""

    workers: Sequence[str]
    target: str | None = None
    session_id: str | None = None
    start: Path | None = None
    policy: WorkspacePolicy | None = None
    completion: str | None = None
    retain_until: float | None = None
    retain_for: float | None = None
    required: Sequence[str] = ()
    after: Sequence[str] = ()
    owner: Owner | None = None
    base_sha: str | None = None
    home: Path = field(default_factory=lambda: names.lionagi_home(os.environ))


def lease(paths: names.RunPaths, request: Request) -> tuple[Run, list[LeaseFile]]:
    """Allocate a lease for every worker of ``request``, or none at all.

    Raises ``id_invalid``, ``id_reused``, ``name_taken``, ``target_invalid``,
    ``protected_target``, ``policy_mismatch``, ``run_mismatch``,
    ``repository_unsupported``, ``filter_untrusted`` and the failures of git and
    the system; after any of them nothing of this call is left.
    """
    _check_ids(paths, request)
    store = Store(paths)
    plan = _prepare(paths, store, request)
    repository.verify_unmoved(plan.run)
    if not plan.opens:
        repository.require_safe_config(plan.run)
    run = Run(plan.run, store)
    _require_uninterrupted(run)
    _check_free(run, request)
    _check_predecessors(run, request)
    point("lease.planned")
    with contextlib.ExitStack() as stack:
        for worker_id in sorted(request.workers):
            stack.enter_context(locks.held(paths.lease_lock(worker_id), f"lease {worker_id!r}"))
        made = _Made()
        try:
            with locks.held(paths.run_lock, "run"):
                now = store.read_run()
                if now is None:
                    _open(paths, store, plan, made)
                elif now != plan.run:
                    # Another call opened the run meanwhile: its pins count.
                    run = Run(_compare(now, paths, request).run, store)
                _reserve(run, request, made)
            return run, _allocate(run, made)
        except BaseException as error:
            told = _failed(run, error, made)
            if told is error:
                raise
            raise told from error


@dataclass
class _Made:
    """What a call has made so far, and would have to undo."""

    opened: bool = False
    files: list[LeaseFile] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)
    parents: bool = False
    branches: bool = False


@dataclass(frozen=True)
class _Plan:
    """What opening the run would write."""

    run: RunFile
    repository: repository.Repository | None = None
    settings: snapshot.Settings | None = None

    @property
    def opens(self) -> bool:
        return self.repository is not None


def _prepare(paths: names.RunPaths, store: Store, request: Request) -> _Plan:
    """Compare with the run that is open, or work out its opening."""
    opened = store.read_run()
    if opened is None:
        point("lease.unopened")
        try:
            return _plan(paths, request)
        except LionwtError:
            # Another call may be opening the run: what stands in the way is the run's own then.
            opened = store.read_run()
            if opened is None:
                raise
    return _compare(opened, paths, request)


def _check_ids(paths: names.RunPaths, request: Request) -> None:
    names.check_id(paths.run_id, "run")
    if request.session_id is not None:
        names.check_session(request.session_id)
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


def _plan(paths: names.RunPaths, request: Request) -> _Plan:
    """Work out the opening of a run without making anything."""
    if request.target is None:
        raise LionwtError(
            "usage",
            f"run {paths.run_id!r} has not been opened yet, so --target is needed; nothing was made",
            hint="name the run's own working branch: --target BRANCH",
        )
    # The policy is resolved before the base is read (ADR-0091 D1).
    policy = _policy(request)
    git.check_version()
    config = snapshot.read_operator_config(request.home)
    found = repository.discover(request.start or repository.place_of_start(None, os.environ))
    common = str(found.common_dir)
    settings = snapshot.read_settings(found, config.trusted_filters)
    protected = [*config.protected_branches, *repository.default_branches(common)]
    if settings.default_branch:
        protected.append(settings.default_branch)
    landing = policy.completion == "merge_validated"
    if landing:
        repository.require_unprotected(names.short_branch(request.target.removeprefix("heads/")), protected)
    target = repository.resolve_target(common, request.target)
    if landing:
        repository.require_unprotected(target.full, protected)
    if request.base_sha is not None and request.base_sha != target.oid:
        raise LionwtError(
            "run_mismatch",
            f"the base {request.base_sha} is not the commit of {request.target!r} ({target.oid}); nothing was made",
        )
    _refuse_nested(paths, found)
    worktree.check_places(found.common_dir, found.main_worktree, paths.run_id)
    _check_run_names(paths, common, found.main_worktree)
    run = RunFile(
        run_id=paths.run_id,
        session_id=request.session_id or paths.run_id,
        artifact_root=str(paths.artifact_root),
        main_worktree=Place.of(found.main_worktree),
        common_dir=Place.of(found.common_dir),
        checkout=Place.of(found.checkout),
        checkout_git_dir=str(found.git_dir),
        object_format="sha256" if found.object_format == "sha256" else "sha1",
        target=target.full,
        base_sha=target.oid,
        policy=policy,
        retain_for=request.retain_for,
        required_validations=tuple(request.required),
        protected=tuple(dict.fromkeys(protected)),
        user_name=settings.user_name,
        user_email=settings.user_email,
        config_sha256=repository.config_fingerprint(found.common_dir),
        hooks_sha256=repository.hooks_fingerprint(found.common_dir),
        opened_at=time.time(),
    )
    return _Plan(run, found, settings)


def _policy(request: Request) -> WorkspacePolicy:
    if request.policy is not None:
        if request.policy.mode != "worktree_per_worker":
            raise LionwtError(
                "shared_host",
                "the policy's mode is shared_host, which allocates no worktree; nothing was made",
                hint='use WorkspacePolicy(mode="worktree_per_worker")',
            )
        return request.policy
    until = request.retain_until
    if request.retain_for is not None:
        until = time.time() + request.retain_for
    try:
        return WorkspacePolicy.model_validate(
            {
                "mode": "worktree_per_worker",
                "completion": request.completion or "patch_only",
                "retain_worktree_on_resolution": until is not None,
                "retention_until": until,
            }
        )
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise LionwtError("usage", f"{said}; nothing was made") from error


def _compare(run: RunFile, paths: names.RunPaths, request: Request) -> _Plan:
    """Refuse whatever differs from what the run pinned."""
    pinned = run.policy
    if request.policy is not None:
        differs = _policy(request) != pinned
    else:
        differs = (
            (request.completion is not None and request.completion != pinned.completion)
            or (request.retain_until is not None and request.retain_until != pinned.retention_until)
            or (request.retain_for is not None and request.retain_for != run.retain_for)
        )
    if differs:
        raise LionwtError(
            "policy_mismatch",
            f"run {run.run_id!r} was opened with another policy ({pinned.completion}); nothing was made",
            hint="leave the policy out, or repeat the one the run has",
        )
    wrong = None
    if request.session_id is not None and request.session_id != run.session_id:
        wrong = f"the session is {run.session_id!r}"
    elif request.base_sha is not None and request.base_sha != run.base_sha:
        wrong = f"the base is {run.base_sha}"
    elif request.required and tuple(request.required) != run.required_validations:
        wrong = f"the declared validations are {', '.join(run.required_validations) or 'none'}"
    elif request.target is not None and not _same_target(run, request.target):
        wrong = f"the target is {names.short_branch(run.target)!r}"
    elif request.start is not None and repository.discover(request.start).common_dir != Path(run.common_dir.path):
        wrong = f"the repository is {run.main_worktree.path}"
    if wrong:
        raise LionwtError(
            "run_mismatch",
            f"{wrong}: that was pinned when run {run.run_id!r} was opened; nothing was made",
            hint="leave it out, or open another run",
        )
    return _Plan(run)


def _same_target(run: RunFile, given: str) -> bool:
    if names.HEADS + given == run.target or given == run.target:
        return True
    try:
        return repository.resolve_target(run.common_dir.path, given).full == run.target
    except LionwtError:
        return False


def _refuse_nested(paths: names.RunPaths, found: repository.Repository) -> None:
    """State and artifacts must not lie where worktrees are captured and removed."""
    worktrees = names.worktrees_root(found.main_worktree)
    for what, path in (("state root", paths.state_root), ("artifact root", paths.artifact_root)):
        if path.is_relative_to(worktrees):
            raise LionwtError(
                "path_unsafe",
                f"the {what} {path} lies among the worktrees in {worktrees}; nothing was made",
                hint="choose a directory outside",
            )


def _check_run_names(paths: names.RunPaths, common_dir: str, main_worktree: Path) -> None:
    """Refuse a run id that is taken in this repository: by a branch, or by a name that folds to it."""
    folded = names.fold(paths.run_id)
    for branch in repository.find_branches(common_dir, "refs/heads/lionagi", "refs/lionwt"):
        parts = branch.removeprefix("refs/heads/").removeprefix("refs/").split("/")
        if len(parts) == 1 or (len(parts) == 2 and names.fold(parts[1]) == folded):
            raise LionwtError(
                "name_taken",
                f"branch {names.short_branch(branch)!r} is where lionwt keeps branches of its own; nothing was made",
                hint="rename that branch, or choose another run id",
            )
        if names.fold(parts[1]) == folded:
            raise _run_reused(paths.run_id, f"branch {names.short_branch(branch)}")
    for directory in (names.worktrees_root(main_worktree) / "lionagi", paths.state_root.parent):
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                same = entry == paths.run_id
                if names.fold(entry) == folded and (not same or directory != paths.state_root.parent):
                    raise _run_reused(paths.run_id, str(directory / entry))


def _run_reused(run_id: str, by: str) -> LionwtError:
    return LionwtError(
        "id_reused",
        f"run id {run_id!r} is taken: {by} is there; nothing was made",
        hint="choose another run id",
    )


def _check_free(run: Run, request: Request) -> None:
    """Refuse ids that were used before in any state, and branches or paths that are in the way."""
    worktree.check_places(run.common_dir, run.main_worktree, run.file.run_id)
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
    for worker_id in request.workers:
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


def _check_predecessors(run: Run, request: Request) -> None:
    for worker_id in request.after:
        run.lease(worker_id)


def _open(paths: names.RunPaths, store: Store, plan: _Plan, made: _Made) -> None:
    """Open the run durably: first the private git directory, then the file that says so."""
    if plan.repository is None or plan.settings is None:
        raise LionwtError(
            "run_unknown",
            f"run {paths.run_id!r} was given up by the call that opened it; nothing was made",
            hint="run the same command again, with --target",
        )
    if store.worker_ids():
        raise LionwtError(
            "state_unreadable",
            f"{paths.run_file} is gone, but leases of run {paths.run_id!r} are in {paths.workspaces}; nothing was made",
            hint="restore it from a backup, or choose another run id",
        )
    made.opened = True
    make_private_dir(paths.state_root)
    snapshot.make_private_git_dir(paths.git_dir, plan.repository, plan.settings)
    store.open_run(plan.run)


def _unopen(store: Store) -> None:
    """Undo an opening, when no lease of the run is left."""
    with locks.held(store.paths.run_lock, "run"):
        if not store.worker_ids():
            store.paths.run_file.unlink(missing_ok=True)
            shutil.rmtree(store.paths.git_dir, ignore_errors=True)


def _reserve(run: Run, request: Request, made: _Made) -> None:
    """Write every lease with the intent to allocate, under the run lock: now the ids are taken."""
    _check_free(run, request)
    pinned = run.file
    now = time.time()
    for position, worker_id in enumerate(request.workers):
        lease = WorkerWorktreeLease(
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
        # Read as stored: a run's policy was resolved when it was opened, and outlives its own expiry.
        file = LeaseFile.model_validate(
            {
                "lease": lease,
                "policy": pinned.policy,
                "required_validations": pinned.required_validations,
                "predecessors": tuple(request.after),
                "owner": request.owner,
                "intent": Intent(kind="allocate", at=now, nonce=os.urandom(16).hex()),
                "history": (Transition(at=now, state="allocated", by="lease"),),
            },
            context=STORED,
        )
        made.files.append(file)
        made.files[-1] = run.store.write(file)
    point("lease.intended")


def _allocate(run: Run, made: _Made) -> list[LeaseFile]:
    """Make the worktrees of reserved leases."""
    for file in made.files:
        _make_artifact_dir(file, made)
    with run.registration():
        made.parents = True
        worktree.exclude_worktrees(run.common_dir)
        worktree.make_parents(run.main_worktree, run.file.run_id)
        made.branches = True
        try:
            worktree.create_branches(run.file, [file.lease.branch_name for file in made.files])
        except worktree.BranchesRefused:
            made.branches = False  # what stands there is not this call's
            raise
        identities = []
        for file in made.files:
            identities.append(worktree.register(run.file, file.worker_id, _nonce(file)))
            point("lease.registered")
    _populate(run, made.files, identities)
    point("lease.populated")
    allocated = []
    for file, identity in zip(made.files, identities, strict=True):
        allocated.append(run.store.write(file.model_copy(update={"identity": identity, "intent": None})))
    point("lease.recorded")
    return allocated


def _make_artifact_dir(file: LeaseFile, made: _Made) -> None:
    path = file.lease.artifact_path
    if path.is_symlink():
        raise LionwtError(
            "path_unsafe", f"{path} is a symbolic link; nothing was made", hint="artifacts need a directory"
        )
    made.directories += [parent for parent in (path, *path.parents) if not parent.exists()]
    make_private_dir(path)


def _populate(run: Run, files: list[LeaseFile], identities: list[Identity]) -> None:
    """Fill the worktrees, two at a time: more gain nothing (the disk is the limit)."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(worktree.populate, run.file, run.paths, file.worker_id, identity)
            for file, identity in zip(files, identities, strict=True)
        ]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def _nonce(file: LeaseFile) -> str:
    assert file.intent is not None and file.intent.nonce is not None
    return file.intent.nonce


def _failed(run: Run, error: BaseException, made: _Made) -> BaseException:
    """Undo what a failed call made; returns the error, which says whether anything was left."""
    if isinstance(error, OSError):
        error = from_os_error(error, "leasing")
    try:
        left = _undo(run, made)
        if made.opened:
            _unopen(run.store)
    except (LionwtError, OSError) as failure:
        left = [str(failure)]
    if not isinstance(error, LionwtError):
        return error
    message, hint = error.message, error.hint
    if error.code == "git_failed" and repository.is_partial_clone(run.common_dir):
        message += "; this is a partial clone, and lionwt fetches nothing"
        hint = f"fetch what is missing first: git -C {run.file.checkout.path} fetch --refetch --no-filter"
    if left:
        message += f"; what this call had made could not all be undone: {'; '.join(left)}"
        hint = f"clear what is named, then: lionwt reconcile {run.argument}"
    elif "nothing was" not in message:
        message += "; nothing was made"
    return LionwtError(error.code, message, hint=hint, diagnostics=error.diagnostics)


def _undo(run: Run, made: _Made) -> list[str]:
    """Undo an allocation; where that is not complete, the lease ends as ``teardown_failed``.

    Returns what was left. The registration lock is taken only when there is
    something to undo under it: the failure may have been that it is held.
    """
    left: list[str] = []
    if made.branches:
        with run.registration():
            for file in made.files:
                try:
                    left += _undo_one(run, file)
                except (LionwtError, OSError) as failure:
                    left.append(f"{file.worker_id}: {failure}")
    else:
        for file in made.files:
            run.store.forget(file.worker_id)
    for path in sorted(made.directories, reverse=True):  # the deepest first
        with contextlib.suppress(OSError):
            path.rmdir()
    if made.parents:
        left += trash.clear(run)
    return left


def _undo_one(run: Run, file: LeaseFile) -> tuple[str, ...]:
    removal = undo_allocation(run, file)
    if removal.worktree_removed and removal.branch_deleted:
        run.store.forget(file.worker_id)
    else:
        run.store.write(ended(_as_stored(run, file), removal, "lease"))
    return removal.errors


def _as_stored(run: Run, file: LeaseFile) -> LeaseFile:
    """``file`` with the serial that the last write of this call gave it."""
    try:
        return file.model_copy(update={"serial": run.lease(file.worker_id).serial})
    except LionwtError:
        return file


def undo_allocation(run: Run, file: LeaseFile) -> worktree.Removal:
    """Remove what carries the nonce of an unfinished allocation. Call under the registration lock."""
    nonce = _nonce(file)
    run.paths.saved_index(file.worker_id).unlink(missing_ok=True)
    admin = worktree.admin_with_nonce(run.common_dir, nonce)
    branch = names.HEADS + file.lease.branch_name
    path = file.lease.worktree_path
    identity = None
    if admin is not None:
        with contextlib.suppress(OSError):
            seen = os.lstat(path)
            identity = Identity(device=seen.st_dev, inode=seen.st_ino, admin_dir=str(admin), nonce=nonce)
        if identity is None:
            identity = Identity(device=0, inode=0, admin_dir=str(admin), nonce=nonce)
    elif os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)  # git made the directory and got no further
    known = repository.find_branches(str(run.common_dir), branch).get(branch)
    tip = run.file.base_sha if known is not None else None
    return worktree.remove(run.file, file.model_copy(update={"identity": identity}), tip)


def ended(file: LeaseFile, removal: worktree.Removal, by: str) -> LeaseFile:
    """The terminal file of a lease whose allocation failed."""
    clean = removal.worktree_removed and removal.branch_deleted
    ending = file.to("terminal", by, intent=None)
    record = WorkerWorktreeRecord(
        lease=ending.lease,
        policy=file.policy.completion,
        status="discarded" if clean else "teardown_failed",
        patch_ref=None,
        promoted_commit=None,
        teardown_errors=list(removal.errors),
        worktree_removed=removal.worktree_removed,
        branch_deleted=removal.branch_deleted,
        completed_at=time.time(),
    )
    return ending.model_copy(update={"record": record})
