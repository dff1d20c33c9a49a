"""What workers do to git, and that the change set comes out whole all the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Repo, World, files_of

Deed = Callable[[World, Repo, Repo], None]


def diagnostics(world: World) -> set[str]:
    return {note["code"] for note in world.lease_file("r1", "w1")["diagnostics"]}


def frozen(world: World) -> None:
    """Freeze, and prove that it changed nothing and that the patch is the worktree."""
    before = world.standing("r1", "w1")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert world.standing("r1", "w1") == before
    world.round_trip("r1", "w1")


# Histories -------------------------------------------------------------------


def commits_once(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})


def commits_and_goes_on(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})
    worker.commit("two", **{"b.txt": "b\n"})
    worker.write("c.txt", "not committed\n")


def amends(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})
    worker.write("a.txt", "a amended\n")
    worker.git("commit", "-qa", "--amend", "-m", "amended")


def squashes(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})
    worker.commit("two", **{"b.txt": "b\n"})
    worker.git("reset", "-q", "--soft", "HEAD~2")
    worker.git("commit", "-qm", "squashed")


def rebases_interactively(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})
    worker.commit("two", **{"b.txt": "b\n"})
    worker.git("-c", "sequence.editor=sed -i '1!G;h;$!d'", "rebase", "-q", "-i", "HEAD~2")


def resets_before_the_base(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("lost", **{"a.txt": "a\n"})
    worker.git("reset", "-q", "--hard", "HEAD~2")
    worker.write("b.txt", "b\n")


def starts_an_orphan_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("switch", "-q", "--orphan", "new-world")
    worker.commit("orphan", **{"only.txt": "only\n"})


def switches_its_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("switch", "-q", "-c", "feature/x")
    worker.commit("one", **{"a.txt": "a\n"})


def detaches(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("switch", "-q", "--detach")
    worker.commit("one", **{"a.txt": "a\n"})


def deletes_its_branch(world: World, repo: Repo, worker: Repo) -> None:
    detaches(world, repo, worker)
    worker.git("branch", "-q", "-D", "lionagi/r1/w1")


def renames_its_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("branch", "-m", "mine")
    worker.commit("one", **{"a.txt": "a\n"})


def stands_on_an_unborn_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.write("a.txt", "a\n")
    worker.git("symbolic-ref", "HEAD", "refs/heads/not/there")


def forwards_to_its_own_side_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("switch", "-q", "-c", "side")
    worker.commit("one", **{"a.txt": "a\n"})
    worker.git("switch", "-q", "lionagi/r1/w1")
    worker.git("merge", "-q", "--ff-only", "side")


def merges_its_own_side_branch(world: World, repo: Repo, worker: Repo) -> None:
    worker.git("switch", "-q", "-c", "side")
    worker.commit("one", **{"a.txt": "a\n"})
    worker.git("switch", "-q", "lionagi/r1/w1")
    worker.git("merge", "-q", "--no-ff", "-m", "merged", "side")


def deletes_its_git_file(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("one", **{"a.txt": "a\n"})
    (worker.path / ".git").unlink()


def points_its_git_file_elsewhere(world: World, repo: Repo, worker: Repo) -> None:
    worker.write("a.txt", "a\n")
    victim = world.repo("victim")
    (worker.path / ".git").write_text(f"gitdir: {victim.path / '.git'}\n")


def makes_its_git_file_a_link(world: World, repo: Repo, worker: Repo) -> None:
    worker.write("a.txt", "a\n")
    victim = world.repo("victim")
    (worker.path / ".git").unlink()
    (worker.path / ".git").symlink_to(victim.path / ".git")


def loses_its_index(world: World, repo: Repo, worker: Repo) -> None:
    worker.write("a.txt", "a\n")
    Path(worker.git("rev-parse", "--absolute-git-dir"), "index").unlink()


def leaves_a_stale_index_lock(world: World, repo: Repo, worker: Repo) -> None:
    worker.write("a.txt", "a\n")
    Path(worker.git("rev-parse", "--absolute-git-dir"), "index.lock").touch()


@dataclass(frozen=True)
class Kept:
    """``kept`` of the worker's commits are landed as they are; ``notes`` are the diagnostics."""

    deed: Deed
    kept: int
    notes: frozenset[str] = frozenset()
    clean: bool = True


