"""What a worker's submodules hold that the captured tree only points to.

A gitlink is a commit id: the commits, the uncommitted and the ignored files
behind it lie in repositories of the worker's own, which go with its worktree.
So each of them is looked into, submodules of submodules and those without a
checkout included: commits are bundled, from refs and reflogs, ignored and
special files are named, and uncommitted work is what makes a capture
incomplete (design section 7, freeze 4).

Such a repository is the worker's, so it is read through a scratch directory
with lionwt's own configuration; nothing of it is executed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lionwt import files, git, history, names, repository, store, trees
from lionwt.capture import Capture, parents_of, require_readable_repositories
from lionwt.errors import LionwtError
from lionwt.listing import GITLINK, LIST, Listing
from lionwt.records import Identity, LeaseFile, RunFile
from lionwt.values import State
from lionwt.walk import Walk, require_readable_rules, walk_tree

#: Reflogs of one repository are read up to this many files.
_MOST_LOGS: Final = 10_000


class Inside(State):
    """What was found in the submodules of a worktree; all names are relative to the worktree.

    ``rows`` are for the manifest; ``unsaved`` is what makes the capture incomplete.
    """

    rows: list[dict[str, Any]] = []
    unsaved: list[tuple[str, str]] = []
    ignored: list[bytes] = []
    special: dict[bytes, str] = {}
    empty_dirs: list[bytes] = []


def look(
    run: RunFile,
    paths: names.RunPaths,
    file: LeaseFile,
    identity: Identity,
    capture: Capture,
    scratch: Path,
    evidence: Path,
    prefix: str = "",
    known: Mapping[str, str] = MappingProxyType({}),
) -> Inside:
    """Look into every submodule of a captured worktree; bundles go to ``evidence``, under ``prefix``.

    A repository whose refs are ``known`` by their digest is not bundled again.
    """
    looking = _Look(run, paths, file.lease.worktree_path, scratch, evidence, prefix, known)
    for name in capture.submodules:
        looking.enter(name, capture.entries[name].oid, looking.base_of(name))
    looking.without_checkout(Path(identity.admin_dir))
    return looking.found


def save_stores(
    run: RunFile, paths: names.RunPaths, file: LeaseFile, identity: Identity, scratch: Path, evidence: Path, prefix: str
) -> list[str]:
    """Bundle what the submodules of a worktree hold that is not there any more; returns the bundles' references.

    Raises ``patch_missing`` where one cannot be saved: its repository goes with the registration.
    """
    looking = _Look(run, paths, file.lease.worktree_path, scratch, evidence, prefix, MappingProxyType({}))
    looking.without_checkout(Path(identity.admin_dir))
    for _, message in looking.found.unsaved:
        raise LionwtError(
            "patch_missing",
            f"the worktree of {file.worker_id!r} is gone, and {message}; nothing of it was removed",
            hint="move that repository away, then reconcile again",
        )
    return [row["bundle"] for row in looking.found.rows if row["bundle"]]


class _Look:
    def __init__(
        self,
        run: RunFile,
        paths: names.RunPaths,
        root: Path,
        scratch: Path,
        evidence: Path,
        prefix: str,
        known: Mapping[str, str],
    ) -> None:
        self.run, self.paths, self.root = run, paths, root
        self.scratch, self.evidence, self.prefix, self.known = scratch, evidence, prefix, known
        self.main = git.private(paths.git_dir, run.common_dir.path)
        self.entered: set[Path] = set()
        self.found = Inside()

    def enter(self, name: bytes, commit: str, base: str | None) -> None:
        """Look into one submodule with a checkout, and into those inside it; ``base`` is what the run began with."""
        path = self.root / git.text(name)
        walk = walk_tree(path)
        require_readable_rules(path, walk)
        require_readable_repositories(path, walk)
        row = self._row(git.text(name), commit)
        try:
            store_dir = _store_of(path)
            view = self._save_commits(row, store_dir, [base] if base else [], work_tree=path)
            nested = self._look_around(name, commit, walk, view)
        except (OSError, LionwtError) as error:
            self._unsaved("unreadable", f"submodule {git.text(name)}: {error}")
            return
        for inner, oid in nested.items():
            self.enter(os.path.join(name, inner), oid, _gitlinks(view, base, inner).get(inner) if base else None)

    def without_checkout(self, admin: Path) -> None:
        """Save what only a submodule's repository holds whose checkout was taken away, or never was in this tree."""
        bases: set[str] | None = None
        for store_dir in _stores_below(admin / "modules"):
            if store_dir in self.entered:
                continue
            if bases is None:
                bases = set(_gitlinks(self.main, self.run.base_sha).values())
            row = self._row(f".git/{store_dir.relative_to(admin)}", None)
            try:
                self._save_commits(row, store_dir, bases)
            except (OSError, LionwtError) as error:
                self._unsaved("unreadable", f"the submodule's repository {store_dir}: {error}")

    def base_of(self, name: bytes) -> str | None:
        """The commit that the base of the run has for a submodule."""
        return _gitlinks(self.main, self.run.base_sha, name).get(name)

    def _row(self, path: str, commit: str | None) -> dict[str, Any]:
        row: dict[str, Any] = {"path": path, "commit": commit, "bundle": None}
        self.found.rows.append(row)
        return row

    def _unsaved(self, kind: str, message: str) -> None:
        self.found.unsaved.append((f"submodule_{kind}", message))

    def _save_commits(
        self, row: dict[str, Any], store_dir: Path, bases: Iterable[str], work_tree: Path | None = None
    ) -> git.Git:
        """Bundle the commits that no base has; returns a way to look at the repository."""
        if special := files.special_below(store_dir, ("modules", "worktrees")):
            raise OSError(f"{special} is no file, and git would wait for it")
        self.entered.add(Path(os.path.realpath(store_dir)))
        objects = git.private(self.paths.git_dir, store_dir)
        refs = _refs_of(store_dir, objects)
        row["refs"] = hashlib.sha256(repr(sorted(refs.items())).encode("utf-8", "surrogateescape")).hexdigest()
        number = len(self.found.rows) - 1
        view = self.scratch / f"submodule-{number}"
        history.make_git_dir(view, self.paths.git_dir, refs)
        (view / "shallow").unlink(missing_ok=True)
        if (store_dir / "shallow").is_file():
            (view / "shallow").write_bytes(files.read_small(store_dir / "shallow", follow=True))
        inside = git.private(view, store_dir, work_tree=work_tree, index=view / "index")
        exclude = [f"^{oid}" for oid in _commits_among(objects, bases)]
        is_new = row["refs"] != self.known.get(row["path"])
        if is_new and inside.run("rev-list", "--max-count=1", "--all", *exclude, "--").out:
            bundle = self.evidence / f"{self.prefix}submodule-{number}.bundle"
            made = self.scratch / bundle.name
            inside.run("bundle", "create", "--quiet", made, "--all", *exclude, timeout=git.CONTENT)
            store.move_file(made, bundle)
            row["bundle"] = self.paths.ref(bundle)
        return inside

    def _look_around(self, name: bytes, commit: str, walk: Walk, view: git.Git) -> dict[bytes, str]:
        """Name what a submodule's commits do not hold; returns the submodules with a checkout inside it."""
        view.run("read-tree", commit, timeout=git.CONTENT)
        view.run("update-index", "-q", "--refresh", ok=(0, 1), timeout=git.CONTENT)
        dirty = view.run("diff-files", "-z", "--name-only", "--ignore-submodules=dirty", timeout=git.CONTENT).out
        others = view.run("ls-files", "-z", "-o", "--exclude-per-directory=.gitignore", timeout=git.CONTENT).out
        entries = Listing(view.run(*LIST, timeout=git.CONTENT).out, self.run.object_format)
        gitlinks = entries.gitlinks
        work = git.records(dirty + others)
        seen = {path.rstrip(b"/") for path in work}
        foreign = [path for path in walk.repositories if path and path not in gitlinks and path not in seen]
        tracked_dirs = {parent for path in entries for parent in parents_of(path)} if foreign else set()
        work += [path for path in foreign if path in tracked_dirs]
        # Files where a submodule belongs: git looks away.
        bare_links = tuple(path + b"/" for path in gitlinks.keys() - set(walk.repositories))
        shadowed = {path for path in walk.files if bare_links and path.startswith(bare_links)}
        work += sorted(shadowed)
        shown = git.text(name)
        if work:
            self._unsaved("dirty", f"submodule {shown} holds uncommitted work: {git.text(work[0])}")
        for path in walk.unreadable:
            self._unsaved("unreadable", f"submodule {shown}: {git.text(path) or 'it'} cannot be read")
        left = list(entries.beyond(walk.files) - seen - shadowed)
        left += [path + b"/" for path in foreign if path not in tracked_dirs]
        self.found.ignored += sorted(os.path.join(name, path) for path in left)
        self.found.special.update((os.path.join(name, path), kind) for path, kind in sorted(walk.special.items()))
        self.found.empty_dirs += sorted(os.path.join(name, path) for path in walk.empty_dirs if path not in gitlinks)
        return {path: gitlinks[path] for path in sorted(gitlinks.keys() & set(walk.repositories))}


