"""Records, locks, owners and clocks that made a tool forget, take or delete what was not its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Repo, World, answer_of, go_on


def edited(world: World, worker: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a lease file as another process, another time or another machine would have written it."""
    path = world.state("r1") / f"workspaces/{worker}.json"
    stored = json.loads(path.read_bytes())
    change(stored)
    path.write_text(json.dumps(stored))


TEARS: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "tail": lambda content: content + content[-40:],
    "null": lambda content: b"null",
    "nan": lambda content: content.replace(b'"serial"', b'"x": NaN, "serial"', 1),
    "text": lambda content: b"gone\n",
}


def test_a_torn_record_is_never_no_record_for_any_verb(world: World, repo: Repo) -> None:
    """A record that a crash had torn was read as "no lease", and its worktree was leased again, or reaped.

    Design 3: unreadable or torn is ambiguous: named, left byte for byte, never treated as "no lease".
    """
    names = list(TEARS)
    workers = world.lease("r1", "sound", *names)
    torn: dict[Path, bytes] = {}
    for name, tear in TEARS.items():
        path = world.state("r1") / f"workspaces/{name}.json"
        torn[path] = tear(path.read_bytes())
        path.write_bytes(torn[path])
        workers[name].write("precious.txt", "precious\n")
    workers["sound"].write("new.txt", "new\n")
    for verb in (("start", "r1", "zeros"), ("freeze", "r1", "half", "--failed"), ("promote", "r1", "nan"),
                 ("reconcile", "r1", "--takeover"), ("reap", "r1"), ("status", "r1")):  # fmt: skip
        answer = world.lionwt(*verb, "--json")
        # status shows what it finds; the others that are asked for such a lease name it and stop there.
        assert answer.code == (0 if verb[0] == "status" else 7), (verb, answer)
        assert ("restore it from a backup" if verb[0] == "status" else "state_unreadable") in answer.out, (verb, answer)
        assert {path: path.read_bytes() for path in torn} == torn, verb
    again = world.lionwt("lease", "r1", "-w", "empty", "--owner-pid", "none", "--json")
    assert (again.code, again.error) == (3, "id_reused"), again
    for name in names:
        assert (workers[name].path / "precious.txt").exists()
        assert repo.run_git("rev-parse", "-q", "--verify", f"refs/heads/lionagi/r1/{name}", check=False).returncode == 0
    assert world.record("r1", "sound")["worktree_removed"] is True


def test_writers_at_once_leave_one_whole_record(world: World, repo: Repo) -> None:
    """Two writers shared one temporary name, and the record was half of each.

    Design 3: a unique temporary name; ``serial`` rises by one under the lease's lock.
    """
    world.lease("r1", "w1", start=False)
    serial = world.lease_file("r1", "w1")["serial"]
    children = [world.popen("start", "r1", "w1", "--json") for _ in range(6)]
    assert [answer_of(child).code for child in children] == [0] * 6
    assert world.lease_file("r1", "w1")["serial"] == serial + 1
    children = [world.popen("freeze", "r1", "w1", "--json", "--succeeded") for _ in range(3)]
    answers = [answer_of(child) for child in children]
    assert [answer.code for answer in answers] == [0] * 3, answers
    assert len({json.dumps(answer.json["candidate"]) for answer in answers}) == 1
    assert world.lease_file("r1", "w1")["serial"] == serial + 2
    names = os.listdir(world.state("r1") / "workspaces")
    assert sorted(names) == [".run.lock", ".w1.lock", "w1.json"]


def test_a_lock_file_is_the_same_from_the_first_lease_to_the_last_teardown(world: World, repo: Repo) -> None:
    """A lock file that was unlinked on release had two holders: one on the old inode, one on the new.

    Design 3: locks are never unlinked.
    """
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})

    def locks() -> dict[str, int]:
        tops = (world.state("r1") / "workspaces", repo.path / ".git/lionwt")
        return {str(path): path.stat().st_ino for top in tops for path in top.glob("*.lock")}

    before = locks()
    assert len(before) == 3, before  # run, lease, registration
    assert world.promote("r1").code == 0
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert world.lionwt("reap", "--all").code == 0
    after = locks()
    assert {name: after[name] for name in before} == before and len(after) == 4


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"started": 1.0}, False),
        ({"boot": "another boot"}, False),
        ({"host": "another-machine", "pid": 1}, True),
        ({"pid": 2**22 + 1}, False),
    ],
    ids=["same", "pid-reused", "rebooted", "another-host", "gone"],
)
def test_an_owner_is_more_than_a_pid(world: World, repo: Repo, changes: dict[str, Any], alive: bool) -> None:
    """A process that had got a dead owner's pid kept its leases alive for ever; on another host all looked dead.

    Design 7: the owner is host, boot, pid, start time; it only ever makes reconcile wait.
    """
    with subprocess.Popen(["sleep", "300"]) as owner:
        try:
            opened = ("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", str(owner.pid))
            assert world.lionwt(*opened).code == 0
            os.kill(owner.pid, signal.SIGSTOP)  # a suspended owner is an owner
            edited(world, "w1", lambda stored: stored["owner"].update(changes))
            written = world.lease_bytes("r1", "w1")
            answer = world.lionwt("reconcile", "r1", "--json")
            if alive:
                assert (answer.code, answer.error) == (6, "owner_alive"), answer
                assert world.lease_bytes("r1", "w1") == written
                assert world.lionwt("reconcile", "r1", "--takeover").code == 0
            else:
                assert answer.code == 0, answer
            assert owner.poll() is None, "an owner is never stopped"
        finally:
            owner.kill()


