"""The read-model: rows that never assert a lease the files do not hold, and faults that never cost one.

ADR-0091 A1.2, design section 9, invariant 18. On real SQLite files and a real
PostgreSQL server.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lionwt import migrations, names, readmodel
from lionwt.readmodel import ReadModel, Row
from tests import postgres
from tests.conftest import Answer, Repo, World, answer_of, go_on, unprivileged, wait_until

COLUMNS = "run_id, worker_id, serial, state, status, intent, host, state_root, run_digest, created_at, retention_until"
WARNING = "lionwt: the read-model "


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.Server]:
    """One server for each process that runs tests, started when the first test needs it."""
    started = postgres.Server(tmp_path_factory.mktemp("postgresql"))
    try:
        wait_until(started.answers, 60)
        yield started
    finally:
        started.end()


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both databases in turn: the default file, or an empty one on the server."""
    if request.param == "sqlite":
        return str(world.lionagi_home / "lionwt.db")
    return use_postgresql(request, world, monkeypatch)


def use_postgresql(request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    server: postgres.Server = request.getfixturevalue("server")
    url = server.database()
    world.env["LIONWT_DB"] = url
    monkeypatch.setenv("LIONWT_DB", url)
    return url


def sql(where: str, statement: str) -> list[tuple[Any, ...]]:
    """One statement on the database itself, without any code of lionwt."""
    if "://" in where:
        with psycopg.connect(where, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
    with contextlib.closing(sqlite3.connect(f"file:{where}?mode=rw", uri=True, isolation_level=None)) as opened:
        return opened.execute(statement).fetchall()


def rows(where: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Every row by run and worker."""
    keys = COLUMNS.split(", ")
    found = [dict(zip(keys, row, strict=True)) for row in sql(where, f"SELECT {COLUMNS} FROM lionwt_lease")]
    assert len({(row["run_id"], row["worker_id"]) for row in found}) == len(found)
    return {(row["run_id"], row["worker_id"]): row for row in found}


def said(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["serial"], row["state"], row["status"], row["intent"]


def file_said(file: dict[str, Any]) -> tuple[Any, ...]:
    record, intent = file["record"] or {}, file["intent"] or {}
    return file["serial"], file["lease"]["state"], record.get("status"), intent.get("kind")


def assert_asserts_nothing_else(world: World, where: str) -> None:
    """Invariant 18 for the rows as they lie there, however they came to be."""
    for (run, worker), row in rows(where).items():
        path = world.state(run) / "workspaces" / f"{worker}.json"
        if row["state"] != "terminal":
            assert path.exists(), row
            assert world.lease_file(run, worker)["lease"]["state"] != "terminal", row
        elif row["status"] is not None:
            assert world.lease_file(run, worker)["record"]["status"] == row["status"], row


def assert_current(world: World, where: str, run: str = "r1") -> None:
    """Every lease file of the run has its row, which says what it says; nothing else has one."""
    files = sorted((world.state(run) / "workspaces").glob("[!.]*.json"))
    expected = {path.stem: file_said(json.loads(path.read_bytes())) for path in files}
    assert {worker: said(row) for (of, worker), row in rows(where).items() if of == run} == expected


def warnings(answer: Answer) -> list[str]:
    return [line for line in answer.err.splitlines() if line.startswith(WARNING)]


# --- rows follow the files --------------------------------------------------------------------------------------------


def test_every_verb_leaves_its_row_as_the_file_stands(world: World, repo: Repo, where: str) -> None:
    """Design section 9: one row per lease, carrying the lease's serial."""
    leased = world.lease("r1", "w1", "w2", "w3", start=False)
    assert_current(world, where)
    row = rows(where)["r1", "w1"]
    assert (row["host"], row["state_root"]) == (os.uname().nodename, str(world.state("r1")))
    assert world.lionwt("start", "r1", "w1").code == 0
    assert rows(where)["r1", "w1"]["state"] == "running"
    leased["w1"].write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert rows(where)["r1", "w1"]["state"] == "frozen"
    assert world.freeze("r1", "w2", "--failed").code == 0
    assert said(rows(where)["r1", "w2"])[1:] == ("terminal", "discarded", None)
    assert_current(world, where)
    answer = world.promote("r1", "w1")
    assert answer.code == 0 and not warnings(answer), answer
    assert said(rows(where)["r1", "w1"])[1:] == ("terminal", "promoted", None)
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert rows(where)["r1", "w3"]["status"] == "discarded"
    assert_current(world, where)


def test_a_retained_lease_says_until_when_and_no_longer_once_it_is_reaped(world: World, repo: Repo) -> None:
    """ADR-0091 A1.2: the row is for reapers, and marked in the operation that retires the record."""
    where = str(world.lionagi_home / "lionwt.db")
    until = time.time() + 3600
    world.frozen("r1", {"w1": {"f1.txt": "theirs\n"}}, args=["--retain-until", str(until)])
    repo.commit("mine", **{"f1.txt": "mine\n"})
    assert world.promote("r1").code == 4
    row = rows(where)["r1", "w1"]
    assert (row["status"], row["retention_until"]) == ("retained", until)
    path = world.state("r1") / "workspaces/w1.json"
    path.write_bytes(path.read_bytes().replace(str(until).encode(), str(time.time() - 1).encode()))
    assert world.lionwt("reap", "r1", env={"LIONWT_FAULT": "readmodel.marked:kill:2"}).code == -signal.SIGKILL
    assert (rows(where)["r1", "w1"]["status"], world.record("r1", "w1")["status"]) == (None, "retained")
    assert world.lionwt("reconcile", "r1").code == 4
    assert rows(where)["r1", "w1"]["status"] == "needs_resolution"
    assert_current(world, where)


def test_a_row_comes_after_its_file_and_is_marked_before_the_file_ends(world: World, repo: Repo) -> None:
    """Design section 9: created after the lease file, marked before the file's terminal write."""
    where = str(world.lionagi_home / "lionwt.db")
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    with world.stopped("lease.intended", "lease", "r1", "-w", "w2") as child:
        assert said(rows(where)["r1", "w2"])[1:] == ("allocated", None, "allocate")
        assert go_on(child).code == 0
    with world.stopped("readmodel.marked", "promote", "r1") as child:
        assert said(rows(where)["r1", "w1"])[1:] == ("terminal", None, None)
        assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
        assert go_on(child).code == 0
    assert_current(world, where)


def test_what_a_failed_lease_had_reserved_loses_its_row_before_its_file(world: World, repo: Repo) -> None:
    """Design section 9: undone allocations likewise; the row is gone first."""
    where = str(world.lionagi_home / "lionwt.db")
    world.lease("r1", "w1")
    refused = world.lionwt("lease", "r1", "-w", "w2", env={"LIONWT_FAULT": "lease.registered:raise"})
    assert refused.code == 1
    assert set(rows(where)) == {("r1", "w1")} and not (world.state("r1") / "workspaces/w2.json").exists()
    fault = "lease.registered:raise,readmodel.dropped:kill"
    assert world.lionwt("lease", "r1", "-w", "w2", env={"LIONWT_FAULT": fault}).code == -signal.SIGKILL
    assert set(rows(where)) == {("r1", "w1")} and (world.state("r1") / "workspaces/w2.json").exists()
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert rows(where)["r1", "w2"]["status"] == "discarded"
    assert_current(world, where)


def test_a_file_that_could_not_be_written_leaves_a_row_that_asserts_nothing(world: World, repo: Repo) -> None:
    """Design section 9: the row understates until the verb is repeated."""
    where = str(world.lionagi_home / "lionwt.db")
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    full = world.promote("r1", env={"LIONWT_FAULT": "store.written:nospace:3"})
    assert (full.code, full.error) == (8, "no_space"), full
    assert said(rows(where)["r1", "w1"])[1:] == ("terminal", None, None)
    assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
    [standing] = world.lionwt("status", "--json").json["leases"]
    assert (standing["state"], standing["status"]) == ("frozen", None)
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert rows(where)["r1", "w1"]["status"] == "promoted"
    assert_current(world, where)


LEASING = ["lease.intended", "lease.registered", "lease.populated", "lease.recorded"]
LEASING += [f"{point}:{nth}" for point in ("store.written", "store.replaced") for nth in (1, 2, 3, 4)]
LEASING += [f"readmodel.written:{nth}" for nth in (1, 2, 3, 4)]
ENDING = ["promote.intended", "promote.moved", "promote.landed"]
ENDING += [f"teardown.{step}" for step in ("trashed", "retired", "branch_deleted", "recorded")]
ENDING += [f"{point}:{nth}" for point in ("store.written", "store.replaced", "readmodel.written") for nth in (1, 2, 3)]
ENDING += ["readmodel.marked"]


@pytest.mark.parametrize("point", LEASING)
def test_no_kill_in_a_lease_leaves_a_row_that_asserts_too_much(world: World, repo: Repo, point: str) -> None:
    """Invariant 18 at every instant of every crash; reconcile brings the rows up to date."""
    where = str(world.lionagi_home / "lionwt.db")
    world.lease("r1", "w0")
    killed_and_mended(world, where, point, "lease", "r1", "-w", "w1", "-w", "w2")


@pytest.mark.parametrize("point", ENDING)
def test_no_kill_at_an_end_leaves_a_row_that_asserts_too_much(world: World, repo: Repo, point: str) -> None:
    """Invariant 18 at every instant of every crash; reconcile brings the rows up to date."""
    where = str(world.lionagi_home / "lionwt.db")
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    killed_and_mended(world, where, point, "promote", "r1")


@pytest.mark.parametrize("point", ["teardown.intended", "readmodel.marked", "teardown.recorded"])
def test_no_kill_at_the_end_of_what_never_started_leaves_a_wrong_row(world: World, repo: Repo, point: str) -> None:
    """Invariant 18 for a lease that ends without a candidate to complete."""
    world.lease("r1", "w1", start=False)
    killed_and_mended(world, str(world.lionagi_home / "lionwt.db"), point, "freeze", "r1", "w1", "--failed")


@pytest.mark.parametrize("point", ["readmodel.marked", "store.written:3", "store.replaced:3", "teardown.recorded"])
def test_no_kill_leaves_a_wrong_row_on_a_server(
    world: World, repo: Repo, point: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 18 where many machines report to one place."""
    where = use_postgresql(request, world, monkeypatch)
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    killed_and_mended(world, where, point, "promote", "r1")


def killed_and_mended(world: World, where: str, point: str, *arguments: str) -> None:
    name, _, nth = point.partition(":")
    killed = world.lionwt(*arguments, env={"LIONWT_FAULT": f"{name}:kill:{nth or 1}"})
    assert killed.code == -signal.SIGKILL, killed
    assert_asserts_nothing_else(world, where)
    mended = world.lionwt("reconcile", "r1", "--takeover")
    assert mended.code == 0 and not warnings(mended), mended
    assert_asserts_nothing_else(world, where)
    assert_current(world, where)


# --- reconcile repairs ------------------------------------------------------------------------------------------------


def test_reconcile_rebuilds_a_deleted_database_whoever_is_alive(world: World, repo: Repo, where: str) -> None:
    """Design section 9: deleting it loses nothing; reconcile repairs, even where it answers busy."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    world.lease("r1", "w2", "w3")
    assert world.promote("r1").code == 0
    if "://" in where:
        sql(where, "DROP TABLE lionwt_lease, lionwt_schema")
    else:
        os.unlink(where)
    assert world.lionwt("reconcile", "r1", "--dry-run").code == 6
    with contextlib.suppress(sqlite3.OperationalError, psycopg.errors.UndefinedTable):
        assert rows(where) == {}
    assert world.lionwt("reconcile", "r1").code == 6
    assert_current(world, where)
    assert set(rows(where)) == {("r1", "w1"), ("r1", "w2"), ("r1", "w3")}


def test_reconcile_mends_rows_that_are_wrong(world: World, repo: Repo, where: str) -> None:
    """Design section 9: reconcile repairs what is behind, ahead, missing or of no file."""
    world.lease("r1", "behind", "ahead", "missing")
    world.lease("r2", "other", args=["--target", "work"], start=False)
    assert world.freeze("r1", "ahead", "--failed").code == 0
    before = rows(where)["r2", "other"]
    sql(where, "UPDATE lionwt_lease SET serial = 1, state = 'allocated' WHERE worker_id = 'behind'")
    sql(where, "UPDATE lionwt_lease SET serial = 99, state = 'running', status = NULL WHERE worker_id = 'ahead'")
    sql(where, "DELETE FROM lionwt_lease WHERE worker_id = 'missing'")
    values = COLUMNS.replace("worker_id", "'nobody'")
    sql(
        where,
        f"INSERT INTO lionwt_lease ({COLUMNS}, target_branch, written_at) "
        f"SELECT {values}, target_branch, written_at FROM lionwt_lease WHERE worker_id = 'behind'",
    )
    assert world.lionwt("reconcile", "r1").code == 6
    assert_current(world, where)
    assert rows(where)["r2", "other"] == before


# --- what goes wrong costs a warning ----------------------------------------------------------------------------------


def broken_path(world: World, kind: str) -> str:
    """A database file that cannot be used, and its path."""
    path = world.root / "elsewhere" / "rows.db"
    if kind == "missing_directory":
        return str(path)
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    elif kind == "corrupt":
        path.write_bytes(b"these are no rows\n" * 500)
    elif kind == "torn":
        with contextlib.closing(ReadModel(str(path), pytest.fail)) as model:
            model.put([row_of("w0")])
        content = bytearray(path.read_bytes())
        content[100:] = b"\xff" * (len(content) - 100)
        path.write_bytes(content)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in ("read_only", "newer"):
        with contextlib.closing(ReadModel(str(path), pytest.fail)) as model:
            model.put([row_of("w0")])
        if kind == "newer":
            sql(str(path), "UPDATE lionwt_schema SET version = 99")
        path.chmod(0o400)
        path.parent.chmod(0o500)
    elif kind == "foreign":
        sqlite3.connect(path).close()
        with contextlib.closing(sqlite3.connect(path)) as opened:
            opened.execute("CREATE TABLE lionwt_lease (something TEXT)")
    return str(path)


def row_of(worker: str, **changes: Any) -> Row:
    made = Row("d" * 64, worker, "r9", "here", "/x", 1, "running", None, None, "work", 1.0, None, 2.0)
    return made.having(**changes)


def every_verb_works(world: World, repo: Repo, where: str, wrapper: list[str]) -> list[Answer]:
    """The whole life of two workers with an unusable database; returns what was answered."""
    world.env["LIONWT_DB"] = where

    def call(*arguments: str) -> Answer:
        began = time.monotonic()
        answer = world.lionwt(*arguments, "--json", wrapper=wrapper)
        assert time.monotonic() - began < 60
        assert (answer.code, answer.json["error"]) == (0, None), answer
        assert len(warnings(answer)) <= 1, answer.err
        assert where.partition("@")[0] not in answer.err or "@" not in where
        assert postgres.PASSWORD not in answer.err
        return answer

    answers = [call("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--policy", "merge_validated")]
    tree = Path(answers[0].json["leases"][0]["worktree_path"])
    answers.append(call("start", "r1", "w1"))
    (tree / "new.txt").write_text("new\n")
    answers.append(call("freeze", "r1", "w1", "--succeeded"))
    answers.append(call("promote", "r1"))
    answers.append(call("reconcile", "r1", "--takeover"))
    answers.append(call("reap", "--all"))
    everywhere = call("status")
    answers.append(everywhere)
    found = {row["worker_id"]: row["status"] for row in everywhere.json["leases"]}
    assert found == {"w1": "promoted", "w2": "discarded"}
    assert repo.git("show", "work:new.txt") == "new"
    assert world.lionwt("status", "r1").err == ""
    return answers


@pytest.mark.parametrize("kind", ["lease file", "corrupt", "torn", "torn default"])
def test_only_what_can_be_lionwt_s_own_database_is_said_to_be_deletable(world: World, repo: Repo, kind: str) -> None:
    """LIONWT_DB may name any file by mistake, and whoever reads the advice at night follows it."""
    world.lease("r1", "w1")
    if kind == "torn default":
        named = world.lionagi_home / "lionwt.db"
        named.write_bytes(b"these are no rows\n" * 500)
    else:
        lease = world.state("r1") / "workspaces" / "w1.json"
        named = lease if kind == "lease file" else Path(broken_path(world, kind))
        world.env["LIONWT_DB"] = str(named)
    before = named.read_bytes()
    [warning] = warnings(world.lionwt("lease", "r1", "-w", "w2", "--owner-pid", "none"))
    assert ("delete" in warning) is kind.startswith("torn"), warning
    assert ("LIONWT_DB" in warning) is not kind.startswith("torn"), warning
    assert named.read_bytes() == before


KINDS = ["missing_directory", "directory", "corrupt", "torn", "fifo", "read_only", "newer", "foreign"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_used_costs_one_warning(world: World, repo: Repo, kind: str) -> None:
    """Design section 9: missing, corrupt or unreadable costs a warning, never a lease."""
    where = broken_path(world, kind)
    path = Path(where)
    before = path.read_bytes() if path.is_file() else None
    answers = every_verb_works(world, repo, where, unprivileged())
    # What is read-only can be read.
    silent = answers[-2:] if kind == "read_only" else []
    for answer in answers:
        assert len(warnings(answer)) == (answer not in silent), answer
        if answer not in silent:
            assert f"{WARNING}{where} was not used: " in answer.err
            assert "lionwt reconcile RUN" in answer.err
    if kind in ("corrupt", "torn"):  # what does not begin as a database may be anybody's
        assert ("leave that file" if kind == "corrupt" else f"delete {where}") in answers[0].err
    assert (path.read_bytes() if path.is_file() else None) == before
    if kind == "newer":
        assert "version 99" in answers[0].err
    path.parent.exists() and path.parent.chmod(0o700)


DAMAGES = {
    "sqlite": [
        "UPDATE lionwt_schema SET version = 'abc'",
        "UPDATE lionwt_schema SET version = x'ff'",
        "UPDATE lionwt_lease SET created_at = 'abc' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET written_at = 'abc', host = 'elsewhere', run_digest = 'd' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET state_root = x'2f61' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET state_root = '/a\\u0000b' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET state_root = '/a\\ud800b' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET worker_id = x'00' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET serial = 1e300 WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET retention_until = 9e999 WHERE worker_id = 'odd'",
    ],
    "postgresql": [
        "ALTER TABLE lionwt_schema ALTER version TYPE TEXT USING 'abc'",
        "UPDATE lionwt_lease SET created_at = 'NaN' WHERE worker_id = 'odd'",
        "UPDATE lionwt_lease SET written_at = 'Infinity', host = 'x', run_digest = 'd' WHERE worker_id = 'odd'",
        "ALTER TABLE lionwt_lease ALTER created_at TYPE TEXT",
    ],
}


def test_whatever_a_database_holds_costs_one_warning(
    world: World, repo: Repo, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design section 9: what lionwt never writes into a column is a corrupt database as well."""
    damages = DAMAGES["postgresql" if "://" in where else "sqlite"]
    for number, damage in enumerate(damages):
        world.lease(f"a{number}", "odd", start=False)
        sql(where, damage)
        leased = world.lionwt("lease", f"b{number}", "-w", "w1", "--target", "work", "--json", "--owner-pid", "none")
        everywhere = world.lionwt("status", "--json")
        reaped = world.lionwt("reap", "--all", "--dry-run", "--json")
        mended = world.lionwt("reconcile", f"a{number}", "--takeover", "--json")
        for answer in (leased, everywhere, reaped, mended):
            assert (answer.code, answer.json["error"]) == (0, None), (damage, answer)
            assert len(warnings(answer)) <= 1, (damage, answer.err)
        assert len(warnings(everywhere)) == 1, damage
        shown = {(row["run_id"], row["worker_id"]) for row in everywhere.json["leases"]}
        assert {(f"a{number}", "odd"), (f"b{number}", "w1")} <= shown, damage
        if "://" not in where:
            assert f"delete {where}" in everywhere.err
            Path(where).unlink()
        else:
            where = world.env["LIONWT_DB"] = f"{where.rpartition('/')[0]}/{fresh_database(where)}"


def fresh_database(url: str) -> str:
    """Another empty database beside the one of ``url``."""
    name = f"fresh_{os.urandom(4).hex()}"
    sql(url, f"CREATE DATABASE {name}")
    return name


def test_no_flipped_byte_costs_more_than_a_warning(world: World, repo: Repo) -> None:
    """Design section 9: a corrupt file, whatever in it is corrupt."""
    world.lease("r1", *[f"w{number}" for number in range(1, 6)], start=False)
    path = world.lionagi_home / "lionwt.db"
    sound, chance = path.read_bytes(), random.Random(7)
    used = [position for position, byte in enumerate(sound) if byte]
    for _ in range(200):
        flipped = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            flipped[chance.choice(used)] = chance.randrange(256)
        path.write_bytes(flipped)
        said: list[str] = []
        with contextlib.closing(ReadModel(str(path), said.append)) as model:
            for row in model.rows() or ():
                json.dumps(readmodel.Row.in_order(row), allow_nan=False)
                os.fsencode(row.root + row.machine + row.target)
            model.put([row_of("w9")])
            model.mark(row_of("w1"))
            model.drop([row_of("w9")])
        assert len(said) <= 1


def test_a_locked_file_costs_one_warning_and_a_bounded_wait(world: World, repo: Repo) -> None:
    """Invariant 24: every wait is bounded; what another process does with the database stops no verb."""
    where = broken_path(world, "free")
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        model.put([row_of("w0")])
    with contextlib.closing(sqlite3.connect(where, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        answers = every_verb_works(world, repo, where, [])
        assert all(len(warnings(answer)) == 1 for answer in answers)
        assert "database is locked" in answers[0].err
        assert_gives_up_in_time(where)
    world.env["LIONWT_DB"] = where
    assert world.lionwt("reconcile", "r1").code == 0
    assert_current(world, where)


def assert_gives_up_in_time(where: str) -> None:
    """After the first failure nothing is tried again: the waits of a command do not add up."""
    told: list[str] = []
    model = ReadModel(where, told.append)
    began = time.monotonic()
    for number in range(20):
        model.put([row_of(f"w{number}")])
        model.mark(row_of(f"w{number}"))
    assert model.rows() is None
    model.close()
    assert time.monotonic() - began < 2 * readmodel.WAIT + 2
    assert len(told) == 1


def test_a_server_that_says_nothing_costs_one_warning_and_a_bounded_wait(world: World, repo: Repo) -> None:
    """Design section 9: unreachable costs a warning; a name server or network that is silent, too."""
    with postgres.silent() as port:
        where = f"postgresql://lionwt:{postgres.PASSWORD}@127.0.0.1:{port}/rows"
        answers = every_verb_works(world, repo, where, [])
        assert all(len(warnings(answer)) == 1 for answer in answers)
        assert f"{WARNING}postgresql://127.0.0.1:{port}/rows was not used" in answers[0].err
        assert_gives_up_in_time(where)


@pytest.mark.parametrize("kind", ["refused", "password", "database", "stopped", "newer", "scheme", "malformed"])
def test_a_server_that_cannot_be_used_costs_one_warning(
    world: World, repo: Repo, kind: str, server: postgres.Server
) -> None:
    """Design section 9: refused, stopped, with a wrong password, or of a newer schema."""
    where = {
        "refused": f"postgres://lionwt:{postgres.PASSWORD}@127.0.0.1:1/rows",
        "password": server.url(password="wrong"),
        "database": server.url("nothing"),
        "scheme": "mysql://localhost/rows",
        "malformed": "postgresql://127.0.0.1:notaport/rows",
    }.get(kind) or server.database()
    if kind == "newer":
        with contextlib.closing(ReadModel(where, pytest.fail)) as model:
            model.put([row_of("w0")])
        sql(where, "UPDATE lionwt_schema SET version = 99")
        before = rows(where)
    if kind == "stopped":
        with contextlib.closing(ReadModel(where, pytest.fail)) as model:
            model.put([row_of("w0")])
            [[backend]] = model_query(model, "SELECT pg_backend_pid()")
            os.kill(backend, signal.SIGSTOP)
            try:
                began = time.monotonic()
                told: list[str] = []
                model._warn = told.append
                for number in range(10):
                    model.put([row_of(f"w{number}")])
                assert (len(told), time.monotonic() - began < 2 * readmodel.WAIT) == (1, True)
            finally:
                os.kill(backend, signal.SIGCONT)
        return
    world.env["LIONWT_DB"] = where
    for arguments in (["lease", "r1", "-w", "w1", "--target", "work"], ["freeze", "r1", "w1", "--failed"], ["status"]):
        answer = world.lionwt(*arguments, "--json")
        assert (answer.code, answer.json["error"]) == (0, None), answer
        assert len(warnings(answer)) == 1 and "wrong" not in answer.err, answer
        assert postgres.PASSWORD not in answer.err
    assert answer.json["leases"][0]["status"] == "discarded"
    if kind == "newer":
        assert "version 99" in answer.err and rows(where) == before


def model_query(model: ReadModel, statement: str) -> list[tuple[Any, ...]]:
    assert model._database is not None
    return model._database.query(statement, (), lambda: 2.0)


def test_a_machine_without_psycopg_is_told_what_to_install(world: World, repo: Repo) -> None:
    """An optional library that is missing costs a warning as well."""
    shadow = world.root / "shadow"
    shadow.mkdir()
    (shadow / "psycopg.py").write_text("raise ImportError('not here')\n")
    env: dict[str, str | None] = {"PYTHONPATH": str(shadow), "LIONWT_DB": "postgresql://127.0.0.1:1/rows"}
    answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", env=env)
    assert answer.code == 0 and len(warnings(answer)) == 1
    assert "pip install 'lionwt[postgresql]'" in answer.err


def test_the_port_says_its_warning_in_the_log(world: World, repo: Repo, caplog: pytest.LogCaptureFixture) -> None:
    """Design section 9 for a Python program: nothing is printed, one line is logged for each verb."""
    leased = world.lease("r1", "w1", start=False)
    world.env["LIONWT_DB"] = str(world.root)
    world.start_now(world.lease_file("r1", "w1")["lease"])
    assert leased and world.lease_file("r1", "w1")["lease"]["state"] == "running"
    assert [record.name for record in caplog.records] == ["lionwt"]
    assert "not a regular file" in caplog.text


# --- the database itself ----------------------------------------------------------------------------------------------


def test_the_database_is_private_and_where_it_was_asked_for(world: World, repo: Repo) -> None:
    """Invariant 23: 0600, whatever the umask; LIONWT_DB moves it."""
    moved = world.root / "moved" / "rows %23?#.db"
    moved.parent.mkdir()
    world.env["LIONWT_DB"] = str(moved)
    old = os.umask(0)
    try:
        world.lease("r1", "w1", start=False)
        del world.env["LIONWT_DB"]
        world.lease("r2", "w2", start=False)
    finally:
        os.umask(old)
    default = world.lionagi_home / "lionwt.db"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (moved, default)] == [0o600, 0o600]
    assert sorted(path.name for path in moved.parent.iterdir()) == [moved.name]
    with contextlib.closing(ReadModel(str(moved), pytest.fail)) as model:
        assert [row.run_id for row in model.rows() or ()] == ["r1"]
    assert set(rows(str(default))) == {("r2", "w2")}


def test_a_run_elsewhere_makes_the_home_for_its_row(world: World, repo: Repo) -> None:
    """The default place is made where it is missing, as private as everything of lionwt's."""
    root = world.root / "roots" / "far"
    answer = world.lionwt("lease", root, "-w", "w1", "--target", "work")
    assert answer.code == 0 and answer.err == ""
    assert stat.S_IMODE(world.lionagi_home.stat().st_mode) == 0o700
    assert [row["state_root"] for row in rows(str(world.lionagi_home / "lionwt.db")).values()] == [str(root)]


HAMMER = """
import sys, os
from tests.test_readmodel import row_of
from lionwt.readmodel import ReadModel
where, name = sys.argv[1:]
sys.stdin.readline()
for number in range(25):
    model = ReadModel(where, lambda text: sys.exit(text))
    model.put([row_of(f"{name}-{number}"), row_of("shared", serial=number)])
    model.mark(row_of(f"{name}-{number}", serial=2))
    model.rows()
    model.close()
"""


def test_many_processes_make_and_fill_one_database(world: World, where: str) -> None:
    """Design section 9: many commands at once, the first of them on no database at all: no warning, no row lost."""
    world.lionagi_home.mkdir()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, where, f"p{number}"],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    ends = [child.communicate("go\n", timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * 6, ends
    found = {worker: said(row) for (_, worker), row in rows(where).items()}
    assert found.pop("shared")[0] == 24
    assert found == {f"p{p}-{n}": (2, "terminal", None, None) for p in range(6) for n in range(25)}


def test_leases_in_many_processes_each_have_their_row(world: World, repo: Repo) -> None:
    """Design section 9: the rows of concurrent commands stand side by side."""
    where = str(world.lionagi_home / "lionwt.db")
    world.lease("r1", "w0")
    children = [world.popen("lease", "r1", "-w", f"w{number}", "--owner-pid", "none") for number in range(1, 7)]
    answers = [answer_of(child) for child in children]
    assert [answer.code for answer in answers] == [0] * 6, answers
    assert [warnings(answer) for answer in answers] == [[]] * 6
    assert_current(world, where)


def test_an_older_row_never_takes_the_place_of_a_newer_one(world: World, where: str) -> None:
    """A write that a slow server carries out late must not bring an ended lease back."""
    world.lionagi_home.mkdir()
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        model.put([row_of("w1", serial=3)])
        model.mark(row_of("w1", serial=4))
        model.put([row_of("w1", serial=3)])
        assert [said(row) for row in rows(where).values()] == [(4, "terminal", None, None)]
        model.put([row_of("w1", serial=2)], instead=[row_of("w1")])
        assert [said(row) for row in rows(where).values()] == [(2, "running", None, None)]


def test_an_older_database_is_migrated_and_a_newer_one_left_alone(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design section 9: migrations by version; what is there stays."""
    world.lionagi_home.mkdir()
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        model.put([row_of("w1")])
    assert sql(where, "SELECT version FROM lionwt_schema") == [(len(migrations.MIGRATIONS),)]
    with monkeypatch.context() as newer:
        steps = ("ALTER TABLE lionwt_lease ADD COLUMN remark TEXT", "UPDATE lionwt_lease SET remark = 'old'")
        newer.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, steps))
        for _ in range(2):
            with contextlib.closing(ReadModel(where, pytest.fail)) as model:
                assert [row.worker_id for row in model.rows() or ()] == ["w1"]
        broken = (*migrations.MIGRATIONS, ("UPDATE lionwt_lease SET remark = 'lost'", "NONSENSE"))
        newer.setattr(migrations, "MIGRATIONS", broken)
        told: list[str] = []
        with contextlib.closing(ReadModel(where, told.append)) as model:
            assert model.rows() is None and len(told) == 1
    version = len(migrations.MIGRATIONS) + 1
    assert sql(where, "SELECT version FROM lionwt_schema") == [(version,)]
    assert sql(where, "SELECT worker_id, remark FROM lionwt_lease") == [("w1", "old")]
    told = []
    with contextlib.closing(ReadModel(where, told.append)) as model:
        model.put([row_of("w2")])
    assert len(told) == 1 and f"version {version}" in told[0]
    assert sql(where, "SELECT worker_id, remark FROM lionwt_lease") == [("w1", "old")]


def test_a_file_left_behind_by_a_deleted_database_is_not_taken_for_the_new_ones(world: World) -> None:
    """Deleting the database loses nothing, also when a journal of it was left."""
    world.lionagi_home.mkdir()
    path = world.lionagi_home / "lionwt.db"
    with contextlib.closing(ReadModel(str(path), pytest.fail)) as model:
        model.put([row_of("old")])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as opened:
        opened.execute("PRAGMA cache_size = 1")
        opened.execute("BEGIN")
        for number in range(500):
            opened.execute(f"INSERT INTO lionwt_schema VALUES ({number})")
        opened.execute("UPDATE lionwt_lease SET state_root = 'changed'")
        shutil.copy(f"{path}-journal", world.root / "journal")
        opened.execute("ROLLBACK")
    path.unlink()
    shutil.move(world.root / "journal", f"{path}-journal")
    with contextlib.closing(ReadModel(str(path), pytest.fail)) as model:
        model.put([row_of("new")])
        assert [row.worker_id for row in model.rows() or ()] == ["new"]


def test_a_path_that_is_no_text_stands_in_its_row_and_comes_back(world: World, where: str) -> None:
    """Design section 3: any path round-trips, also through a database that knows no surrogates."""
    world.lionagi_home.mkdir()
    paths = names.RunPaths("r1", Path(os.fsdecode(b"/srv/\xff \xc3\xa4\"'\\\n")), Path("/srv/a"))
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        model.put([row_of("w1", state_root=readmodel._ascii(str(paths.state_root)))])
        [row] = model.rows() or ()
    assert row.root == str(paths.state_root) and row.state_root.isascii()


# --- status across runs -----------------------------------------------------------------------------------------------


def test_status_without_a_run_shows_every_run_wherever_it_lies(world: World, repo: Repo, where: str) -> None:
    """Design section 9: status across runs; the rows know runs that no directory under the home names."""
    world.lease("r1", "w1")
    far = world.root / "roots" / "far"
    assert world.lionwt("lease", far, "-w", "w2", "--target", "work").code == 0
    world.lease("r3", "w3")
    answer = world.lionwt("status", "--json")
    assert answer.code == 0 and answer.err == ""
    shown = [(row["run_id"], row["worker_id"], row["state"]) for row in answer.json["leases"]]
    assert shown == [("r1", "w1", "running"), ("r3", "w3", "running"), ("far", "w2", "allocated")]
    assert answer.json["leases"][2]["next"] == f"lionwt start {far} w2"
    assert [answer.json[key] for key in ("gone", "reported", "unreadable")] == [[], [], []]
    told = world.lionwt("status").out
    assert "far  w2  allocated" in told and "r1   w1" not in told
    # Rows are missing: the directories still tell of the run.
    sql(where, "DELETE FROM lionwt_lease WHERE run_id = 'r1'")
    assert {row["run_id"] for row in world.lionwt("status", "--json").json["leases"]} == {"r1", "r3", "far"}


def test_status_says_what_the_files_say_and_not_what_the_rows_say(world: World, repo: Repo, where: str) -> None:
    """Invariant 18: no reader asserts a lease that the files do not hold."""
    world.lease("r1", "ended", "lost", start=False)
    world.lease("r2", "w2")
    assert world.freeze("r1", "ended", "--failed").code == 0
    sql(where, "UPDATE lionwt_lease SET state = 'running', status = NULL WHERE worker_id = 'ended'")
    (world.state("r1") / "workspaces/lost.json").unlink()
    repo.git("worktree", "remove", "-f", "-f", repo.path / ".worktrees/lionagi/r2/w2")
    (repo.path / ".worktrees/lionagi/r2").rmdir()
    repo.git("branch", "-D", "lionagi/r2/w2")
    shutil.rmtree(world.state("r2"))
    answer = world.lionwt("status", "--json")
    assert answer.code == 0 and answer.err == ""
    assert [(row["worker_id"], row["status"]) for row in answer.json["leases"]] == [("ended", "discarded")]
    host = os.uname().nodename
    assert answer.json["gone"] == [
        {"run_id": "r1", "worker_id": "lost", "state_root": str(world.state("r1")), "host": host},
        {"run_id": "r2", "worker_id": "w2", "state_root": str(world.state("r2")), "host": host},
    ]
    told = world.lionwt("status")
    assert f"r2  w2: its files are gone from {world.state('r2')}" in told.out
    # Another run has taken the place of the one the row speaks of.
    world.lease("r2", "new")
    answer = world.lionwt("status", "--json")
    assert [(row["run_id"], row["worker_id"]) for row in answer.json["gone"]] == [("r1", "lost"), ("r2", "w2")]
    assert world.lionwt("reap", "--all", "--dry-run", "--json").json["findings"]
    assert ("r2", "w2") in rows(where)
    world.lionwt("reap", "--all")
    assert set(rows(where)) == {("r1", "ended"), ("r2", "new")}


def test_what_another_machine_reports_is_shown_as_its_report(world: World, repo: Repo, where: str) -> None:
    """Design section 9: many machines report to one place; nobody can look at another's files."""
    world.lease("r1", "w1")
    mine = rows(where)["r1", "w1"]
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        # The same path and ids as here, but not this run.
        there = row_of("w9", host="far\\u001baway", run_id="r1", state_root=mine["state_root"], retention_until=5.0)
        model.put([there, row_of("w8", host="far\\u001baway", state="terminal", status="promoted")])
    answer = world.lionwt("status", "--json")
    assert answer.code == 0 and answer.err == ""
    assert [row["worker_id"] for row in answer.json["leases"]] == ["w1"]
    reported = {row["worker_id"]: row for row in answer.json["reported"]}
    assert {row["host"] for row in reported.values()} == {"far\x1baway"}
    assert [row["verified"] for row in reported.values()] == [False, False]
    assert (reported["w9"]["state"], reported["w8"]["status"]) == ("running", "promoted")
    told = world.lionwt("status").out
    assert told.count("reported by far\\x1baway") == 2 and told.count("not verified here") == 2
    world.lionwt("reap", "--all")
    assert len(rows(where)) == 3


def test_status_falls_back_to_the_files_where_there_is_no_database(world: World, repo: Repo) -> None:
    """Design section 9: missing costs a warning; where nothing was ever leased there is nothing to warn of."""
    where = world.lionagi_home / "lionwt.db"
    empty = world.lionwt("status")
    assert (empty.code, empty.out, empty.err) == (0, "no leases\n", "")
    assert not where.exists()
    world.lease("r1", "w1")
    where.unlink()
    answer = world.lionwt("status", "--json")
    assert answer.code == 0 and len(warnings(answer)) == 1 and "it is missing" in answer.err
    assert [row["worker_id"] for row in answer.json["leases"]] == ["w1"]
    assert not where.exists()


def test_status_across_runs_asks_once(world: World, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Design section 9: one query, then the files."""
    from lionwt import runs

    world.lionagi_home.mkdir()
    with contextlib.closing(ReadModel(where, pytest.fail)) as model:
        model.put([row_of(f"w{number}", run_id=f"r{number}") for number in range(300)])
    asked: list[str] = []
    query: Callable[..., Any] = ReadModel._ask
    monkeypatch.setattr(ReadModel, "_ask", lambda model, work: asked.append("asked") or query(model, work))
    assert len(runs.find(world.lionagi_home).elsewhere) == 300
    assert asked == ["asked"]


@pytest.mark.parametrize("how", ["torn", "link", "mode", "missing"])
def test_a_run_that_cannot_be_looked_at_is_named_and_keeps_its_rows(
    world: World, repo: Repo, where: str, how: str
) -> None:
    """Design section 3: ambiguous is never "no lease"; gone is only what a look proves."""
    far = world.root / "roots" / "far"
    assert world.lionwt("lease", far, "-w", "w1", "--target", "work").code == 0
    world.lease("sound", "w2", start=False)
    path, aside = far / "workspaces.json", far / "aside"
    path.rename(aside)
    if how == "torn":
        path.write_bytes(aside.read_bytes()[:99])
    elif how == "link":
        path.symlink_to(aside)
    elif how == "mode":
        path.write_bytes(aside.read_bytes())
        path.chmod(0)
    for arguments in (["status"], ["reap", "--all", "--dry-run"], ["reap", "--all"], ["status"]):
        answer = world.lionwt(*arguments, "--json", wrapper=unprivileged())
        assert (answer.code, answer.error) == (7, "state_unreadable"), answer
        assert str(path) in answer.json["error"]["message"]
        assert answer.json["gone"] == []
    aside.replace(path)
    answer = world.lionwt("status", "--json")
    assert {row["run_id"] for row in answer.json["leases"]} == {"far", "sound"}, answer


def test_reap_says_which_rows_it_drops_before_it_does(world: World, repo: Repo) -> None:
    """Design section 9: rows whose files are gone, the run's or the lease's, or of a run that was opened anew."""
    for run in ("deleted", "anew", "kept"):
        world.lease(run, "w1", "w2", start=False)
    for run in ("deleted", "anew"):
        world.lionwt("reconcile", run, "--takeover")
        shutil.rmtree(world.state(run))
    (world.state("kept") / "workspaces/w2.json").unlink()
    assert world.lionwt("lease", "anew", "-w", "w3", "--target", "work").code == 0
    gone = {("deleted", "w1"), ("deleted", "w2"), ("anew", "w1"), ("anew", "w2"), ("kept", "w2")}
    dry = world.lionwt("reap", "--all", "--dry-run", "--json")
    assert {(row["run_id"], row["worker_id"]) for row in dry.json["gone"]} == gone
    told = world.lionwt("reap", "--all", "--dry-run").out
    assert f"deleted  w1: its files are gone from {world.state('deleted')}; would drop its row" in told
    assert world.lionwt("reap", "--all", "--json").json["gone"] == dry.json["gone"]
    assert set(rows(str(world.lionagi_home / "lionwt.db"))) == {("anew", "w3"), ("kept", "w1")}
