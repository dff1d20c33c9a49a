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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lionwt import files, git, names, worktree
from lionwt.errors import LionwtError
from lionwt.records import Identity, LeaseFile, RunFile

GITLINK: Final = "160000"
SYMLINK: Final = "120000"
_LOOKS: Final = 6
_LARGEST_INDEX: Final = 1 << 30  # bytes
#: So many paths may fail one by one before the failure counts as git's own.
_MOST_REFUSED: Final = 64


@dataclass(frozen=True)
class Entry:
    """One path of an index: mode and object."""

    mode: str
    oid: str


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


@dataclass
class Walk:
    """Everything that lies in a worktree, apart from its own ``.git``."""

    files: set[bytes] = field(default_factory=set)
    special: dict[bytes, str] = field(default_factory=dict)
    empty_dirs: list[bytes] = field(default_factory=list)
    repositories: list[bytes] = field(default_factory=list)
    unreadable: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Capture:
    """A worktree at one moment: the tree, and what is not in it."""

    tree: str
    entries: dict[bytes, Entry]
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


@dataclass(frozen=True)
class _WorkerIndex:
    names: frozenset[bytes] = frozenset()
    gitlinks: dict[bytes, str] = field(default_factory=dict)
    unmerged: tuple[bytes, ...] = ()
    flagged: tuple[bytes, ...] = ()
    skipped: dict[bytes, Entry] = field(default_factory=dict)
    broken: str | None = None


class Capturer:
    """Captures one lease's worktree into an index in ``scratch``."""

    def __init__(self, run: RunFile, paths: names.RunPaths, file: LeaseFile, identity: Identity, scratch: Path) -> None:
        self.root = file.lease.worktree_path
        self.run = run
        self.index = scratch / "index"
        self.git = git.private(paths.git_dir, run.common_dir.path, work_tree=self.root, index=self.index)
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
            walk = walk_tree(self.root)
            require_readable_rules(self.root, walk)
            theirs = self._worker_index()
            looked = self._look(theirs)
            absent = {name: entry for name, entry in theirs.skipped.items() if not self._lies_there(name)}
            entries = self._corrected(theirs, absent)
            forced = [name for name in theirs.names - entries.keys() - looked.keys() if self._is_file(name)]
            if forced:
                looked.update((name, self._signature(name)) for name in forced)
                self._update(sorted(forced))
                entries = self._entries()
            touched.update(dict.fromkeys(looked))
            tree = self.git.oid("write-tree", timeout=git.CONTENT)
            seen = {name: self._signature(name) for name in touched}
            dirty, others = self._dirty_and_others()
            nested = {name.rstrip(b"/") for name in others if name.endswith(b"/")}
            left = {*dirty, *(name for name in others if not name.endswith(b"/"))} - absent.keys()
            # What git was given and still does not hold, though it has not changed, it does not take.
            stuck = {name for name in left if name in looked and looked[name] == self._signature(name)}
            if left == stuck and self._worker_index() == theirs:
                return self._result(tree, entries, seen, walk, theirs, nested, stuck, absent)
        raise changing(self.root)

    def _result(
        self,
        tree: str,
        entries: dict[bytes, Entry],
        touched: dict[bytes, Signature | None],
        walk: Walk,
        theirs: _WorkerIndex,
        nested: set[bytes],
        stuck: set[bytes],
        absent: Iterable[bytes],
    ) -> Capture:
        gitlinks = {name for name, entry in entries.items() if entry.mode == GITLINK}
        foreign = [name for name in walk.repositories if name not in gitlinks]
        # A repository below an ignored directory is ignored like the rest of it;
        # any other would take content out of the tree without a trace.
        tracked_dirs = {parent for name in entries for parent in _parents(name)} if foreign else set()
        repositories = [name for name in foreign if not name or name in nested or name in tracked_dirs]
        bare_links = tuple(name + b"/" for name in gitlinks.difference(walk.repositories))
        # Files where a submodule belongs: git looks away, and so must nobody else.
        shadowed = [name for name in walk.files if bare_links and name.startswith(bare_links)]
        unreadable = {name for name in stuck if not self._is_readable(name)}
        left_out = [name for name in walk.files if name not in entries and name not in stuck]
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
            unmerged=theirs.unmerged,
            flagged=theirs.flagged,
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

    def _look(self, theirs: _WorkerIndex) -> dict[bytes, Signature | None]:
        """Bring the index up to the worktree; returns the paths that were looked at, as they were then."""
        if theirs.gitlinks:
            self._allowed |= theirs.gitlinks.keys() & self._named_submodules()
        dirty, others = self._dirty_and_others()
        found = [*dirty, *(name for name in others if not name.endswith(b"/"))]
        looked = {name: self._signature(name) for name in found}
        self._update(found)
        if theirs.gitlinks:
            looked.update({name: self._signature(name) for name in self._take_unpopulated(theirs.gitlinks)})
        return looked

    def _corrected(self, theirs: _WorkerIndex, absent: dict[bytes, Entry]) -> dict[bytes, Entry]:
        """The index's entries, after two things that the disk alone does not tell.

        A path that the worker's sparse definition took off the disk is as its index has
        it, not deleted. A submodule that the worker took out of its index is gone, also
        where other files lie in its place.
        """
        entries = self._entries()
        lines = [
            f"{entry.mode} {entry.oid}\t".encode() + name + b"\0"
            for name, entry in absent.items()
            if entries.get(name) != entry
        ]
        if theirs.names:  # an index that was lost says nothing
            lines += [
                f"0 {self._zero}\t".encode() + name + b"\0"
                for name, entry in entries.items()
                if entry.mode == GITLINK and name not in theirs.names and not self._lies_there(name + b"/.git")
            ]
        if not lines:
            return entries
        self.git.run("update-index", "-z", "--replace", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
        return self._entries()

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

    def _take_unpopulated(self, gitlinks: dict[bytes, str]) -> list[bytes]:
        """Take submodules without a checkout from the worker's index: nothing on disk could tell their commit."""
        held = self._entries()
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

    def _dirty_and_others(self) -> tuple[list[bytes], list[bytes]]:
        # diff-files names every path whose stat differs, also one that a
        # conversion makes equal again: its raw content may still be the work.
        def dirty() -> list[bytes]:
            listed = self.git.run(
                "diff-files", "-z", "--raw", "--ignore-submodules=dirty", "--no-ext-diff", timeout=git.CONTENT
            )
            rows = git.records(listed.out)
            metas, found = rows[::2], rows[1::2]
            links = [name for meta, name in zip(metas, found, strict=True) if meta.startswith(b":160000")]
            self._allowed = self._allowed.union(links)
            return found

        def others() -> list[bytes]:
            return git.records(
                self.git.run("ls-files", "-z", "-o", "--exclude-per-directory=.gitignore", timeout=git.CONTENT).out
            )

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.submit(dirty), pool.submit(others)
            return first.result(), second.result()

    def _update(self, found: list[bytes]) -> None:
        parents: dict[bytes, bool] = {}
        present = [name for name in found if self._is_file(name, parents)]
        gone = sorted(set(found) - set(present))
        if gone:
            lines = b"".join(f"0 {self._zero}\t".encode() + name + b"\0" for name in gone)
            self.git.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)
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
        if not directory:
            return False
        if directory not in known:
            known[directory] = self._beyond_link(root, os.path.dirname(directory), known) or os.path.islink(
                os.path.join(root, directory)
            )
        return known[directory]

    def _entries(self) -> dict[bytes, Entry]:
        listed = self.git.run("ls-files", "-z", "-s", timeout=git.CONTENT).out
        entries = {}
        for row in git.records(listed):
            meta, _, name = row.partition(b"\t")
            mode, oid, _ = meta.decode("ascii").split(" ")
            entries[name] = Entry(mode, oid)
        return entries

    def _worker_index(self) -> _WorkerIndex:
        if not self.admin.exists():
            return _WorkerIndex()  # somebody removed the registration
        index = self.admin / "index"
        if os.path.lexists(index) and not (index.is_file() and not index.is_symlink()):
            return _WorkerIndex(broken=f"{index} is not a regular file")
        try:
            if index.is_file() and not self._is_whole(index):
                return _WorkerIndex(broken=f"{index} is torn")
        except OSError as error:
            return _WorkerIndex(broken=f"{index}: {error.strerror}")
        listed = self.worker_git.run("ls-files", "-z", "-s", "-v", ok=(0, 128), timeout=git.CONTENT)
        if listed.code:
            return _WorkerIndex(broken=git.text(listed.err).strip())
        found: set[bytes] = set()
        gitlinks: dict[bytes, str] = {}
        unmerged: dict[bytes, None] = {}
        flagged: list[bytes] = []
        skipped: dict[bytes, Entry] = {}
        for row in git.records(listed.out):
            meta, _, name = row.partition(b"\t")
            tag, mode, oid, stage = meta.split(b" ")
            found.add(name)
            if mode == GITLINK.encode():
                gitlinks[name] = oid.decode("ascii")
            if stage != b"0":
                unmerged[name] = None
            elif tag not in (b"H", b"M"):
                flagged.append(name)
                if tag in (b"S", b"s"):
                    skipped[name] = Entry(mode.decode("ascii"), oid.decode("ascii"))
        return _WorkerIndex(frozenset(found), gitlinks, tuple(unmerged), tuple(flagged), skipped)


