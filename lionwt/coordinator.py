"""The asynchronous port of ADR-0091 over the same verbs as the command line.

Every method runs its verb in a thread, so an orchestrator's event loop is never
blocked by git; the verbs themselves hold the locks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lionwt import names, records, session
from lionwt.command import running
from lionwt.contracts import (
    RunLike,
    ValidationResult,
    WorkerCandidate,
    WorkerPathBinding,
    WorkerWorktreeLease,
    WorkerWorktreeRecord,
    WorkspacePolicy,
    public,
    stored,
)
from lionwt.errors import LionwtError
from lionwt.freeze import Verdict, freeze
from lionwt.lease import lease
from lionwt.opening import Request
from lionwt.promote import promote
from lionwt.reconcile import reconcile
from lionwt.start import start

T = TypeVar("T")


class WorktreeCoordinator:
    """Implements :class:`lionwt.WorkerWorkspaceCoordinator` (ADR-0091 D3).

    ``repo`` is a checkout of the repository (default: the current directory when
    a run is opened); ``policy`` is what a run is opened with. The default policy
    is ``shared_host``, under which :meth:`allocate` raises ``shared_host`` and
    nothing is made. ``required`` names the validations a run declares. Every
    method raises :class:`lionwt.LionwtError`.
    """

    def __init__(
        self,
        *,
        repo: str | os.PathLike[str] | None = None,
        policy: WorkspacePolicy | None = None,
        required: tuple[str, ...] = (),
    ) -> None:
        self._repo = Path(repo) if repo is not None else None
        self._policy = policy or WorkspacePolicy()
        self._required = required
        self._runs: dict[tuple[str, Path], names.RunPaths] = {}

    async def allocate(
        self,
        *,
        run: RunLike,
        session_id: str,
        worker_id: str,
        target_branch: str,
        base_sha: str,
        after: tuple[str, ...] = (),
    ) -> WorkerWorktreeLease:
        """Lease one worktree (ADR-0091 D2); ``after`` names workers to land before this one."""
        from lionwt import processes

        paths = self._paths(run)
        request = Request(
            workers=(worker_id,),
            target=target_branch,
            session_id=session_id,
            start=self._repo,
            policy=stored(self._policy, records.Policy),
            required=self._required,
            after=after,
            owner=processes.owner(os.getpid()),
            base_sha=base_sha,
        )
        _, files = await _in_thread(lambda: lease(paths, request))
        return public(files[0].lease, WorkerWorktreeLease)

    async def mark_running(
        self, lease: WorkerWorktreeLease, binding: WorkerPathBinding | None = None
    ) -> WorkerWorktreeLease:
        """allocated → running, once the worker's grants are installed (ADR-0091 D3).

        ``binding`` is what was installed, and is compared with the lease's own.
        """
        grants = binding.model_dump() if binding is not None else None
        file = await _in_thread(lambda: start(self._opened(lease), lease.worker_id, grants))
        return public(file.lease, WorkerWorktreeLease)

    async def freeze(
        self,
        lease: WorkerWorktreeLease,
        *,
        worker_succeeded: bool,
        cancelled: bool,
        validations: tuple[ValidationResult, ...],
    ) -> WorkerCandidate:
        """Stop the worker and capture what it did (ADR-0091 D3)."""
        results = tuple(stored(result, records.Validation) for result in validations)
        verdict = Verdict(succeeded=worker_succeeded, cancelled=cancelled, validations=results)
        file = await _in_thread(lambda: freeze(self._opened(lease), lease.worker_id, verdict))
        if file.candidate is None:
            raise LionwtError("wrong_state", f"the lease of {lease.worker_id!r} has ended without a candidate")
        return public(file.candidate, WorkerCandidate)

    async def complete(self, candidate: WorkerCandidate, policy: WorkspacePolicy) -> WorkerWorktreeRecord:
        """Keep or land one frozen candidate (ADR-0091 D4).

        Raises the error of a candidate that stays frozen (``checkout_blocked``,
        ``predecessor_pending``, ``lock_timeout``), ``candidate_mismatch`` for one
        that is not the frozen one.
        """
        return await _in_thread(lambda: self._complete(candidate, policy))

    def _complete(self, candidate: WorkerCandidate, policy: WorkspacePolicy) -> WorkerWorktreeRecord:
        worker_id = candidate.lease.worker_id
        run = self._opened(candidate.lease)
        frozen = run.lease(worker_id).candidate
        if frozen is None or public(frozen, WorkerCandidate) != candidate:
            raise LionwtError(
                "candidate_mismatch",
                f"the candidate of {worker_id!r} is not the one that was frozen; nothing was changed",
                hint="complete what freeze returned, unchanged",
            )
        _, done = promote(run, (worker_id,), policy.completion)
        if done.pending:
            raise done.pending[0].error
        return public(done.records[0], WorkerWorktreeRecord)

    async def reconcile(self, run: RunLike, policy: WorkspacePolicy) -> list[WorkerWorktreeRecord]:
        """Bring every lease that a dead owner left to a truthful end; returns all records (ADR-0091 D5).

        ``policy`` has to complete as the pinned one does, or narrower; raises
        ``policy_mismatch``, ``owner_alive``, ``worker_alive``, and the error of
        the first lease that could not be ended.
        """
        return await _in_thread(lambda: self._reconcile(run, policy))

    def _reconcile(self, run: RunLike, policy: WorkspacePolicy) -> list[WorkerWorktreeRecord]:
        opened = session.load(self._paths(run))
        done = reconcile(opened, completion=policy.completion)
        if done.pending:
            raise done.pending[0].error
        return [public(record, WorkerWorktreeRecord) for record in done.records]

    def _paths(self, run: RunLike) -> names.RunPaths:
        paths = names.RunPaths(
            names.check_id(run.run_id, "run"),
            Path(os.path.realpath(run.state_root)),
            Path(os.path.realpath(run.artifact_root)),
        )
        self._runs[paths.run_id, paths.workspaces] = paths
        return paths

    def _opened(self, lease: WorkerWorktreeLease) -> session.Run:
        state_root = lease.state_path.parent.parent
        known = self._runs.get((lease.run_id, lease.state_path.parent))
        return session.load(known or names.RunPaths(lease.run_id, state_root, lease.artifact_path.parent))


def _as_command(verb: Callable[[], T]) -> T:
    """A verb is a command of its own, whose warnings go to the log."""
    with running(logging.getLogger("lionwt").warning):
        return verb()


async def _in_thread(verb: Callable[[], T]) -> T:
    """Run a verb in a thread; a cancelled caller waits for it, so that no lease is left unrecorded."""
    task: asyncio.Task[Any] = asyncio.ensure_future(asyncio.to_thread(_as_command, verb))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()
        raise
