"""Promotions beside each other, beside a freeze, and beside an operator at work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Answer, Repo, World, answer_of, go_on, is_stopped, wait_until


def together(world: World, *commands: tuple[str, ...]) -> list[Answer]:
    """Run several ``promote`` at once, each in a process of its own."""
    children = [world.popen("promote", *command, "--json", "--lock-timeout", "120") for command in commands]
    return [answer_of(child) for child in children]


def require_consistent(world: World, repo: Repo, runs: dict[str, list[str]], base: str, ref: str = "work") -> list[str]:
    """Records and history agree: each landing once, in one line from the base; returns who landed, in order."""
    landed = {}
    for run, workers in runs.items():
        for worker in workers:
            record = world.record(run, worker)
            assert (record["status"] == "promoted") == (record["promoted_commit"] is not None)
            if record["promoted_commit"]:
                landed[record["promoted_commit"]] = (f"{run}/{worker}", record["lease"]["expected_target_sha"])
    merges = list(reversed(repo.merges(ref)))
    assert sorted(merges) == sorted(landed)
    order, head = [], base
    for merge in merges:
        name, expected = landed[merge]
        assert repo.parents(merge)[0] == expected == head
        order.append(name)
        head = merge
    assert repo.head(ref) == head
    return order


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file the way another lionwt would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_ten_workers_promoted_by_ten_processes_land_once_each(world: World, repo: Repo) -> None:
    """Invariant 25: of concurrent promotions each lands exactly once."""
    workers = [f"w{number}" for number in range(10)]
    world.frozen("r1", {worker: {f"{worker}.txt": "x\n"} for worker in workers})
    base = repo.head()
    answers = together(world, *[("r1", worker) for worker in workers])
    assert [answer.code for answer in answers] == [0] * 10, answers
    assert len(require_consistent(world, repo, {"r1": workers}, base)) == 10
    assert repo.status() == "" and all((repo.path / f"{worker}.txt").exists() for worker in workers)
    assert world.leftovers("r1", repo) == []


def test_of_two_runs_on_one_target_the_second_says_that_it_moved(world: World, repo: Repo) -> None:
    """ADR-0091 A1.1 and D4: the lock closes the cross-run race; the other run's workers need a person."""
    workers = [f"w{number}" for number in range(3)]
    runs = dict.fromkeys(("r1", "r2"), workers)
    for run in runs:
        world.frozen(run, {worker: {f"{run}-{worker}.txt": "x\n"} for worker in workers})
    base = repo.head()
    commands = [(run, worker) for worker in workers for run in runs]
    answers = dict(zip(commands, together(world, *commands), strict=True))
    order = require_consistent(world, repo, runs, base)
    assert len(order) == 3 and len({name.split("/")[0] for name in order}) == 1
    for (run, worker), answer in answers.items():
        lost = f"{run}/{worker}" not in order
        assert (answer.code, answer.error) == ((4, "target_moved") if lost else (0, None)), answer
        assert world.record(run, worker)["status"] == ("needs_resolution" if lost else "promoted")
    assert repo.status() == "" and world.leftovers("r1", repo) == [] == world.leftovers("r2", repo)


def test_two_runs_on_two_targets_do_not_disturb_each_other(world: World, repo: Repo) -> None:
    """ADR-0091 A1.1: the lock is the repository's, the expected head is the run's."""
    linked = Repo(world.root / "linked", repo.env)
    repo.git("worktree", "add", "-q", "-b", "second", linked.path)
    base, workers = repo.head(), ["w0", "w1"]
    world.frozen("r1", {worker: {f"{worker}.txt": "1\n"} for worker in workers})
    world.frozen("r2", {worker: {f"{worker}.txt": "2\n"} for worker in workers}, target="second", cwd=linked.path)
    answers = together(world, *[(run, worker) for worker in workers for run in ("r1", "r2")])
    assert [answer.code for answer in answers] == [0] * 4, answers
    require_consistent(world, repo, {"r1": workers}, base)
    require_consistent(world, repo, {"r2": workers}, base, "second")
    assert repo.status() == linked.status() == ""
    assert (repo.path / "w0.txt").read_text() == "1\n" and (linked.path / "w0.txt").read_text() == "2\n"


@pytest.mark.parametrize("which", ["promotion", "lease"])
def test_a_lock_that_is_held_too_long_is_busy_and_changes_nothing(world: World, repo: Repo, which: str) -> None:
    """ADR-0091 A1.1: a bounded wait that fails loud; design 5: exit 6 lock_timeout."""
    world.frozen("r1", {f"w{number}": {f"{number}.txt": "x\n"} for number in range(4)})
    before, leases = repo.snapshot(), world.state_bytes("r1")
    paths = {
        "promotion": repo.path / ".git" / "lionwt" / "promotion.lock",
        "lease": world.state("r1") / "workspaces" / ".w0.lock",
    }
    workers = () if which == "promotion" else ("w0",)
    with locked(paths[which]):
        started = time.monotonic()
        answer = world.promote("r1", *workers, "--lock-timeout", "1")
        took = time.monotonic() - started
    assert (answer.code, answer.error) == (6, "lock_timeout"), answer
    assert which in answer.json["error"]["message"] and str(paths[which]) in answer.json["error"]["message"]
    assert len(answer.json["pending"]) == len(workers or range(4))
    # One wait for the command, however many workers it is asked for.
    assert ["waited 1 s" in entry["message"] for entry in answer.json["pending"]].count(True) == 1
    assert answer.json["records"] == [] and 1 <= took < 20
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)
    assert world.promote("r1").code == 0


