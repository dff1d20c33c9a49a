"""What lionwt keeps about a run and its leases, and the legal transitions.

The fields of ADR-0091's contracts (:mod:`lionwt.contracts` holds those, for
importers), and the envelope around them (design section 3): what the contracts
do not hold (intent, identity, evidence, outcome) lives there, so that they stay
exactly what the decision says. Frozen, nothing extra, checked when read.

Times are Unix seconds. Text that came from a path may hold surrogate escapes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from lionwt.errors import LionwtError
from lionwt.values import Value

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


class Data(Value, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A value with a JSON form."""


R = TypeVar("R", bound=Data)


def read(value: Any, kind: type[R]) -> R:
    """Plain data (JSON, or a contract's dump) as ``kind``; raises ``ValueError`` naming the field that is wrong."""
    return msgspec.convert(value, kind, dec_hook=_path)


def plain(data: Data) -> dict[str, Any]:
    """The JSON form: what :func:`read` reads back."""
    return msgspec.to_builtins(data, enc_hook=os.fspath)  # type: ignore[no-any-return]


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise ValueError("Expected a path")


class Policy(Data, frozen=True, kw_only=True):
    """``WorkspacePolicy`` (ADR-0091 D1); its expiry was checked when it was resolved."""

    mode: WorkspaceMode = "shared_host"
    completion: CompletionPolicy = "patch_only"
    retain_worktree_on_resolution: bool = False
    retention_until: float | None = None


class Lease(Data, frozen=True, kw_only=True):
    """``WorkerWorktreeLease`` (ADR-0091 D2)."""

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


class Binding(Data, frozen=True, kw_only=True):
    """``WorkerPathBinding`` (ADR-0091 D2)."""

    cwd: Path
    provider_repo: Path
    source_roots: tuple[Path, ...]
    writable_artifact_root: Path
    env: dict[str, str]

    @classmethod
    def of(cls, lease: Lease) -> Binding:
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
        """See :meth:`lionwt.WorkerPathBinding.resolve`."""
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


class Validation(Data, frozen=True, kw_only=True):
    """``ValidationResult`` (ADR-0091 D3)."""

    name: str
    passed: bool
    exit_code: int | None = None
    evidence_ref: str | None = None


class Candidate(Data, frozen=True, kw_only=True):
    """``WorkerCandidate`` (ADR-0091 D3)."""

    lease: Lease
    patch_ref: str
    patch_sha256: str
    files_changed: tuple[str, ...]
    artifact_manifest_ref: str
    validations: tuple[Validation, ...] = ()
    worker_succeeded: bool
    cancelled: bool = False


class Record(Data, frozen=True, kw_only=True):
    """``WorkerWorktreeRecord`` (ADR-0091 D3)."""

    lease: Lease
    policy: CompletionPolicy
    status: WorkerTerminalStatus
    patch_ref: str | None
    promoted_commit: str | None
    teardown_errors: list[str]
    worktree_removed: bool
    branch_deleted: bool
    retention_until: float | None = None
    completed_at: float


class Owner(Data, frozen=True, kw_only=True):
    """The process that answers for a lease; identified so that a reused pid is not taken for it."""

    host: str
    boot: str
    pid: int
    started: float


class Identity(Data, frozen=True, kw_only=True):
    """Which directory was leased: never decided by a path alone."""

    device: int
    inode: int
    admin_dir: str
    nonce: str


class Evidence(Data, frozen=True, kw_only=True):
    """What a freeze proved: the tree, the candidate commit, and where the worker stood."""

    tree: str
    commit: str
    head: str | None
    branch_tip: str | None
    manifest_sha256: str
    blocker: str | None = None
    #: The SHA-256 of each ``late-N.json``, by name, in the order in which they were written.
    late: dict[str, str] = {}


class Landing(Data, frozen=True, kw_only=True):
    """A journalled landing: the target moves from ``expected`` to ``merge`` by compare-and-swap."""

    expected: str
    merge: str
    candidate: str
    tree: str
    index_lock: int | None = None
    scratch: str | None = None
    #: Whether the target had a reflog before; the move makes one.
    logged: bool | None = None