LEFT_BRANCH, LEFT_BASE = frozenset({"worker_left_branch"}), frozenset({"worker_left_base"})
GIT_FILE = frozenset({"git_file_changed"})
LANDED = [
    Kept(commits_once, 1),
    Kept(commits_and_goes_on, 2, clean=False),
    Kept(amends, 1),
    Kept(squashes, 1),
    Kept(rebases_interactively, 2),
    Kept(resets_before_the_base, 0, LEFT_BASE, False),
    Kept(starts_an_orphan_branch, 0, LEFT_BRANCH | LEFT_BASE, False),
    Kept(switches_its_branch, 1, LEFT_BRANCH),
    Kept(detaches, 1, LEFT_BRANCH),
    Kept(deletes_its_branch, 1, LEFT_BRANCH),
    Kept(renames_its_branch, 1, LEFT_BRANCH),
    Kept(stands_on_an_unborn_branch, 0, LEFT_BASE, False),
    Kept(forwards_to_its_own_side_branch, 1),
    Kept(merges_its_own_side_branch, 0, LEFT_BASE, False),
    Kept(deletes_its_git_file, 1, GIT_FILE),
    Kept(points_its_git_file_elsewhere, 0, GIT_FILE, False),
    Kept(makes_its_git_file_a_link, 0, GIT_FILE, False),
    Kept(loses_its_index, 0, frozenset(), False),
    Kept(leaves_a_stale_index_lock, 0, frozenset(), False),
]


@pytest.mark.parametrize("case", LANDED, ids=lambda case: case.deed.__name__)
def test_whatever_the_worker_did_to_its_history_its_tree_is_what_lands(world: World, repo: Repo, case: Kept) -> None:
    """Design 7, freeze 5: a line from the base is kept, anything else is one commit on the base."""
    repo.commit("second", **{"second.txt": "second\n"})
    base = repo.head()
    worker = world.lease("r1", "w1")["w1"]
    case.deed(world, repo, worker)
    victim = world.root / "victim"
    untouched = Repo(victim, world.environment()).snapshot() if victim.exists() else {}
    frozen(world)
    evidence, manifest = world.lease_file("r1", "w1")["evidence"], world.manifest("r1", "w1")
    assert case.notes <= diagnostics(world)
    assert ("worker_left_base" in diagnostics(world)) == ("worker_left_base" in case.notes)
    assert len(manifest["commits"]["kept"]) == case.kept
    line = repo.git("rev-list", "--reverse", f"{base}..{evidence['commit']}").split()
    assert len(line) == case.kept + (not case.clean)
    assert line[: case.kept] == manifest["commits"]["kept"]
    assert all(len(row.split()) == 2 for row in repo.git("rev-list", "--parents", f"{base}..{line[-1]}").splitlines())
    if case.clean:
        assert evidence["commit"] == evidence["head"]
    left = files_of(worker.path)
    answer = world.promote("r1")
    assert answer.code == 0, answer
    record = answer.json["records"][0]
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("promoted", True, True)
    assert repo.git("rev-list", "--parents", "-1", "work").split()[1:] == [base, evidence["commit"]]
    assert {name: entry for name, entry in files_of(repo.path).items() if not name.startswith(b".git/")} == left
    assert repo.status() == ""
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    if untouched:
        assert Repo(victim, world.environment()).snapshot() == untouched


