"""The contracts of ADR-0091, the envelope around them, and the legal transitions.

The models are the record's own: same names, fields and literals, frozen,
nothing extra. A lease file is an envelope around them (design section 3); what
the contracts do not hold (intent, identity, evidence, outcome) lives there, so
that the contracts stay exactly what the decision says.

Times are Unix seconds. Text that came from a path may hold surrogate escapes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from lionwt.errors import LionwtError

WorkspaceMode = Literal["shared_host", "worktree_per_worker"]
CompletionPolicy = Literal["patch_only", "merge_validated"]
WorkerLeaseState = Literal["allocated", "running", "frozen", "terminal"]
WorkerTerminalStatus = Literal["promoted", "discarded", "retained", "needs_resolution", "teardown_failed"]

LEASE_SCHEMA: Final = "lionwt/lease@1"
RUN_SCHEMA: Final = "lionwt/run@1"

_ARROWS: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        ("allocated", "running"),
        ("running", "frozen"),
        ("frozen", "terminal"),
        ("allocated", "terminal"),
        ("running", "terminal"),
    }
)

#: Validation context for what is read back from disk: clocks are not consulted.
STORED: Final = {"stored": True}


class _Contract(BaseModel):
    # Validators are built on first use: most commands need few of these models.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


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
        return cls(
            cwd=lease.worktree_path,
            provider_repo=lease.worktree_path,
            source_roots=(lease.worktree_path,),
            writable_artifact_root=lease.artifact_path,
            env={
                "LIONAGI_RUN_ID": lease.run_id,
                "LIONAGI_SESSION_ID": lease.session_id,
                "LIONAGI_WORKER_ID": lease.worker_id,
            },
        )

    def resolve(self, path: str | os.PathLike[str]) -> Path:
        """Turn a worker's relative path into a real one under its own roots (ADR-0091 D2).

        The path is looked for under the worktree, and under the artifact root
        when the worktree does not have it but the artifact root does. Raises
        ``path_escape`` for an absolute path, ``..``, ``.git``, and for a symlink
        at any level, wherever it points.
        """
        text = os.fspath(path)
        parts = Path(text).parts
        if not text or "\0" in text or os.path.isabs(text) or ".." in parts:
            raise _escape(text, "it is empty, absolute or contains '..'")
        if any(part.casefold() == ".git" for part in parts):
            raise _escape(text, "it names a .git entry")
        roots = (*self.source_roots, self.writable_artifact_root)
        for root in roots:
            # A lease's roots are real paths: a link above one was put there since.
            if os.path.realpath(root) != str(root):
                raise _escape(text, f"{str(root)!r} is reached through a symbolic link")
            self._refuse_links(root, parts, text)
        for root in roots:
            if os.path.lexists(root.joinpath(*parts)):
                return root.joinpath(*parts)
        return self.cwd.joinpath(*parts)

    @staticmethod
    def _refuse_links(root: Path, parts: tuple[str, ...], text: str) -> None:
        step = root
        for part in parts:
            step = step / part
            if step.is_symlink():
                raise _escape(text, f"{str(step)!r} is a symbolic link")


def _escape(text: str, why: str) -> LionwtError:
    return LionwtError(
        "path_escape", f"path {text!r} is refused: {why}", hint="use a relative path inside the worktree"
    )


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


class Owner(_Contract):
    """The process that answers for a lease; identified so that a reused pid is not taken for it."""

    host: str
    boot: str
    pid: int
    started: float


class Identity(_Contract):
    """Which directory was leased: never decided by a path alone."""

    device: int
    inode: int
    admin_dir: str
    nonce: str


class Evidence(_Contract):
    """What a freeze proved: the tree, the candidate commit, and where the worker stood."""

    tree: str
    commit: str
    head: str | None
    branch_tip: str | None
    manifest_sha256: str
    blocker: str | None = None
    late_trees: tuple[str, ...] = ()


class Landing(_Contract):
    """A journalled landing: the target moves from ``expected`` to ``merge`` by compare-and-swap."""

    expected: str
    merge: str
    candidate: str
    tree: str
    index_lock: int | None = None
    scratch: str | None = None
    #: Whether the target had a reflog before; the move makes one.
    logged: bool | None = None


class Intent(_Contract):
    """What is about to be done, durable before it is begun."""

    kind: Literal["allocate", "promote", "teardown"]
    at: float
    nonce: str | None = None
    landing: Landing | None = None


class Outcome(_Contract):
    """What was decided about a lease, before anything is removed."""

    status: Literal["promoted", "discarded", "needs_resolution", "retained"]
    policy: CompletionPolicy
    code: str | None = None
    message: str | None = None
    hint: str | None = None
    landing: Landing | None = None
    empty: bool = False


class Diagnostic(_Contract):
    """Something a person may want to know; ``ref`` is relative to the artifact root."""

    at: float
    code: str
    message: str
    ref: str | None = None


class Transition(_Contract):
    at: float
    state: WorkerLeaseState
    by: str


class LeaseFile(_Contract):
    """One lease as it stands on disk: the source of truth (design section 3)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    schema_: str = Field(default=LEASE_SCHEMA, alias="schema")
    serial: int = 0
    lease: WorkerWorktreeLease
    policy: WorkspacePolicy
    required_validations: tuple[str, ...] = ()
    predecessors: tuple[str, ...] = ()
    owner: Owner | None = None
    identity: Identity | None = None
    intent: Intent | None = None
    evidence: Evidence | None = None
    candidate: WorkerCandidate | None = None
    outcome: Outcome | None = None
    record: WorkerWorktreeRecord | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    history: tuple[Transition, ...] = ()

    @property
    def worker_id(self) -> str:
        return self.lease.worker_id

    def to(self, state: WorkerLeaseState, by: str, **changes: Any) -> LeaseFile:
        """The file after a transition; raises ``wrong_state`` where the ADR has no arrow."""
        old = self.lease.state
        if (old, state) not in _ARROWS:
            raise LionwtError(
                "wrong_state",
                f"the lease of {self.worker_id!r} is {old}; it cannot become {state}; nothing was changed",
                hint=f"look at it: lionwt status {self.lease.run_id}",
            )
        lease = changes.pop("lease", self.lease).model_copy(update={"state": state})
        history = (*self.history, Transition(at=time.time(), state=state, by=by))
        return self.model_copy(update={"lease": lease, "history": history, **changes})

    def noting(self, code: str, message: str, ref: str | None = None) -> LeaseFile:
        """The file with one more diagnostic."""
        note = Diagnostic(at=time.time(), code=code, message=message, ref=ref)
        return self.model_copy(update={"diagnostics": (*self.diagnostics, note)})


class Place(_Contract):
    """A directory by path and by identity."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Place:
        seen = os.stat(path, follow_symlinks=False)
        return cls(path=os.fspath(path), device=seen.st_dev, inode=seen.st_ino)

    def stands(self) -> bool:
        """Whether the directory is still the one that was recorded."""
        try:
            return Place.of(self.path) == self
        except OSError:
            return False


class RunFile(_Contract):
    """The run as lionwt opened it: pinned once, never changed (design section 3)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    schema_: str = Field(default=RUN_SCHEMA, alias="schema")
    run_id: str
    session_id: str
    artifact_root: str
    main_worktree: Place
    common_dir: Place
    checkout: Place
    checkout_git_dir: str
    object_format: Literal["sha1", "sha256"]
    target: str
    base_sha: str
    policy: WorkspacePolicy
    retain_for: float | None = None
    required_validations: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    user_name: str | None = None
    user_email: str | None = None
    config_sha256: str
    hooks_sha256: str
    opened_at: float