class Intent(Data, frozen=True, kw_only=True):
    """What is about to be done, durable before it is begun."""

    kind: Literal["allocate", "promote", "teardown"]
    at: float
    nonce: str | None = None
    landing: Landing | None = None


class Outcome(Data, frozen=True, kw_only=True):
    """What was decided about a lease, before anything is removed."""

    status: Literal["promoted", "discarded", "needs_resolution", "retained"]
    policy: CompletionPolicy
    code: str | None = None
    message: str | None = None
    hint: str | None = None
    landing: Landing | None = None
    empty: bool = False


class Diagnostic(Data, frozen=True, kw_only=True):
    """Something a person may want to know; ``ref`` is relative to the artifact root."""

    at: float
    code: str
    message: str
    ref: str | None = None


class Transition(Data, frozen=True, kw_only=True):
    at: float
    state: WorkerLeaseState
    by: str


class LeaseFile(Data, frozen=True, kw_only=True, rename={"schema_": "schema"}):
    """One lease as it stands on disk: the source of truth (design section 3)."""

    schema_: str = LEASE_SCHEMA
    serial: int = 0
    lease: Lease
    policy: Policy
    required_validations: tuple[str, ...] = ()
    predecessors: tuple[str, ...] = ()
    owner: Owner | None = None
    identity: Identity | None = None
    intent: Intent | None = None
    evidence: Evidence | None = None
    candidate: Candidate | None = None
    outcome: Outcome | None = None
    record: Record | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    history: tuple[Transition, ...] = ()

    @property
    def worker_id(self) -> str:
        return self.lease.worker_id

    def contradiction(self) -> str | None:
        """What in a file that was read no lionwt can have written together; None where nothing is."""
        state, intent = self.lease.state, self.intent
        kind = intent.kind if intent is not None else None
        wrong = {
            "its serial or its owner's pid is out of range": not 0 <= self.serial < 1 << 63
            or not (self.owner is None or 0 < self.owner.pid < 1 << 31),
            "it is frozen and has no candidate or no evidence": state == "frozen"
            and (self.candidate is None or self.evidence is None),
            "it has ended and has no record, or the reverse": (state == "terminal") != (self.record is not None),
            "it was to be allocated, and is not of a lease that begins": kind == "allocate"
            and (state != "allocated" or intent is None or intent.nonce is None),
            "it was to be landed, and nothing says what": kind == "promote"
            and (state != "frozen" or intent is None or intent.landing is None),
            "its teardown was begun without an outcome": kind == "teardown" and self.outcome is None,
        }
        return next((what for what, holds in wrong.items() if holds), None)

    def to(self, state: WorkerLeaseState, by: str, **changes: Any) -> LeaseFile:
        """The file after a transition; raises ``wrong_state`` where the ADR has no arrow."""
        old = self.lease.state
        if (old, state) not in _ARROWS:
            raise LionwtError(
                "wrong_state",
                f"the lease of {self.worker_id!r} is {old}; it cannot become {state}; nothing was changed",
                hint=f"look at it: lionwt status {self.lease.run_id}",
            )
        lease = changes.pop("lease", self.lease).having(state=state)
        history = (*self.history, Transition(at=time.time(), state=state, by=by))
        return self.having(lease=lease, history=history, **changes)

    def noting(self, code: str, message: str, ref: str | None = None) -> LeaseFile:
        """The file with one more diagnostic."""
        note = Diagnostic(at=time.time(), code=code, message=message, ref=ref)
        return self.having(diagnostics=(*self.diagnostics, note))


class Check(Data, frozen=True, kw_only=True):
    """A command that a run declares; it may take ``timeout`` seconds."""

    name: str
    command: str
    timeout: float


class Place(Data, frozen=True, kw_only=True):
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


class RunFile(Data, frozen=True, kw_only=True, rename={"schema_": "schema"}):
    """The run as lionwt opened it: pinned once, never changed (design section 3)."""

    schema_: str = RUN_SCHEMA
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
    policy: Policy
    retain_for: float | None = None
    required_validations: tuple[str, ...] = ()
    merged_checks: tuple[Check, ...] = ()
    protected: tuple[str, ...] = ()
    user_name: str | None = None
    user_email: str | None = None
    config_sha256: str
    hooks_sha256: str
    opened_at: float
