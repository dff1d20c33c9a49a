"""Opening a run: what the first ``lease`` pins, and what later ones are compared with.

In the ADR's order: the policy is resolved first, then the target and its base
are read, then the operator's settings are taken, before any worker of the run
exists. Working that out makes nothing; the opening itself is the run's own
file, written last (ADR-0091 D1, A1.3; design sections 4 and 7).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from lionwt import git, locks, mounts, names, places, repository, snapshot, words
from lionwt.command import running
from lionwt.errors import LionwtError
from lionwt.faults import point
from lionwt.records import Check, CompletionPolicy, Owner, Place, Policy, RunFile
from lionwt.store import Store, make_private_dir
from lionwt.values import Value


class Request(Value, frozen=True):
    """One call of ``lease``. What is None was not given, and then the run's pinned value counts."""

    workers: Sequence[str]
    target: str | None = None
    session_id: str | None = None
    default_session: str | None = None  # counts only when the run is opened
    start: Path | None = None
    policy: Policy | None = None
    completion: CompletionPolicy | None = None
    retain_until: float | None = None
    retain_for: float | None = None
    required: Sequence[str] = ()
    merged: Sequence[Check] = ()
    after: Sequence[str] = ()
    owner: Owner | None = None
    base_sha: str | None = None
    home: Path | None = None  # LIONAGI_HOME, unless told


class Plan(Value, frozen=True):
    """What opening the run would write."""

    run: RunFile
    repository: repository.Repository | None = None
    settings: snapshot.Settings | None = None

    @property
    def opens(self) -> bool:
        return self.repository is not None


def prepare(paths: names.RunPaths, store: Store, request: Request) -> Plan:
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
                store.require_no_leases("nothing was made")
                raise
    return compare(opened, paths, request)


def _plan(paths: names.RunPaths, request: Request) -> Plan:
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
    config = snapshot.read_operator_config(request.home or names.lionagi_home(os.environ))
    found = repository.discover(request.start or repository.place_of_start())
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
    snapshot.require_filters_outside(settings, found.common_dir, target.oid)
    _refuse_nested(paths, found)
    places.check(found.common_dir, found.main_worktree, paths.run_id)
    _check_run_names(paths, common, found.main_worktree)
    _warn_of_state_in_a_checkout(paths, found)
    run = RunFile(
        run_id=paths.run_id,
        session_id=request.session_id or request.default_session or paths.run_id,
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
        merged_checks=tuple(request.merged),
        protected=tuple(dict.fromkeys(protected)),
        user_name=settings.user_name,
        user_email=settings.user_email,
        config_sha256=repository.config_fingerprint(found.common_dir),
        hooks_sha256=repository.hooks_fingerprint(found.common_dir),
        opened_at=time.time(),
    )
    return Plan(run, found, settings)


def _policy(request: Request) -> Policy:
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
    if until is not None and until <= time.time():
        raise LionwtError("usage", "retention_until must be in the future; nothing was made")
    return Policy(
        mode="worktree_per_worker",
        completion=request.completion or "patch_only",
        retain_worktree_on_resolution=until is not None,
        retention_until=until,
    )


def compare(run: RunFile, paths: names.RunPaths, request: Request) -> Plan:
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
    elif request.merged and tuple(request.merged) != run.merged_checks:
        wrong = f"the merge checks are {', '.join(check.name for check in run.merged_checks) or 'none'}"
    elif request.target is not None and not _same_target(run, request.target):
        wrong = f"the target is {names.short_branch(run.target)!r}"
    elif request.start is not None and repository.discover(request.start).checkout != Path(run.checkout.path):
        wrong = f"the checkout is {run.checkout.path}"
    if wrong:
        raise LionwtError(
            "run_mismatch",
            f"{wrong}: that was pinned when run {run.run_id!r} was opened; nothing was made",
            hint="leave it out, or open another run",
        )
    return Plan(run)


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
    owned = (worktrees / "lionagi", worktrees / ".trash")  # a checkout of the operator's may lie beside them
    if any(found.checkout.is_relative_to(place) for place in owned):
        raise LionwtError(
            "path_unsafe",
            f"{found.checkout} is a worker's worktree, which goes when its lease ends; nothing was made",
            hint=f"name the operator's checkout: {words.command('--repo', found.main_worktree)}",
        )
    for place in (found.checkout, found.main_worktree, found.common_dir):
        if place.is_relative_to(paths.state_root):
            raise LionwtError(
                "path_unsafe",
                f"the state root {paths.state_root} holds the repository {place}; nothing was made",
                hint="name the run by an id, or by a directory of its own",
            )
    for what, path in (("state root", paths.state_root), ("artifact root", paths.artifact_root)):
        if path.is_relative_to(worktrees):
            raise LionwtError(
                "path_unsafe",
                f"the {what} {path} lies among the worktrees in {worktrees}; nothing was made",
                hint="choose a directory outside",
            )


