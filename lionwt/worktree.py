"""Make, identify and remove a worker's worktree.

Made by halves: the registration (branch, admin directory, empty tree) in the
shared directory under the registration lock, because git's own ``worktree add``
fails when others are being made beside it; then the files from the private
directory, where no hook or filter of a worker's exists.

Removed by halves as well, and by what a look finds: the directory is known by
device and inode, moved to the trash, and only when it is gone is the one
registration retired and the branch deleted by compare-and-swap. ``git worktree
prune`` is never called, it removes what others are making.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from lionwt import branches, git, mounts, names, registration, store, words
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.records import Identity, LeaseFile, RunFile
from lionwt.values import Value


def register(run: RunFile, worker_id: str, nonce: str) -> Identity:
    """Register one empty worktree on its branch; returns its identity.

    Call under the registration lock. On failure the caller undoes it by ``nonce``.
    """
    path = names.worktree_path(Path(run.main_worktree.path), run.run_id, worker_id)
    shared = git.shared(run.common_dir.path, work_tree=run.main_worktree.path)
    shared.run(
        "worktree",
        "add",
        "--quiet",
        "--no-checkout",
        "--lock",
        "--reason",
        registration.lock_reason(nonce),
        "--",
        path,
        names.worker_branch(run.run_id, worker_id),
    )
    named = (path / ".git").read_bytes()
    admin = Path(git.text(named[len(b"gitdir: ") :].rstrip(b"\n")))
    if admin.parent != Path(run.common_dir.path) / "worktrees" or registration.read_nonce(admin) != nonce:
        raise LionwtError("git_failed", f"git registered {path} at {admin}, which does not carry the lease's nonce")
    _drop_sparse_settings(admin)
    seen = os.lstat(path)
    return Identity(device=seen.st_dev, inode=seen.st_ino, admin_dir=str(admin), nonce=nonce)


def _drop_sparse_settings(admin: Path) -> None:
    """git copies the operator's sparse settings into a new worktree; a worker sees everything."""
    (admin / "info" / "sparse-checkout").unlink(missing_ok=True)
    config = admin / "config.worktree"
    if config.exists():
        for key in ("core.sparseCheckout", "core.sparseCheckoutCone", "index.sparse"):
            editor = git.Git(env=git.shared(str(admin.parent.parent)).env)
            editor.run("config", "--file", config, "--unset-all", key, ok=(0, 5))


def populate(run: RunFile, paths: names.RunPaths, worker_id: str, identity: Identity, stopped: int) -> None:
    """Fill a registered worktree from the base, and keep its index for the freeze.

    Given up as soon as ``stopped`` can be read.
    """
    path = names.worktree_path(Path(run.main_worktree.path), run.run_id, worker_id)
    index = Path(identity.admin_dir) / "index"
    private = git.private(paths.git_dir, run.common_dir.path, work_tree=path, index=index)
    private.stopped_by(stopped).run("read-tree", "-m", "-u", run.base_sha, timeout=git.CONTENT)
    saved = paths.saved_index(worker_id)
    copy_index(index, saved)
    saved.chmod(0o600)
    store.sync_file(saved)
    store.sync_dir(saved.parent)


def copy_saved_index(saved: Path, target: Path, object_format: str) -> bool:
    """Copy the index of the lease's beginning; False where there is none that is whole.

    git does not look at the checksum, and a cut-off index would fail every
    freeze; what it says can be had from the base.
    """
    try:
        content = saved.read_bytes()
    except FileNotFoundError:
        return False
    digest = hashlib.new(object_format, usedforsecurity=False)
    digest.update(content[: -digest.digest_size])
    if content[-digest.digest_size :] != digest.digest():
        return False
    copy_index(saved, target)
    return True