def test_the_wait_for_a_lock_is_thirty_seconds_by_default(world: World, repo: Repo) -> None:
    """ADR-0091 A1.1: the wait is bounded; the help says by how much."""
    from lionwt import locks

    assert locks.DEFAULT_WAIT == 30
    assert "default: 30" in world.lionwt("promote", "--help").out
    assert world.promote("r1", "--lock-timeout", "soon").error == "usage"


def test_two_processes_that_promote_the_same_worker_land_it_once(world: World, repo: Repo) -> None:
    """Invariant 25: the second has seen a frozen candidate, and finds the record under the lock."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    first = world.stopped_at("promote.moved", "promote", "r1", "w1", "--json")
    second = world.stopped_at("locks.asked", "promote", "r1", "w1", "--json")
    answers = [go_on(first), go_on(second)]
    assert [answer.code for answer in answers] == [0, 0], answers
    assert answers[0].out == answers[1].out
    assert repo.merges() == [world.record("r1", "w1")["promoted_commit"]] and repo.status() == ""


def test_promote_does_not_wait_for_a_freeze_and_lands_afterwards(world: World, repo: Repo) -> None:
    """Design 5: what is not frozen yet is busy, at once; the freeze is not disturbed."""
    world.lease("r1", "w1")["w1"].write("new.txt", "new\n")
    freezing = world.stopped_at("freeze.anchored", "freeze", "r1", "w1", "--succeeded", "--json")
    leases = world.state_bytes("r1")
    answer = world.promote("r1", "w1")
    assert (answer.code, answer.error) == (6, "not_frozen"), answer
    assert world.state_bytes("r1") == leases
    assert go_on(freezing).code == 0
    assert world.promote("r1").code == 0 and len(repo.merges()) == 1


def test_keeping_a_patch_never_decides_over_a_landing_that_has_begun(world: World, repo: Repo) -> None:
    """Design 7, promote 1: every unresolved intent is settled first; a crashed promotion may be the head."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    landing = world.popen(
        "promote", "r1", "--json", env={"LIONWT_FAULT": "promote.index_locked:stop,promote.moved:kill"}
    )
    wait_until(lambda: is_stopped(landing.pid))
    keeping = world.stopped_at("locks.asked", "promote", "r1", "w1", "--policy", "patch_only", "--json")
    assert go_on(landing).code == -9
    answer = go_on(keeping)
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("promoted", repo.head("work")), answer
    assert answer.code == 0 and repo.status() == "" and world.leftovers("r1", repo) == []


def test_an_operator_who_commits_all_the_time_loses_nothing(world: World, repo: Repo) -> None:
    """Invariants 9, 11 and 14: whichever comes first, both are in the history and neither is reverted."""
    commits: list[str] = []
    for turn in range(3):
        run = f"r{turn}"
        world.frozen(run, {"w1": {f"{run}.txt": "landed\n", "f1.txt": f"landed by {run}\n"}})
        landing = world.popen("promote", run, "--json")
        while landing.poll() is None or len(commits) <= turn:
            repo.write(f"mine-{len(commits)}.txt", "mine\n")
            repo.run_git("add", "-A", check=False)
            made = repo.run_git("commit", "-q", "-a", "-m", "mine", check=False)
            if made.returncode == 0:
                commits.append(f"mine-{len(commits)}.txt")
            elif b"index.lock" not in made.stderr:
                raise AssertionError(made)
        answer = answer_of(landing)
        status = world.record(run, "w1")["status"] if answer.code != 4 or answer.json["records"] else "pending"
        if status == "promoted":
            assert answer.code == 0, answer
            merge = world.record(run, "w1")["promoted_commit"]
            assert repo.run_git("merge-base", "--is-ancestor", merge, "work", check=False).returncode == 0
            assert repo.git("show", f"work:{run}.txt") == "landed"
            assert repo.git("show", "work:f1.txt") == f"landed by {run}"
        else:
            assert answer.error in ("target_moved", "checkout_blocked"), answer
            assert repo.run_git("cat-file", "-e", f"work:{run}.txt", check=False).returncode != 0
        assert not (repo.path / ".git" / "index.lock").exists()
    repo.commit("the rest")
    held = set(repo.git("ls-tree", "--name-only", "work").split())
    assert held.issuperset(commits) and repo.status() == ""


def test_the_given_wait_holds_for_the_lease_of_another_landing_too(world: World, repo: Repo) -> None:
    """A landing that a dead coordinator began is settled first, without waiting longer than was asked."""
    world.frozen("r1", {"w0": {"0.txt": "x\n"}, "w1": {"1.txt": "x\n"}})
    assert world.promote("r1", "w0", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    with locked(world.state("r1") / "workspaces" / ".w0.lock"):
        started = time.monotonic()
        answer = world.promote("r1", "w1", "--lock-timeout", "1")
        took = time.monotonic() - started
    assert (answer.code, answer.error) == (6, "lock_timeout"), answer
    assert took < 20
