"""The second look at a worktree: what comes, goes or is replaced after the walk is noticed (design 7, freeze 2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lionwt import walk


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.txt", "d/b.txt", "d/e/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_tree_that_stands_still_is_current(tree: Path) -> None:
    seen = walk.walk_tree(tree)
    assert seen.files == {b"a.txt", b"d/b.txt", b"d/e/c.txt"}
    assert seen.is_current()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "d/e/new.txt").write_text("new"),
        lambda tree: (tree / "d/e/c.txt").unlink(),
        lambda tree: (tree / "d/b.txt").rename(tree / "d/e/b.txt"),
        lambda tree: (tree / "d").rename(tree / "elsewhere"),
        lambda tree: (tree / "d/e/empty").mkdir(),
        lambda tree: os.mkfifo(tree / "pipe"),
    ],
    ids=["new", "gone", "renamed", "directory moved", "new directory", "pipe"],
)
def test_a_tree_in_which_an_entry_changed_is_not_current(tree: Path, change: Callable[[Path], object]) -> None:
    seen = walk.walk_tree(tree)
    change(tree)
    assert not seen.is_current()


def test_a_change_too_quick_for_a_new_time_is_seen_by_the_entries(tree: Path) -> None:
    """A directory's time ticks in milliseconds; one that was fresh when it was read is read again."""
    seen = walk.walk_tree(tree)
    (tree / "d/new.txt").write_text("new")
    for name in (b"", b"d"):
        now = walk._stamp(os.path.join(os.fsencode(tree), name))
        seen._read[name] = seen._read[name]._replace(stamp=now)
    assert not seen.is_current()
