"""The read-model: one row per lease, derived from the lease files (ADR-0091 A1.2, design section 9).

A row is written after its lease file. Before a file ends, the row is marked as
ended, without a claim about how; before a file goes, the row goes. So a row
never asserts a lease that the files do not hold, wherever a process dies. The
files stay the truth: who reads a row re-reads the file before it says or does
anything. A row carries the file's serial, and never gives way to an older one.

A database that cannot be used costs one warning and a short wait in a command,
and nothing else; ``reconcile`` writes what is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lionwt import command, database
from lionwt.database import Database
from lionwt.faults import point
from lionwt.migrations import Missing, Statement, Unusable, Wait
from lionwt.names import RunPaths
from lionwt.values import Value, checked

if TYPE_CHECKING:
    from lionwt.records import LeaseFile

T = TypeVar("T")

#: Seconds that one command waits for the database in all.
WAIT: Final = 2.0
#: Seconds of each call that are work, not waiting.
_WORK: Final = 0.05


class Row(Value, frozen=True):
    """What is known of one lease across runs. Times in Unix seconds.

    ``run_digest`` is the hash of the run's own file, which never changes: it
    tells one opened run from every other, on this machine and elsewhere.
    ``host`` and ``state_root`` say where the lease was last written. An ended
    lease whose ``status`` is None was about to be recorded.
    """

    run_digest: str
    worker_id: str
    run_id: str
    host: str
    state_root: str
    serial: int
    state: str
    status: str | None
    intent: str | None
    target_branch: str
    created_at: float
    retention_until: float | None
    written_at: float

    @classmethod
    def of(cls, digest: str, paths: RunPaths, file: LeaseFile) -> Row:
        """The row that a lease file makes."""
        record = file.record
        return cls(
            run_digest=digest,
            worker_id=file.worker_id,
            run_id=paths.run_id,
            host=this_host(),
            state_root=_ascii(str(paths.state_root)),
            serial=file.serial,
            state=file.lease.state,
            status=record.status if record is not None else None,
            intent=file.intent.kind if file.intent is not None else None,
            target_branch=_ascii(file.lease.target_branch),
            created_at=file.lease.created_at,
            retention_until=record.retention_until if record is not None else None,
            written_at=time.time(),
        )

    @classmethod
    def read(cls, values: Sequence[Any]) -> Row:
        """The row that a database gave; raises ``ValueError`` where lionwt cannot have written it."""
        row = checked(cls, dict(zip(_COLUMNS, values, strict=True)))
        times = (row.created_at, row.written_at, row.retention_until or 0.0)
        names = (row.run_id, row.worker_id, row.root, row.machine, row.target)
        if not all(map(math.isfinite, times)) or b"\0" in b"".join(map(os.fsencode, names)):
            raise ValueError("a time without end, or a name that none can be")
        return row

    def marked(self) -> Row:
        """The row of a lease that is about to end: it asserts nothing any more."""
        return self.having(state="terminal", status=None, intent=None, retention_until=None)

    def says_the_same(self, other: Row) -> bool:
        """Whether two rows differ at most in who wrote them and when."""
        return other.having(host=self.host, written_at=self.written_at) == self

    @property
    def root(self) -> str:
        """The state root as a path."""
        return _text(self.state_root)

    @property
    def machine(self) -> str:
        """The name of the machine that wrote the row."""
        return _text(self.host)

    @property
    def target(self) -> str:
        """The short name of the target."""
        return _text(self.target_branch)


_COLUMNS: Final = Row.__struct_fields__
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM lionwt_lease"
_PUT: Final = (
    f"INSERT INTO lionwt_lease ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    "ON CONFLICT (run_digest, worker_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[2:])
    + " WHERE lionwt_lease.serial <= excluded.serial"
)
_DROP: Final = "DELETE FROM lionwt_lease WHERE run_digest = ? AND worker_id = ?"


def this_host() -> str:
    """The name of this machine, as rows carry it."""
    return _ascii(os.uname().nodename)


def _ascii(text: str) -> str:
    """Any path or name as ASCII, reversibly, since no database holds surrogates."""
    return json.dumps(text, ensure_ascii=True)[1:-1]


def _text(value: str) -> str:
    try:
        return str(json.loads(f'"{value}"'))
    except ValueError:
        return value


def digest_of(run_file: Path) -> str:
    """The ``run_digest`` of an opened run; raises ``OSError``."""
    from hashlib import sha256

    from lionwt.files import read_small

    return sha256(read_small(run_file)).hexdigest()


class ReadModel:
    """The rows, for the length of one command: one connection, and after the first failure none."""

    def __init__(self, where: str, warn: Callable[[str], None]) -> None:
        self.where = where
        self.missing = False  # there was nothing to read
        self._warn = warn
        self._warned = False
        self._usable = True
        self._left = WAIT
        self._database: Database | None = None

    def rows(self, digest: str | None = None) -> list[Row] | None:
        """Every row, or those of one run, in the order of leasing; None where the database cannot be used."""
        where, values = (" WHERE run_digest = ?", (digest,)) if digest is not None else ("", ())
        found = self._ask(lambda wait: self._open(wait, create=False).query(_SELECT + where, values, wait))
        if found is None:
            return None
        rows: list[Row] = []
        for values in found:
            try:
                rows.append(Row.read(values))
            except ValueError as error:  # the other rows are no worse for it
                self._tell(f"has a row that lionwt did not write ({error}), which was left out", self._deletion())
        return sorted(rows, key=lambda row: row.created_at)

    def put(self, rows: Iterable[Row], *, instead: Iterable[Row] = ()) -> None:
        """Write rows, unless newer ones stand there; those of ``instead`` go first, whatever they say."""
        self._write([(_DROP, _keys(instead)), (_PUT, [row.in_order() for row in rows])], "readmodel.written")

    def mark(self, row: Row) -> None:
        """Say durably that a lease has ended, before its file does."""
        self._write([(_PUT, [row.marked().in_order()])], "readmodel.marked", durable=True)

    def drop(self, rows: Iterable[Row | tuple[str, str]]) -> None:
        """Remove rows durably: before their files go, or because they have gone."""
        self._write([(_DROP, _keys(rows))], "readmodel.dropped", durable=True)

    def _write(self, statements: Sequence[Statement], passed: str, durable: bool = False) -> None:
        wanted = [(sql, rows) for sql, rows in statements if rows]
        if not wanted:
            return

        def work(wait: Wait) -> bool:
            self._open(wait, create=True).write(wanted, wait, durable)
            return True

        if self._ask(work):
            point(passed)

    def _open(self, wait: Wait, *, create: bool) -> Database:
        if self._database is None:
            self._database = database.connect(self.where, wait, create=create)
        return self._database

    def _ask(self, work: Callable[[Wait], T]) -> T | None:
        """What ``work`` gives; None, a warning and no further try where the database fails.

        The boundary between what a database may hold and a lease: every use of one goes through here.
        """
        if not self._usable:
            return None
        try:
            database.load(self.where)
            began, left = time.monotonic(), self._left
            try:
                found = work(lambda: began + left - time.monotonic())
            finally:
                self._left -= max(0.0, time.monotonic() - began - _WORK)
            if self._left <= 0.0:
                self.give_up("it is too slow")
            return found
        except Missing:
            self.missing = True
        except (Unusable, OSError) as error:
            self.give_up(str(error), getattr(error, "hint", None))
        except Exception as error:
            self.give_up(f"it holds what lionwt did not write ({type(error).__name__}: {error})", self._deletion())
        return None

    def _deletion(self) -> str | None:
        """What to do about a file that is corrupt; a server is others' as well."""
        return None if "://" in self.where else f"delete {self.where}: that loses nothing"

    def give_up(self, why: str, hint: str | None = None) -> None:
        """Warn, and leave the database alone for the rest of the command."""
        self._usable = False
        self._tell(f"was not used: {why}; every lease is as its file says", hint)

    def _tell(self, what: str, hint: str | None) -> None:
        """The one warning of a command."""
        if self._warned:
            return
        self._warned = True
        advice = f"{hint}; " if hint else ""
        self._warn(
            f"the read-model {database.shown(self.where)} {what}. "
            f"{advice}lionwt reconcile RUN brings its rows up to date"
        )

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _keys(rows: Iterable[Row | tuple[str, str]]) -> list[tuple[str, str]]:
    return [(row.run_digest, row.worker_id) if isinstance(row, Row) else row for row in rows]


