"""Allocating reserved leases: worktrees for all of them, or for none.

A nonce in each lease's intent is in its registration too, so that whatever a
failure or a crash leaves half-made can be told from everything else and undone
(design section 7, allocate). ``reconcile`` undoes with the same functions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import Final

from lionwt import branches, names, places, registration, repository, trash, words, worktree
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.opening import unopen
from lionwt.records import (
    Identity,
    LeaseFile,
    Record,
)
from lionwt.session import Run
from lionwt.store import make_private_dir, shared
from lionwt.together import at_once
from lionwt.values import State

#: An index beyond this size (bytes; some thousands of files) is worth waiting for.
_LARGE_INDEX: Final = 256 << 10
#: A file system's clock may stand this far (seconds) behind the system's.
_TICK: Final = 0.03


class Made(State):
    """What a call has made so far, and would have to undo."""

    opened: bool = False
    files: list[LeaseFile] = []
    directories: list[Path] = []
    parents: bool = False
    branches: bool = False


def allocate(run: Run, made: Made) -> list[LeaseFile]:
    """Make the worktrees of reserved leases."""
    for file in made.files:
        _make_artifact_dir(file, made)
    with run.registration():
        made.parents = True
        places.exclude(run.common_dir)
        places.make_parents(run.main_worktree, run.file.run_id, is_shared=shared(run.common_dir))
        places.hide(run.file)
        made.branches = True
        try:
            branches.create(run.file, [file.lease.branch_name for file in made.files])
        except branches.BranchesRefused:
            made.branches = False  # what stands there is not this call's
            raise
        point("lease.branched")
        identities = []
        for file in made.files:
            identities.append(worktree.register(run.file, file.worker_id, nonce_of(file)))
            point("lease.registered")
    _populate(run, made.files, identities)
    point("lease.populated")
    allocated = []
    for file, identity in zip(made.files, identities, strict=True):
        allocated.append(run.store.write(file.having(identity=identity, intent=None)))
    point("lease.recorded")
    return allocated


def _make_artifact_dir(file: LeaseFile, made: Made) -> None:
    path = file.lease.artifact_path
    if path.is_symlink():
        raise LionwtError(
            "path_unsafe", f"{path} is a symbolic link; nothing was made", hint="artifacts need a directory"
        )
    made.directories += [parent for parent in (path, *path.parents) if not parent.exists()]
    make_private_dir(path)


def _populate(run: Run, files: list[LeaseFile], identities: list[Identity]) -> None:
    """Fill the worktrees, two at a time: more gain nothing (the disk is the limit)."""
    at_once(
        [
            functools.partial(worktree.populate, run.file, run.paths, file.worker_id, identity)
            for file, identity in zip(files, identities, strict=True)
        ],
        most=2,
    )
    _let_the_second_pass(run, files, identities)


def _let_the_second_pass(run: Run, files: list[LeaseFile], identities: list[Identity]) -> None:
    """Give large indexes a second of their own, while nobody else writes there yet.

    git takes each file of the index's own second for possibly changed and reads
    it again, at every look of the worker's and of the freeze.
    """
    large = []
    for file, identity in zip(files, identities, strict=True):
        index = Path(identity.admin_dir, "index")
        if index.stat().st_size > _LARGE_INDEX:
            large += [index, run.paths.saved_index(file.worker_id)]
    if not large:
        return
    newest = max(index.stat().st_mtime_ns for index in large) // 10**9
    wait = newest + 1 - time.time()
    if -_TICK < wait <= 1:
        time.sleep(wait + _TICK)
    for index in large:
        os.utime(index)


def nonce_of(file: LeaseFile) -> str:
    assert file.intent is not None and file.intent.nonce is not None
    return file.intent.nonce


def failed(run: Run, error: BaseException, made: Made) -> BaseException:
    """Undo what a failed call made; returns the error, which says whether anything was left."""
    if isinstance(error, OSError):
        error = from_os_error(error, "leasing")
    try:
        left = _undo(run, made)
        if made.opened:
            unopen(run.store)
    except Exception as failure:
        left = [str(failure)]
    if not isinstance(error, LionwtError):
        return error
    message, hint = error.message, error.hint
    if error.code == "git_failed" and repository.is_partial_clone(run.common_dir):
        message += "; this is a partial clone, and lionwt fetches nothing"
        fetch = words.command("git", "-C", run.file.checkout.path, "fetch", "--refetch", "--no-filter")
        hint = f"fetch what is missing first: {fetch}"
    if left:
        message += f"; what this call had made could not all be undone: {'; '.join(left)}"
        hint = f"clear what is named, then: lionwt reconcile {run.argument}"
    elif "nothing was" not in message:
        message += "; nothing was made"
    return LionwtError(error.code, message, hint=hint, diagnostics=error.diagnostics)


def _undo(run: Run, made: Made) -> list[str]:
    """Undo an allocation; where that is not complete, the lease ends as ``teardown_failed``.

    Returns what was left. The registration lock is taken only when there is
    something to undo under it: the failure may have been that it is held.
    """
    left: list[str] = []
    with run.registration() if made.branches else contextlib.nullcontext():
        for file in made.files:
            try:
                left += _undo_one(run, file) if made.branches else _forget(run, file)
            except Exception as failure:  # whatever befalls one, the others are undone
                left.append(f"{file.worker_id}: {failure}")
    for path in sorted(made.directories, reverse=True):  # the deepest first
        with contextlib.suppress(OSError):
            path.rmdir()
    if made.parents:
        left += trash.clear(run)
    return left


def _undo_one(run: Run, file: LeaseFile) -> tuple[str, ...]:
    file, removal = undo_allocation(run, file)
    if removal.worktree_removed and removal.branch_deleted:
        return _forget(run, file)
    run.store.write(ended(_as_stored(run, file), removal, "lease"))
    return removal.errors


def _forget(run: Run, file: LeaseFile) -> tuple[str, ...]:
    run.store.forget(file.worker_id)
    return ()


def _as_stored(run: Run, file: LeaseFile) -> LeaseFile:
    """``file`` with the serial that the last write of this call gave it."""
    try:
        return file.having(serial=run.lease(file.worker_id).serial)
    except LionwtError:
        return file


def undo_allocation(run: Run, file: LeaseFile) -> tuple[LeaseFile, worktree.Removal]:
    """Remove what carries the nonce of an unfinished allocation. Call under the registration lock.

    Returns the file with the identity that was found by the nonce, which the
    intent takes with it: what could not be removed is found by it again.
    """
    nonce = nonce_of(file)
    path = file.lease.worktree_path
    admin = registration.admin_with_nonce(run.common_dir, nonce, path)
    run.paths.saved_index(file.worker_id).unlink(missing_ok=True)
    branch = names.HEADS + file.lease.branch_name
    identity = None
    if admin is not None:
        # What somebody else has put in its place is nobody's of lionwt's: no directory has inode 0.
        identity = Identity(device=0, inode=0, admin_dir=str(admin), nonce=nonce)
        with contextlib.suppress(OSError):
            seen = os.lstat(path)
            if registration.was_made_for(path, admin):
                identity = Identity(device=seen.st_dev, inode=seen.st_ino, admin_dir=str(admin), nonce=nonce)
    else:
        worktree.drop_set_aside(run.common_dir, nonce)
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)  # git made the directory and got no further
    tip = run.file.base_sha if repository.find_tip(str(run.common_dir), branch) is not None else None
    file = file.having(identity=identity)
    return file, worktree.remove(run.file, file, tip)


def ended(file: LeaseFile, removal: worktree.Removal, by: str) -> LeaseFile:
    """The terminal file of a lease whose allocation failed."""
    clean = removal.worktree_removed and removal.branch_deleted
    ending = file.to("terminal", by, intent=None)
    record = Record(
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
    return ending.having(record=record)
