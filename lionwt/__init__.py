"""lionwt: one git worktree per coding agent, and the truth about what became of it.

The public names of ADR-0091 are resolved on first use, so that ``import lionwt``
imports nothing else: ``lionwt --version`` and :mod:`lionwt.turn` stay as cheap
as the interpreter itself.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for typing's, which is not imported for it
if TYPE_CHECKING:
    from typing import Any

    from lionwt.contracts import (
        RunLike,
        ValidationResult,
        WorkerCandidate,
        WorkerPathBinding,
        WorkerWorkspaceCoordinator,
        WorkerWorktreeLease,
        WorkerWorktreeRecord,
        WorkspacePolicy,
    )
    from lionwt.coordinator import WorktreeCoordinator
    from lionwt.errors import LionwtError
    from lionwt.records import CompletionPolicy, WorkerLeaseState, WorkerTerminalStatus, WorkspaceMode

_HOMES = {
    "CompletionPolicy": "records",
    "LionwtError": "errors",
    "RunLike": "contracts",
    "ValidationResult": "contracts",
    "WorkerCandidate": "contracts",
    "WorkerLeaseState": "records",
    "WorkerPathBinding": "contracts",
    "WorkerTerminalStatus": "records",
    "WorkerWorkspaceCoordinator": "contracts",
    "WorkerWorktreeLease": "contracts",
    "WorkerWorktreeRecord": "contracts",
    "WorkspaceMode": "records",
    "WorkspacePolicy": "contracts",
    "WorktreeCoordinator": "coordinator",
}

__all__ = [
    "CompletionPolicy",
    "LionwtError",
    "RunLike",
    "ValidationResult",
    "WorkerCandidate",
    "WorkerLeaseState",
    "WorkerPathBinding",
    "WorkerTerminalStatus",
    "WorkerWorkspaceCoordinator",
    "WorkerWorktreeLease",
    "WorkerWorktreeRecord",
    "WorkspaceMode",
    "WorkspacePolicy",
    "WorktreeCoordinator",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lionwt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lionwt.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
