"""Turn a capture into evidence: the proven patch, the manifest, and what git cannot hold.

The patch is written by git straight into its file, proven by applying it to
the base and comparing tree ids, and hashed from the file as read back. Files
that the tree does not hold byte for byte (ignored ones, converted ones, a
repository given up with ``--accept-incomplete``) are named in the manifest and,
where that is feasible, kept raw in ``saved.tar`` (design section 7, freeze 3 and 4).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from lionwt import files, git, names, store, trees
from lionwt.capture import Capture, changing, signature
from lionwt.errors import LionwtError, from_os_error
from lionwt.listing import GITLINK, SYMLINK, Entry
from lionwt.records import LeaseFile, RunFile
from lionwt.values import State, Value

if TYPE_CHECKING:
    import tarfile

MANIFEST_SCHEMA: Final = "lionwt/manifest@1"
LATE_SCHEMA: Final = "lionwt/late@1"
#: An ignored file up to this size (bytes) is kept raw.
SMALL: Final = 1 << 20
#: All ignored files of a lease together are kept raw up to this size (bytes).
SMALL_IN_ALL: Final = 32 << 20
#: An artifact beyond this size (bytes) is named without its hash.
LARGEST_ARTIFACT: Final = 4 << 30
#: The mode of a path that a tree does not have.
_NOTHING: Final = "000000"
#: The patch made anew where the frozen one is no longer what was frozen.
RECOVERED: Final = "recovered.patch"

_DIFF: Final = ("--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none")


class Change(Value, frozen=True):
    """One changed path between the base and the captured tree."""

    path: bytes
    status: str
    old: Entry
    new: Entry


class Notes(State):
    """What the evidence has to say beyond the patch."""

    diagnostics: list[tuple[str, str]] = []
    incomplete: list[tuple[str, str]] = []


def changes_between(private: git.Git, old: str, new: str) -> list[Change]:
    """The changed paths from one tree-ish to another, renames as delete and add."""
    listed = private.run("diff-tree", "-r", "-z", "--raw", "--no-abbrev", *_DIFF, old, new, timeout=git.CONTENT)
    rows = git.records(listed.out)
    found = []
    for meta, path in zip(rows[::2], rows[1::2], strict=True):
        old_mode, new_mode, old_oid, new_oid, status = meta.decode("ascii").lstrip(":").split(" ")
        found.append(Change(path, status[:1], Entry(old_mode, old_oid), Entry(new_mode, new_oid)))
    return found


def write_patch(private: git.Git, base: str, tree: str, target: Path) -> tuple[str, int]:
    """Write the binary full-index patch from ``base`` to ``tree``; returns its SHA-256 and size in bytes."""
    with open(target, "wb", opener=_private_file) as file:
        private.run(
            "diff-tree", "-r", "-p", "--binary", "--full-index", "--no-color", "--src-prefix=a/", "--dst-prefix=b/",
            *_DIFF, base, tree, stdout=file, timeout=git.CONTENT,
        )  # fmt: skip
        file.flush()
        os.fsync(file.fileno())
    return sha256_of(target)


def sha256_of(path: Path, limit: int | None = None) -> tuple[str, int]:
    """SHA-256 and size in bytes of a regular file, read once in pieces, never through a symlink.

    Raises ``OSError`` for one of more than ``limit`` bytes: a sparse one would be read for hours.
    """
    digest = hashlib.sha256()
    size = 0
    with files.open_regular(path) as file:
        expected = os.fstat(file.fileno()).st_size
        while limit is None or max(size, expected) <= limit:
            block = file.read(1 << 20)
            if not block:
                return digest.hexdigest(), size
            digest.update(block)
            size += len(block)
    raise OSError(errno.EFBIG, "too large to hash", str(path))


def digests(directory: Path, names_in_it: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of the files that is there and can be read, by name."""
    found = {}
    for name in sorted(names_in_it):
        with contextlib.suppress(OSError):
            found[name], _ = sha256_of(directory / name)
    return found


def prove(private: git.Git, changes: Sequence[Change], index: Path, patch: Path, size: int) -> None:
    """Raise ``patch_missing`` unless the patch turns the base into exactly the frozen tree.

    It is applied to the base's entries of every path in which the two trees
    differ, and must give the frozen tree's entries of these paths and of no
    other; all other paths are the same objects in both. ``index`` is used up.
    """
    proof = private.with_env(GIT_INDEX_FILE=index).with_flags("-c", "core.fsync=all,-index")
    old = [change.old.row(change.path) for change in changes if change.old.mode != _NOTHING]
    new = {change.new.row(change.path) for change in changes if change.new.mode != _NOTHING}
    try:
        if old:
            lines = b"".join(row + b"\0" for row in old)
            proof.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)
        if size:
            proof.run("apply", "--cached", "--binary", "--whitespace=nowarn", patch, timeout=git.CONTENT)
        given = set(git.records(proof.run("ls-files", "-z", "-s", timeout=git.CONTENT).out))
    except LionwtError as error:
        raise _unproven(str(error)) from error
    if wrong := sorted(given ^ new):
        name = git.text(wrong[0].partition(b"\t")[2])
        raise _unproven(f"it does not give {name} as it was captured")
    # Binary data that a patch lacks git finds in the object store, here and nowhere else.
    if _has_line(patch, b"Binary files "):
        raise _unproven("it names a binary file without its content")