@contextlib.contextmanager
def used() -> Iterator[ReadModel]:
    """The read-model of the command that runs."""
    with command.running() as running:
        model = running.opened.get(ReadModel)
        if not isinstance(model, ReadModel):
            model = running.opened[ReadModel] = ReadModel(database.place(os.environ), running.warn)
        yield model


@contextlib.contextmanager
def following(paths: RunPaths, file: LeaseFile) -> Iterator[None]:
    """Around the writing of a lease file: a lease that ends is marked before, every row is written after."""
    with used() as model:
        row = _row(model, paths, file)
        if row is not None and row.state == "terminal":
            model.mark(row)
        yield
        if row is not None:
            model.put([row])


def forgetting(paths: RunPaths, worker_id: str) -> None:
    """Before the removal of a lease file: its row goes first."""
    with used() as model:
        try:
            model.drop([(digest_of(paths.run_file), worker_id)])
        except FileNotFoundError:
            pass  # a run that was never opened has no rows
        except OSError as error:
            model.give_up(f"{paths.run_file}: {error.strerror or error}")


def _row(model: ReadModel, paths: RunPaths, file: LeaseFile) -> Row | None:
    try:
        return Row.of(digest_of(paths.run_file), paths, file)
    except OSError as error:
        model.give_up(f"{paths.run_file}: {error.strerror or error}")
        return None
