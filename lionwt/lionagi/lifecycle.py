"""lionagi's lifecycle signals with the turn's id (ADR-0018 D5).

lionagi's signals forbid further fields, so these are subclasses of the same name: what asks for
lionagi's class gets them, and what is stored by kind is stored as before, with `turn_id` beside it.
Importing this imports lionagi.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from uuid import UUID

_lionagi: Any = import_module("lionagi.session.signal")

#: What lionagi itself sends at the start and at the end of a run.
PLAIN: tuple[type, ...] = (_lionagi.RunStart, _lionagi.RunEnd, _lionagi.RunFailed)


class RunStart(_lionagi.RunStart):  # type: ignore[misc]
    """A turn has begun; `turn_id` is the same in its terminal signal."""

    turn_id: UUID | None = None


class RunEnd(_lionagi.RunEnd):  # type: ignore[misc]
    """A turn has ended well; usage and duration (milliseconds) as lionagi counts them."""

    turn_id: UUID | None = None


class RunFailed(_lionagi.RunFailed):  # type: ignore[misc]
    """A turn has failed or was cancelled; `data` is the exception."""

    turn_id: UUID | None = None


def run_end(branch: Any, turn_id: UUID | None, duration_ms: float, result: Any) -> Any:
    """lionagi's own `RunEnd` of `branch`, stamped."""
    plain = _lionagi.build_run_end(branch, duration_ms=duration_ms, result=result)
    return RunEnd(turn_id=turn_id, **{name: getattr(plain, name) for name in type(plain).model_fields})