def require_proven(patch: Path, sha256: str, size: int) -> None:
    """Raise ``patch_missing`` unless the file, where it stands now, is the one that was proven."""
    if sha256_of(patch) != (sha256, size):
        raise _unproven(f"{patch} was changed after it had been proven")


def _has_line(path: Path, start: bytes) -> bool:
    """Whether a line after the first begins with ``start``; read in pieces, whatever a line's length."""
    wanted = b"\n" + start
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            if wanted in rest + block:
                return True
            rest = block[-len(wanted) :]
    return False


def _unproven(why: str) -> LionwtError:
    return LionwtError(
        "patch_missing",
        f"the patch does not reproduce the worktree: {why}; nothing was recorded, the worktree is as it was",
        hint="freeze again; if it stays, look at the named path",
    )


def _private_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _no_follow(path: str, flags: int) -> int:
    """Opens the file itself; a FIFO that came in its place is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


#: What the system says of a path that cannot be read; anything else is a failure to write.
_UNREADABLE: Final = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG}


class Saver:
    """Keeps raw files in ``saved.tar``, made only when there is something to keep."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root = os.fsencode(root)
        self.target = target
        self._raw: BinaryIO | None = None
        self._tar: tarfile.TarFile | None = None
        #: What could not be read, and why; it is named instead.
        self.failed: dict[str, str] = {}
        #: Whether anything was kept.
        self.used = False

    def add(self, name: bytes) -> bool:
        """Keep one path (a directory with everything below it), links as links; False when it cannot be read."""
        pending = [name]
        while pending:
            entry = pending.pop()
            try:
                inside = self._add_one(entry)
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                self.failed[git.text(entry)] = error.strerror or str(error)
                continue
            self.used = True
            pending += [os.path.join(entry, child) for child in reversed(inside)]
        return git.text(name) not in self.failed

    def _add_one(self, name: bytes) -> list[bytes]:
        """Keep one entry; returns the names of what lies in it."""
        if self._tar is None:
            import tarfile

            self._raw = open(self.target, "wb", opener=_private_file)
            self._tar = tarfile.open(fileobj=self._raw, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8")
        path = os.path.join(self.root, name)
        if stat.S_ISREG(os.lstat(path).st_mode):
            self._add_file(path, os.fsdecode(name))
            return []
        self._tar.add(os.fsdecode(path), arcname=os.fsdecode(name) or ".", recursive=False)
        return sorted(os.listdir(path)) if os.path.isdir(path) and not os.path.islink(path) else []

    def _add_file(self, path: bytes, name: str) -> None:
        assert self._tar is not None
        with open(path, "rb", opener=_no_follow) as file:
            info = self._tar.gettarinfo(fileobj=file, arcname=name)
            if info.size <= SMALL:  # a log may still grow: what is read is what is kept
                content = file.read(SMALL + 1)[:SMALL]
                info.size = len(content)
                self._tar.addfile(info, io.BytesIO(content))
            else:
                self._tar.addfile(info, file)

    def close(self) -> None:
        if self._tar is None or self._raw is None:
            return
        self._tar.close()
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self._raw.close()


def raw_blob(run: RunFile, path: bytes) -> tuple[str, str, int]:
    """The blob id, SHA-256 and size in bytes that a file has without any conversion."""
    seen = os.lstat(path)
    with open(path, "rb", opener=_no_follow) as file:
        blob = hashlib.new(run.object_format, f"blob {seen.st_size}\0".encode(), usedforsecurity=False)
        plain = hashlib.sha256()
        size = 0
        while block := file.read(1 << 20):
            blob.update(block)
            plain.update(block)
            size += len(block)
    return blob.hexdigest(), plain.hexdigest(), size


def converted(run: RunFile, root: Path, capture: Capture, saver: Saver, keep: bool = True) -> list[dict[str, Any]]:
    """The touched files whose raw content is not what the tree holds (line endings, filters)."""
    found = []
    top = os.fsencode(root)
    unfit = {*capture.unreadable, *capture.refused, *capture.sparse}
    for name, seen in capture.touched.items():
        entry = capture.entries.get(name)
        if entry is None or entry.mode in (SYMLINK, GITLINK) or name in unfit:
            continue
        try:
            blob, sha256, size = raw_blob(run, os.path.join(top, name))
        except FileNotFoundError as error:
            raise changing(root) from error
        if signature(top, name) != seen:
            raise changing(root)
        if blob == entry.oid:
            continue
        # git-lfs keeps the raw content itself, under its SHA-256.
        in_lfs = Path(run.common_dir.path, "lfs", "objects", sha256[:2], sha256[2:4], sha256)
        kept = "lfs" if in_lfs.is_file() and in_lfs.stat().st_size == size else "saved.tar"
        if keep and kept == "saved.tar":
            saver.add(name)
        found.append({"path": git.text(name), "sha256": sha256, "bytes": size, "blob": entry.oid, "kept": kept})
    return found


def ignored(root: Path, left_out: Sequence[bytes], saver: Saver) -> list[dict[str, Any]]:
    """Name files that the tree leaves out; the small ones are kept raw."""
    found = []
    budget = SMALL_IN_ALL
    for name in left_out:
        row = ignored_row(root, name)
        size = row.get("bytes")
        if size is not None and size <= SMALL and size <= budget:
            budget -= size
            row["kept"] = "saved.tar" if saver.add(name) else None
        found.append(row)
    return found


def ignored_row(root: Path, name: bytes) -> dict[str, Any]:
    """How the manifest names a file that the tree leaves out; size and time tell one version from another."""
    row: dict[str, Any] = {"path": git.text(name), "kept": None}
    try:
        seen = os.lstat(os.path.join(os.fsencode(root), name))
    except OSError:
        return row
    if not stat.S_ISDIR(seen.st_mode):
        row["bytes"], row["mtime_ns"] = seen.st_size, seen.st_mtime_ns
    return row


def leaves_worktree(root: Path, name: bytes) -> str | None:
    """Where a symlink leads when that is outside the worktree."""
    target = os.readlink(os.path.join(os.fsencode(root), name))
    joined = os.path.normpath(os.path.join(os.path.dirname(name) or b".", target))
    if target.startswith(b"/") or joined == b".." or joined.startswith(b"../"):
        return git.text(target)
    return None


def artifact_files(directory: Path) -> list[dict[str, Any]]:
    """The worker's own artifacts: path, size in bytes and SHA-256."""
    found = []
    if directory.is_symlink():
        return [{"path": ".", "link": os.readlink(directory)}]
    for parent, _, inside in trees.walk(os.fspath(directory)):
        for name in inside:
            path = Path(parent, name)
            row: dict[str, Any] = {"path": str(path.relative_to(directory))}
            try:
                row["sha256"], row["bytes"] = sha256_of(path, LARGEST_ARTIFACT)
            except OSError as error:
                row["unread"] = error.strerror or "not a regular file"
            found.append(row)
    return found


def write_manifest(path: Path, manifest: dict[str, Any]) -> str:
    """Write the manifest durably; returns the SHA-256 of the file as read back."""
    store.replace_json(path, manifest)
    return sha256_of(path)[0]


def broken(paths: names.RunPaths, file: LeaseFile) -> LionwtError | None:
    """What is wrong with the frozen evidence: gone, or not what was frozen."""
    assert file.candidate is not None and file.evidence is not None
    for ref, wanted in (
        (file.candidate.patch_ref, file.candidate.patch_sha256),
        (file.candidate.artifact_manifest_ref, file.evidence.manifest_sha256),
    ):
        path = Path(paths.artifact_root, ref)
        try:
            found, _ = sha256_of(path)
        except (FileNotFoundError, NotADirectoryError):
            return LionwtError(
                "patch_missing",
                f"the frozen {path.name} of {file.worker_id!r} is gone; nothing was landed",
                hint=f"what is left of the evidence lies in {path.parent}",
            )
        except OSError as error:
            if path.is_file() and not path.is_symlink():
                doing = f"reading {path} (nothing was changed and the candidate stays frozen)"
                raise from_os_error(error, doing) from error
            found = "not a regular file"
        if found != wanted:
            return LionwtError(
                "patch_changed",
                f"the frozen {path.name} of {file.worker_id!r} was changed after the freeze; nothing was landed",
                hint=f"look at {path}: it is not what was frozen",
            )
    return None


def recover(paths: names.RunPaths, file: LeaseFile, private: git.Git, scratch: Path) -> Path:
    """Make the frozen patch anew from the object store, proven; the last moment is before the anchors go."""
    assert file.evidence is not None
    base, tree = file.lease.base_sha, file.evidence.tree
    target = paths.evidence(file.worker_id) / RECOVERED
    store.make_own_dir(target.parent)
    # Aside first: a file of that name is always whole, and a link in its place is replaced.
    made = target.with_name(f".{RECOVERED}.tmp")
    made.unlink(missing_ok=True)
    _, size = write_patch(private, base, tree, made)
    prove(private, changes_between(private, base, tree), scratch / "base", made, size)
    os.rename(made, target)
    store.sync_dir(target.parent)
    store.sync_dir(target.parent.parent)
    return target
