"""The schema of the read-model, for SQLite and PostgreSQL alike, as numbered migrations.

What stands here once is never changed: a database that was made by an older
lionwt gets what it lacks, and one of a newer lionwt is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Version n is reached by the first n entries; each is a few statements that both databases understand.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE lionwt_schema (version INTEGER NOT NULL)",
        "INSERT INTO lionwt_schema VALUES (0)",
        "CREATE TABLE lionwt_lease ("
        "run_digest TEXT NOT NULL, worker_id TEXT NOT NULL, run_id TEXT NOT NULL, host TEXT NOT NULL, "
        "state_root TEXT NOT NULL, serial BIGINT NOT NULL, state TEXT NOT NULL, status TEXT, intent TEXT, "
        "target_branch TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, retention_until DOUBLE PRECISION, "
        "written_at DOUBLE PRECISION NOT NULL, PRIMARY KEY (run_digest, worker_id))",
    ),
)

#: How many seconds may still be waited; less at every call.
Wait = Callable[[], float]
#: A statement and the rows of values it is carried out with.
Statement = tuple[str, Sequence[Sequence[Any]]]


class Unusable(Exception):
    """The database cannot be used now; the text says why, ``hint`` what to do."""

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.hint = hint


class Missing(Unusable):
    """There is no database, and the caller only wanted to read."""


def newest() -> int:
    """The version that this lionwt knows."""
    return len(MIGRATIONS)


def steps_from(version: int) -> list[str]:
    """The statements that bring a database of ``version`` up to date."""
    steps = [sql for migration in MIGRATIONS[version:] for sql in migration]
    return [*steps, f"UPDATE lionwt_schema SET version = {newest()}"]