def test_commits_under_a_head_that_is_a_symbolic_link_are_kept(world: World, repo: Repo) -> None:
    """core.preferSymlinkRefs makes HEAD a link that leads to no file; it names the branch all the same."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("config", "core.preferSymlinkRefs", "true")
    worker.git("switch", "-q", "-c", "own")
    one = worker.commit("one", **{"a.txt": "a\n"})
    worker.git("switch", "-q", "lionagi/r1/w1")
    worker.git("reset", "-q", "--hard", "own")
    two = worker.commit("two", **{"b.txt": "b\n"})
    head = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"], "HEAD")
    assert head.is_symlink() and not head.exists()
    frozen(world)
    assert diagnostics(world) == {"shared_config_changed"}
    assert world.promote("r1").code == 0
    assert repo.parents("work")[1] == two and repo.parents(two) == [one]


def test_commits_that_only_a_reflog_remembers_are_in_the_bundle(world: World, repo: Repo) -> None:
    """Cases 02 and 04: nothing that the worker committed is lost with the branch."""
    worker = world.lease("r1", "w1")["w1"]
    one = worker.commit("one", **{"lost.txt": "lost\n"})
    worker.git("reset", "-q", "--hard", "HEAD~1")
    worker.git("switch", "-q", "--detach")
    two = worker.commit("two", **{"left.txt": "left\n"})
    worker.git("switch", "-q", "lionagi/r1/w1")
    frozen(world)
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == []
    answer = world.promote("r1")
    assert (answer.code, answer.json["records"][0]["status"]) == (0, "discarded")
    repo.git("reflog", "expire", "--expire=now", "--all")
    repo.git("gc", "-q", "--prune=now")
    assert repo.run_git("cat-file", "-e", one, check=False).returncode
    bundle = world.evidence("r1", "w1") / world.manifest("r1", "w1")["commits"]["bundle"].rpartition("/")[2]
    repo.git("fetch", "-q", bundle, "+refs/heads/*:refs/got/*")
    assert set(repo.git("for-each-ref", "--format=%(objectname)", "refs/got").split()) == {one, two}
    assert repo.git("show", f"{one}:lost.txt") == "lost"


# What is not promotable ------------------------------------------------------


def _side(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "theirs", "main")
    repo.commit("theirs", **{"theirs.txt": "theirs\n", "f1.txt": "theirs\n"})
    repo.git("switch", "-q", "work")


def merges_another_branch(world: World, repo: Repo, worker: Repo) -> None:
    _side(repo)
    worker.commit("own", **{"own.txt": "own\n"})
    worker.git("merge", "-q", "-m", "merged", "theirs")


def forwards_to_another_branch(world: World, repo: Repo, worker: Repo) -> None:
    _side(repo)
    worker.git("merge", "-q", "--ff-only", "theirs")
    worker.write("own.txt", "own\n")


def rebases_onto_the_moved_target(world: World, repo: Repo, worker: Repo) -> None:
    worker.commit("own", **{"own.txt": "own\n"})
    repo.commit("moved", **{"moved.txt": "moved\n"})
    worker.git("rebase", "-q", "work")


def stops_in_a_merge(world: World, repo: Repo, worker: Repo) -> None:
    _side(repo)
    worker.commit("own", **{"f1.txt": "own\n"})
    assert worker.run_git("merge", "-q", "theirs", check=False).returncode == 1
    assert b"<<<<<<<" in (worker.path / "f1.txt").read_bytes()


def stops_in_a_rebase(world: World, repo: Repo, worker: Repo) -> None:
    _side(repo)
    worker.commit("own", **{"f1.txt": "own\n"})
    assert worker.run_git("rebase", "-q", "theirs", check=False).returncode == 1


def stops_in_a_cherry_pick(world: World, repo: Repo, worker: Repo) -> None:
    _side(repo)
    worker.commit("own", **{"f1.txt": "own\n"})
    assert worker.run_git("cherry-pick", "theirs", check=False).returncode == 1


def keeps_unmerged_paths(world: World, repo: Repo, worker: Repo) -> None:
    stops_in_a_merge(world, repo, worker)
    Path(worker.git("rev-parse", "--absolute-git-dir"), "MERGE_HEAD").unlink()


@pytest.mark.parametrize(
    "deed",
    [
        merges_another_branch,
        forwards_to_another_branch,
        rebases_onto_the_moved_target,
        stops_in_a_merge,
        stops_in_a_rebase,
        stops_in_a_cherry_pick,
        keeps_unmerged_paths,
    ],
)
def test_what_is_unfinished_or_merged_in_from_elsewhere_is_kept_and_never_landed(
    world: World, repo: Repo, deed: Deed
) -> None:
    """Design 7, freeze 4: a diagnostic, and not promotable."""
    worker = world.lease("r1", "w1")["w1"]
    deed(world, repo, worker)
    frozen(world)
    assert "worktree_unmerged" in diagnostics(world)
    before = repo.snapshot()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "worktree_unmerged"), answer
    record = answer.json["records"][0]
    assert (record["status"], record["promoted_commit"]) == ("needs_resolution", None)
    assert (record["worktree_removed"], record["branch_deleted"]) == (True, True)
    after = repo.snapshot()
    ours = ("refs/heads/lionagi", "refs/lionwt", "logs/refs/heads/lionagi")
    assert {name: entry for name, entry in after.items() if not any(own in name for own in ours)} == {
        name: entry for name, entry in before.items() if not any(own in name for own in ours)
    }
    assert (world.evidence("r1", "w1") / "candidate.patch").stat().st_size


def test_a_worker_that_moves_the_target_lands_nothing(world: World, repo: Repo) -> None:
    """Case 67: the expected head is the only witness; movement needs a person."""
    worker = world.lease("r1", "w1")["w1"]
    moved = worker.commit("own", **{"own.txt": "own\n"})
    worker.git("update-ref", "refs/heads/work", "HEAD")
    frozen(world)
    answer = world.promote("r1")
    assert answer.code == 4, answer
    assert answer.json["records"][0]["status"] == "needs_resolution"
    assert answer.json["records"][0]["promoted_commit"] is None
    assert repo.head("work") == moved


# The directory ---------------------------------------------------------------


def _victim(world: World) -> dict[bytes, tuple[str, bytes]]:
    victim = world.root / "victim"
    for name in ("precious.txt", "sub/dir/deep.txt"):
        path = victim / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious\n")
    return files_of(victim)


def becomes_a_link(world: World, repo: Repo, worker: Repo) -> None:
    shutil.copy(worker.path / ".git", world.root / "victim/.git")
    worker.path.rename(world.root / "aside")
    worker.path.symlink_to(world.root / "victim")


def becomes_another_directory(world: World, repo: Repo, worker: Repo) -> None:
    worker.path.rename(world.root / "aside")
    shutil.copytree(world.root / "aside", worker.path)


def is_gone(world: World, repo: Repo, worker: Repo) -> None:
    worker.path.rename(world.root / "aside")


def lies_behind_a_link(world: World, repo: Repo, worker: Repo) -> None:
    parent = worker.path.parent
    parent.rename(world.root / "elsewhere")
    parent.symlink_to(world.root / "elsewhere")


@pytest.mark.parametrize("deed", [becomes_a_link, becomes_another_directory, is_gone, lies_behind_a_link])
def test_a_worktree_that_is_not_the_leased_directory_is_never_followed(world: World, repo: Repo, deed: Deed) -> None:
    """Case 10: device and inode decide, not the path; put back, it is frozen as if nothing had been."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    victim = _victim(world)
    deed(world, repo, worker)
    written = world.lease_bytes("r1", "w1")
    for verdict in ("--succeeded", "--failed"):
        answer = world.freeze("r1", "w1", verdict)
        assert (answer.code, answer.error) == (7, "worktree_moved"), answer
    assert world.lease_bytes("r1", "w1") == written
    if (world.root / "victim/.git").exists():
        (world.root / "victim/.git").unlink()
    assert files_of(world.root / "victim") == victim
    if worker.path.is_symlink():
        worker.path.unlink()
    if worker.path.parent.is_symlink():
        worker.path.parent.unlink()
        (world.root / "elsewhere").rename(worker.path.parent)
    else:
        if worker.path.exists():
            shutil.rmtree(worker.path)
        (world.root / "aside").rename(worker.path)
    frozen(world)
    assert world.promote("r1").code == 0


