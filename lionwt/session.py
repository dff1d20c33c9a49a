"""What every verb begins with: the run, its repository as recorded, one lease under its lock.

Verbs are plain functions over a :class:`Run`; the command line and the
asynchronous port call the same ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lionwt import git, locks, mounts, names, repository, words
from lionwt.errors import LionwtError
from lionwt.records import LeaseFile, RunFile
from lionwt.store import Store
from lionwt.values import Value


class Run(Value, frozen=True):
    """An opened run and its files."""

    file: RunFile
    store: Store

    @property
    def paths(self) -> names.RunPaths:
        return self.store.paths

    @property
    def common_dir(self) -> Path:
        return Path(self.file.common_dir.path)

    @property
    def main_worktree(self) -> Path:
        return Path(self.file.main_worktree.path)

    @property
    def argument(self) -> str:
        """The RUN argument that names this run on a command line."""
        return self.paths.argument(os.environ)

    def private(self) -> git.Git:
        """Object work without files: trees, commits, merges."""
        return git.private(self.paths.git_dir, self.common_dir)

    def commit_tree(self, tree: str, parents: Sequence[str], message: str, at: float | None = None) -> str:
        """Make a commit under the operator's name, or lionwt's where the operator has none; ``at`` in Unix seconds."""
        name = self.file.user_name or "lionwt"
        email = self.file.user_email or "lionwt@localhost"
        identified = self.private().with_env(
            GIT_AUTHOR_NAME=name, GIT_AUTHOR_EMAIL=email, GIT_COMMITTER_NAME=name, GIT_COMMITTER_EMAIL=email
        )
        if at is not None:
            identified = identified.with_env(GIT_AUTHOR_DATE=f"@{at:.0f} +0000", GIT_COMMITTER_DATE=f"@{at:.0f} +0000")
        flags = [flag for parent in parents for flag in ("-p", parent)]
        return identified.oid("commit-tree", tree, *flags, stdin=os.fsencode(message))

    def lease(self, worker_id: str) -> LeaseFile:
        return self.store.lease(worker_id, self.file)

    def freeze_command(self, file: LeaseFile) -> str:
        """What to type when a worker has done its job, with every validation that the run declares."""
        declared = [word for name in file.required_validations for word in ("--validation", f"{name}=pass")]
        return f"lionwt freeze {self.argument} {words.command(file.worker_id, '--succeeded', *declared)}"

    @contextlib.contextmanager
    def locked(self, worker_id: str, wait: float = locks.DEFAULT_WAIT) -> Iterator[LeaseFile]:
        """Hold one lease for a verb and yield it as it stands under the lock."""
        self.lease(worker_id)  # an unknown worker is refused before a lock file is made for it
        with locks.held(self.paths.lease_lock(worker_id), f"lease {worker_id!r}", wait):
            yield self.lease(worker_id)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A directory of lionwt's own beside the private git directory, gone afterwards.

        ``name`` is a worker id, held under that lease's lock, or begins with a
        dot and is used under the promotion lock: so whoever makes one is alone
        with the name, and what lies there was left by the dead.
        """
        where = self.paths.git_dir / "lionwt"
        for leftover in where.glob(f"{name}~????????"):
            if leftover.is_dir() and not leftover.is_symlink():
                with contextlib.suppress(OSError):
                    mounts.remove_tree(leftover)
        path = where / f"{name}~{os.urandom(4).hex()}"
        where.mkdir(0o700, exist_ok=True)
        path.mkdir(0o700)
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                mounts.remove_tree(path)

    @contextlib.contextmanager
    def registration(self) -> Iterator[None]:
        with locks.held(registration_lock(self.common_dir), "registration"):
            yield


def registration_lock(common_dir: Path) -> Path:
    return common_dir / "lionwt" / "registration.lock"


def promotion_lock(common_dir: Path) -> Path:
    return common_dir / "lionwt" / "promotion.lock"


def load(paths: names.RunPaths) -> Run:
    """The opened run; raises ``run_unknown``, ``repository_moved``."""
    store = Store(paths)
    run = store.run()
    repository.verify_unmoved(run)
    return Run(run, store)


def refuse_workers(environ: Mapping[str, str], verb: str) -> None:
    """Raise ``called_by_worker``: a worker never completes itself (ADR-0091 D3)."""
    worker = environ.get("LIONAGI_WORKER_ID")
    if worker:
        raise LionwtError(
            "called_by_worker",
            f"{verb} was called by worker {worker!r} (LIONAGI_WORKER_ID is set); nothing was changed",
            hint="the orchestrator completes a worker; run it without LIONAGI_WORKER_ID",
        )
