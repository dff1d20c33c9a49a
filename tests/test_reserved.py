"""What is lionwt's below ``.worktrees`` is never a worker's to change, and what is somebody else's there stays."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import Repo, World


@pytest.mark.parametrize(
    "name",
    [
        ".worktrees",
        ".worktrees/lionagi/r1/w2/evil",
        ".worktrees/lionagi/r1/w1/sub/own",
        ".worktrees/.trash/t",
        ".worktrees/lionagi",
        ".worktrees/.gitignore",
    ],
)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_change_in_the_place_of_the_worktrees_is_kept_and_never_landed(
    world: World, repo: Repo, name: str, kind: str
) -> None:
    """Invariants 8 and 14: it would be written into another worker's worktree, or be deleted with the trash."""
    workers = world.lease("r1", "w1", "w2")
    worker, other = workers["w1"], workers["w2"]
    path = worker.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_text("evil\n")
    else:
        path.symlink_to("f1.txt")
    worker.write("f2.txt", "good\n")
    world.freeze_now("r1", "w1")
    before = repo.head("work")
    answer = world.promote("r1", "w1")
    assert (answer.code, answer.json["outcomes"][0]["code"]) == (4, "path_reserved"), answer
    assert repo.head("work") == before and repo.status() == "" and other.status() == ""
    patch = (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    assert name.encode() in patch
    done = subprocess.run(answer.json["next"][0], shell=True, env=repo.env, capture_output=True, check=False)
    assert done.returncode == 0, done
    assert repo.status().split() == ["M", "f2.txt"]


def test_a_repository_may_keep_files_of_its_own_beside_the_worktrees(world: World, repo: Repo) -> None:
    """Design 3: lionwt's are two directories there and no more."""
    repo.write(".worktrees/README", "how we work\n")
    repo.git("add", "-f", ".worktrees/README")
    repo.git("commit", "-q", "-m", "a readme")
    world.frozen("r1", {"w1": {".worktrees/README": "how we work now\n", "worktrees/lionagi": "x\n"}})
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert (repo.path / ".worktrees/README").read_text() == "how we work now\n" and repo.status() == ""


@pytest.mark.parametrize("verb", ["promote", "reap", "reconcile"])
def test_only_removed_trees_are_deleted_from_the_trash(world: World, repo: Repo, verb: str) -> None:
    """Invariants 14 and 16: a file and a worktree of the operator's there are not lionwt's."""
    trash = repo.path / ".worktrees/.trash"
    trash.mkdir(parents=True)
    (trash / "mine").write_text("keep\n")
    (trash / "a.b.notmine1").write_text("keep\n")
    repo.git("worktree", "add", "-q", "--detach", str(trash / "keepme"), "HEAD")
    (trash / "keepme/unsaved").write_text("unsaved\n")
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    left = trash / "r1.w9.0123abcd"
    left.mkdir()
    assert world.lionwt(verb, "r1", *(["--takeover"] if verb == "reconcile" else []), "--json").code == 0
    assert (trash / "keepme/unsaved").read_text() == "unsaved\n" and (trash / "mine").exists()
    assert (trash / "a.b.notmine1").exists() and not left.exists()
    if verb != "reap":
        assert repo.git("show", "work:f1.txt") == "new"
