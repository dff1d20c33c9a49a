"""Work in submodules that went with a worktree, because a look at the worktree alone does not see it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Repo, World


@pytest.fixture
def lib(world: World, repo: Repo) -> Repo:
    """The library ``lib`` of the operator's repository, which has a submodule ``inner`` of its own."""
    innermost = world.repo("inner", branch="main")
    upstream = world.repo("lib", branch="main")
    upstream.git("submodule", "--quiet", "add", str(innermost.path), "inner")
    upstream.commit("a submodule of its own")
    repo.git("submodule", "--quiet", "add", str(upstream.path), "lib")
    repo.commit("submodule")
    return upstream


@pytest.fixture
def worker(world: World, repo: Repo, lib: Repo) -> Repo:
    """A worker that has checked out all submodules."""
    leased = world.lease("r1", "w1")["w1"]
    leased.git("submodule", "--quiet", "update", "--init", "--recursive")
    return leased


def inside(worker: Repo, name: str) -> Repo:
    return Repo(worker.path / name, worker.env)


def rows(world: World) -> dict[str, dict[str, str]]:
    return {row["path"]: row for row in world.manifest("r1", "w1")["submodules"]}


def bundled(world: World, repo: Repo, bundle: str) -> str:
    """Every commit that a bundle of the evidence names."""
    return repo.git("bundle", "list-heads", str(world.state("r1") / "artifacts" / bundle))


def test_commits_in_a_submodule_of_a_submodule_outlive_the_worktree(world: World, repo: Repo, worker: Repo) -> None:
    """An inner library's commit vanished with the worktree; its pointer alone was in the patch.

    Design 7, freeze 4: submodule commits not in the main store are bundled.
    """
    deep = inside(worker, "lib/inner").commit("deep", **{"deep.txt": "deep\n"})
    middle = inside(worker, "lib").commit("middle")
    assert world.freeze("r1", "w1").code == 0
    found = rows(world)
    assert found["lib"]["commit"] == middle and middle in bundled(world, repo, found["lib"]["bundle"])
    assert found["lib/inner"]["commit"] == deep and deep in bundled(world, repo, found["lib/inner"]["bundle"])
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["teardown_errors"]) == ("promoted", [])
    (world.root / "inner").rename(world.root / "gone")
    got = Repo(world.root / "gone", repo.env)
    got.git("fetch", "-q", str(world.state("r1") / "artifacts" / found["lib/inner"]["bundle"]), "+refs/*:refs/got/*")
    assert got.git("show", f"{deep}:deep.txt") == "deep"


@pytest.mark.parametrize("what", ["edit", "untracked", "moved"])
def test_uncommitted_work_in_a_submodule_of_a_submodule_refuses_the_freeze(
    world: World, repo: Repo, worker: Repo, what: str
) -> None:
    """``git status`` of the outer worktree said clean, and the edit two levels down was destroyed.

    Design 7, freeze 4: what makes the capture incomplete fails it; given up, the raw files are kept.
    """
    if what == "moved":
        inside(worker, "lib/inner").commit("only the inner one")
    else:
        worker.write(f"lib/inner/{'f1.txt' if what == 'edit' else 'new.txt'}", "work\n")
    lease = world.lease_bytes("r1", "w1")
    answer = world.freeze("r1", "w1")
    assert (answer.code, answer.error) == (4, "patch_missing"), answer
    assert "holds uncommitted work" in answer.json["error"]["message"]
    assert world.lease_bytes("r1", "w1") == lease
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    if what != "moved":
        assert (0o644, b"work\n") in world.saved("r1", "w1").values()


@pytest.mark.parametrize("how", ["reset", "detached", "dropped-branch", "stash", "other-branch", "tag"])
def test_commits_that_a_submodule_only_remembers_are_bundled(world: World, repo: Repo, worker: Repo, how: str) -> None:
    """A commit that was reset away, or made detached, was in no ref of the submodule when its store went.

    Design 10, invariant 8: nothing unrepresentable is dropped silently.
    """
    library = inside(worker, "lib")
    start = library.head()
    if how == "stash":
        library.write("f1.txt", "first\n")
        library.git("stash", "-q")
        lost = library.head("refs/stash")
        library.write("f1.txt", "second\n")
        library.git("stash", "-q")
    else:
        library.git("switch", "-q", "-c", "side")
        lost = library.commit("lost", **{"lost.txt": "lost\n"})
        if how == "reset":
            library.git("reset", "-q", "--hard", start)
        elif how == "tag":
            library.git("tag", "kept")
        library.git("switch", "-q", "--detach", start)
        if how in ("dropped-branch", "tag"):
            library.git("branch", "-q", "-D", "side")
        if how == "detached":
            library.git("update-ref", "-d", "refs/heads/side")
    assert world.freeze("r1", "w1").code == 0
    assert lost in bundled(world, repo, rows(world)["lib"]["bundle"])
    assert world.promote("r1").json["records"][0]["worktree_removed"] is True


