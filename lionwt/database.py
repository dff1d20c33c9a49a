"""Where the read-model's rows lie: a SQLite file, or a PostgreSQL server that many machines share.

One schema for both, brought up to date by numbered migrations. Whatever is
wrong with a database becomes :class:`Unusable`, within a bounded wait: nothing
here may cost a lease. SQLite keeps its ordinary rollback journal, which works
on any file system and leaves no file beside the database that a new one could
be taken for. Writes are left to the kernel, for the lease files are the truth;
only what must be on disk before a lease file changes waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from lionwt import migrations, names
from lionwt.migrations import Missing, Statement, Unusable, Wait

if TYPE_CHECKING:
    from lionwt.postgresql import PostgreSQL

_IS_URL: Final = ("postgresql://", "postgres://")
#: What every SQLite file begins with.
_MAGIC: Final = b"SQLite format 3\0"
#: Between making an empty file and closing it nobody of this process may open it: closing drops SQLite's locks.
_creating = threading.Lock()


class Database(Protocol):
    """One open connection. Every method raises :class:`Unusable`."""

    def query(self, sql: str, values: Sequence[Any], wait: Wait) -> list[tuple[Any, ...]]:
        """The rows of one statement."""

    def write(self, statements: Iterable[Statement], wait: Wait, durable: bool = False) -> None:
        """Carry out all statements or none; with ``durable`` they are on disk afterwards."""

    def close(self) -> None:
        """Give the connection back."""


def place(environ: Mapping[str, str]) -> str:
    """``$LIONWT_DB``: a path or a PostgreSQL URL; by default ``$LIONAGI_HOME/lionwt.db``."""
    where = environ.get("LIONWT_DB")
    if not where:
        return str(names.lionagi_home(environ) / "lionwt.db")
    return where if "://" in where else os.path.abspath(os.path.expanduser(where))


def shown(where: str) -> str:
    """``where`` as a message may say it: a URL without user and password."""
    if "://" not in where:
        return where
    from urllib.parse import urlsplit

    with contextlib.suppress(ValueError):
        parts = urlsplit(where)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return where.partition("://")[0]


def load(where: str) -> None:
    """Import the library that ``where`` needs: its time is no waiting."""
    if where.startswith(_IS_URL):
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise Unusable(
                f"psycopg cannot be imported ({error})", "install it: pip install 'lionwt[postgresql]'"
            ) from error
    elif "://" in where:
        raise Unusable("LIONWT_DB is neither a path nor a PostgreSQL URL")


def connect(where: str, wait: Wait, *, create: bool) -> Database:
    """Open the database and bring its schema up to date; ``create`` makes a SQLite file that is missing.

    Raises :class:`Missing`, :class:`Unusable`; a schema of a newer lionwt is left alone.
    """
    database: _SQLite | PostgreSQL
    if where.startswith(_IS_URL):
        from lionwt.postgresql import PostgreSQL

        database = PostgreSQL(where, wait)
    else:
        database = _SQLite(where, create)
    try:
        _migrate(database, wait)
    except BaseException:
        database.close()
        raise
    return database


def _migrate(database: _SQLite | PostgreSQL, wait: Wait) -> None:
    version = database.version(wait)
    if version > migrations.newest():
        raise Unusable(
            f"its schema is version {version} and this lionwt knows {migrations.newest()}; it was left as it is",
            "use the lionwt that made it, or a newer one",
        )
    if version < migrations.newest():
        database.migrate(wait)


class _SQLite:
    def __init__(self, path: str, create: bool) -> None:
        import sqlite3

        self._path = path
        with _creating:
            self._require_file(create)
        # SQLite itself never makes the file: it would be readable for others.
        quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        with self._faults():
            self._connection = sqlite3.connect(f"file:{quoted}?mode=rw", uri=True, isolation_level=None)

    def _require_file(self, create: bool) -> None:
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):
                raise Unusable("it is not a regular file")
            return
        except FileNotFoundError:
            if not create:
                raise Missing("there is none") from None
        except OSError as error:
            raise Unusable(error.strerror or str(error)) from error
        parent = os.path.dirname(self._path)
        try:
            if parent == str(names.lionagi_home(os.environ)):
                os.makedirs(parent, 0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise Unusable(error.strerror or str(error)) from error

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        import sqlite3

        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            broken = "malformed" in str(error) or "not a database" in str(error)
            hint = self._way_out() if broken else None
            raise Unusable(str(error), hint) from error

    def _way_out(self) -> str:
        """What to do about a file that is no sound database; only one that can be lionwt's may be deleted."""
        is_ours = self._path == place({**os.environ, "LIONWT_DB": ""})
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            is_ours = is_ours or file.read(len(_MAGIC)) == _MAGIC
        if is_ours:
            return f"delete {self._path}: that loses nothing"
        return "LIONWT_DB names a file that is no database of lionwt's; leave that file, and point it elsewhere"

    def version(self, wait: Wait) -> int:
        if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'lionwt_schema'", (), wait):
            return 0
        return int(self.query("SELECT max(version) FROM lionwt_schema", (), wait)[0][0] or 0)

    def migrate(self, wait: Wait) -> None:
        with self._transaction(wait):  # alone now: another process may have been quicker
            version = self.version(wait)
            if version < migrations.newest():
                for sql in migrations.steps_from(version):
                    self._connection.execute(sql)

    def query(self, sql: str, values: Sequence[Any], wait: Wait) -> list[tuple[Any, ...]]:
        with self._faults():
            self._patience(wait)
            return self._connection.execute(sql, values).fetchall()

    def write(self, statements: Iterable[Statement], wait: Wait, durable: bool = False) -> None:
        with self._faults():
            # EXTRA also waits until the journal's removal is on disk: without that the write could still be undone.
            self._connection.execute(f"PRAGMA synchronous = {'EXTRA' if durable else 'OFF'}")
        with self._transaction(wait):
            for sql, rows in statements:
                self._connection.executemany(sql, rows)

    @contextlib.contextmanager
    def _transaction(self, wait: Wait) -> Iterator[None]:
        with self._faults():
            self._patience(wait)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._patience(wait)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise

    def _patience(self, wait: Wait) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {max(int(wait() * 1000), 1)}")

    def close(self) -> None:
        with contextlib.suppress(Unusable), self._faults():
            self._connection.close()
