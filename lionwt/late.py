"""What a worker still wrote after its freeze is saved as evidence before its worktree goes.

The worktree is captured once more, by the code that froze it, and compared with
what the manifest says was frozen: the tree, the files beside it, submodules and
commits. What is new goes into ``late-N.*``; whatever cannot be saved is named,
and keeps the worktree (ADR-0091 D5, design section 7, teardown).

What an earlier look has saved counts only while it is still there: the lease
file holds the hash of each ``late-N.json``, and that the hashes of the files
beside it. Whatever is not what was written is saved again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lionwt import evidence, git, history, registration, submodules, trees, worktree
from lionwt.capture import Capture, Capturer
from lionwt.errors import LionwtError, from_os_error
from lionwt.records import Identity, LeaseFile
from lionwt.session import Run
from lionwt.store import make_own_dir, move_file, sync_dir
from lionwt.values import State


def save(run: Run, file: LeaseFile) -> tuple[LeaseFile, list[str]]:
    """Save what is new in the worktree; returns the file and the reasons why the worktree must stay."""
    path, identity = file.lease.worktree_path, file.identity
    if identity is None or file.evidence is None or not worktree.is_leased_directory(path, identity):
        return file, []  # removal looks again, and leaves what is not the lease's
    try:
        with run.scratch(file.worker_id) as scratch:
            return _Look(run, file, identity, scratch).save()
    except LionwtError as error:
        return file, [f"the worktree could not be compared with what was frozen, so it was kept: {error.message}"]
    except OSError as error:
        return file, [f"{from_os_error(error, 'comparing the worktree with what was frozen')}; it was kept"]


class _Known(State):
    """What the manifest and the late looks before this one have saved or named."""

    ignored: set[tuple[str, Any, Any]] = set()
    converted: set[tuple[str, str]] = set()
    refs: dict[str, str] = {}
    tips: set[str] = set()
    given_up: set[str] = set()
    not_saved: set[str] = set()
    since: int = 0
    #: The tree of the last look whose evidence stands; the next patch begins there.
    tree: str = ""

    def learn(self, manifest: dict[str, Any]) -> None:
        self.ignored |= {_version(row) for row in manifest.get("ignored", [])}
        self.converted |= {(row["path"], row["sha256"]) for row in manifest.get("converted", [])}
        self.refs.update((row["path"], row.get("refs", "")) for row in manifest.get("submodules", []))
        self.tips |= set(manifest.get("commits", {}).get("tips", []))
        self.since = manifest.get("began_ns", self.since)


def _version(row: dict[str, Any]) -> tuple[str, Any, Any]:
    return row["path"], row.get("bytes"), row.get("mtime_ns")


class _Look:
    """One look at a worktree whose freeze is over."""

    def __init__(self, run: Run, file: LeaseFile, identity: Identity, scratch: Path) -> None:
        self.run, self.file, self.identity, self.scratch = run, file, identity, scratch
        self.root = file.lease.worktree_path
        self.target = run.paths.evidence(file.worker_id)
        make_own_dir(self.target)
        self.name = f"late-{1 + _numbered(self.target)}"
        self.known = _known(run, file, self.target)
        self.saver = evidence.Saver(self.root, scratch / "late.tar")
        self.kept: list[str] = []

    def save(self) -> tuple[LeaseFile, list[str]]:
        assert self.file.evidence is not None
        capture = Capturer(self.run.file, self.run.paths, self.file, self.identity, self.scratch).capture()
        last = self.known.tree
        inside = submodules.look(
            self.run.file, self.run.paths, self.file, self.identity, capture, self.scratch, self.target,
            prefix=f"{self.name}-", known=self.known.refs,
        )  # fmt: skip
        found: dict[str, Any] = {
            "schema": evidence.LATE_SCHEMA,
            "tree": capture.tree,
            "ignored": self._ignored(capture, inside.ignored),
            "converted": self._converted(capture),
            "submodules": self._submodules(capture, inside),
            "commits": self._commits(),
        }
        self._outside_the_tree(capture)
        self.saver.close()
        for name, why in self.saver.failed.items():
            self._keep(f"{name} cannot be saved ({why})")
        new = [key for key in ("ignored", "converted", "submodules") if found[key]]
        if capture.tree == last and not new and not found["commits"]["tips"] and not self.saver.used:
            return self.file, self.kept
        return self._record(capture.tree, last, found), self.kept

    def _record(self, tree: str, last: str, found: dict[str, Any]) -> LeaseFile:
        assert self.file.evidence is not None
        patch = self.target / f"{self.name}.patch"
        # Made aside and moved in: nothing that was planted under the name is written through.
        evidence.write_patch(self.run.private(), last, tree, self.scratch / "late.patch")
        move_file(self.scratch / "late.patch", patch)
        if self.saver.used:
            move_file(self.scratch / "late.tar", self.target / f"{self.name}.tar")
        own = [entry for entry in os.listdir(self.target) if entry.startswith((f"{self.name}.", f"{self.name}-"))]
        found["kept"] = evidence.digests(self.target, own)
        sha256 = evidence.write_manifest(self.target / f"{self.name}.json", found)
        sync_dir(self.target)
        noted = self.file.noting(
            "late_writes", "the worktree was written to after the freeze", self.run.paths.ref(patch)
        )
        late = {**self.file.evidence.late, f"{self.name}.json": sha256}
        frozen = self.file.evidence.having(late=late)
        return self.run.store.write(noted.having(evidence=frozen))

    def _keep(self, why: str) -> None:
        self.kept.append(f"{why}; the worktree was kept: move it away, then reconcile")

    def _ignored(self, capture: Capture, in_submodules: list[bytes]) -> list[dict[str, Any]]:
        """Ignored files that are new or not as they were; one too large to save keeps the worktree."""
        now = {name: evidence.ignored_row(self.root, name) for name in (*capture.left_out, *in_submodules)}
        new = [name for name, row in now.items() if _version(row) not in self.known.ignored]
        for name in [name for name in now if name.endswith(b"/")]:  # a repository of its own, or empty
            path = os.path.join(os.fsencode(self.root), name)
            if os.listdir(path) and (name in new or _changed_since(path, self.known.since)):
                self._keep(f"{git.text(name)} is an ignored directory that was written to after the freeze")
        special = {*capture.unreadable, *capture.refused}
        rows = evidence.ignored(self.root, [name for name in new if name not in special], self.saver)
        for row in rows:
            if row["kept"] is None and "bytes" in row and row["path"] not in self.saver.failed:
                self._keep(f"{row['path']} is ignored, was written after the freeze and is too large to save")
        return [row for row in rows if row["kept"]]

    def _converted(self, capture: Capture) -> list[dict[str, Any]]:
        rows = evidence.converted(self.run.file, self.root, capture, self.saver, keep=False)
        new = [row for row in rows if (row["path"], row["sha256"]) not in self.known.converted]
        for row in new:
            if row["kept"] == "saved.tar":
                self.saver.add(os.fsencode(row["path"]))
        return new

    def _submodules(self, capture: Capture, inside: submodules.Inside) -> list[dict[str, Any]]:
        codes = {code for code, _ in inside.unsaved}
        for name in capture.submodules if self.known.given_up & codes else ():
            self._again(name)
        for code, message in inside.unsaved:
            if code not in self.known.given_up:
                self._keep(message)
        return [row for row in inside.rows if row["bundle"]]

    def _commits(self) -> dict[str, Any]:
        """Commits that came after the freeze, wherever the worktree remembers them."""
        if registration.read_nonce(Path(self.identity.admin_dir)) != self.identity.nonce:
            return {"tips": [], "bundle": None}
        past = history.read(self.run.file, self.run.paths.git_dir, self.file, self.identity)
        new = tuple(tip for tip in past.tips if tip not in self.known.tips)
        bundle = self.target / f"{self.name}.bundle"
        made = self.scratch / "late.bundle"
        if not new or not history.save_commits(self.run.file, self.run.paths.git_dir, self.scratch / "git", new, made):
            return {"tips": [], "bundle": None}
        move_file(made, bundle)
        return {"tips": list(new), "bundle": self.run.paths.ref(bundle)}

    def _outside_the_tree(self, capture: Capture) -> None:
        """What git does not take: what was given up at the freeze is saved again where it changed, the rest kept."""
        for name in (*capture.repositories, *capture.shadowed, *capture.unreadable, *capture.refused):
            shown = git.text(name) or "."
            if shown in self.known.given_up:
                self._again(name)
            else:
                self._keep(f"{shown} appeared after the freeze and cannot be captured")
        unfit = {*capture.unreadable, *capture.refused}
        for shown in sorted(self.known.not_saved - self.saver.failed.keys()):
            name = os.fsencode(shown)
            if os.path.lexists(self.root / shown) and (name in unfit or name not in capture.entries):
                self.saver.add(name)

    def _again(self, name: bytes) -> None:
        if _changed_since(os.path.join(os.fsencode(self.root), name), self.known.since):
            self.saver.add(name)


def _changed_since(path: bytes, when: int) -> bool:
    """Whether anything at or below ``path`` was changed at or after ``when`` (ns); its change times cannot be set."""
    if os.lstat(path).st_ctime_ns >= when:
        return True
    for parent, directories, files in trees.walk(path):
        if any(os.lstat(os.path.join(parent, entry)).st_ctime_ns >= when for entry in (*directories, *files)):
            return True
    return False


def _numbered(target: Path) -> int:
    """The highest number that a late look has used, also one that did not come to its end."""
    numbers = [entry[5:].partition(".")[0].partition("-")[0] for entry in os.listdir(target) if entry[:5] == "late-"]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _known(run: Run, file: LeaseFile, target: Path) -> _Known:
    known = _Known(tree=file.evidence.tree if file.evidence and file.evidence.tree else file.lease.base_sha)
    if file.candidate is None or file.evidence is None:
        return known
    path = run.paths.artifact_root / file.candidate.artifact_manifest_ref
    if (manifest := _read(path, file.evidence.manifest_sha256)) is not None:
        if _stands(target, manifest):
            known.learn(manifest)
        left = manifest.get("not_captured", {})
        for kind in ("repositories", "in_submodules", "unreadable", "refused"):
            known.given_up |= set(left.get(kind, []))
        known.given_up |= {note["code"] for note in manifest["diagnostics"] if note["message"].startswith("given up")}
        known.not_saved = set(left.get("not_saved", {}))
    follows = True
    for name, sha256 in file.evidence.late.items():
        look = _read(target / name, sha256)
        if look is None or not _stands(target, look):
            follows = False  # each patch begins where the one before it ended
            continue
        known.learn(look)
        if follows:
            known.tree = look["tree"]
    return known


def _stands(target: Path, manifest: dict[str, Any]) -> bool:
    """Whether the files that a manifest speaks of are still there, as they were written."""
    kept: dict[str, str] = manifest.get("kept", {})
    return evidence.digests(target, kept) == kept


def _read(path: Path, sha256: str) -> dict[str, Any] | None:
    """A manifest, or None for one that is not what was written: then nothing counts as saved."""
    try:
        if evidence.sha256_of(path)[0] != sha256:
            return None
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None