def test_ignored_and_special_files_of_a_submodule_are_named_and_the_small_ones_kept(
    world: World, repo: Repo, worker: Repo
) -> None:
    """A submodule's .env and its build output vanished: nobody looked for ignored files below a gitlink.

    Design 7, freeze 4: ignored files (named; small ones saved), FIFOs, empty directories are in the manifest.
    """
    worker.write("lib/.env.log", "TOKEN=1\n").chmod(0o600)
    worker.write("lib/inner/ignored/deep.bin", b"\0deep")
    worker.write("lib/big.log", b"\0" * ((1 << 20) + 1))
    os.mkfifo(worker.path / "lib/pipe")
    (worker.path / "lib/empty").mkdir()
    nested = Repo(worker.path / "lib/ignored/vendor", worker.env)
    nested.path.mkdir(parents=True)
    nested.git("init", "-q")
    assert world.freeze("r1", "w1").code == 0
    manifest = world.manifest("r1", "w1")
    kept = {row["path"]: row["kept"] for row in manifest["ignored"]}
    assert kept == {
        "lib/.env.log": "saved.tar", "lib/big.log": None, "lib/ignored/vendor/": None,
        "lib/inner/ignored/deep.bin": "saved.tar",
    }  # fmt: skip
    saved = world.saved("r1", "w1")
    assert saved["lib/.env.log"] == (0o600, b"TOKEN=1\n") and saved["lib/inner/ignored/deep.bin"][1] == b"\0deep"
    assert manifest["not_captured"]["special"] == {"lib/pipe": "fifo"}
    assert manifest["not_captured"]["empty_directories"] == ["lib/empty"]
    assert {"ignored_files", "special_files"} <= {note["code"] for note in manifest["diagnostics"]}
    assert manifest["complete"] is True
    # What comes after the freeze is saved before anything goes, in the submodule as well.
    worker.write("lib/.env.log", "TOKEN=2\n")
    assert world.promote("r1").json["records"][0]["worktree_removed"] is True
    assert "lib/.env.log" in (world.evidence("r1", "w1") / "late-1.json").read_text()


def test_a_submodule_whose_checkout_was_taken_away_still_gives_up_its_commits(
    world: World, repo: Repo, worker: Repo
) -> None:
    """``git submodule deinit`` leaves commits in a store that only the worktree's registration holds.

    Design 7, teardown: its submodule stores are checked.
    """
    outer = inside(worker, "lib").commit("outer", **{"new.txt": "new\n"})
    deep = inside(worker, "lib/inner").commit("deep", **{"deep.txt": "deep\n"})
    worker.git("submodule", "--quiet", "deinit", "--force", "--all")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    found = rows(world)
    assert outer in bundled(world, repo, found[".git/modules/lib"]["bundle"])
    assert deep in bundled(world, repo, found[".git/modules/lib/modules/inner"]["bundle"])
    assert world.promote("r1").json["records"][0]["worktree_removed"] is True
    assert world.leftovers("r1", repo) == []


def test_submodule_commits_are_saved_where_the_worktree_was_deleted_by_hand(
    world: World, repo: Repo, worker: Repo
) -> None:
    """With the directory gone, the registration still held the submodule's only commits, and it was pruned.

    Design 8: what a look finds decides; nothing is lost with what is retired.
    """
    deep = inside(worker, "lib/inner").commit("deep", **{"deep.txt": "deep\n"})
    shutil.rmtree(worker.path)
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert answer.code == 0, answer
    refs = [note["ref"] for note in world.lease_file("r1", "w1")["diagnostics"] if note["code"] == "commits_saved"]
    assert any(deep in bundled(world, repo, ref) for ref in refs)
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("name", ["lib", "lib/inner"])
@pytest.mark.parametrize("place", ["HEAD", "config", "logs/HEAD", "refs/heads/pipe"])
def test_a_pipe_in_a_submodule_refuses_the_freeze_and_is_named(
    world: World, repo: Repo, worker: Repo, name: str, place: str
) -> None:
    """A pipe in a submodule's git directory was waited for without end.

    Design 10, invariant 24: every wait is bounded; design 7: what cannot be read is never lost in silence.
    """
    path = Path(inside(worker, name).git("rev-parse", "--absolute-git-dir"), place)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    answer = world.lionwt("freeze", "r1", "w1", "--json", "--succeeded", wrapper=("timeout", "-s", "KILL", "60"))
    assert (answer.code, answer.error) == (4, "patch_missing"), answer
    assert str(path) in answer.json["error"]["message"]
