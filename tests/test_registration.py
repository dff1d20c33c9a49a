"""A worktree that git knows elsewhere is moved and not gone: nothing of it goes (invariants 8, 15, 16)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer, Repo, World
from tests.test_reconcile import set_back

RECONCILE = ("reconcile", "r1", "--takeover", "--json")


def _git_move(repo: Repo, worktree: Path, place: Path) -> None:
    repo.git("worktree", "move", "-f", "-f", worktree, place)


def _unlock_and_move(repo: Repo, worktree: Path, place: Path) -> None:
    repo.git("worktree", "unlock", worktree)
    repo.git("worktree", "move", worktree, place)


def _move_and_lock(repo: Repo, worktree: Path, place: Path) -> None:
    _unlock_and_move(repo, worktree, place)
    repo.git("worktree", "lock", "--reason", "mine", place)


def _move_and_repair(repo: Repo, worktree: Path, place: Path) -> None:
    worktree.rename(place)
    repo.git("worktree", "repair", place)


WAYS: dict[str, Callable[[Repo, Path, Path], None]] = {
    "moved by force": _git_move,
    "unlocked and moved": _unlock_and_move,
    "locked by another": _move_and_lock,
    "repaired": _move_and_repair,
}


def _moved(world: World, repo: Repo, worker: Repo, how: str = "moved by force") -> Repo:
    place = world.root / "away from it"
    WAYS[how](repo, worker.path, place)
    return Repo(place, repo.env)


def _put_back(world: World, command: str) -> None:
    subprocess.run(command, shell=True, check=True, env=world.git_environment(), cwd=world.root)


def _is_refused(answer: Answer, place: Path) -> None:
    assert (answer.code, answer.error) == (7, "worktree_moved"), answer
    assert f" to {place}; it was left as it is" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("how", "state"),
    [*((how, "running") for how in WAYS), ("moved by force", "allocated"), ("unlocked and moved", "frozen")],
)
def test_a_worktree_that_was_moved_is_not_gone_and_the_hint_brings_it_back(
    world: World, repo: Repo, how: str, state: str
) -> None:
    worker = world.lease("r1", "w1", start=state != "allocated")["w1"]
    worker.commit("own", **{"own.txt": "own\n"})
    worker.write("staged.txt", "staged\n")
    worker.git("add", "staged.txt")
    if state == "frozen":
        world.freeze_now("r1", "w1", "--failed")
    place = _moved(world, repo, worker, how)
    status, lease = place.status(), world.lease_bytes("r1", "w1")
    refs = repo.refs()
    assert world.lionwt(*RECONCILE, "--dry-run").json["steps"] == []
    for _ in range(2):
        _is_refused(world.lionwt(*RECONCILE), place.path)
        assert (world.lease_bytes("r1", "w1"), repo.refs()) == (lease, refs)
        assert place.status() == status == "A  staged.txt"
        assert "own" in place.git("reflog")
    _put_back(world, world.lionwt(*RECONCILE).json["next"][0])
    ended = world.lionwt(*RECONCILE)
    assert ended.code == 0 and ended.json["records"][0]["status"] == "discarded", ended
    assert b"+staged\n" in (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    assert world.leftovers("r1", repo) == []


def test_a_freeze_of_a_worktree_that_was_moved_works_after_what_the_hint_says(world: World, repo: Repo) -> None:
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    place = _moved(world, repo, worker)
    refused = world.freeze("r1", "w1")
    _is_refused(refused, place.path)
    _put_back(world, refused.json["next"][0])
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    assert world.leftovers("r1", repo) == []


def test_what_stands_in_the_place_of_a_moved_worktree_is_to_be_moved_away_first(world: World, repo: Repo) -> None:
    worker = world.lease("r1", "w1")["w1"]
    place = _moved(world, repo, worker)
    worker.write("operators.txt", "of the operator's\n")
    refused = world.lionwt(*RECONCILE)
    _is_refused(refused, place.path)
    assert refused.json["error"]["hint"].startswith(f"move away what lies at {worker.path}, then ")
    assert (worker.path / "operators.txt").exists()
    worker.path.rename(world.root / "operators")
    _put_back(world, refused.json["next"][0])
    assert world.lionwt(*RECONCILE).code == 0


def test_a_teardown_leaves_a_worktree_that_was_moved_and_is_finished_when_it_is_back(world: World, repo: Repo) -> None:
    worker = world.frozen("r1", {"w1": {"new.txt": "new\n"}})["w1"]
    place = _moved(world, repo, worker)
    for answer in (world.promote("r1"), world.lionwt(*RECONCILE)):
        assert (answer.code, answer.error) == (5, "teardown_failed"), answer
        record = world.record("r1", "w1")
        assert (record["worktree_removed"], record["branch_deleted"]) == (False, False)
        assert place.status() == "?? new.txt"
    assert repo.git("show", "work:new.txt") == "new"
    (why,) = (error for error in record["teardown_errors"] if "was moved" in error)
    _put_back(world, why.partition("move it back: ")[2])
    assert world.lionwt(*RECONCILE).json["records"][0]["status"] == "promoted"
    assert world.leftovers("r1", repo) == []


def test_what_was_to_be_retained_is_retained_when_it_is_back_and_reaped_only_then(world: World, repo: Repo) -> None:
    """Invariant 17: retained means that it is there."""
    worker = world.lease("r1", "w1", args=("--retain-for", "1h"))["w1"]
    worker.write("f1.txt", "of the worker\n")
    world.freeze_now("r1", "w1")
    repo.commit("meanwhile", **{"f1.txt": "of the operator\n"})
    place = _moved(world, repo, worker)
    refused = world.promote("r1")
    _is_refused(refused, place.path)
    assert world.lease_file("r1", "w1")["record"] is None
    _put_back(world, refused.json["next"][0])
    assert world.lionwt(*RECONCILE).json["records"][0]["status"] == "retained"
    _moved(world, repo, worker)
    set_back(world, retention_until=time.time() - 1)
    assert world.lionwt("reap", "r1", "--json").code == 5
    assert place.status() == " M f1.txt"


def test_a_copy_that_git_was_told_of_is_left_and_can_be_taken_from_git(world: World, repo: Repo) -> None:
    """Invariant 16: a copy has another inode, so it is never taken back nor removed."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    place = Repo(world.root / "copy", repo.env)
    shutil.copytree(worker.path, place.path, symlinks=True)
    shutil.rmtree(worker.path)
    repo.git("worktree", "repair", place.path)
    refused = world.lionwt(*RECONCILE)
    _is_refused(refused, place.path)
    assert place.status() == "?? new.txt"
    _put_back(world, refused.json["next"][0].replace("&& lionwt", f"&& LIONAGI_HOME={world.lionagi_home} true"))
    assert world.lionwt(*RECONCILE).json["records"][0]["status"] == "discarded"
    assert (place.path / "new.txt").read_text() == "new\n"
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("what", ["nothing", "a directory", "another repository"])
def test_where_a_moved_worktree_does_not_stand_any_more_it_is_gone(world: World, repo: Repo, what: str) -> None:
    """Design section 8: the registration alone proves nothing."""
    place = _moved(world, repo, world.lease("r1", "w1")["w1"])
    shutil.rmtree(place.path)
    if what != "nothing":
        place.path.mkdir()
        place.write("file", "content\n")
    if what == "another repository":
        place.git("init", "-q")
    ended = world.lionwt(*RECONCILE)
    assert ended.code == 0 and ended.json["records"][0]["status"] == "discarded", ended
    assert os.path.lexists(place.path) == (what != "nothing")
    assert world.leftovers("r1", repo) == []