def copy_index(source: Path, target: Path) -> None:
    """Copy an index with its modification time: git decides by it which files to look at again."""
    shutil.copyfile(source, target)
    seen = os.stat(source)
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def require_identity(file: LeaseFile, *, registered: bool = True) -> Identity:
    """Raise ``worktree_moved`` unless the directory at the lease's path is the one that was leased.

    Its registration must carry the lease; without ``registered`` it may also be gone altogether.
    """
    identity = file.identity
    path, worker_id = file.lease.worktree_path, file.worker_id
    is_there = os.path.lexists(path)
    if identity is not None and (moved := moved_elsewhere(file, identity)):
        raise moved
    if identity is None or (is_there and not is_leased_directory(path, identity)):
        raise LionwtError(
            "worktree_moved",
            f"{path} is not the directory that was leased to {worker_id!r}; nothing was changed",
            hint="if it was moved, put it back; if it is lost, move away what lies there, "
            "then run the same command again; a symbolic link in its place is never followed",
        )
    admin = Path(identity.admin_dir)
    is_registered = os.path.lexists(admin)
    if is_registered and registration.read_nonce(admin) != identity.nonce:
        raise LionwtError(
            "worktree_moved",
            f"the registration {admin} no longer carries the lease of {worker_id!r}; nothing was changed",
            hint=f"{f'its files are still in {path}; ' if is_there else ''}if that is its worktree, "
            f"give the lock back: {registration.lock_again(identity, path)}",
        )
    end = words.command("lionwt", "reconcile", file.lease.state_path.parent.parent, "--takeover")
    if not is_there:
        raise LionwtError(
            "worktree_moved",
            f"{path}, which was leased to {worker_id!r}, is gone; nothing was changed",
            hint=f"if it was moved, put it back; if not, save what is left and end the unfinished leases: {end}",
        )
    if registered and not is_registered:
        raise LionwtError(
            "worktree_moved",
            f"the registration {admin} of {worker_id!r} is gone; nothing was changed",
            hint=f"its files are still in {path}; save them and end the unfinished leases: {end}",
        )
    return identity


def is_leased_directory(path: Path, identity: Identity) -> bool:
    try:
        seen = os.lstat(path)
    except OSError:
        return False
    same = (seen.st_dev, seen.st_ino) == (identity.device, identity.inode)
    return same and stat.S_ISDIR(seen.st_mode) and os.path.realpath(path) == str(path)


def moved_elsewhere(file: LeaseFile, identity: Identity) -> LionwtError | None:
    """Why what was leased is neither here nor gone, and the way back; None where git knows of no other place."""
    path = file.lease.worktree_path
    if is_leased_directory(path, identity) or (place := registration.moved_to(identity, path)) is None:
        return None
    blocked = f"move away what lies at {path}, then " if os.path.lexists(path) else ""
    seen = os.lstat(place)
    if (seen.st_dev, seen.st_ino) == (identity.device, identity.inode):
        hint = f"{blocked}move it back: {registration.move_back(identity, place, path)}"
    else:
        end = words.command("lionwt", "reconcile", file.lease.state_path.parent.parent, "--takeover")
        hint = (
            f"that is a copy and not the directory that was leased; {blocked or 'if nobody works in it any more, '}"
            f"take it from git, which leaves its files, and end the unfinished leases: "
            f"{words.command('rm', place / '.git')} && {end}"
        )
    return LionwtError(
        "worktree_moved",
        f"the worktree of {file.worker_id!r} was moved from {path} to {place}; it was left as it is",
        hint=hint,
    )


class Removal(Value, frozen=True):
    """What a look found after a removal."""

    worktree_removed: bool
    branch_deleted: bool
    errors: tuple[str, ...]


