"""Directories of any depth: beyond what Python calls, and beyond the longest path that the system takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lionwt import trees
from tests.conftest import Repo, World

#: Deeper than Python calls; the path is still one that the system takes.
DEEP = 1500
#: No path leads to the end of that.
DEEPEST = 5000


@pytest.fixture(autouse=True)
def nothing_deep_is_left(tmp_path: Path) -> Iterator[None]:
    """pytest's own clean-up goes no deeper than Python calls."""
    yield
    for entry in list(tmp_path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            trees.remove(entry, unlock=True)


def nest(top: Path, depth: int, name: str = "x", content: str = "deep\n") -> None:
    """Make a chain of directories below ``top``, with one file at its end."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=fd)
        inner = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    end = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd)
    os.write(end, content.encode())
    os.close(end)
    os.close(fd)


@pytest.mark.parametrize("depth", [0, 1, 99, 100, 101, 250, DEEPEST])
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, depth: int) -> None:
    top = tmp_path / "top"
    top.mkdir()
    nest(top, depth)
    (top / "b").mkdir()
    nest(top / "b", depth)
    trees.remove(top)
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    nested = top / "a" / "b"
    nested.mkdir(parents=True)
    (nested / "link").symlink_to(outside)
    (top / "link").symlink_to(outside)
    trees.remove(top)
    assert os.listdir(tmp_path) == ["outside"] and os.listdir(outside) == ["kept"]
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError):
        trees.remove(tmp_path / "link")
    assert os.listdir(outside) == ["kept"]


def test_a_walk_names_everything_once_and_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "file").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    top = str(tmp_path)
    assert list(trees.walk(top)) == [
        (top, ["a", "b"], ["link"]),
        (f"{top}/a", [], []),
        (f"{top}/b", ["c"], ["file"]),
        (f"{top}/b/c", [], []),
    ]
    nest(tmp_path, 0)
    deep = tmp_path / "a"
    nest(deep, DEEP)
    assert sum("x" in names for _, _, names in trees.walk(str(deep))) == 1
    trees.remove(deep)


@pytest.mark.parametrize("where", ["tracked", "ignored", "repository", "artifacts", "modules"])
def test_a_worker_that_nests_deeper_than_python_calls_ends_like_any_other(world: World, repo: Repo, where: str) -> None:
    """Invariants 8 and 20: no depth is a bug of lionwt's, and what lies there is captured or named."""
    worker = world.lease("r1", "w1")["w1"]
    place = worker.path
    if where == "ignored":
        place = worker.path / "ignored"
        place.mkdir()
    elif where == "repository":
        worker.git("init", "-q", "nest")
        place = worker.path / "nest"
    elif where == "artifacts":
        place = world.state("r1") / "artifacts" / "w1"
    elif where == "modules":
        place = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"]) / "modules"
        place.mkdir()
    nest(place, DEEP)
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert answer.code == 0, answer
    assert world.record("r1", "w1")["status"] == "discarded"
    assert world.leftovers("r1", repo) == []
    manifest = world.manifest("r1", "w1")
    path = "a/" * DEEP + "x"
    if where == "tracked":
        assert [row["path"] for row in manifest["files"]] == [path]
    elif where == "artifacts":
        assert [row["path"] for row in manifest["artifacts"]] == [path]
    elif where == "repository":
        assert world.saved("r1", "w1")[f"nest/{path}"][1] == b"deep\n"
    elif where == "ignored":
        assert world.saved("r1", "w1")[f"ignored/{path}"][1] == b"deep\n"


def test_a_deep_change_lands(world: World, repo: Repo) -> None:
    worker = world.lease("r1", "w1")["w1"]
    nest(worker.path, DEEP // 2)
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    assert repo.git("ls-tree", "-r", "--name-only", "work", "--", "a") == "a/" * (DEEP // 2) + "x"
    assert (repo.path / ("a/" * (DEEP // 2)) / "x").read_text() == "deep\n" and repo.status() == ""
    assert world.leftovers("r1", repo) == []


def test_what_no_path_leads_to_keeps_its_worktree_until_it_is_cleared(world: World, repo: Repo) -> None:
    """Invariant 8: it cannot be saved, so it is not removed either; told in a message that one can read."""
    worker = world.lease("r1", "w1")["w1"]
    nest(worker.path, DEEPEST)
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (4, "patch_missing"), refused
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer
    assert len(answer.json["error"]["message"]) < 1000
    assert worker.path.exists() and "lionwt reconcile r1" in answer.json["error"]["hint"]
    trees.remove(worker.path / "a")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, world.record("r1", "w1")["status"]) == (0, "discarded"), answer
    assert world.leftovers("r1", repo) == []
