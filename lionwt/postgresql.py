"""A connection to a PostgreSQL server, every call of it with a bounded wait.

The server, a name server or the network may keep silent for minutes, and only
some of that is covered by a timeout of the library's. So each call runs in a
thread that is waited for only so long, and that closes the connection itself
where nobody waits any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lionwt import migrations
from lionwt.migrations import Statement, Unusable, Wait

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_MIGRATING: Final = 0x6C696F6E7774  # the advisory lock of a migration: "lionwt"


class PostgreSQL:
    """One connection. Every method raises :class:`Unusable`."""

    def __init__(self, url: str, wait: Wait) -> None:
        import psycopg

        self._connection: psycopg.Connection | None = None
        self._busy = self._abandoned = False
        self._lock = threading.Lock()
        timeout = max(1, int(wait() * 1000))

        def opened() -> None:
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=2,
                prepare_threshold=None,  # a pooler between may not know prepared statements
                fallback_application_name="lionwt",
            )
            self._connection.execute(f"SET statement_timeout = {timeout}")

        try:
            self._within(wait, opened)
        except BaseException:
            self.close()
            raise

    def _execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        assert self._connection is not None
        cursor = self._connection.execute(sql.replace("?", "%s").encode("ascii"), values or None)
        return cursor.fetchall() if cursor.description else []

    def _within(self, wait: Wait, work: Callable[[], T]) -> T:
        import psycopg

        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                errors.append(error)
            with self._lock:
                self._busy = False
                if self._abandoned:
                    self._end()

        self._busy = True
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(wait(), 0.01))
        if thread.is_alive():
            raise Unusable("it did not answer in time")
        for error in errors:
            if isinstance(error, (psycopg.Error, OSError, ValueError)):
                raise Unusable(" ".join(str(error).split())) from error
            raise error
        return answers[0]

    def version(self, wait: Wait) -> int:
        return self._within(wait, self._version)

    def _version(self) -> int:
        if self._execute("SELECT to_regclass('lionwt_schema')")[0][0] is None:
            return 0
        return int(self._execute("SELECT max(version) FROM lionwt_schema")[0][0] or 0)

    def migrate(self, wait: Wait) -> None:
        def work() -> None:
            assert self._connection is not None
            with self._connection.transaction():
                self._execute(f"SELECT pg_advisory_xact_lock({_MIGRATING})")
                version = self._version()
                if version < migrations.newest():
                    for sql in migrations.steps_from(version):
                        self._execute(sql)

        self._within(wait, work)

    def query(self, sql: str, values: Sequence[Any], wait: Wait) -> list[tuple[Any, ...]]:
        return self._within(wait, lambda: self._execute(sql, values))

    def write(self, statements: Iterable[Statement], wait: Wait, durable: bool = False) -> None:
        def work() -> None:
            assert self._connection is not None
            with self._connection.transaction(), self._connection.cursor() as cursor:
                for sql, rows in statements:
                    cursor.executemany(sql.replace("?", "%s").encode("ascii"), rows)

        self._within(wait, work)

    def close(self) -> None:
        """Close the connection now, or leave that to the thread that still waits for the server."""
        with self._lock:
            self._abandoned = True
            if not self._busy:
                self._end()

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()