def _is_empty_dir(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def _parents(name: bytes) -> list[bytes]:
    found = []
    while name := os.path.dirname(name):
        found.append(name)
    return found


def walk_tree(root: Path) -> Walk:
    """Name everything that lies under ``root``; repositories inside are named, not entered."""
    walk = Walk()
    top = os.fsencode(root)
    pending = [b""]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(os.path.join(top, directory)) as listing:
                entries = list(listing)
        except OSError:
            walk.unreadable.append(directory)
            continue
        # In whatever spelling, where the file system takes it for .git.
        dot_git = any(entry.name.lower() == b".git" for entry in entries)
        if directory and dot_git and os.path.lexists(os.path.join(top, directory, b".git")):
            walk.repositories.append(directory)
            continue
        if directory and not entries:
            walk.empty_dirs.append(directory)
        for entry in entries:
            name = os.path.join(directory, entry.name)
            if not directory and entry.name == b".git":
                if entry.is_dir(follow_symlinks=False):
                    walk.repositories.append(b"")
            elif entry.is_dir(follow_symlinks=False):
                pending.append(name)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                walk.files.add(name)
            else:
                walk.special[name] = _kind(entry)
    return walk


def require_readable_rules(root: Path, walk: Walk) -> None:
    """Raise ``patch_missing`` for a FIFO where git reads its rules: git would wait for it for ever."""
    for name, kind in walk.special.items():
        if name.rpartition(b"/")[2].lower() in (b".gitignore", b".gitattributes", b".gitmodules"):
            raise LionwtError(
                "patch_missing",
                f"{git.text(name)} is a {kind}, from which git would read its rules; "
                "the lease and the worktree are as they were",
                hint=f"remove it, then freeze again: rm {root / git.text(name)}",
            )


def _kind(entry: os.DirEntry[bytes]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    for test, kind in ((stat.S_ISFIFO, "fifo"), (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "block device")):
        if test(mode):
            return kind
    return "character device"