def test_a_frozen_worktree_that_became_a_link_is_left_and_what_it_leads_to_is_untouched(
    world: World, repo: Repo
) -> None:
    """Design 10, invariant 16: removal never leaves the recorded inode."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    victim = _victim(world)
    becomes_a_link(world, repo, worker)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (5, "teardown_failed")
    record = answer.json["records"][0]
    assert (record["worktree_removed"], record["branch_deleted"]) == (False, False)
    assert record["promoted_commit"] == repo.head("work")
    (world.root / "victim/.git").unlink()
    assert files_of(world.root / "victim") == victim
    assert worker.path.is_symlink()
    assert (world.root / "aside/new.txt").exists()


def test_an_unlocked_registration_is_refused_and_the_way_back_is_named(world: World, repo: Repo) -> None:
    """Design 7: whose a registration is says its nonce; without it nothing is guessed."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.git("worktree", "unlock", ".")
    answer = world.freeze("r1", "w1")
    assert (answer.code, answer.error) == (7, "worktree_moved")
    hint = answer.json["error"]["hint"]
    nonce = world.lease_file("r1", "w1")["identity"]["nonce"]
    assert f"worktree lock --reason 'lionwt {nonce}' " in hint
    repo.git("worktree", "lock", "--reason", f"lionwt {nonce}", worker.path)
    frozen(world)


