"""What must be true of a repository and its runs, whatever was killed (design section 10).

Everything is decided by a look at git and at the files: nothing of lionwt is
imported, so a mistake in it cannot hide itself here. A :class:`Checker`
remembers what it saw, so that it also knows what must not have changed since.

``look()`` holds at any moment, in the middle of a crash as well;
``look(settled=True)`` adds what must hold once ``reconcile`` has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import Repo
from tests.crash import litter
from tests.crash.leases import STATUSES, Lease, check_changes, check_conditions, check_files, read_leases, runs_of

_OWN_REFS = ("refs/heads/lionagi/", "refs/lionwt/")


class Broken(AssertionError):
    """An invariant does not hold; the message lists each, with its number in the design."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("invariants violated:\n  " + "\n  ".join(found))
        self.found = found


@dataclass
class Operator:
    """What the operator has in the checkout, as it was when it was noted."""

    files: dict[bytes, tuple[int, bytes]]
    status: list[bytes]
    staged: list[bytes]
    refs: dict[str, str]
    head: str


@dataclass
class Checker:
    """Looks at one repository and at every run of it below ``home``."""

    repo: Repo
    home: Path
    secret: str = ""
    target: str = "refs/heads/work"
    #: What the operator did to the target or the checkout that a record cannot know of.
    operator_moved_target: bool = False
    left_behind: set[bytes] = field(default_factory=set)
    #: Whether a settled look also reads every object; it takes as long as there are objects.
    deep: bool = True
    operator: Operator = field(init=False)
    _known: dict[str, Lease] = field(init=False, default_factory=dict)
    _proven: set[tuple[str, ...]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.common = Path(os.path.realpath(self.repo.path / self.repo.git("rev-parse", "--git-common-dir")))
        self.git_dir = Path(os.path.realpath(self.repo.path / self.repo.git("rev-parse", "--git-dir")))
        self.base_target = ""
        self.note_operator()

    # What the operator has

    def note_operator(self) -> None:
        """Take what the operator has now for what must survive from here on."""
        self.operator = self._operators()
        self.base_target = self.operator.refs.get(self.target, "")

    def note_file(self, name: bytes) -> None:
        """Take what one file holds now for what must survive; it differed from the target before as well."""
        self.operator.files[name] = self._file(name)

    def note_expiry(self, lease: Lease) -> None:
        """Take what a lease's file says now for what is known of it: its retention was moved into the past."""
        self._known[lease.name] = lease

    def forget(self) -> None:
        """Begin anew: the runs that were looked at are somebody else's to remember."""
        self._known = {}

    def _operators(self) -> Operator:
        status = self._status()
        refs = dict(
            row.split(" ", 1) for row in self._git("for-each-ref", "--format=%(refname) %(objectname)%(symref)")
        )
        return Operator(
            files={name: self._file(name) for name in (row[3:] for row in status) if not name.endswith(b"/")},
            status=status,
            staged=self._raw("diff-index", "--cached", "-z", "--no-renames", "HEAD").split(b"\0"),
            refs=refs,
            head=self._git("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))[0] if self._has_head() else "",
        )

    def _refs(self) -> dict[str, str]:
        listed = self._git("for-each-ref", "--format=%(refname) %(objectname)%(symref)")
        return dict(row.split(" ", 1) for row in listed)

    def _has_head(self) -> bool:
        return (self.git_dir / "HEAD").read_bytes().startswith(b"ref: ")

    def _status(self) -> list[bytes]:
        """Paths that differ, untracked and ignored ones included; without renames, so one path a row."""
        out = self._raw(
            "status", "--porcelain=v1", "-z", "--ignored", "--untracked-files=all", "--no-renames", "--no-ahead-behind"
        )
        rows = [row for row in out.split(b"\0") if row]
        return sorted(row for row in rows if not row[3:].startswith(b".worktrees"))

    def _file(self, name: bytes) -> tuple[int, bytes]:
        path = os.path.join(os.fsencode(self.repo.path), name)
        try:
            seen = os.lstat(path)
        except OSError:
            return 0, b""
        if stat.S_ISLNK(seen.st_mode):
            return stat.S_IFLNK, os.readlink(path)
        if stat.S_ISREG(seen.st_mode):
            return seen.st_mode, Path(os.fsdecode(path)).read_bytes()
        return stat.S_IFMT(seen.st_mode), b""

    # Looking

    def look(self, *, settled: bool = False) -> list[str]:
        """Every invariant that does not hold now."""
        found: list[str] = []
        leases = list(read_leases(self.home, found))
        refs = dict(
            row.split(" ", 1) for row in self._git("for-each-ref", "--format=%(refname) %(objectname)%(symref)")
        )
        for check in (
            check_files(leases),
            check_changes(self._known, leases),
            self._check_orphans(leases, refs),
            self._check_evidence(leases),
            self._check_target(leases, refs, settled),
            self._check_records(leases, refs),
            self._check_operator(leases, refs, settled),
            self._check_modes(),
            self._check_settled(leases, refs) if settled else iter(()),
        ):
            found += check
        self._known = {lease.name: lease for lease in leases}
        return found

    def require(self, *, settled: bool = False, about: str = "") -> None:
        """Raise :class:`Broken` with the whole list."""
        found = self.look(settled=settled)
        if found:
            raise Broken([f"[{about}] {entry}" if about else entry for entry in found])

    def leases(self) -> list[Lease]:
        """The lease files that can be read."""
        return list(read_leases(self.home, []))

    def _registrations(self) -> Iterator[tuple[Path, str]]:
        """Registrations that lionwt's lock reason marks, with the worktree they lead to."""
        admin = self.common / "worktrees"
        for entry in sorted(admin.iterdir()) if admin.is_dir() else []:
            try:
                if (entry / "locked").read_bytes().startswith(b"lionwt "):
                    leads = (entry / "gitdir").read_text() if (entry / "gitdir").exists() else ""
                    yield entry, leads.strip()
            except OSError:
                continue

    def _check_orphans(self, leases: list[Lease], refs: dict[str, str]) -> Iterator[str]:
        """2: nothing of lionwt's in the repository without a file that speaks of it."""
        known = {(lease.run, lease.worker) for lease in leases}
        for ref in refs:
            parts = ref.split("/")
            if ref.startswith(_OWN_REFS):
                pair = (parts[3], parts[4]) if ref.startswith("refs/heads/") else (parts[2], parts[3])
                if pair not in known:
                    yield f"2: {ref} has no lease file"
        paths = {lease.data["lease"]["worktree_path"] for lease in leases}
        nonces = {(lease.data["intent"] or {}).get("nonce") for lease in leases}
        nonces |= {(lease.data["identity"] or {}).get("nonce") for lease in leases}
        for entry, leads in self._registrations():
            nonce = (entry / "locked").read_text().split()[-1]
            if os.path.dirname(leads) not in paths and nonce not in nonces:
                yield f"2: the registration {entry} has no lease file"
        for run in (self.repo.path / ".worktrees" / "lionagi").glob("*"):
            for worktree in run.iterdir():
                if str(worktree) not in paths:
                    yield f"2: {worktree} has no lease file"

    def _check_evidence(self, leases: list[Lease]) -> Iterator[str]:
        """6 and 7: the patch makes the base into the frozen tree, and the hashes are those of the files."""
        for lease in leases:
            candidate, proof = lease.data["candidate"], lease.data["evidence"]
            if candidate is None:
                continue
            artifacts = self._artifact_root(lease)
            patch, manifest = (artifacts / candidate[key] for key in ("patch_ref", "artifact_manifest_ref"))
            key = (lease.name, candidate["patch_sha256"], proof["tree"])
            if not patch.is_file() or not manifest.is_file():
                yield f"7: the patch or manifest of {lease.name} is missing"
                continue
            if hashlib.sha256(patch.read_bytes()).hexdigest() != candidate["patch_sha256"]:
                yield f"6: the patch of {lease.name} is not the one that was frozen"
            if hashlib.sha256(manifest.read_bytes()).hexdigest() != proof["manifest_sha256"]:
                yield f"6: the manifest of {lease.name} is not the one that was frozen"
            if key not in self._proven:
                made = self._applied(lease.data["lease"]["base_sha"], patch)
                if made != proof["tree"]:
                    yield f"6: the patch of {lease.name} makes {made}, not {proof['tree']}"
                self._proven.add(key)

    def _artifact_root(self, lease: Lease) -> Path:
        run = json.loads((lease.path.parent.parent / "workspaces.json").read_bytes())
        return Path(run["artifact_root"])

    def _applied(self, base: str, patch: Path) -> str:
        """The tree that plain git makes of the base and the patch; nothing is written to the repository."""
        with tempfile.TemporaryDirectory(dir=self.home) as scratch:
            os.mkdir(os.path.join(scratch, "objects"))
            env = {
                **self.repo.env,
                "GIT_INDEX_FILE": os.path.join(scratch, "index"),
                "GIT_OBJECT_DIRECTORY": os.path.join(scratch, "objects"),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self.common / "objects"),
            }
            self._git("read-tree", base, env=env)
            if patch.stat().st_size:
                self._git("apply", "--cached", "--binary", "--whitespace=nowarn", str(patch), env=env)
            return self._git("write-tree", env=env)[0]

    def _check_target(self, leases: list[Lease], refs: dict[str, str], settled: bool) -> Iterator[str]:
        """4, 9, 10, 11 and 25: what the target holds is what was journalled, once each, in one line."""
        head = refs.get(self.target, "")
        if self.operator_moved_target or not head or not self.base_target:
            return
        commits = self._line(self.base_target, head)
        if commits is None:
            yield f"9: {self.target} went from {self.base_target} to {head}, which does not descend from it"
            return
        journal = {lease.landing["merge"]: lease for lease in leases if lease.landing is not None}
        landed: dict[str, str] = {}
        for commit, tree, parents, body in commits:
            lease = journal.get(commit)
            if lease is None:
                yield f"9: {self.target} holds {commit}, which no lease file speaks of"
                continue
            landing = lease.landing
            assert landing is not None
            if lease.name in landed:
                yield f"11: {lease.name} landed twice, as {landed[lease.name]} and {commit}"
            landed[lease.name] = commit
            if parents != [landing["expected"], landing["candidate"]] or landing["tree"] != tree:
                yield f"10: {commit} has parents {parents} and tree {tree}, the journal says {landing}"
            if landing["candidate"] != lease.data["evidence"]["commit"]:
                yield f"10: {commit} landed {landing['candidate']}, frozen was {lease.data['evidence']['commit']}"
            if f"Lionwt-Worker: {lease.worker}" not in body or f"Lionwt-Run: {lease.run}" not in body:
                yield f"10: {commit} does not say whose it is"
            yield from self._check_merge(commit, tree, parents)
            yield from check_conditions(lease)
        for lease in leases:
            promoted = lease.data["outcome"] is not None and lease.data["outcome"]["status"] == "promoted"
            begun = lease.landing["merge"] if lease.landing is not None else None
            if promoted and lease.name not in landed and not self._reaches(head, begun):
                yield f"11: {lease.name} says that it landed as {begun}, {self.target} does not hold it"
            if not promoted and lease.name in landed and (settled or lease.intent != "promote"):
                yield f"11: {lease.name} landed as {landed[lease.name]}, its file does not say so"

    def _line(self, base: str, head: str) -> list[tuple[str, str, list[str], str]] | None:
        if base == head:
            return []
        if not self._reaches(head, base):
            return None
        out = self._raw("log", "-z", "--first-parent", "--format=%H%n%T%n%P%n%B", f"{base}..{head}")
        rows = [row.decode("utf-8", "replace").split("\n", 3) for row in out.split(b"\0") if row]
        return [(commit, tree, parents.split(), body) for commit, tree, parents, body in reversed(rows)]

    def _reaches(self, head: str, commit: str | None) -> bool:
        if not commit:
            return False
        return self._run(["merge-base", "--is-ancestor", commit, head]).returncode == 0

    def _check_merge(self, commit: str, tree: str, parents: list[str]) -> Iterator[str]:
        if ("merge", commit) in self._proven or len(parents) != 2:
            return
        self._proven.add(("merge", commit))
        made = self._run(["merge-tree", "--write-tree", *parents])
        if made.returncode or made.stdout.decode().split("\n")[0] != tree:
            yield f"10: {commit} is not the merge of its parents"

    def _check_records(self, leases: list[Lease], refs: dict[str, str]) -> Iterator[str]:
        """15 and 17: a record says what a look finds."""
        registered = {leads for _, leads in self._registrations()}
        for lease in leases:
            record = lease.record
            if record is None:
                continue
            path = lease.data["lease"]["worktree_path"]
            there = os.path.lexists(path) or f"{path}/.git" in registered
            branch = "refs/heads/" + lease.data["lease"]["branch_name"] in refs
            retained = record["status"] == "retained" and lease.intent is None
            if record["worktree_removed"] and there:
                yield f"15: {lease.name} says that its worktree is removed: {path} or its registration is there"
            if record["branch_deleted"] and branch:
                yield f"15: {lease.name} says that its branch is deleted"
            if record["status"] not in ("teardown_failed", "retained"):
                if not (record["worktree_removed"] and record["branch_deleted"]):
                    yield f"15: {lease.name} is {record['status']} and not removed"
                if record["teardown_errors"]:
                    yield f"15: {lease.name} is {record['status']} with errors {record['teardown_errors']}"
            if record["status"] not in STATUSES:
                yield f"1: {lease.name} has status {record['status']}"
            if (record["status"] == "promoted") > bool(record["promoted_commit"]):
                yield f"11: {lease.name} is promoted and names no commit"
            until = record["retention_until"]
            if retained and not (os.path.lexists(path) and branch and until and until > record["completed_at"]):
                yield f"17: {lease.name} is retained until {until}: worktree {there}, branch {branch}"
            if (until is not None) != (record["status"] == "retained"):
                yield f"17: {lease.name} is {record['status']} with an expiry of {until}"

    def _check_operator(self, leases: list[Lease], refs: dict[str, str], settled: bool) -> Iterator[str]:
        """12 and 14: no other branch moves, and what the operator has survives byte for byte."""
        for name in sorted({*refs, *self.operator.refs}):
            if name == self.target or name.startswith(_OWN_REFS):
                continue
            if refs.get(name) != self.operator.refs.get(name):
                yield f"12: {name} moved from {self.operator.refs.get(name)} to {refs.get(name)}"
        for path, before in self.operator.files.items():
            if (now := self._file(path)) != before:
                yield f"14: {path!r} was {_short(before)}, is {_short(now)}"
        if not settled:
            return
        status = self._status()
        if wrong := sorted(set(status) ^ set(self.operator.status)):
            wrong = [row for row in wrong if row[3:] not in self.left_behind]
            if wrong:
                yield f"14: the checkout is not the target's: {wrong[:6]}"
        staged = self._raw("diff-index", "--cached", "-z", "--no-renames", "HEAD").split(b"\0")
        if staged != self.operator.staged and not self.left_behind:
            yield f"14: what is staged was {self.operator.staged[:4]}, is {staged[:4]}"

    def _check_modes(self) -> Iterator[str]:
        """23: nobody else reads lionwt's files, and no environment is in them."""
        for state in runs_of(self.home):
            for parent, directories, files in os.walk(state):
                # What a git child writes into a scratch directory, which is 0700, keeps the caller's umask.
                directories[:] = [name for name in directories if "~" not in name and not name.endswith(".tmp")]
                for name in (*directories, *files):
                    path = os.path.join(parent, name)
                    try:
                        seen = os.lstat(path)
                    except OSError:
                        continue
                    if stat.S_IMODE(seen.st_mode) & 0o077 and not stat.S_ISLNK(seen.st_mode):
                        yield f"23: {path} has mode {stat.S_IMODE(seen.st_mode):o}"
                    if self.secret and stat.S_ISREG(seen.st_mode) and seen.st_size < 1 << 20:
                        try:
                            if self.secret.encode() in Path(path).read_bytes():
                                yield f"23: {path} holds the environment"
                        except OSError:
                            continue

    def _check_settled(self, leases: list[Lease], refs: dict[str, str]) -> Iterator[str]:
        """After a reconcile: 20 is the caller's; here, that nothing is left of what has ended."""
        ended = {lease.name for lease in leases if lease.record is not None and _is_gone(lease.record)}
        for lease in leases:
            if lease.name not in ended:
                continue
            branch = "refs/heads/" + lease.data["lease"]["branch_name"]
            prefix = f"refs/lionwt/{lease.name}/"
            for ref in refs:
                if ref == branch or ref.startswith(prefix):
                    yield f"left: {ref} of {lease.name}, which has ended"
            saved = lease.path.parent.parent / "git" / "lionwt" / f"{lease.worker}.index"
            if saved.exists():
                yield f"left: {saved} of {lease.name}, which has ended"
        if len(ended) == len(leases):
            yield from litter.directories(self.repo.path, self.common)
        yield from litter.files(self.repo.path, self.common, self.git_dir, self.home)
        yield from litter.processes(self.common, self.home)
        if self.deep:
            yield from self._check_fsck()

    def _check_fsck(self) -> Iterator[str]:
        done = self._run(["fsck", "--strict", "--no-progress", "--no-dangling"])
        if done.returncode or done.stdout or done.stderr:
            yield f"fsck: {(done.stdout + done.stderr).decode(errors='replace')[:500]}"

    # git

    def _run(self, arguments: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=self.repo.path,
            env=env or self.repo.env,
            capture_output=True,
            check=False,
            timeout=120,
        )

    def _raw(self, *arguments: str, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> bytes:
        done = self._run(list(arguments), env)
        if done.returncode not in ok:
            raise Broken([f"git {arguments} failed: {done.stderr.decode(errors='replace')}"])
        return done.stdout

    def _git(self, *arguments: str, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> list[str]:
        return self._raw(*arguments, ok=ok, env=env).decode("utf-8", "surrogateescape").splitlines()


def _is_gone(record: dict[str, Any]) -> bool:
    return bool(record["worktree_removed"] and record["branch_deleted"])


def _short(file: tuple[int, bytes]) -> str:
    return f"{file[0]:o} {file[1][:60]!r} ({len(file[1])} bytes)"