def remove(run: RunFile, file: LeaseFile, branch_tip: str | None) -> Removal:
    """Remove the worktree, its registration, the anchors and the branch, and say what is gone.

    Call under the registration lock. Safe to repeat: what is absent already
    counts as removed; what is not the lease's own is left and is an error.
    ``branch_tip`` is the only commit at which the branch is deleted.
    """
    errors: list[str] = []
    path = file.lease.worktree_path
    try:
        gone = _to_trash(run, file, errors)
        point("teardown.trashed")
        if gone:
            gone = _retire(run, file, errors)
            point("teardown.retired")
    except OSError as error:
        errors.append(str(from_os_error(error, f"removing {path}")))
        gone = False
    deleted = branches.delete(run, file, branch_tip, errors) if gone else False
    if not gone:
        what = "the worktree" if os.path.lexists(path) else "its registration"
        errors.append(f"the branch was kept because {what} is still there")
    point("teardown.branch_deleted")
    return Removal(gone and not os.path.lexists(path), deleted, tuple(errors))


def _to_trash(run: RunFile, file: LeaseFile, errors: list[str]) -> bool:
    path, identity = file.lease.worktree_path, file.identity
    if identity is not None and (moved := moved_elsewhere(file, identity)):
        errors.append(f"{moved.message}; {moved.hint}")
        return False
    if not os.path.lexists(path):
        return True
    if identity is None or not is_leased_directory(path, identity):
        errors.append(f"{path} is not the directory that was leased; it was left as it is")
        return False
    if foreign := _foreign_registration(path, identity):  # known before anything goes: half a removal helps nobody
        errors.append(foreign)
        return False
    # The registration goes after the directory: what is mounted in it is seen before anything goes.
    mounted = [reason for place in (path, Path(identity.admin_dir)) if (reason := mounts.refusal(place))]
    if mounted:
        errors += mounted
        return False
    trash = names.worktrees_root(Path(run.main_worktree.path)) / ".trash"
    try:
        os.mkdir(trash, 0o700)
    except FileExistsError:
        if trash.is_symlink() or not trash.is_dir():
            errors.append(f"{trash} is not a directory of its own; {path} was left as it is")
            return False
    if store.shared(Path(run.common_dir.path)):
        store.open_to_group(trash)
    aside = trash / names.trash_name(run.run_id, file.worker_id)
    os.rename(path, aside)
    # The look that counts: what was moved is what was leased.
    seen = os.lstat(aside)
    if (seen.st_dev, seen.st_ino) != (identity.device, identity.inode):
        os.rename(aside, path)
        errors.append(f"{path} changed while it was removed; it was left as it is")
        return False
    store.sync_dir(path.parent)
    return True


def _foreign_registration(path: Path, identity: Identity) -> str | None:
    """Why the registration is not the lease's to remove, and the way back; None where it is, or is gone."""
    admin = Path(identity.admin_dir)
    if not os.path.lexists(admin) or (not admin.is_symlink() and registration.read_nonce(admin) == identity.nonce):
        return None
    return (
        f"the registration {admin} does not carry this lease; it was left as it is; if it is that worktree's, "
        f"give the lock back: {registration.lock_again(identity, path)}"
    )


def _retire(run: RunFile, file: LeaseFile, errors: list[str]) -> bool:
    identity = file.identity
    if identity is None:
        return True
    admin = Path(identity.admin_dir)
    # Out of git's sight by one rename: deleted in place, a crash would leave
    # half a registration that says no longer whose it is.
    aside = _set_aside(Path(run.common_dir.path), identity.nonce)
    if os.path.lexists(admin):
        if foreign := _foreign_registration(file.lease.worktree_path, identity):
            errors.append(foreign)
            return False
        if mounted := mounts.refusal(admin):
            errors.append(mounted)
            return False
        os.rename(admin, aside)
        store.sync_dir(admin.parent)
        point("teardown.set_aside")
    drop_set_aside(admin.parent.parent, identity.nonce)
    return True


def _set_aside(common_dir: Path, nonce: str) -> Path:
    return common_dir / "lionwt" / f"retired.{nonce}"


def drop_set_aside(common_dir: Path, nonce: str) -> None:
    """Delete a registration that was set aside, also by somebody who died then. Call under the registration lock."""
    aside = _set_aside(common_dir, nonce)
    if os.path.lexists(aside):
        mounts.remove_tree(aside)
    try:
        os.rmdir(common_dir / "worktrees")
    except OSError:
        pass