def test_a_worktree_inside_the_worktree_is_a_repository_inside(world: World, repo: Repo) -> None:
    """Case 07: a linked worktree has its own .git file."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("worktree", "add", "-q", "--detach", "inner")
    answer = world.freeze("r1", "w1")
    assert (answer.code, answer.error) == (4, "embedded_repository")
    worker.git("worktree", "remove", "--force", "inner")
    frozen(world)


def test_a_torn_index_is_refused_until_it_is_mended_or_given_up(world: World, repo: Repo) -> None:
    """Case 25: what cannot be read is a missing capture, not an empty one."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    index = Path(worker.git("rev-parse", "--absolute-git-dir"), "index")
    index.write_bytes(index.read_bytes()[:40])
    torn = index.read_bytes()
    written = world.lease_bytes("r1", "w1")
    answer = world.freeze("r1", "w1")
    assert (answer.code, answer.error) == (4, "patch_missing"), answer
    assert world.lease_bytes("r1", "w1") == written
    assert index.read_bytes() == torn
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    world.round_trip("r1", "w1")


# What everybody shares -------------------------------------------------------


def test_a_stash_of_the_worker_is_named_and_left_alone(world: World, repo: Repo) -> None:
    """Case 06: lionwt never stashes, and names what the worker stashed."""
    repo.write("f1.txt", "operator's\n")
    repo.git("stash", "-q")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f2.txt", "worker's\n")
    worker.git("stash", "-q")
    worker.write("new.txt", "new\n")
    frozen(world)
    notes = [note["message"] for note in world.manifest("r1", "w1")["diagnostics"] if note["code"] == "stash_entries"]
    assert len(notes) == 1 and notes[0].startswith("1 stash entry of this branch")
    assert world.promote("r1").code == 0
    assert len(repo.git("stash", "list").splitlines()) == 2


def test_no_stash_of_somebody_else_is_blamed_on_the_worker(world: World, repo: Repo) -> None:
    """Case 06: attribution goes by the branch in the entry."""
    repo.write("f1.txt", "operator's\n")
    repo.git("stash", "-q")
    world.lease("r1", "w1")
    frozen(world)
    assert "stash_entries" not in diagnostics(world)


def test_changes_of_the_shared_configuration_and_hooks_are_diagnostics(world: World, repo: Repo) -> None:
    """Case 36: config and hooks are compared with their hashes at freeze."""
    worker = world.lease("r1", "w1", "w2")["w1"]
    assert world.freeze("r1", "w2").code == 0
    assert world.lease_file("r1", "w2")["diagnostics"] == []
    worker.git("config", "user.name", "Somebody Else")
    hook = repo.path / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    os.chmod(hook, 0o755)
    worker.write("new.txt", "new\n")
    frozen(world)
    assert {"shared_config_changed", "shared_hooks_changed"} <= diagnostics(world)
    assert world.promote("r1", "w1").code == 0
    assert repo.git("log", "-1", "--format=%an %cn", "work") == "Operator Operator"


def test_a_graft_does_not_hide_what_was_merged_in(world: World, repo: Repo) -> None:
    """The parents that count are the commits' own, not those that a file of the shared directory gives them."""
    worker = world.lease("r1", "w1")["w1"]
    merges_another_branch(world, repo, worker)
    merged, base = worker.head(), repo.head()
    repo.write(".git/info/grafts", f"{merged} {base}\n")
    assert world.freeze("r1", "w1").code == 0
    repo.git("update-ref", "-d", "refs/heads/theirs")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "worktree_unmerged"), answer
    assert repo.head("work") == base


