"""The tools of a worker that is a model behind an API (ADR-0091 D2)."""

from __future__ import annotations

from typing import Any, Final

from lionwt.errors import LionwtError
from lionwt.lionagi.leases import Held

#: Tools that reach neither files nor processes.
HARMLESS: Final = frozenset({"messenger"})


def bind(branch: Any, held: Held) -> None:
    """Refuse every tool that is not known to reach neither files nor processes."""
    registry = branch.acts.registry
    other = sorted(set(registry) - HARMLESS)
    if other:
        raise LionwtError(
            "grants_mismatch",
            f"{held.worker_id!r} has tools that no lease confines ({', '.join(other)}); it was not started",
            hint="take them from the agent's profile",
        )