def test_behind_a_suspended_holder_the_wait_ends_and_nothing_is_stolen(world: World, repo: Repo) -> None:
    """Everything hung behind a process that somebody had suspended; or its lock was broken while it lived.

    Design 3 and 5: each with a bounded wait, exit 6; the lock stays its holder's.
    """
    world.frozen("r1", {"w1": {"new.txt": "new\n"}, "w2": {"other.txt": "other\n"}})
    with world.stopped("promote.moved", "promote", "r1", "w1", "--json") as holder:
        before, refs = world.state_bytes("r1"), repo.refs()
        began = time.monotonic()
        for words in (("promote", "r1", "w2"), ("promote", "r1", "w1"), ("promote", "r1")):
            busy = world.lionwt(*words, "--lock-timeout", "0.3", "--json")
            assert (busy.code, busy.error) == (6, "lock_timeout"), busy
            assert "nothing was changed" in busy.json["error"]["message"]
        assert time.monotonic() - began < 60
        assert (world.state_bytes("r1"), repo.refs()) == (before, refs)
        assert go_on(holder).code == 0
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 2 and world.leftovers("r1", repo) == []


def _retained(world: World, repo: Repo) -> Repo:
    worker = world.lease("r1", "w1", args=("--retain-for", "2h"))["w1"]
    worker.write("f1.txt", "theirs\n")
    world.freeze_now("r1", "w1")
    repo.commit("moves the target", **{"f1.txt": "mine\n"})
    assert world.promote("r1").json["records"][0]["status"] == "retained"
    return worker


def _times(**changes: float) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        for holder in (stored["record"], stored["policy"], stored["lease"], stored["record"]["lease"]):
            holder.update({key: value for key, value in changes.items() if key in holder})

    return change


def test_reapers_at_once_look_again_before_they_remove(world: World, repo: Repo) -> None:
    """A reaper removed a tree that had come into use between its look and its act; two reapers met in one tree.

    Design 7, teardown: observed, not assumed; design 10, invariant 26.
    """
    worker = _retained(world, repo)
    edited(world, "w1", _times(retention_until=time.time() - 10))
    late = world.stopped_at("locks.asked", "reap", "r1", "--json")
    with subprocess.Popen(["sleep", "300"], cwd=worker.path, env=world.environment()) as shell:
        try:
            busy = go_on(late)
            assert busy.code == 6 and worker.path.exists() and shell.poll() is None, busy
        finally:
            shell.kill()
    children = [world.popen("reap", "--all", "--json") for _ in range(4)]
    answers = [answer_of(child) for child in children]
    assert all(answer.code in (0, 6) for answer in answers), answers
    assert world.lionwt("reap", "--all").code == 0
    record = world.record("r1", "w1")
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("needs_resolution", True, True)
    assert record["teardown_errors"] == [] and world.leftovers("r1", repo) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"created_at": 7200.0, "completed_at": 7200.0, "retention_until": 7300.0}, 7),
        ({"created_at": 7200.0, "retention_until": -10.0}, 7),
        ({"retention_until": 0.0}, 0),
        ({"retention_until": 9e9}, 0),
    ],
    ids=["clock-fell-back", "clock-fell-back-past-the-expiry", "expired-now", "never"],
)
def test_a_clock_that_jumped_reaps_nothing_early(
    world: World, repo: Repo, changes: dict[str, float], code: int
) -> None:
    """The wall clock jumped, and what was retained for two hours was deleted at once.

    Design 8: retained, clock before ``created_at`` → refused: the clock is wrong.
    """
    worker = _retained(world, repo)
    now = time.time()
    edited(world, "w1", _times(**{key: now + value for key, value in changes.items()}))
    answer = world.lionwt("reap", "r1", "--json")
    assert answer.code == code, answer
    assert worker.path.exists() == (changes != {"retention_until": 0.0})
    if code:
        assert "clock_wrong" in {finding["code"] for finding in answer.json["findings"]}


