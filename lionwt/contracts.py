"""The contracts of ADR-0091 as the record spells them, for programs that import lionwt.

Same names, fields and literals, frozen, nothing extra. The commands work on
:mod:`lionwt.records`, which hold the same fields and cost no pydantic; whoever
calls the port gets and gives these.

Times are Unix seconds. Text that came from a path may hold surrogate escapes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from lionwt import records
from lionwt.records import CompletionPolicy, WorkerLeaseState, WorkerTerminalStatus, WorkspaceMode

#: Validation context for what is read back from disk: clocks are not consulted.
STORED: Final = {"stored": True}


class _Contract(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkspacePolicy(_Contract):
    """What a run does with its workers' changes (ADR-0091 D1).

    ``retention_until`` is an absolute expiry in Unix seconds. Raises
    ``ValueError`` for retention without an expiry, or with one that is past when
    the policy is resolved; a stored policy is read back without that look at the
    clock (``context={"stored": True}``).
    """

    mode: WorkspaceMode = "shared_host"
    completion: CompletionPolicy = "patch_only"
    retain_worktree_on_resolution: bool = False
    retention_until: float | None = None

    @model_validator(mode="after")
    def bounded_retention(self, info: ValidationInfo) -> WorkspacePolicy:
        """Refuse retention without an end."""
        if self.retain_worktree_on_resolution and self.retention_until is None:
            raise ValueError("retained worktrees require retention_until")
        stored = bool(info.context and info.context.get("stored"))
        if not stored and self.retention_until is not None and self.retention_until <= time.time():
            raise ValueError("retention_until must be in the future")
        return self


class WorkerWorktreeLease(_Contract):
    """Who owns which worktree, from which commit (ADR-0091 D2). ``created_at`` in Unix seconds."""

    run_id: str
    session_id: str
    worker_id: str
    target_branch: str
    base_sha: str
    expected_target_sha: str
    branch_name: str
    worktree_path: Path
    artifact_path: Path
    state_path: Path
    state: WorkerLeaseState = "allocated"
    created_at: float


class WorkerPathBinding(_Contract):
    """The paths and environment a worker gets, and nothing else (ADR-0091 D2)."""

    cwd: Path
    provider_repo: Path
    source_roots: tuple[Path, ...]
    writable_artifact_root: Path
    env: dict[str, str]

    @classmethod
    def of(cls, lease: WorkerWorktreeLease) -> WorkerPathBinding:
        """The binding of ``lease``, exactly as ADR-0091 D2 spells it."""
        return public(records.Binding.of(stored(lease, records.Lease)), cls)

    def resolve(self, path: str | os.PathLike[str]) -> Path:
        """Turn a worker's relative path into a real one under its own roots (ADR-0091 D2).

        The path is looked for under the worktree, and under the artifact root
        when the worktree does not have it but the artifact root does. Raises
        ``path_escape`` for an absolute path, ``..``, ``.git``, and for a symlink
        at any level, wherever it points.
        """
        return stored(self, records.Binding).resolve(path)


class ValidationResult(_Contract):
    """One declared check and how it ended (ADR-0091 D3)."""

    name: str
    passed: bool
    exit_code: int | None = None
    evidence_ref: str | None = None


class WorkerCandidate(_Contract):
    """A frozen lease: immutable evidence of what the worker did (ADR-0091 D3).

    ``patch_ref`` and ``artifact_manifest_ref`` are relative to the run's artifact root.
    """

    lease: WorkerWorktreeLease
    patch_ref: str
    patch_sha256: str
    files_changed: tuple[str, ...]
    artifact_manifest_ref: str
    validations: tuple[ValidationResult, ...] = ()
    worker_succeeded: bool
    cancelled: bool = False


class WorkerWorktreeRecord(_Contract):
    """The terminal truth of a lease (ADR-0091 D3). Times in Unix seconds."""

    lease: WorkerWorktreeLease
    policy: CompletionPolicy
    status: WorkerTerminalStatus
    patch_ref: str | None
    promoted_commit: str | None
    teardown_errors: list[str]
    worktree_removed: bool
    branch_deleted: bool
    retention_until: float | None = None
    completed_at: float


class RunLike(Protocol):
    """What the port needs of a run; lionagi's own ``RunDir`` has it."""

    @property
    def run_id(self) -> str:
        """The id that branches, paths and environments carry."""

    @property
    def state_root(self) -> Path:
        """Where the run's own files lie, leases among them."""

    @property
    def artifact_root(self) -> Path:
        """Where workers leave artifacts, and lionwt its evidence."""


class WorkerWorkspaceCoordinator(Protocol):
    """The asynchronous port of ADR-0091 D3. :class:`lionwt.WorktreeCoordinator` implements it."""

    async def allocate(
        self, *, run: RunLike, session_id: str, worker_id: str, target_branch: str, base_sha: str
    ) -> WorkerWorktreeLease:
        """A worktree and branch at ``base_sha``, durably recorded before it is returned."""

    async def mark_running(self, lease: WorkerWorktreeLease) -> WorkerWorktreeLease:
        """allocated → running, once provider and tools have the lease's paths and no others."""

    async def freeze(
        self,
        lease: WorkerWorktreeLease,
        *,
        worker_succeeded: bool,
        cancelled: bool,
        validations: tuple[ValidationResult, ...],
    ) -> WorkerCandidate:
        """running → frozen: the worker is stopped, its change captured as evidence."""

    async def complete(self, candidate: WorkerCandidate, policy: WorkspacePolicy) -> WorkerWorktreeRecord:
        """frozen → terminal: the patch is kept, or landed, and the lease torn down (D4)."""

    async def reconcile(self, run: RunLike, policy: WorkspacePolicy) -> list[WorkerWorktreeRecord]:
        """Finish what a dead coordinator began, before anything new is allocated (D5)."""


M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=records.Data)


def public(data: records.Data, kind: type[M]) -> M:
    """What a command works on, as the contract that says the same."""
    return kind.model_validate(records.plain(data), context=STORED)


def stored(model: BaseModel, kind: type[R]) -> R:
    """A contract as what the commands work on; raises ``ValueError`` where the contract was built unchecked."""
    return records.read(model.model_dump(), kind)
