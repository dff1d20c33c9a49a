"""The checkout's ``index.lock``, held from before the target moves until its new index stands.

While it is there git refuses to commit, so nothing can come between the move and
the checkout's update (design section 7, promote 5 and 6). The lock appears with
its owner's name in it, so that one which was left before any intent was on disk
can be told from a git's, and removed; a copy of the index beside it becomes the
new one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import Final

from lionwt import store, words, worktree
from lionwt.checkout import Checkout, blocked
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.files import open_regular
from lionwt.store import sync_dir
from lionwt.values import State

#: Seconds to wait for a git of the operator's to finish with the index.
INDEX_WAIT: Final = 5.0
#: What the stamp in a lock does not exceed (bytes): two names.
_STAMP: Final = 8192


class Stamp(State):
    """What lionwt wrote into the lock that is there: its inode, the copy's name, the lease's file."""

    inode: int
    copy: str
    state_path: Path


class IndexLock(State):
    """The lock of a checkout in our hands, and the copy of the index that will replace it."""

    root: Path
    git_dir: Path
    inode: int
    copy: Path

    @property
    def path(self) -> Path:
        return _path(self.git_dir)

    @property
    def index(self) -> Path:
        return self.git_dir / "index"

    def is_held(self) -> bool:
        """Whether the lock at its path is this one: a freed inode's number is soon used again, so the stamp counts."""
        stamp = _stamp(self.git_dir)
        return stamp is not None and (stamp.inode, stamp.copy) == (self.inode, self.copy.name)

    def fill(self) -> None:
        """Copy the index beside itself, where git also finds the other half of a split one."""
        if self.index.exists():
            worktree.copy_index(self.index, self.copy)
            os.chmod(self.copy, stat.S_IMODE(self.index.stat().st_mode))

    def sweep(self) -> None:
        """Remove what the dead left: under the promotion lock and this one, every copy is theirs."""
        for leftover in self.git_dir.glob("lionwt-*.index*"):
            leftover.unlink(missing_ok=True)

    def empty(self) -> None:
        """Remove the copy, what a git that worked on it left, and the name that the lock was made under."""
        for path in (self.copy, Path(f"{self.copy}.lock"), Path(f"{self.copy}.new")):
            path.unlink(missing_ok=True)

    def give_back(self) -> None:
        """Undo the taking: nothing of the checkout has been touched."""
        self.empty()
        self._release()

    def install(self) -> None:
        """Make the updated copy the index, and only then release the lock; raises ``checkout_behind``.

        The lock keeps its inode to the end: whatever is found at its path after
        a crash is the journalled one, or it is not lionwt's.
        """
        if not self.is_held():
            self.copy.unlink(missing_ok=True)
            raise LionwtError(
                "checkout_behind",
                f"landed, but {self.path} was taken away meanwhile, so the index of {self.root} was left as it is",
                hint="promote again: that brings the checkout forward",
            )
        if self.copy.exists():
            fd = os.open(self.copy, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(self.copy, self.index)
            sync_dir(self.git_dir)
        point("promote.index_installed")
        self._release()
        sync_dir(self.git_dir)

    def _release(self) -> None:
        if self.is_held():
            self.path.unlink(missing_ok=True)


def take(checkout: Checkout, state_path: Path) -> IndexLock:
    """Take the index's lock for the lease of ``state_path``, and copy the index; raises ``checkout_blocked``."""
    lock = IndexLock(checkout.root, checkout.git_dir, 0, checkout.git_dir / f"lionwt-{os.urandom(6).hex()}.index")
    made = Path(f"{lock.copy}.new")
    try:
        with open(made, "xb") as out:
            out.write(b"lionwt %s %s\n" % (os.fsencode(lock.copy.name), os.fsencode(state_path)))
        lock.inode = made.stat().st_ino
        deadline = time.monotonic() + INDEX_WAIT
        while not _link(made, lock.path):
            if _drop_abandoned(lock.root, lock.git_dir):
                continue
            if time.monotonic() >= deadline:
                raise blocked(
                    f"{lock.path} is there: a git works in the checkout, or one died in it",
                    f"wait for it; if no git runs there, remove that file: {words.command('rm', lock.path)}",
                )
            time.sleep(0.05)
        point("promote.index_linked")
    except OSError as error:
        raise from_os_error(error, f"locking the index of {lock.root}") from error
    finally:
        made.unlink(missing_ok=True)
    try:
        lock.sweep()
        lock.fill()
    except BaseException:
        lock.give_back()
        raise
    return lock


def left_behind(checkout: Checkout, inode: int | None, copy: str | None) -> IndexLock:
    """The lock that a dead landing journalled, whether or not it is still there."""
    return IndexLock(checkout.root, checkout.git_dir, inode or 0, checkout.git_dir / (copy or "none"))


def is_held_for(checkout: Checkout, state_path: Path) -> bool:
    """Whether the lock that is there was taken for the lease of ``state_path``."""
    stamp = _stamp(checkout.git_dir)
    return stamp is not None and stamp.state_path == state_path


def drop_abandoned(checkout: Checkout) -> None:
    """Remove a lock that a landing left before its intent was written, where there is one.

    Call under the promotion lock. A landing that was begun has its intent,
    and its lock stays until that is settled.
    """
    with contextlib.suppress(LionwtError):
        _drop_abandoned(checkout.root, checkout.git_dir)


def _link(made: Path, lock: Path) -> bool:
    try:
        os.link(made, lock)
    except FileExistsError:
        return False
    return True


def _drop_abandoned(root: Path, git_dir: Path) -> bool:
    """Remove a lock of lionwt's own that no landing accounts for; True when there was one.

    Under the promotion lock nobody else is landing here. A landing that was
    begun by another run has its intent on disk, and its lock stays.
    """
    stamp = _stamp(git_dir)
    if stamp is None:
        return False
    owner = stamp.state_path
    try:
        intent = store.read_json(owner).get("intent") or {}
    except FileNotFoundError:
        intent = {}
    if (intent.get("landing") or {}).get("index_lock") == stamp.inode:
        raise blocked(
            f"a landing of {owner.stem!r} was interrupted and its index lock is still in {root}",
            f"finish it first: {words.command('lionwt', 'reconcile', owner.parent.parent)}",
        )
    IndexLock(root, git_dir, stamp.inode, git_dir / stamp.copy).give_back()
    return True


def _path(git_dir: Path) -> Path:
    return git_dir / "index.lock"


def _stamp(git_dir: Path) -> Stamp | None:
    try:
        with open_regular(_path(git_dir)) as file:
            inode = os.fstat(file.fileno()).st_ino
            word, _, rest = file.read(_STAMP).partition(b" ")
    except OSError:
        return None
    copy, _, state_path = rest.rstrip(b"\n").partition(b" ")
    if word != b"lionwt" or not copy.startswith(b"lionwt-") or b"/" in copy:
        return None
    return Stamp(inode, os.fsdecode(copy), Path(os.fsdecode(state_path)))
