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

import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lionwt import git, names, worktree
from lionwt.errors import LionwtError
from lionwt.records import Identity, LeaseFile, RunFile

GITLINK: Final = "160000"
SYMLINK: Final = "120000"
_LOOKS: Final = 6


@dataclass(frozen=True)
class Entry:
    """One path of an index: mode and object."""

    mode: str
    oid: str


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
    touched: tuple[bytes, ...]
    left_out: tuple[bytes, ...]
    special: dict[bytes, str]
    empty_dirs: tuple[bytes, ...]
    repositories: tuple[bytes, ...]
    shadowed: tuple[bytes, ...]
    submodules: tuple[bytes, ...]
    unreadable: tuple[bytes, ...]
    unmerged: tuple[bytes, ...]
    flagged: tuple[bytes, ...]


@dataclass(frozen=True)
class _WorkerIndex:
    names: frozenset[bytes]
    gitlinks: frozenset[bytes]
    unmerged: tuple[bytes, ...]
    flagged: tuple[bytes, ...]


class Capturer:
    """Captures one lease's worktree into an index in ``scratch``."""

    def __init__(self, run: RunFile, paths: names.RunPaths, file: LeaseFile, identity: Identity, scratch: Path) -> None:
        self.root = file.lease.worktree_path
        self.admin_dir = Path(identity.admin_dir)
        self.run = run
        self.index = scratch / "index"
        self.git = git.private(paths.git_dir, run.common_dir.path, work_tree=self.root, index=self.index)
        self.worker_git = git.shared(run.common_dir.path, git_dir=identity.admin_dir, work_tree=str(self.root))
        self.saved = paths.saved_index(file.worker_id)
        self._allowed: frozenset[bytes] = frozenset()

    def capture(self) -> Capture:
        """Take the worktree; raises ``patch_missing`` and ``worktree_changing``."""
        if self.saved.exists():
            worktree.copy_index(self.saved, self.index)
        else:
            self.git.run("read-tree", self.run.base_sha, timeout=git.CONTENT)
        touched: dict[bytes, None] = {}
        for _ in range(_LOOKS):
            theirs = self._worker_index()
            new = self._look(theirs)
            entries = self._entries()
            forced = [name for name in theirs.names - entries.keys() if self._is_file(name)]
            if forced:
                self._update(sorted(forced))
                entries = self._entries()
            touched.update(dict.fromkeys([*new, *forced]))
            tree = self.git.oid("write-tree", timeout=git.CONTENT)
            walk = walk_tree(self.root)
            dirty, others = self._dirty_and_others()
            nested = {name.rstrip(b"/") for name in others if name.endswith(b"/")}
            if not dirty and len(nested) == len(others) and self._worker_index() == theirs:
                return self._result(tree, entries, touched, walk, theirs, nested)
        raise LionwtError(
            "worktree_changing",
            f"{self.root} kept changing while it was captured; nothing was recorded, the worktree is as it was",
            hint="stop whatever writes there, then run the same command again",
        )

    def _result(
        self,
        tree: str,
        entries: dict[bytes, Entry],
        touched: Iterable[bytes],
        walk: Walk,
        theirs: _WorkerIndex,
        nested: set[bytes],
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
        left_out = [name for name in walk.files if name not in entries]
        left_out += [name + b"/" for name in foreign if name not in repositories]
        return Capture(
            tree=tree,
            entries=entries,
            touched=tuple(sorted(touched)),
            left_out=tuple(sorted(left_out)),
            special=dict(sorted(walk.special.items())),
            empty_dirs=tuple(sorted(set(walk.empty_dirs) - gitlinks)),
            repositories=tuple(sorted(repositories)),
            shadowed=tuple(sorted(shadowed)),
            submodules=tuple(sorted(gitlinks.intersection(walk.repositories))),
            unreadable=tuple(sorted(walk.unreadable)),
            unmerged=theirs.unmerged,
            flagged=theirs.flagged,
        )

    def _look(self, theirs: _WorkerIndex) -> list[bytes]:
        """Bring the index up to the worktree; returns the paths that were looked at."""
        if theirs.gitlinks:
            self._allowed |= theirs.gitlinks & self._named_submodules()
        dirty, others = self._dirty_and_others()
        found = [*dirty, *(name for name in others if not name.endswith(b"/"))]
        self._update(found)
        return found

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
            zero = "0" * (64 if self.run.object_format == "sha256" else 40)
            lines = b"".join(f"0 {zero}\t".encode() + name + b"\0" for name in gone)
            self._git_update(["-z", "--index-info"], lines, gone)
        if present:
            self._git_update(
                ["-z", "--add", "--replace", "--stdin"], b"".join(name + b"\0" for name in present), present
            )

    def _git_update(self, options: list[str], stdin: bytes, found: list[bytes]) -> None:
        try:
            self.git.run("update-index", *options, stdin=stdin, timeout=git.CONTENT)
        except LionwtError as error:
            if error.code != "git_failed":
                raise
            raise LionwtError(
                "patch_missing",
                f"the change could not be captured: {error.message}; the lease and the worktree are as they were",
                hint="mend or remove what is named, then freeze again; or give it up with "
                "--failed --accept-incomplete, which keeps the raw files",
                diagnostics={"paths": [git.text(name) for name in found[:20]]},
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
        if not self.admin_dir.exists():
            return _WorkerIndex(frozenset(), frozenset(), (), ())  # somebody removed the registration
        listed = self.worker_git.run("ls-files", "-z", "-s", "-v", ok=(0, 128), timeout=git.CONTENT)
        if listed.code:
            raise LionwtError(
                "patch_missing",
                f"the worker's index cannot be read: {git.text(listed.err).strip()}; "
                "the lease and the worktree are as they were",
                hint="mend it in the worktree (remove a torn index, then git reset), then freeze again",
            )
        found: set[bytes] = set()
        gitlinks: set[bytes] = set()
        unmerged: dict[bytes, None] = {}
        flagged: list[bytes] = []
        for row in git.records(listed.out):
            meta, _, name = row.partition(b"\t")
            tag, mode, _, stage = meta.split(b" ")
            found.add(name)
            if mode == GITLINK.encode():
                gitlinks.add(name)
            if stage != b"0":
                unmerged[name] = None
            elif tag not in (b"H", b"M"):
                flagged.append(name)
        return _WorkerIndex(frozenset(found), frozenset(gitlinks), tuple(unmerged), tuple(flagged))


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
        if directory and any(entry.name.lower() == b".git" for entry in entries):
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


def _kind(entry: os.DirEntry[bytes]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    for test, kind in ((stat.S_ISFIFO, "fifo"), (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "block device")):
        if test(mode):
            return kind
    return "character device"