def test_the_commits_of_a_discarded_worker_do_not_land_through_another(world: World, repo: Repo) -> None:
    """What a worker took over from another is not its own, also when that one and its branch have gone."""
    workers = world.lease("r1", "w0", "w1")
    workers["w0"].commit("theirs", **{"theirs.txt": "theirs\n"})
    workers["w1"].git("merge", "-q", "--ff-only", "lionagi/r1/w0")
    workers["w1"].commit("own", **{"own.txt": "own\n"})
    assert world.freeze("r1", "w0", "--failed").code == 0
    assert world.promote("r1", "w0").json["records"][0]["status"] == "discarded"
    assert world.freeze("r1", "w1").code == 0
    base = repo.head("work")
    answer = world.promote("r1", "w1")
    assert (answer.code, answer.error) == (4, "worktree_unmerged"), answer
    assert repo.head("work") == base


@pytest.mark.parametrize("kind", ["fifo", "sparse"])
@pytest.mark.parametrize("name", ["admin/logs/HEAD", "admin/index", "common/hooks/big", "artifacts/big"])
def test_nothing_that_a_worker_leaves_is_waited_for_or_read_without_end(
    world: World, repo: Repo, name: str, kind: str
) -> None:
    """Design 7, freeze: a FIFO or a sparse file of terabytes in the place of a file is named, and the freeze ends."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    file = world.lease_file("r1", "w1")
    tops = {
        "admin": Path(file["identity"]["admin_dir"]),
        "common": repo.path / ".git",
        "artifacts": Path(file["lease"]["artifact_path"]),
    }
    top, _, rest = name.partition("/")
    path = tops[top] / rest
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 38)
    answer = world.lionwt("freeze", "r1", "w1", "--json", "--succeeded", wrapper=("timeout", "-s", "KILL", "20"))
    if name == "admin/index":
        assert answer.error == "patch_missing" and "the worker's index cannot be read" in answer.out
        return
    assert answer.code == 0, answer
    manifest = world.manifest("r1", "w1")
    if name == "admin/logs/HEAD":
        assert "reflog_unreadable" in [note["code"] for note in manifest["diagnostics"]]
    if top == "artifacts":
        wanted = "not a regular file" if kind == "fifo" else "too large to hash"
        assert wanted in json.dumps(manifest)


@pytest.mark.parametrize("name", ["locked", "exclude"])
def test_a_fifo_in_the_place_of_a_small_file_is_not_waited_for(world: World, repo: Repo, name: str) -> None:
    """Design 7: what lionwt asks of a registration or the exclude file it reads in bounded time."""
    world.lease("r1", "w1")
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    path = admin / "locked" if name == "locked" else repo.path / ".git/info/exclude"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    words = ("freeze", "r1", "w1", "--succeeded") if name == "locked" else ("lease", "r1", "-w", "w2")
    answer = world.lionwt(*words, "--json", wrapper=("timeout", "-s", "KILL", "20"))
    assert answer.code > 0 and answer.error == ("worktree_moved" if name == "locked" else "system"), answer


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("admin/commondir", ("freeze", "r1", "w1", "--succeeded")),
        ("common/packed-refs", ("freeze", "r1", "w1", "--succeeded")),
        ("common/shallow", ("promote", "r1", "w2")),
        ("common/objects/info/alternates", ("promote", "r1", "w2")),
        ("common/refs/heads/pipe", ("lease", "r1", "-w", "w3")),
        ("admin/gitdir", ("promote", "r1", "w2")),
    ],
)
def test_a_fifo_that_git_itself_opens_is_named_and_not_waited_for(
    world: World, repo: Repo, place: str, words: tuple[str, ...]
) -> None:
    """Design 10, invariant 24: every wait is bounded, and the answer names what to remove."""
    world.lease("r1", "w1", "w2")["w2"].write("new.txt", "new\n")
    world.freeze_now("r1", "w2")
    top, _, rest = place.partition("/")
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    path = (admin if top == "admin" else repo.path / ".git") / rest
    kept = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    before = world.state_bytes("r1")
    answer = world.lionwt(*words, "--json", wrapper=("timeout", "-s", "KILL", "50"))
    assert (answer.code, answer.error) == (8, "git_timeout"), answer
    assert str(path) in answer.json["error"]["message"] and f"rm {path}" in answer.json["error"]["hint"]
    assert world.state_bytes("r1").keys() == before.keys()
    path.unlink()
    if kept is not None:
        path.write_bytes(kept)
    assert world.lionwt(*words, "--json").code == 0
