"""Read, replace and list lease files, and the run's own file (design section 3).

Every write replaces the whole file: a unique temporary name in the same
directory that no listing takes for a lease, fsync, rename, fsync of the
directory. So a reader sees the old file or the new one, and what a function
here has returned from is on disk.

A file that cannot be read for sure is *ambiguous*: it is named, left byte for
byte, and never taken for "no lease".
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from lionwt import names, readmodel, words
from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.records import LEASE_SCHEMA, RUN_SCHEMA, LeaseFile, RunFile, plain, read
from lionwt.values import Value

_LARGEST = 256 * 1024 * 1024


def make_private_dir(path: Path) -> None:
    """Make ``path`` and its missing parents, mode 0700."""
    if path.is_dir():
        return
    make_private_dir(path.parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    try:
        sync_dir(path.parent)
    except PermissionError:
        pass  # a directory of somebody else's that may be entered and not listed


def shared(directory: Path) -> bool:
    """Whether a repository's directory is its group's to write (``core.sharedRepository``)."""
    try:
        return bool(stat.S_IMODE(os.stat(directory).st_mode) & stat.S_IWGRP)
    except OSError:
        return False


def open_to_group(path: Path) -> None:
    """Let the group of a shared repository work in a directory of lionwt's, whatever the caller's umask."""
    wanted = stat.S_IRWXU | stat.S_IRWXG | stat.S_ISGID
    try:
        seen = os.lstat(path)
        if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and seen.st_mode & wanted != wanted:
            os.chmod(path, stat.S_IMODE(seen.st_mode) | wanted)
    except PermissionError:
        pass  # another user made it, who has seen to that


def sync_file(path: Path) -> None:
    """Make a file's content durable that somebody else has written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def move_file(source: Path, target: Path) -> None:
    """Move a finished file to its place, content on disk before the name; the caller syncs the directory.

    Whoever made it, git with the caller's umask for one, nobody else reads it there.
    """
    os.chmod(source, 0o600)
    sync_file(source)
    try:
        os.rename(source, target)
    except OSError:  # the artifact root is on another file system
        temporary = target.with_name(f".{target.name}.tmp")
        with open(source, "rb") as reading, open(temporary, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
            writing.flush()
            os.fsync(writing.fileno())
        os.rename(temporary, target)
    point("store.moved")


def make_own_dir(path: Path) -> None:
    """Like :func:`make_private_dir`; raises ``path_unsafe`` where a symlink leads elsewhere."""
    if os.path.realpath(path) != str(path):
        raise LionwtError(
            "path_unsafe",
            f"{path} leads to {os.path.realpath(path)}; nothing was changed",
            hint="remove the symbolic link, then run the same command again",
        )
    make_private_dir(path)


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_bytes(path: Path, content: bytes, mode: int | None = 0o600) -> None:
    """Replace ``path`` durably by ``content``; on failure the old file stands.

    It gets exactly ``mode``, whatever the caller's umask; None leaves it to the umask.
    """
    temporary = path.parent / f".{path.name}.{os.urandom(8).hex()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else 0o600)
        try:
            if mode is not None:
                os.fchmod(fd, mode)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        point("store.written")
        os.rename(temporary, path)
    except BaseException as error:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        if isinstance(error, OSError):
            raise from_os_error(error, f"writing {path}") from error
        raise
    sync_dir(path.parent)
    point("store.replaced")


def replace_json(path: Path, value: dict[str, Any]) -> bytes:
    """Replace ``path`` by ``value`` as ASCII JSON; returns the bytes written."""
    content = json.dumps(value, ensure_ascii=True, indent=1).encode("ascii") + b"\n"
    replace_bytes(path, content)
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object, never through a symlink.

    Raises ``FileNotFoundError`` when there is none, ``state_unreadable`` when
    there is something else.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        linked = error.errno == errno.ELOOP
        raise _ambiguous(path, "it is a symbolic link" if linked else error.strerror or str(error)) from error
    seen = os.fstat(fd)
    if not stat.S_ISREG(seen.st_mode):
        os.close(fd)
        raise _ambiguous(path, "it is not a regular file")
    with os.fdopen(fd, "rb") as file:
        if seen.st_size > _LARGEST:
            raise _ambiguous(path, "it is far too large")
        try:
            content = file.read()
            loaded = json.loads(content, parse_constant=_no_number, parse_float=_finite, parse_int=_bounded)
            if b"\\" in content or not content.isascii():
                _check_texts(loaded)
        except (ValueError, RecursionError, OSError) as error:
            raise _ambiguous(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _ambiguous(path, "it is not a JSON object")
    return loaded


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _bounded(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:  # an inode may need all 64 bits
        _no_number(text)
    return value


def _check_texts(value: Any) -> None:
    """Raise ``ValueError`` for a text that no path or name can be: NUL, or half a character that is no raw byte."""
    if isinstance(value, str):
        value.encode("utf-8", "surrogateescape")
        if "\0" in value:
            raise ValueError("a text holds NUL")
    elif isinstance(value, list):
        for entry in value:
            _check_texts(entry)
    elif isinstance(value, dict):
        for pair in value.items():
            _check_texts(list(pair))


def _ambiguous(path: Path, why: str) -> LionwtError:
    return LionwtError(
        "state_unreadable",
        f"{path} cannot be understood: {why}; it was left as it is and nothing was changed",
        hint="restore it from a backup, or move it aside after looking at it",
    )


def _check_schema(path: Path, loaded: dict[str, Any], known: str) -> None:
    schema = loaded.get("schema")
    family, _, version = str(schema).partition("@")
    if schema == known:
        return
    if family == known.partition("@")[0] and version.isdigit():
        raise LionwtError(
            "schema_newer",
            f"{path} has schema {schema}, this lionwt knows {known}; nothing was changed",
            hint="use the lionwt that wrote it, or a newer one",
        )
    raise _ambiguous(path, f"unknown schema {schema!r}")


class Ambiguous(Value, frozen=True):
    """A file that stands where a lease would, and the reason it is not one for sure."""

    worker_id: str
    error: LionwtError


class Store:
    """The files of one run."""

    def __init__(self, paths: names.RunPaths) -> None:
        self.paths = paths

    def read_run(self) -> RunFile | None:
        """The run as it was opened, or None when it has not been."""
        path = self.paths.run_file
        try:
            loaded = read_json(path)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise _ambiguous(path, str(error)) from error
        _check_schema(path, loaded, RUN_SCHEMA)
        try:
            run = read(loaded, RunFile)
        except ValueError as error:
            raise _ambiguous(path, str(error)) from error
        if run.run_id != self.paths.run_id or run.artifact_root != str(self.paths.artifact_root):
            raise _ambiguous(path, "it names another run or artifact root")
        return run

    def open_run(self, run: RunFile) -> None:
        replace_json(self.paths.run_file, plain(run))

    def run(self) -> RunFile:
        """The opened run; raises ``run_unknown``, and ``state_unreadable`` where only its own file is gone."""
        run = self.read_run()
        if run is None:
            self.require_no_leases("nothing was changed")
            raise LionwtError(
                "run_unknown",
                f"run {self.paths.run_id!r} has not been opened (no {self.paths.run_file}); nothing was changed",
                hint=words.did_you_mean(self.paths.run_id, self._runs_beside(), "the runs there")
                + "check the run id and LIONAGI_HOME; lionwt lease RUN -w WORKER --target BRANCH opens a run",
            )
        return run

    def require_no_leases(self, untouched: str) -> None:
        """Raise ``state_unreadable`` where a run that has no file has leases."""
        if self.worker_ids():
            raise LionwtError(
                "state_unreadable",
                f"{self.paths.run_file} is gone, but leases of run {self.paths.run_id!r} are in "
                f"{self.paths.workspaces}; {untouched}",
                hint="restore it from a backup, or choose another run id",
            )

    def _runs_beside(self) -> list[str]:
        """The runs that lionwt has opened beside where this one would be."""
        root = self.paths.state_root.parent
        try:
            return [entry for entry in os.listdir(root) if (root / entry / self.paths.run_file.name).is_file()]
        except OSError:
            return []

    def lease(self, worker_id: str, run: RunFile) -> LeaseFile:
        """One lease; raises ``lease_unknown``, ``state_unreadable``, ``schema_newer``."""
        names.check_id(worker_id, "worker")
        path = self.paths.lease_file(worker_id)
        try:
            loaded = read_json(path)
        except FileNotFoundError as error:
            raise LionwtError(
                "lease_unknown",
                f"worker {worker_id!r} has no lease in run {self.paths.run_id!r}; nothing was changed",
                hint=words.did_you_mean(worker_id, self.worker_ids(), "its workers")
                + f"see the run's workers: lionwt status {self.paths.argument(os.environ)}",
            ) from error
        return self._understood(path, worker_id, loaded, run)

    def _understood(self, path: Path, worker_id: str, loaded: dict[str, Any], run: RunFile) -> LeaseFile:
        _check_schema(path, loaded, LEASE_SCHEMA)
        try:
            file = read(loaded, LeaseFile)
        except ValueError as error:
            raise _ambiguous(path, str(error)) from error
        lease = file.lease
        # What the ids say must be what the file says: a copied or edited file
        # would otherwise point lionwt at another worker's tree.
        expected = (
            self.paths.run_id,
            worker_id,
            names.worker_branch(self.paths.run_id, worker_id),
            names.worktree_path(Path(run.main_worktree.path), self.paths.run_id, worker_id),
            self.paths.artifacts(worker_id),
            path,
            run.base_sha,
            run.target,
        )
        stored = (
            lease.run_id,
            lease.worker_id,
            lease.branch_name,
            lease.worktree_path,
            lease.artifact_path,
            lease.state_path,
            lease.base_sha,
            names.HEADS + lease.target_branch,
        )
        if stored != expected:
            raise _ambiguous(path, "its ids, branch, paths or base are not the ones its name and run give")
        wrong = file.contradiction()
        if wrong is not None:
            raise _ambiguous(path, wrong)
        return file

    def worker_ids(self) -> list[str]:
        """The ids that have a file, readable or not; raises ``state_unreadable`` where nobody can tell."""
        try:
            entries = os.listdir(self.paths.workspaces)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _ambiguous(self.paths.workspaces, error.strerror or str(error)) from error
        return sorted(entry[:-5] for entry in entries if entry.endswith(".json") and not entry.startswith("."))

    def leases(self, run: RunFile) -> tuple[list[LeaseFile], list[Ambiguous]]:
        """Every lease of the run, and every file that is ambiguous."""
        found: list[LeaseFile] = []
        ambiguous: list[Ambiguous] = []
        for worker_id in self.worker_ids():
            try:
                found.append(self.lease(worker_id, run))
            except LionwtError as error:
                if error.code == "lease_unknown":
                    continue  # forgotten since the listing: its allocation was undone
                if error.code == "id_invalid":  # nobody typed it: a copy beside a lease, for one
                    error = _ambiguous(self.paths.lease_file(worker_id), "its name is no worker's")
                ambiguous.append(Ambiguous(worker_id, error))
        return found, ambiguous

    def write(self, file: LeaseFile) -> LeaseFile:
        """Replace the lease's file durably, serial one higher; returns what was written."""
        written = file.having(serial=file.serial + 1)
        with readmodel.following(self.paths, written):
            replace_json(self.paths.lease_file(file.worker_id), plain(written))
        return written

    def forget(self, worker_id: str) -> None:
        """Undo the reservation of an id whose allocation was undone completely."""
        readmodel.forgetting(self.paths, worker_id)
        try:
            os.unlink(self.paths.lease_file(worker_id))
        except FileNotFoundError:
            return
        sync_dir(self.paths.workspaces)
        point("store.forgotten")
