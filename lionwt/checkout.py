"""The operator's checkout: what is in the way, and how it is brought forward.

The ref is the truth and moves first; the checkout follows, under its own
``index.lock`` so that no commit can come between (design section 7, promote 5
and 6). Whatever is done here touches only the paths of one merge, and of those
only the ones that still hold the version before it, the version after it, or a
torn prefix of that one. Everything else is the operator's and stays, whenever
they wrote it: no file is written over (:mod:`lionwt.aside`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from lionwt import evidence, git, history, names, store, words, worktree
from lionwt.aside import Aside, Noted, beyond_link, note
from lionwt.errors import LionwtError, from_os_error
from lionwt.evidence import Change
from lionwt.faults import point
from lionwt.listing import GITLINK, SYMLINK, Entry
from lionwt.records import LeaseFile
from lionwt.session import Run
from lionwt.store import sync_dir
from lionwt.values import State, Value

#: Seconds to wait for a git of the operator's to finish with the index.
INDEX_WAIT: Final = 5.0
#: So many paths in the way are named.
_SHOWN: Final = 10
#: How git says that a file has come to where it was to make one.
_APPEARED: Final = (b"already exists, no checkout", b": File exists", b"is a directory")


def blocked(what: str, hint: str) -> LionwtError:
    """The error of an obstacle: exit 4, everything as it was, the candidate stays frozen."""
    return LionwtError("checkout_blocked", f"{what}; nothing was changed and the candidate stays frozen", hint=hint)


class IndexLock(State):
    """The checkout's ``index.lock`` in our hands, and the copy of the index that will replace it."""

    path: Path
    inode: int
    copy: Path


class Look(Value, frozen=True):
    """A checkout in which nothing is in the way: the changes to come, and what stands at their paths."""

    merge: str
    changes: list[Change]
    noted: Noted