@pytest.mark.parametrize(
    "bad", ["-w1", "--help", "a\\b", "..", "a b", "W\u00dc", "HEAD", "a.lock", "x" * 65, "a\n", "."]
)
def test_an_id_that_is_not_already_safe_is_refused_and_never_rewritten(world: World, repo: Repo, bad: str) -> None:
    """Two ids had one slug and shared one directory; an id that began with a dash was an option.

    Design 4: nothing is rewritten; refused before the run is opened. A state root never holds the repository.
    """
    before = repo.snapshot()
    for words in (("lease", "r1", f"--worker={bad}"), ("lease", "--worker=w1", "--", bad)):
        answer = world.lionwt(*words[:1], "--target", "work", "--json", *words[1:])
        assert answer.code in (2, 3) and answer.error in ("id_invalid", "path_unsafe", "usage"), answer
    assert repo.snapshot() == before and not world.lionagi_home.exists()


def test_ids_that_fold_to_one_name_are_refused_and_like_ones_are_kept_apart(world: World, repo: Repo) -> None:
    """``w1`` and ``W1`` were one directory on another machine; ``r2/w1`` was administered as ``w11``.

    Design 4: two ids that fold to the same name collide; design 8: git is asked which registration is whose.
    """
    both = world.lionwt("lease", "r1", "-w", "w1", "-w", "W1", "--target", "work", "--json")
    assert (both.code, both.error) == (3, "id_reused"), both
    longest = "l" * 64
    world.lease("r1", "w1", "w11", "w1.a", "w1-a", longest)
    world.lease("r2", "w1", "w11")
    files = [world.lease_file("r1", worker) for worker in ("w1", "w11", "w1.a", "w1-a", longest)]
    files += [world.lease_file("r2", worker) for worker in ("w1", "w11")]
    admins = [Path(file["identity"]["admin_dir"]) for file in files]
    assert len({str(admin) for admin in admins}) == len(files)
    for file, admin in zip(files, admins, strict=True):
        assert (admin / "gitdir").read_text().strip() == file["lease"]["worktree_path"] + "/.git"
    assert world.freeze("r2", "w1", "--cancelled").code == 0
    assert world.promote("r2", "w1").json["records"][0]["worktree_removed"] is True
    assert [admin.exists() for admin in admins] == [True] * 5 + [False, True]
    folded = world.lionwt("lease", "r1", "-w", "W11", "--json", "--owner-pid", "none")
    assert (folded.code, folded.error) == (3, "id_reused"), folded


def test_names_that_are_no_text_go_through_records_and_answers(world: World) -> None:
    """A file name that is no UTF-8 could not be written as JSON, and the record was lost; a newline faked a worktree.

    Design 3: JSON is ASCII with surrogate escapes; design 6: NUL-separated lists.
    """
    odd = os.fsdecode(b"re\xff\nworktree \xc3\xa4/x")
    repo = world.repo(odd)
    answer = world.lionwt(
        "lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none", "--json",
        cwd=repo.path,
    )  # fmt: skip
    assert answer.code == 0 and answer.out.isascii(), answer
    worker = Repo(Path(answer.json["leases"][0]["worktree_path"]), repo.env)
    assert world.lionwt("start", "r1", "w1", cwd=repo.path).code == 0
    names = [os.fsdecode(name) for name in (b"a\xffb", b"new\nline", b'"quoted"', b"\xed\xa0\x80", b"\x1b[31m")]
    for name in names:
        worker.write(name, "x\n")
        worker.write(f"{name}.log", "ignored\n")
    frozen = world.lionwt("freeze", "r1", "w1", "--succeeded", "--json", cwd=repo.path)
    assert frozen.code == 0 and frozen.out.isascii(), frozen
    assert set(frozen.json["candidate"]["files_changed"]) == set(names)
    manifest = world.manifest("r1", "w1")
    assert {row["path"] for row in manifest["ignored"]} == {f"{name}.log" for name in names}
    promoted = world.lionwt("promote", "r1", cwd=repo.path)
    assert promoted.code == 0 and "\x1b[31m" not in promoted.out + promoted.err
    assert all((repo.path / name).read_text() == "x\n" for name in names)


@pytest.mark.parametrize("place", ["repo/.lionagi", "elsewhere"])
def test_state_that_lies_in_a_checkout_is_warned_of_once_and_works(world: World, repo: Repo, place: str) -> None:
    """Case 48: ``git clean -ffdx`` deletes what lies in the working tree, and whoever opens a run there is told."""
    env: dict[str, str | None] = {"LIONAGI_HOME": str(world.root / place)}
    opened = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none", "--json", env=env)
    assert opened.code == 0, opened
    assert ("git clean" in opened.err) is (place == "repo/.lionagi"), opened
    later = world.lionwt("lease", "r1", "-w", "w2", "--owner-pid", "none", "--json", env=env)
    assert (later.code, later.err) == (0, ""), later
    assert world.lionwt("reconcile", "r1", "--takeover", env=env).code == 0
    if place == "repo/.lionagi":
        shown = repo.status().splitlines()
        assert shown and all(line.startswith("?? .lionagi/") for line in shown)
    else:
        assert repo.status() == ""
