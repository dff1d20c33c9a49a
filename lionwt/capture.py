"""Capture a worktree whole, without touching it and without running anything of the worker's.

Into an index of lionwt's own: what git calls changed or untracked, joined with
what the worker's index holds beyond that, so that neither index flags nor
excludes nor a sparse definition hide anything (design section 7, freeze 2).
Looks are repeated until one finds nothing new, so the tree is the worktree of
one moment. Then the file system is walked: every entry is in the captured tree
or is named as left out. That is what makes "nothing dropped in silence" hold
by construction and not by a list of special cases.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lionwt import files, git, names, repository, words, worktree
from lionwt.errors import LionwtError
from lionwt.listing import GITLINK, LIST, Entry, Listing
from lionwt.records import Identity, LeaseFile, RunFile
from lionwt.together import meanwhile
from lionwt.values import Value
from lionwt.walk import Walk, require_readable_rules, walk_tree

_LOOKS: Final = 6
_LARGEST_INDEX: Final = 1 << 30  # bytes
#: So many paths may fail one by one before the failure counts as git's own.
_MOST_REFUSED: Final = 64


#: What tells one version of a file from another: inode, mode, size, times.
Signature = tuple[int, ...]


def signature(root: bytes, name: bytes) -> Signature | None:
    """The signature of a path; None when it is gone."""
    try:
        seen = os.lstat(os.path.join(root, name))
    except OSError:
        return None
    return seen.st_ino, seen.st_mode, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def changing(root: str | os.PathLike[str]) -> LionwtError:
    """The error of a worktree that does not stand still."""
    return LionwtError(
        "worktree_changing",
        f"{os.fspath(root)} kept changing while it was captured; nothing was recorded, the worktree is as it was",
        hint="stop whatever writes there, then run the same command again",
    )


class Capture(Value, frozen=True):
    """A worktree at one moment: the tree, and what is not in it."""

    tree: str
    entries: Listing
    touched: dict[bytes, Signature | None]
    left_out: tuple[bytes, ...]
    special: dict[bytes, str]
    empty_dirs: tuple[bytes, ...]
    repositories: tuple[bytes, ...]
    shadowed: tuple[bytes, ...]
    submodules: tuple[bytes, ...]
    unreadable: tuple[bytes, ...]
    refused: tuple[bytes, ...]
    sparse: tuple[bytes, ...]
    unmerged: tuple[bytes, ...]
    flagged: tuple[bytes, ...]
    index_broken: str | None


class _WorkerIndex(Value, frozen=True):
    listing: Listing
    broken: str | None = None


class _Settled(Value, frozen=True):
    entries: Listing
    tree: str
    dirty: list[bytes]


class Capturer:
    """Captures one lease's worktree into an index in ``scratch``."""

    def __init__(self, run: RunFile, paths: names.RunPaths, file: LeaseFile, identity: Identity, scratch: Path) -> None:
        self.root = file.lease.worktree_path
        self.run = run
        self.index = scratch / "index"
        private = git.private(paths.git_dir, run.common_dir.path, work_tree=self.root, index=self.index)
        # Objects are made durable; the index is gone when the freeze is over.
        self.git = private.with_flags("-c", "core.fsync=all,-index")
        # The worker's index, read as a file: neither its HEAD nor any configuration of its has a say.
        self.admin = Path(identity.admin_dir)
        self.worker_git = self.git.with_env(GIT_INDEX_FILE=self.admin / "index")
        self.saved = paths.saved_index(file.worker_id)
        self._allowed: frozenset[bytes] = frozenset()

    def capture(self) -> Capture:
        """Take the worktree; raises ``worktree_changing``, and ``patch_missing`` when git itself fails."""
        if not worktree.copy_saved_index(self.saved, self.index, self.run.object_format):
            self.git.run("read-tree", self.run.base_sha, timeout=git.CONTENT)
        touched: dict[bytes, None] = {}
        for _ in range(_LOOKS):
            stamp = self._worker_stamp()
            walk, theirs, dirty = self._first_look()
            looked: dict[bytes, Signature | None] = {}
            others = self._take(dirty, walk, theirs.listing, looked)
            settled = self._settle()
            skipped = theirs.listing.skipped
            absent = {name: entry for name, entry in skipped.items() if not self._lies_there(name)}
            others, is_more = self._take_hidden(settled.entries, walk, theirs.listing, absent, others, looked)
            if is_more:
                settled = self._settle()
            touched.update(dict.fromkeys(looked))
            seen = {name: self._signature(name) for name in touched}
            entries = settled.entries
            left = {*settled.dirty, *(name for name in others if name not in entries and not name.endswith(b"/"))}
            left -= absent.keys()
            # What git was given and still does not hold, though it has not changed, it does not take.
            stuck = {name for name in left if name in looked and looked[name] == self._signature(name)}
            if left == stuck and walk.is_current() and self._worker_stamp() == stamp:
                nested = {name.rstrip(b"/") for name in others if name.endswith(b"/")}
                return self._result(settled.tree, entries, seen, walk, theirs, nested, stuck, absent)
        raise changing(self.root)

    def _first_look(self) -> tuple[Walk, _WorkerIndex, list[bytes]]:
        """The walk, the worker's index, and what git finds changed: side by side, since each waits for the disk."""
        with meanwhile(self._dirty) as dirty, meanwhile(self._worker_index) as index:
            walk = walk_tree(self.root)
            # A git that hangs on what is refused here is stopped.
            require_readable_rules(self.root, walk)
            require_readable_repositories(self.root, walk)
            return walk, index(), dirty()

    def _settle(self) -> _Settled:
        """The index as it is now, its tree, and what still differs on the disk: the second look."""
        with meanwhile(self._dirty) as dirty, meanwhile(self._write_tree) as tree:
            entries = self._entries()
            return _Settled(entries, tree(), dirty())

    def _write_tree(self, stopped: int) -> str:
        return self.git.stopped_by(stopped).oid("write-tree", timeout=git.CONTENT)

    def _result(
        self,
        tree: str,
        entries: Listing,
        touched: dict[bytes, Signature | None],
        walk: Walk,
        theirs: _WorkerIndex,
        nested: set[bytes],
        stuck: set[bytes],
        absent: Iterable[bytes],
    ) -> Capture:
        gitlinks = set(entries.gitlinks)
        foreign = [name for name in walk.repositories if name not in gitlinks]
        # A repository below an ignored directory is ignored like the rest of it;
        # any other would take content out of the tree without a trace.
        tracked_dirs = {parent for name in entries for parent in parents_of(name)} if foreign else set()
        repositories = [name for name in foreign if not name or name in nested or name in tracked_dirs]
        bare_links = tuple(name + b"/" for name in gitlinks.difference(walk.repositories))
        # Files where a submodule belongs: git looks away, and so must nobody else.
        shadowed = [name for name in walk.files if bare_links and name.startswith(bare_links)]
        unreadable = {name for name in stuck if not self._is_readable(name)}
        left_out = list(entries.beyond(walk.files) - stuck)
        left_out += [name + b"/" for name in foreign if name not in repositories]
        return Capture(
            tree=tree,
            entries=entries,
            touched=dict(sorted(touched.items())),
            left_out=tuple(sorted(left_out)),
            special=dict(sorted(walk.special.items())),
            empty_dirs=tuple(sorted(set(walk.empty_dirs) - gitlinks)),
            repositories=tuple(sorted(repositories)),
            shadowed=tuple(sorted(shadowed)),
            submodules=tuple(sorted(gitlinks.intersection(walk.repositories))),
            unreadable=tuple(sorted(unreadable.union(walk.unreadable))),
            refused=tuple(sorted(stuck - unreadable)),
            sparse=tuple(sorted(absent)),
            unmerged=theirs.listing.unmerged,
            flagged=theirs.listing.flagged,
            index_broken=theirs.broken,
        )

    def _is_whole(self, index: Path) -> bool:
        """Whether an index ends with its own checksum; git reads a torn one without a word."""
        content = files.read_small(index, _LARGEST_INDEX)
        size = 32 if self.run.object_format == "sha256" else 20
        body, checksum = content[:-size], content[-size:]
        if checksum == bytes(size):  # index.skipHash
            return True
        return hashlib.new(self.run.object_format, body, usedforsecurity=False).digest() == checksum

    def _take(
        self, dirty: list[bytes], walk: Walk, theirs: Listing, looked: dict[bytes, Signature | None]
    ) -> list[bytes] | None:
        """Bring the index up to the worktree, noting in ``looked`` each path as it was then.

        Returns what git calls untracked (a repository ends with a slash), None
        where nothing seems to be.
        """
        if theirs.gitlinks:
            self._allowed |= theirs.gitlinks.keys() & self._named_submodules()
        self._look_at(dirty, looked)
        if len(walk.files) <= len(theirs) and all(name in theirs.gitlinks for name in walk.repositories):
            return None
        return self._take_others(looked)

    def _take_others(self, looked: dict[bytes, Signature | None]) -> list[bytes]:
        # Asked after the walk: what lay there and is not named now is ignored, not new.
        others = git.records(
            self.git.run("ls-files", "-z", "-o", "--exclude-per-directory=.gitignore", timeout=git.CONTENT).out
        )
        self._look_at([name for name in others if not name.endswith(b"/")], looked)
        return others

    def _look_at(self, found: list[bytes], looked: dict[bytes, Signature | None]) -> None:
        looked.update({name: self._signature(name) for name in found})
        self._update(found)

    def _take_hidden(
        self,
        entries: Listing,
        walk: Walk,
        theirs: Listing,
        absent: dict[bytes, Entry],
        others: list[bytes] | None,
        looked: dict[bytes, Signature | None],
    ) -> tuple[list[bytes], bool]:
        """Take what the disk alone does not tell; returns the untracked paths, and whether the index has changed."""
        is_more = self._drop_removed_links(entries, theirs)
        foreign = any(name not in entries.gitlinks for name in walk.repositories)
        if is_more or (others is None and (foreign or entries.beyond(walk.files))):
            others = self._take_others(looked)
            is_more = is_more or bool(others)
        if is_more:
            entries = self._entries()
        if taken := self._take_unpopulated(theirs.gitlinks, entries):
            looked.update({name: self._signature(name) for name in taken})
            is_more = True
        if self._put_back(entries, absent):
            is_more = True
        forced = [name for name in theirs.missing_from(entries) - looked.keys() if self._is_file(name)]
        if forced:
            self._look_at(sorted(forced), looked)
            is_more = True
        return others or [], is_more

    def _drop_removed_links(self, entries: Listing, theirs: Listing) -> bool:
        """A submodule that the worker took out of its index is gone, also where other files lie in its place."""
        if not theirs:  # an index that was lost says nothing
            return False
        removed = [name for name in entries.gitlinks if name not in theirs and not self._lies_there(name + b"/.git")]
        if removed:
            self._drop(removed)
        return bool(removed)

    def _put_back(self, entries: Listing, absent: dict[bytes, Entry]) -> bool:
        """A path that the worker's sparse definition took off the disk is as its index has it, not deleted."""
        lines = [
            f"{entry.mode} {entry.oid}\t".encode() + name + b"\0"
            for name, entry in absent.items()
            if entries.get(name) != entry
        ]
        if lines:
            self.git.run("update-index", "-z", "--replace", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
        return bool(lines)

    def _drop(self, gone: list[bytes]) -> None:
        lines = b"".join(f"0 {self._zero}\t".encode() + name + b"\0" for name in gone)
        self.git.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)

    @property
    def _zero(self) -> str:
        return "0" * (64 if self.run.object_format == "sha256" else 40)

    def _lies_there(self, name: bytes) -> bool:
        return os.path.lexists(os.path.join(os.fsencode(self.root), name))

    def _signature(self, name: bytes) -> Signature | None:
        return signature(os.fsencode(self.root), name)

    def _is_readable(self, name: bytes) -> bool:
        path = os.path.join(os.fsencode(self.root), name)
        return os.path.islink(path) or os.access(path, os.R_OK)

    def _take_unpopulated(self, gitlinks: dict[bytes, str], held: Listing) -> list[bytes]:
        """Take submodules without a checkout from the worker's index: nothing on disk could tell their commit."""
        root = os.fsencode(self.root)
        wanted = []
        for name, oid in gitlinks.items():
            entry = held.get(name)
            known = name in self._allowed if entry is None else entry.mode == GITLINK and entry.oid != oid
            if (
                known
                and _is_empty_dir(os.path.join(root, name))
                and not self._beyond_link(root, os.path.dirname(name), {})
            ):
                wanted.append(name)
        if wanted:
            lines = b"".join(f"{GITLINK} {gitlinks[name]}\t".encode() + name + b"\0" for name in wanted)
            self.git.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)
        return wanted

    def _named_submodules(self) -> frozenset[bytes]:
        """The submodule paths that the worktree's own ``.gitmodules`` names."""
        path = self.root / ".gitmodules"
        if path.is_symlink() or not path.is_file():
            return frozenset()
        listed = self.git.run(
            "config", "--file", path, "--null", "--get-regexp", r"^submodule\..*\.path$", ok=(0, 1, 128)
        )
        return frozenset(row.partition(b"\n")[2] for row in git.records(listed.out))

    def _dirty(self, stopped: int) -> list[bytes]:
        """Every path whose stat differs, also one that a conversion makes equal again: its raw content may be work."""
        listed = self.git.stopped_by(stopped).run(
            "diff-files", "-z", "--raw", "--ignore-submodules=dirty", "--no-ext-diff", timeout=git.CONTENT
        )
        rows = git.records(listed.out)
        metas, found = rows[::2], rows[1::2]
        links = [name for meta, name in zip(metas, found, strict=True) if meta.startswith(b":160000")]
        self._allowed = self._allowed.union(links)
        return found

    def _update(self, found: list[bytes]) -> None:
        parents: dict[bytes, bool] = {}
        present = [name for name in found if self._is_file(name, parents)]
        gone = sorted(set(found) - set(present))
        if gone:
            self._drop(gone)
        self._add([name for name in present if self._is_readable(name)])

    def _add(self, found: list[bytes]) -> None:
        """Put files into the index; those that git does not take stay out of it, and are found there later."""
        pending = [found] if found else []
        failed = 0
        while pending:
            names = pending.pop()
            stdin = b"".join(name + b"\0" for name in names)
            try:
                self.git.run("update-index", "-z", "--add", "--replace", "--stdin", stdin=stdin, timeout=git.CONTENT)
            except LionwtError as error:
                if error.code != "git_failed":
                    raise
                # One bad path fails them all (case 25), so it is found by halves.
                if len(names) > 1:
                    pending += [names[len(names) // 2 :], names[: len(names) // 2]]
                    continue
                failed += 1
                if failed > _MOST_REFUSED:
                    raise LionwtError(
                        "patch_missing",
                        f"the change could not be captured: {error.message}; the lease and the worktree are as they "
                        "were",
                        hint="mend what git names, then freeze again",
                    ) from error

    def _is_file(self, name: bytes, parents: dict[bytes, bool] | None = None) -> bool:
        """Whether git can take ``name``: a file, symlink or submodule that no symlink leads to."""
        parents = {} if parents is None else parents
        root = os.fsencode(self.root)
        try:
            seen = os.lstat(os.path.join(root, name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        if stat.S_ISDIR(seen.st_mode) and name not in self._allowed:
            return False
        if not (stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
            return False
        return not self._beyond_link(root, os.path.dirname(name), parents)

    def _beyond_link(self, root: bytes, directory: bytes, known: dict[bytes, bool]) -> bool:
        asked = []
        while directory and directory not in known:
            asked.append(directory)
            directory = os.path.dirname(directory)
        beyond = known.get(directory, False)
        for below in reversed(asked):
            beyond = known[below] = beyond or os.path.islink(os.path.join(root, below))
        return beyond

    def _entries(self) -> Listing:
        return Listing(self.git.run(*LIST, timeout=git.CONTENT).out, self.run.object_format)

    def _worker_stamp(self) -> tuple[int, ...] | None:
        """What tells one state of the worker's index file from another; None where there is none."""
        try:
            seen = os.lstat(self.admin / "index")
        except OSError:
            return None
        return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns

    def _worker_index(self, stopped: int) -> _WorkerIndex:
        if not self.admin.exists():
            return _WorkerIndex(Listing())  # somebody removed the registration
        index = self.admin / "index"
        if os.path.lexists(index) and not (index.is_file() and not index.is_symlink()):
            return _WorkerIndex(Listing(), f"{index} is not a regular file")
        try:
            if index.is_file() and not self._is_whole(index):
                return _WorkerIndex(Listing(), f"{index} is torn")
        except OSError as error:
            return _WorkerIndex(Listing(), f"{index}: {error.strerror}")
        listed = self.worker_git.stopped_by(stopped).run(*LIST, ok=(0, 128), timeout=git.CONTENT)
        if listed.code:
            return _WorkerIndex(Listing(), git.text(listed.err).strip())
        return _WorkerIndex(Listing(listed.out, self.run.object_format))


def _is_empty_dir(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def parents_of(name: bytes) -> list[bytes]:
    """The directories above a path, the nearest first."""
    found = []
    while name := os.path.dirname(name):
        found.append(name)
    return found


def require_readable_repositories(root: Path, walk: Walk) -> None:
    """Raise ``patch_missing`` for a FIFO inside a repository in the worktree: git asks each for its HEAD."""
    for name in walk.repositories:
        git_dir = repository.git_dir_of(root / git.text(name))
        found = files.special_below(git_dir, ("modules", "worktrees")) if git_dir is not None else None
        if found is not None:
            raise LionwtError(
                "patch_missing",
                f"{found} in the repository of submodule {git.text(name)} is no file, and git would wait for it; "
                "the lease and the worktree are as they were",
                hint=f"remove it, then freeze again: {words.command('rm', found)}",
            )
