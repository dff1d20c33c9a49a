"""A worker's branch: made with the others of its call, all or none, and deleted at the tip that was recorded.

What stands in the way of a deletion is found by a look; a branch that moved or
is checked out somewhere is kept and named. The anchors go in the same
transaction (design section 7, allocate and teardown).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from lionwt import files, git, names, repository, words
from lionwt.errors import LionwtError
from lionwt.paths import drop_empty_dirs
from lionwt.records import LeaseFile, RunFile


class BranchesRefused(LionwtError):
    """The branches were not created, not one of them."""


def create(run: RunFile, branches: Sequence[str]) -> None:
    """Create the workers' branches at the base, all or none.

    Raises :class:`BranchesRefused` when git refused before it made anything: a
    branch that stands there already is not the caller's to undo.
    """
    shared = git.shared(run.common_dir.path)
    commands = [f"create {names.HEADS}{branch}\0{run.base_sha}\0".encode() for branch in branches]
    result = git.update_refs(shared, commands)
    if not result.code:
        return
    failure = git.failure(("update-ref",), result)
    if b"prepare: ok" in result.out:
        raise failure
    taken = repository.find_branches(run.common_dir.path, *(names.HEADS + branch for branch in branches))
    if taken:
        raise BranchesRefused(
            "name_taken",
            f"branch {names.short_branch(next(iter(taken)))!r} was made by somebody else meanwhile; nothing was made",
            hint="choose another worker id, or look at that branch and rename it",
        )
    raise BranchesRefused(failure.code, f"{failure.message}; nothing was made", hint=failure.hint)


def delete(run: RunFile, file: LeaseFile, tip: str | None, errors: list[str]) -> bool:
    """Delete the branch at ``tip`` and the anchors; True when a look finds the branch gone."""
    branch = names.HEADS + file.lease.branch_name
    common_dir = run.common_dir.path
    shared = git.shared(common_dir)
    anchors = repository.find_branches(common_dir, names.anchor_prefix(run.run_id, file.worker_id))
    commands = [_delete(anchor.full, anchor.oid) for anchor in anchors.values()]
    used_by = _checked_out_at(run, branch)
    if tip is not None and used_by is None and not git.update_refs(shared, [*commands, _delete(branch, tip)]).code:
        commands = []
    still = repository.find_tip(common_dir, branch)
    if still is not None and still != tip:
        delete = words.command("git", "-C", run.main_worktree.path, "branch", "-D", file.lease.branch_name)
        errors.append(
            f"branch {file.lease.branch_name} moved to {still} after the freeze; it was kept "
            f"(if nobody wants it: {delete})"
        )
    elif still is not None and used_by is not None:
        errors.append(f"branch {file.lease.branch_name} is checked out at {used_by}; it was kept")
    elif still is not None:
        commands.append(_delete(branch, still))
    _drop_stale_locks(common_dir, names.anchor_prefix(run.run_id, file.worker_id))
    if commands:  # without what stood in the way
        result = git.update_refs(shared, commands)
        if result.code:
            errors.append(f"deleting {file.lease.branch_name}: {git.text(result.err).strip()}")
        still = repository.find_tip(common_dir, branch)
    if still is None and os.path.isfile(broken := os.path.join(common_dir, branch)):
        errors.append(f"{broken} names no commit, so git sees no branch there; it was left as it is")
        return False
    return still is None


def _drop_stale_locks(common_dir: str, prefix: str) -> None:
    """Remove the locks of anchors that a git which died has left: under the lease's lock nobody else writes there."""
    for lock in Path(common_dir, prefix).glob("*.lock"):
        with contextlib.suppress(OSError):
            lock.unlink()
        drop_empty_dirs(os.fsencode(common_dir), os.fsencode(lock.relative_to(common_dir)))


def _delete(ref: str, oid: str) -> bytes:
    return b"delete " + os.fsencode(ref) + b"\0" + os.fsencode(oid) + b"\0"


def _checked_out_at(run: RunFile, branch: str) -> str | None:
    """The worktree whose HEAD is ``branch``, or None; asked for this, git reads each registration many times over."""
    common_dir = run.common_dir.path
    if _is_head(f"{common_dir}/HEAD", branch):
        return run.main_worktree.path
    root = f"{common_dir}/worktrees"
    for entry in os.listdir(root) if os.path.isdir(root) else ():
        if _is_head(f"{root}/{entry}/HEAD", branch):
            try:
                return os.path.dirname(git.text(files.read_small(Path(root, entry, "gitdir")).strip()))
            except OSError:
                return f"{root}/{entry}"
    return None


def _is_head(path: str, branch: str) -> bool:
    try:
        # As short as can be, since there may be thousands; a FIFO is not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return repository.linked_ref(path) == branch
    try:
        return os.read(fd, 4096).strip() == b"ref: " + os.fsencode(branch)
    except OSError:
        return False
    finally:
        os.close(fd)
