"""Checked by mypy --strict, never run: the coordinator is the port, and lionagi's kind of run is a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lionwt import RunLike, WorkerPathBinding, WorkerWorkspaceCoordinator, WorktreeCoordinator


@dataclass(frozen=True)
class RunDir:
    """As lionagi has it: frozen, with more than the port asks for."""

    run_id: str
    state_root: Path
    artifact_root: Path
    cwd: Path | None = None


def coordinator() -> WorkerWorkspaceCoordinator:
    return WorktreeCoordinator(repo="/repository")


def a_run(run: RunDir) -> RunLike:
    return run


async def a_life(port: WorkerWorkspaceCoordinator, run: RunDir) -> None:
    lease = await port.allocate(run=run, session_id="s", worker_id="w", target_branch="work", base_sha="0" * 40)
    running = await port.mark_running(lease)
    binding: dict[str, str] = WorkerPathBinding.of(running).env
    assert binding
    candidate = await port.freeze(running, worker_succeeded=True, cancelled=False, validations=())
    assert candidate.lease.state == "frozen"