def _warn_of_state_in_a_checkout(paths: names.RunPaths, found: repository.Repository) -> None:
    """It may lie there, if the operator wants that; one ``git clean -ffdx`` takes every lease with it."""
    for checkout in dict.fromkeys((found.checkout, found.main_worktree)):
        if paths.state_root.is_relative_to(checkout) and not paths.state_root.is_relative_to(found.common_dir):
            with running() as command:
                command.warn(
                    f"the run's state {paths.state_root} lies in the checkout {checkout}: git clean would delete it, "
                    "and with it every lease; better set LIONAGI_HOME to a directory outside"
                )
            return


def check_artifact_paths(paths: names.RunPaths, run: RunFile, workers: Sequence[str]) -> None:
    """Raise ``path_unsafe`` where a worker's grant would reach lionwt's own state or the repository.

    An artifact root may be the state root itself: then the worker id ``git`` names the private git directory.
    """
    owned = [paths.git_dir, paths.workspaces, paths.run_file, paths.state_root / "run.json", Path(run.common_dir.path)]
    for worker_id in workers:
        granted = paths.artifacts(worker_id)
        met = next((path for path in owned if _overlap(granted, path)), None)
        if met is not None:
            raise LionwtError(
                "path_unsafe",
                f"the artifacts of {worker_id!r} would lie in {granted}, which overlaps with {met}; nothing was made",
                hint="choose another worker id, or an artifact root of its own",
            )


def _overlap(one: Path, other: Path) -> bool:
    one, other = (Path(names.fold(str(path))) for path in (one, other))  # as the least careful file system does
    return one.is_relative_to(other) or other.is_relative_to(one)


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
                if names.fold(entry) != folded or (same and directory == paths.state_root.parent):
                    continue
                if same and not (directory / entry).is_symlink() and not os.listdir(directory / entry):
                    continue  # what was undone to its last directory leaves the id free
                raise _run_reused(paths.run_id, str(directory / entry))


def _run_reused(run_id: str, by: str) -> LionwtError:
    return LionwtError(
        "id_reused",
        f"run id {run_id!r} is taken: {by} is there; nothing was made",
        hint="choose another run id",
    )


def open_run(paths: names.RunPaths, store: Store, plan: Plan) -> None:
    """Open the run durably: first the private git directory, then the file that says so."""
    if plan.repository is None or plan.settings is None:
        raise LionwtError(
            "run_unknown",
            f"run {paths.run_id!r} was given up by the call that opened it; nothing was made",
            hint="run the same command again, with --target",
        )
    store.require_no_leases("nothing was made")
    make_private_dir(paths.state_root)
    snapshot.make_private_git_dir(paths.git_dir, plan.repository, plan.settings)
    point("lease.prepared")
    store.open_run(plan.run)


def unopen(store: Store) -> None:
    """Undo an opening, when no lease of the run is left."""
    with locks.held(store.paths.run_lock, "run"):
        if not store.worker_ids():
            store.paths.run_file.unlink(missing_ok=True)
            point("lease.closed")
            with contextlib.suppress(OSError):
                mounts.remove_tree(store.paths.git_dir)
            for leftover in store.paths.state_root.glob(f".{store.paths.run_file.name}.*.tmp"):  # of one that died
                leftover.unlink(missing_ok=True)