class Checkout:
    """The worktree the run was opened in."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.root = Path(run.file.checkout.path)
        self.git_dir = Path(run.file.checkout_git_dir)
        self.index = self.git_dir / "index"
        self.lock_path = self.git_dir / "index.lock"

    def shared(self) -> git.Git:
        return git.shared(str(self.run.common_dir), git_dir=str(self.git_dir), work_tree=str(self.root))

    def private(self, index: Path) -> git.Git:
        return git.private(self.run.paths.git_dir, self.run.common_dir, work_tree=self.root, index=index)

    def is_on_target(self) -> bool:
        """Whether HEAD is the target's branch."""
        head = self.shared().run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))
        return git.text(head.out).strip() == self.run.file.target

    def require_on_target(self) -> None:
        """Raise ``checkout_blocked`` unless the checkout is quietly on the target, and it alone."""
        target = self.run.file.target
        short = names.short_branch(target)
        # First, because an operation in progress detaches HEAD, and a switch would be the wrong advice.
        if running := history.in_progress(self.git_dir):
            raise blocked(
                f"{self.root} is in the middle of {' and '.join(running)}",
                f"finish or abort it (git -C {self.root} status says how), then promote again",
            )
        head = self.shared().run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))
        on = git.text(head.out).strip()
        if head.code:
            raise blocked(f"{self.root} has a detached HEAD, not {short!r}", f"git -C {self.root} switch {short}")
        if on != target:
            raise blocked(
                f"{self.root} is on {names.short_branch(on)!r}, not {short!r}", f"git -C {self.root} switch {short}"
            )
        if others := self._elsewhere():
            raise blocked(
                f"{short!r} is checked out in {' and '.join(others)} as well",
                f"switch to another branch there: git -C {others[0]} switch BRANCH",
            )

    def _elsewhere(self) -> list[str]:
        listed = self.shared().run("worktree", "list", "--porcelain", "-z").out
        found = []
        for block in listed.split(b"\0\0"):
            lines = block.strip(b"\0").split(b"\0")
            path = git.text(lines[0].removeprefix(b"worktree "))
            if b"branch " + os.fsencode(self.run.file.target) in lines and os.path.realpath(path) != str(self.root):
                found.append(path)
        # git lists the main worktree of a submodule under its git directory.
        return [path for path in found if os.path.realpath(path) != str(self.git_dir)]

    def take_index(self, file: LeaseFile) -> IndexLock:
        """Take the index's lock for a lease and copy the index beside it; raises ``checkout_blocked``.

        The lock appears with its owner's name in it, so that one which was left
        before any intent was on disk can be told from a git's, and removed.
        """
        if not self.lock_path.exists():  # without it, and under the promotion lock, all copies are the dead's
            for leftover in self.git_dir.glob("lionwt-*.index*"):
                leftover.unlink(missing_ok=True)
        copy = self.git_dir / f"lionwt-{os.urandom(6).hex()}.index"
        stamp = b"lionwt %s %s\n" % (os.fsencode(copy.name), os.fsencode(file.lease.state_path))
        made = Path(f"{copy}.new")
        deadline = time.monotonic() + INDEX_WAIT
        try:
            with open(made, "xb") as out:
                out.write(stamp)
            inode = made.stat().st_ino
            while not self._link(made):
                if self._abandoned():
                    continue
                if time.monotonic() >= deadline:
                    raise blocked(
                        f"{self.lock_path} is there: a git works in the checkout, or one died in it",
                        f"wait for it; if no git runs there, remove that file: rm {self.lock_path}",
                    )
                time.sleep(0.05)
            point("promote.index_linked")
        except OSError as error:
            raise from_os_error(error, f"locking the index of {self.root}") from error
        finally:
            made.unlink(missing_ok=True)
        lock = IndexLock(self.lock_path, inode, copy)
        try:
            self.copy_index(lock.copy)
        except BaseException:
            self.give_back(lock)
            raise
        return lock

    def _link(self, made: Path) -> bool:
        try:
            os.link(made, self.lock_path)
        except FileExistsError:
            return False
        return True

    def _abandoned(self) -> bool:
        """Remove a lock of lionwt's own that no landing accounts for; True when there was one.

        Under the promotion lock nobody else is landing here. A landing that was
        begun by another run has its intent on disk, and its lock stays.
        """
        stamp = self._stamp()
        if stamp is None:
            return False
        inode, copy, owner = stamp
        try:
            intent = store.read_json(owner).get("intent") or {}
        except FileNotFoundError:
            intent = {}
        if (intent.get("landing") or {}).get("index_lock") == inode:
            raise blocked(
                f"a landing of {owner.stem!r} was interrupted and its index lock is still in {self.root}",
                f"finish it first: lionwt reconcile {owner.parent.parent}",
            )
        self.give_back(IndexLock(self.lock_path, inode, self.git_dir / copy))
        return True

    def drop_abandoned(self) -> None:
        """Remove a lock that a landing left before its intent was written, where there is one.

        Call under the promotion lock. A landing that was begun has its intent,
        and its lock stays until that is settled.
        """
        with contextlib.suppress(LionwtError):
            self._abandoned()

    def is_locked_for(self, state_path: Path) -> bool:
        """Whether the lock that is there was taken for the lease of ``state_path``."""
        stamp = self._stamp()
        return stamp is not None and stamp[2] == state_path

    def _stamp(self) -> tuple[int, str, Path] | None:
        """What lionwt wrote into the lock that is there: its inode, the copy's name, the lease's file."""
        try:
            with open(self.lock_path, "rb", opener=lambda p, f: os.open(p, f | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                inode = os.fstat(file.fileno()).st_ino
                word, _, rest = file.read(8192).partition(b" ")
        except OSError:
            return None
        name, _, state_path = rest.rstrip(b"\n").partition(b" ")
        if word != b"lionwt" or not name.startswith(b"lionwt-") or b"/" in name:
            return None
        return inode, os.fsdecode(name), Path(os.fsdecode(state_path))

    def copy_index(self, copy: Path) -> None:
        """Copy the index beside itself, where git also finds the other half of a split one."""
        if not self.index.exists():
            return
        worktree.copy_index(self.index, copy)
        os.chmod(copy, stat.S_IMODE(self.index.stat().st_mode))

    def give_back(self, lock: IndexLock) -> None:
        """Undo :meth:`take_index`: nothing of the checkout has been touched."""
        for path in (lock.copy, Path(f"{lock.copy}.lock")):
            path.unlink(missing_ok=True)
        self.release(lock)

    def release(self, lock: IndexLock) -> None:
        """Remove the lock, if it is still the one that was taken."""
        if self.holds(lock):
            lock.path.unlink(missing_ok=True)

    def holds(self, lock: IndexLock) -> bool:
        """Whether the lock at its path is that one: a freed inode's number is soon used again, so the stamp counts."""
        stamp = self._stamp()
        return stamp is not None and stamp[:2] == (lock.inode, lock.copy.name)

    def require_clear(self, lock: IndexLock, expected: str, merge: str) -> Look:
        """Raise ``checkout_blocked`` when an operator's file is in the way of the merge."""
        changes = evidence.changes_between(self.run.private(), expected, merge)
        noted = note(os.fsencode(self.root), [change.path for change in changes])  # before git looks
        private = self._as_sparse_as_it_is(self.private(lock.copy))
        private.run(
            "update-index", "-q", "--ignore-submodules", "--refresh", ok=(0, 1), timeout=git.CONTENT
        )  # 1: something differs
        tried = private.run("read-tree", "-n", "-m", "-u", expected, merge, ok=(0, 1, 128), timeout=git.CONTENT)
        in_way = {path: "not committed" for path in self._uncommitted(private, expected, changes) if tried.code}
        for path in self._removed(private, [change.path for change in changes if change.status in "MT"]):
            in_way[path] = "removed, not committed"
        for change in changes:  # git does not look at what has taken a submodule's place
            if change.old.mode == GITLINK and not _is_free(os.fsencode(self.root), change.path):
                in_way[change.path] = "not committed"
        for path in self._hidden_obstacles(private, changes):
            in_way.setdefault(path, "not tracked")
        if in_way:
            raise self._in_the_way(in_way)
        if tried.code:
            said = git.text(tried.err).strip().replace("error: ", "").splitlines()
            raise blocked(
                f"files of yours in {self.root} are in the way: {words.some(said, 6, '; ')}",
                "commit them, stash them or move them away, then promote again",
            )
        return Look(merge, changes, noted)

    def _in_the_way(self, in_way: Mapping[bytes, str]) -> LionwtError:
        """The error that names what is in the way, and how it is put aside."""
        shown = [f"{git.text(path)!r} ({why})" for path, why in sorted(in_way.items())]
        count = words.count(len(in_way), "file of yours is", "files of yours are")
        paths = " ".join(shlex.quote(git.text(path)) for path in sorted(in_way))
        if "not tracked" in in_way.values() or len(in_way) > _SHOWN:
            hint = "commit, stash (git stash push --all) or move away what is named, then promote again"
        else:
            hint = f"commit what is named, or put it aside: git -C {self.root} stash push -- {paths}"
        return blocked(f"{count} in the way in {self.root}: {words.some(shown, _SHOWN)}", hint)

    def _uncommitted(self, private: git.Git, expected: str, changes: Sequence[Change]) -> list[bytes]:
        """The paths of a landing that differ from what is committed: in the index, or in the file."""
        differing: set[bytes] = set()
        for command in (
            ("diff-index", "-z", "--cached", "--name-only", "--no-renames", expected, "--"),
            ("diff-files", "-z", "--name-only", "--"),
        ):
            differing.update(git.records(private.run(*command, timeout=git.CONTENT).out))
        return [change.path for change in changes if change.path in differing]

    def _as_sparse_as_it_is(self, private: git.Git) -> git.Git:
        """The same, under the operator's own sparse definition: what is left out there stays left out."""
        definition = self._sparse_definition(private)
        if definition is None:
            return private
        shutil.copyfile(definition, self.run.paths.git_dir / "info" / "sparse-checkout")
        cone = self._setting("core.sparseCheckoutCone") or "true"
        return private.with_flags("-c", "core.sparseCheckout=true", "-c", f"core.sparseCheckoutCone={cone}")

    def _sparse_definition(self, private: git.Git) -> Path | None:
        """The file that says what the operator has checked out, where that is not everything.

        Only where the index does leave out something: a definition that came
        from elsewhere must not take files out of a whole checkout.
        """
        definition = self.git_dir / "info" / "sparse-checkout"
        if not definition.is_file() or self._setting("core.sparseCheckout") != "true":
            return None
        tagged = git.records(private.run("ls-files", "-z", "-t", timeout=git.CONTENT).out)
        return definition if any(row.startswith(b"S ") for row in tagged) else None

    def _setting(self, key: str) -> str:
        """A truth value from the checkout's own configuration; empty when there is none."""
        found = self.shared().run("config", "--type=bool", "--get", key, ok=(0, 1, 128))
        return git.text(found.out).strip() if found.code == 0 else ""

    def _removed(self, private: git.Git, paths: Sequence[bytes]) -> list[bytes]:
        """The tracked ``paths`` that the operator removed; what sparse leaves out is not removed."""
        missing = [path for path in paths if not os.path.lexists(self._absolute(path))]
        if not missing:
            return []
        listed = git.records(private.run("ls-files", "-z", "-t", timeout=git.CONTENT).out)
        skipped = {row[2:] for row in listed if row.startswith(b"S ")}
        return [path for path in missing if path not in skipped]

    def _hidden_obstacles(self, private: git.Git, changes: Sequence[Change]) -> list[bytes]:
        """What an added path would destroy, ignored and newly staged files among it, which git does not mind."""
        root = os.fsencode(self.root)
        added = [change.path for change in changes if change.status in "AT"]
        removed = {change.path for change in changes if change.status in "DT"}
        suspects = [path for path in added if _first_existing(root, path) is not None]
        if not suspects:
            return []
        listed = private.run("ls-files", "-z", timeout=git.CONTENT).out
        tracked = set(git.records(listed))
        obstacles: dict[bytes, None] = {}
        for path in suspects:
            found = _first_existing(root, path)
            if found is None or found in tracked:
                continue
            if not os.path.isdir(os.path.join(root, found)) or os.path.islink(os.path.join(root, found)):
                obstacles[found] = None
                continue
            for parent, _, files in os.walk(os.path.join(root, found)):
                inside = (os.path.relpath(os.path.join(parent, name), root) for name in files)
                obstacles.update((inner, None) for inner in inside if inner not in tracked or inner not in removed)
        return list(obstacles)

    def forward(self, lock: IndexLock, look: Look, keep_fd: int) -> list[str]:
        """Bring tree and index copy over ``look.changes``; returns paths left as they are.

        What is no longer as the look found it is the operator's, and stays. Where
        lionwt was killed, a child goes on to its end under the promotion lock that
        ``reconcile`` waits for.
        """
        private = self.private(lock.copy).keeping(keep_fd)
        held = self._index_entries(private)
        return self._write(self._aside(look.merge), private, look.changes, look.changes, look.noted, held, [])

    def install(self, lock: IndexLock) -> None:
        """Make the updated copy the index, and only then release the lock.

        The lock keeps its inode to the end: whatever is found at its path after
        a crash is the journalled one, or it is not lionwt's.
        """
        if not self.holds(lock):
            lock.copy.unlink(missing_ok=True)
            raise LionwtError(
                "checkout_behind",
                f"landed, but {lock.path} was taken away meanwhile, so the index of {self.root} was left as it is",
                hint="promote again: that brings the checkout forward",
            )
        if lock.copy.exists():
            fd = os.open(lock.copy, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(lock.copy, self.index)
            sync_dir(self.git_dir)
        point("promote.index_installed")
        self.release(lock)
        sync_dir(self.git_dir)

    def repair(self, lock: IndexLock, expected: str, merge: str, keep_fd: int, head: str | None = None) -> list[str]:
        """Bring the paths of one merge forward, one by one; returns those left as they are.

        Only paths where ``head`` (the merge itself, if not given) still holds the
        merge's version, and of these only files that hold the old version, the
        new one, or a torn prefix of the new one.
        """
        objects = self.run.private()
        changes = evidence.changes_between(objects, expected, merge)
        every = changes
        if head is not None and head != merge:
            moved_on = {change.path for change in evidence.changes_between(objects, merge, head)}
            changes = [change for change in changes if change.path not in moved_on]
        private = self.private(lock.copy).keeping(keep_fd)
        held = self._index_entries(private)
        aside = self._aside(merge)
        kept = self._give_back(aside, expected, every, changes)
        noted = note(os.fsencode(self.root), [change.path for change in changes])
        writable, left = self._sort_out(changes, held)
        left += kept
        return self._write(aside, private, changes, writable, noted, held, left)

    def _write(
        self,
        aside: Aside,
        private: git.Git,
        changes: Sequence[Change],
        writable: Sequence[Change],
        noted: Noted,
        held: dict[bytes, tuple[Entry, bool]],
        left: list[bytes],
    ) -> list[str]:
        """Bring the index copy over ``changes``, and the files of those that are ``writable``."""
        lines = []
        for change in changes:
            entry, _ = held.get(change.path, (None, False))
            if entry is None or entry in (change.old, change.new):
                lines.append(_index_line(change))
        lines.sort(key=lambda line: not line.startswith(b"0 "))  # removals first: a directory may become a file
        private.run("update-index", "-z", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
        point("promote.index_updated")
        skips = {change.path for change in changes if held.get(change.path, (None, False))[1]}
        skips |= self._left_out(private, [change.path for change in changes if change.path not in held])
        skips = {change.path for change in changes if change.path in skips and change.status != "D"}
        absent = {path for path in skips if not os.path.lexists(self._absolute(path))}
        self._write_files(aside, private, [change for change in writable if change.path not in absent], noted, left)
        if skips:
            private.run(
                "update-index", "-z", "--skip-worktree", "--stdin", stdin=b"".join(p + b"\0" for p in sorted(skips))
            )
        return sorted({git.text(path) for path in left})

    def _aside(self, merge: str) -> Aside:
        """Where a landing moves files to: known from its journal, whoever goes on with it."""
        place = self.git_dir / f"lionwt-{merge}.aside"
        if os.stat(self.git_dir).st_dev != os.stat(self.root).st_dev:
            place = self.root / f".lionwt-{merge}.aside"
        return Aside(os.fsencode(self.root), os.fsencode(place))

    def put_back(self, expected: str, merge: str, head: str | None) -> list[str]:
        """Put back what a landing moved aside that is not finished; returns what has to stay where it is.

        ``head`` is what the checkout is on, where that is known: what is as before
        the landing there belongs there.
        """
        if not os.path.isdir(self._aside(merge).place):
            return []
        objects = self.run.private()
        changes = evidence.changes_between(objects, expected, merge)
        handled: list[Change] = []
        if head is not None:
            other = {change.path for change in evidence.changes_between(objects, expected, head)}
            handled = [change for change in changes if change.path not in other]
        return [git.text(place) for place in self._give_back(self._aside(merge), expected, changes, handled)]

    def _give_back(
        self, aside: Aside, expected: str, changes: Sequence[Change], handled: Sequence[Change]
    ) -> list[bytes]:
        with self.run.scratch(".repair") as scratch:
            return aside.give_back(
                {change.path for change in handled},
                lambda place: self._matching(
                    scratch, [(change.path, change.old) for change in changes], Path(git.text(place)), expected
                ),
                lambda taken: self._landed(scratch, [change for change in handled if change.path in taken]),
            )

    def _left_out(self, private: git.Git, new: Sequence[bytes]) -> set[bytes]:
        """The paths among ``new`` entries of the index that the operator's sparse definition leaves out."""
        definition = self._sparse_definition(private) if new else None
        if definition is None:
            return set()
        # What the definition takes in is what it would exclude, read as an exclude file.
        listed = private.run("ls-files", "-z", "-c", "-i", f"--exclude-from={definition}", timeout=git.CONTENT)
        return set(new).difference(git.records(listed.out))

    def _absolute(self, path: bytes) -> bytes:
        return os.path.join(os.fsencode(self.root), path)

    @staticmethod
    def _index_entries(private: git.Git) -> dict[bytes, tuple[Entry, bool]]:
        entries = {}
        for row in git.records(private.run("ls-files", "-z", "-s", "-v", timeout=git.CONTENT).out):
            meta, _, name = row.partition(b"\t")
            tag, mode, oid, _ = meta.decode("ascii").split(" ")
            entries[name] = (Entry(mode, oid), tag in "Ss")
        return entries

    def _sort_out(
        self, changes: Sequence[Change], held: dict[bytes, tuple[Entry, bool]]
    ) -> tuple[list[Change], list[bytes]]:
        """The changes whose file may be written, and the paths that hold something of the operator's."""
        with self.run.scratch(".repair") as scratch:
            as_old = self._matching(scratch, [(change.path, change.old) for change in changes], self.root)
            landed = self._landed(scratch, [change for change in changes if change.path not in as_old])
        writable, left = [], []
        for change in changes:
            entry, skipped = held.get(change.path, (None, False))
            staged = entry is not None and entry not in (change.old, change.new)
            known = change.path in as_old or change.path in landed
            known = known or (skipped and not os.path.lexists(self._absolute(change.path)))
            if known and not staged:
                writable.append(change)
            else:
                left.append(change.path)
        return writable, left

    def _landed(self, scratch: Path, changes: Sequence[Change]) -> set[bytes]:
        """The paths that hold what the landing writes there, whole or torn, and nothing of the operator's."""
        whole = self._matching(scratch, [(change.path, change.new) for change in changes], self.root)
        return whole | self._torn(scratch, [change for change in changes if change.path not in whole])

    def _matching(
        self, scratch: Path, wanted: Sequence[tuple[bytes, Entry]], top: Path, tree: str | None = None
    ) -> set[bytes]:
        """The paths below ``top`` whose file is exactly that version (or is absent where the version is).

        Elsewhere than in the checkout the attributes are those of ``tree``.
        """
        index = scratch / "match"
        index.unlink(missing_ok=True)
        private = git.private(self.run.paths.git_dir, self.run.common_dir, work_tree=top, index=index)
        found = set()
        lines = []
        root = os.fsencode(top)
        for path, entry in wanted:
            if entry.mode == "000000":
                # A directory may become a file; writing looks again whether it has become empty.
                if beyond_link(root, path) or _is_free(root, path):
                    found.add(path)
            elif entry.mode == GITLINK:
                if _is_free(root, path):
                    found.add(path)
            else:
                lines.append(f"{entry.mode} {entry.oid}\t".encode("ascii") + path + b"\0")
        if tree is not None:
            private.run("read-tree", tree, timeout=git.CONTENT)
        # D/F pairs cannot share an index, so each side has one of its own.
        private.run("update-index", "-z", "--replace", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
        private.run("update-index", "-q", "--refresh", ok=(0, 1), timeout=git.CONTENT)
        listed = private.run("diff-files", "-z", "--name-only", "--no-ext-diff", timeout=git.CONTENT).out
        differing = set(git.records(listed))
        return found | {line.partition(b"\t")[2][:-1] for line in lines} - differing

    def _torn(self, scratch: Path, changes: Sequence[Change]) -> set[bytes]:
        """The paths whose file is a prefix of what the merge would write there."""
        new = [change for change in changes if change.new.mode not in ("000000", SYMLINK, GITLINK)]
        if not new:
            return set()
        index = scratch / "torn"
        private = self.private(index)
        lines = b"".join(
            f"{change.new.mode} {change.new.oid}\t".encode("ascii") + change.path + b"\0" for change in new
        )
        private.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)
        private.run("checkout-index", "-a", f"--prefix={scratch}/new/", timeout=git.CONTENT)
        return {
            change.path
            for change in new
            if _is_prefix(self._absolute(change.path), os.path.join(os.fsencode(scratch), b"new", change.path))
        }

    def _write_files(
        self, aside: Aside, private: git.Git, changes: Sequence[Change], noted: Noted, left: list[bytes]
    ) -> None:
        """Write the files of ``changes``; paths that hold anything but what was ``noted`` go to ``left``."""
        root = os.fsencode(self.root)
        taken = []
        for change in changes:
            if beyond_link(root, change.path) or not aside.take(change.path, noted.get(change.path)):
                left.append(change.path)
            else:
                taken.append(change)
        point("promote.set_aside")
        files = {change.path for change in taken if change.new.mode != "000000"}
        for change in taken:
            if change.old.mode == GITLINK and change.new.mode != GITLINK:
                with contextlib.suppress(OSError):
                    os.rmdir(self._absolute(change.path))  # git leaves a submodule that was checked out
            if change.new.mode == "000000" and files.intersection(_parents(change.path)):
                _drop_empty_dirs(root, change.path)
        present = []
        for change in taken:
            if change.new.mode == "000000":
                continue
            path = self._absolute(change.path)
            if change.new.mode == GITLINK:
                with contextlib.suppress(OSError):
                    os.makedirs(path, exist_ok=True)
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                with contextlib.suppress(OSError):  # an empty one makes room, as with git
                    os.rmdir(path)
            if os.path.lexists(path) or _file_above(root, change.path):
                left.append(change.path)
            else:
                present.append(change.path)
        left += self._write_new(private, present)
        for change in taken:
            if change.new.mode == "000000":
                _drop_empty_dirs(root, change.path)
        point("promote.files_written")
        left += aside.drop(noted, lambda late: late.intersection(present) - self._differing(private))

    @staticmethod
    def _differing(private: git.Git) -> set[bytes]:
        """The tracked paths whose file is not what the index says that git has written."""
        # Where git left a file as it found it, it noted none of those that it wrote.
        private.run("update-index", "-q", "--refresh", ok=(0, 1), timeout=git.CONTENT)
        return set(git.records(private.run("diff-files", "-z", "--name-only", timeout=git.CONTENT).out))

    def _write_new(self, private: git.Git, paths: list[bytes]) -> list[bytes]:
        """Let git write files where none are; moves the paths where one has appeared from ``paths`` to the answer."""
        root = os.fsencode(self.root)
        appeared: set[bytes] = set()
        pending = list(paths)
        while pending:
            stdin = b"".join(path + b"\0" for path in pending)
            # Never forced: git makes each file itself, or leaves what it finds.
            done = private.run(
                "checkout-index", "-u", "-z", "--stdin", stdin=stdin, ok=(0, 1, 128), timeout=git.CONTENT
            )
            if done.code == 0:
                break
            if not all(line.endswith(_APPEARED) for line in done.err.splitlines()):
                raise git.failure(("checkout-index",), done)
            differing = self._differing(private)
            behind = [path for path in pending if path in differing]
            # git gives up where a file has come in the place of a directory.
            missing = [path for path in behind if _is_free(root, path) and not _file_above(root, path)]
            appeared.update(set(behind).difference(missing))
            if len(missing) == len(pending):
                raise git.failure(("checkout-index",), done)
            pending = missing
        paths[:] = [path for path in paths if path not in appeared]
        return sorted(appeared)


def _index_line(change: Change) -> bytes:
    if change.new.mode == "000000":
        return f"0 {'0' * len(change.new.oid)}\t".encode("ascii") + change.path + b"\0"
    return f"{change.new.mode} {change.new.oid}\t".encode("ascii") + change.path + b"\0"


def _first_existing(root: bytes, path: bytes) -> bytes | None:
    """The path itself if it is there, or a parent of it that is no directory."""
    parts = path.split(b"/")
    for count in range(1, len(parts)):
        parent = b"/".join(parts[:count])
        full = os.path.join(root, parent)
        if os.path.lexists(full) and (os.path.islink(full) or not os.path.isdir(full)):
            return parent
    return path if os.path.lexists(os.path.join(root, path)) else None


def _parents(path: bytes) -> Iterator[bytes]:
    while path := os.path.dirname(path):
        yield path


def _is_free(root: bytes, path: bytes) -> bool:
    """Whether no file and no link stands at the path itself."""
    full = os.path.join(root, path)
    return not os.path.lexists(full) or (os.path.isdir(full) and not os.path.islink(full))


def _file_above(root: bytes, path: bytes) -> bool:
    while path := os.path.dirname(path):
        full = os.path.join(root, path)
        if os.path.lexists(full) and not os.path.isdir(full):
            return True
    return False


def _drop_empty_dirs(root: bytes, path: bytes) -> None:
    while path := os.path.dirname(path):
        try:
            os.rmdir(os.path.join(root, path))
        except OSError:
            return


def _is_prefix(short: bytes, whole: bytes) -> bool:
    try:
        with (
            open(short, "rb", opener=lambda p, f: os.open(p, f | os.O_NOFOLLOW | os.O_NONBLOCK)) as one,
            open(whole, "rb") as other,
        ):
            if not stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                return False
            while block := one.read(1 << 20):
                if other.read(len(block)) != block:
                    return False
    except OSError:
        return False
    return True