def _store_of(path: Path) -> Path:
    found = repository.git_dir_of(path)
    if found is None or (path / ".git").is_symlink():
        raise OSError(f"{path / '.git'} names no repository")
    return found


def _stores_below(top: Path) -> Iterator[Path]:
    """Every git directory of a submodule below a ``modules`` directory; a submodule's name may hold slashes."""
    pending = [top]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as listing:
                entries = sorted(entry.name for entry in listing if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            path = directory / entry
            is_store = os.path.lexists(path / "HEAD") and (path / "objects").is_dir()
            if is_store:
                yield path
            pending.append(path / "modules" if is_store else path)


def _refs_of(store_dir: Path, objects: git.Git) -> dict[str, str]:
    """What a submodule's repository has or had a name for: refs, HEAD, and what reflogs remember beyond."""
    shared = git.shared(str(store_dir))
    listed = shared.run("for-each-ref", "--format=%(refname) %(objectname)").out
    refs = dict(
        line.split(" ", 1) for line in git.text(listed).split("\n") if line and not line.startswith("refs/remotes/")
    )
    head = shared.run("rev-parse", "--quiet", "--verify", "HEAD^{commit}", ok=(0, 1, 128))
    if head.code == 0:
        refs["refs/lionwt/head"] = git.text(head.out).strip()
    remembered = sorted(_logged(store_dir / "logs").difference(refs.values()))
    for number, oid in enumerate(_commits_among(objects, remembered)):
        refs[f"refs/lionwt/reflog/{number}"] = oid
    return refs


def _logged(logs: Path) -> set[str]:
    """Every commit that a reflog of the repository's own names; not those of what was fetched."""
    found: set[str] = set()
    count = 0
    for parent, directories, inside in trees.walk(os.fspath(logs)):
        if Path(parent) == logs / "refs" and "remotes" in directories:
            directories.remove("remotes")
        for name in inside:
            count += 1
            if count > _MOST_LOGS:
                raise OSError(f"{logs} holds more than {_MOST_LOGS} reflogs")
            for line in files.read_small(Path(parent, name)).split(b"\n"):
                found.update(word for word in git.text(line).split(" ", 2)[:2] if git.is_oid(word) and word.strip("0"))
    return found


def _commits_among(objects: git.Git, oids: Iterable[str]) -> list[str]:
    """Those of ``oids`` that are commits which the repository has."""
    wanted = sorted(oids)
    if not wanted:
        return []
    asked = "".join(f"{oid}\n" for oid in wanted).encode("ascii")
    answered = objects.run("cat-file", "--batch-check=%(objecttype)", stdin=asked).out.decode().splitlines()
    return [oid for oid, kind in zip(wanted, answered, strict=True) if kind == "commit"]


def _gitlinks(where: git.Git, commit: str, *paths: bytes) -> dict[bytes, str]:
    """The submodules of a commit, all of them or those at ``paths``; none of a commit that is not there."""
    listed = where.run("ls-tree", "-r", "-z", commit, "--", *paths, ok=(0, 128), timeout=git.CONTENT)
    found = {}
    for row in git.records(listed.out) if listed.code == 0 else []:
        meta, _, path = row.partition(b"\t")
        mode, _, oid = meta.decode("ascii").split(" ")
        if mode == GITLINK:
            found[path] = oid
    return found
