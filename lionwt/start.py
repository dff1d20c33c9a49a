"""``start``: the worker has its paths, and only those (ADR-0091 D3, ``mark_running``)."""

from __future__ import annotations

from typing import Any

from lionwt import worktree
from lionwt.errors import LionwtError
from lionwt.records import Binding, LeaseFile, plain, read
from lionwt.session import Run


def start(run: Run, worker_id: str, grants: dict[str, Any] | None = None) -> LeaseFile:
    """allocated → running, only if the grants that were installed are the lease's binding.

    Raises ``grants_mismatch``, ``wrong_state``, ``worktree_moved``. Repeated, it
    answers the same and changes nothing.
    """
    with run.locked(worker_id) as file:
        if grants is not None:
            _require_binding(file, grants)
        if any(step.state == "running" for step in file.history):
            return file
        if file.lease.state == "allocated" and file.intent is not None:
            raise LionwtError(
                "wrong_state",
                f"the allocation of {worker_id!r} was not finished; nothing was changed",
                hint=f"finish what was interrupted: lionwt reconcile {run.argument}",
            )
        running = file.to("running", "start")
        worktree.require_identity(file)
        return run.store.write(running)


def _require_binding(file: LeaseFile, grants: dict[str, Any]) -> None:
    try:
        granted = read(grants, Binding)
    except ValueError as error:
        raise LionwtError(
            "grants_mismatch",
            f"the grants of {file.worker_id!r} are not a path binding: {error}; the lease stays {file.lease.state}",
            hint="install the binding that lease printed, unchanged",
        ) from error
    expected = Binding.of(file.lease)
    if granted == expected:
        return
    wanted = plain(expected)
    differing = [name for name, value in plain(granted).items() if value != wanted[name]]
    raise LionwtError(
        "grants_mismatch",
        f"the grants of {file.worker_id!r} differ from its lease in {', '.join(differing)}; "
        f"the lease stays {file.lease.state}",
        hint="install the binding that lease printed, unchanged",
    )
