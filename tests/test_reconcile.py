"""``reconcile``, ``reap`` and ``status``: the rows of design section 8, on real crashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Answer, Repo, World, wait_until


def reconcile(world: World, *arguments: str) -> Answer:
    return world.lionwt("reconcile", "r1", "--json", "--takeover", *arguments)


def files_of(world: World) -> dict[str, bytes]:
    """Every byte of the run's state that a second reconcile must not change."""
    return {
        str(path): path.read_bytes()
        for path in sorted(world.state("r1").rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def assert_idempotent(world: World, first: Answer) -> None:
    """Design section 10, invariant 19: reconcile twice is reconcile once."""
    before = files_of(world)
    again = reconcile(world)
    assert files_of(world) == before
    assert again.code == first.code, again
    assert again.json["records"] == first.json["records"]
    assert again.json["steps"] == []


def status_of(answer: Answer, worker: str) -> str:
    found = [record for record in answer.json["records"] if record["lease"]["worker_id"] == worker]
    assert len(found) == 1, answer
    return str(found[0]["status"])


@pytest.mark.parametrize("point", ["lease.intended", "lease.registered", "lease.populated", "lease.recorded"])
def test_an_allocation_that_was_killed_is_undone_or_ended(world: World, repo: Repo, point: str) -> None:
    """Design section 8: intent to allocate → what carries its nonce is undone."""
    world.lease("r1", "w0")
    killed = world.lionwt(
        "lease", "r1", "-w", "w1", "-w", "w2", "--owner-pid", "none", env={"LIONWT_FAULT": f"{point}:kill"}
    )
    assert killed.code == -9
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "discarded"
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    assert repo.git("worktree", "list", "--porcelain").count("worktree ") == 1
    assert_idempotent(world, answer)


@pytest.mark.parametrize(
    "point",
    [
        "promote.index_locked",
        "promote.intended",
        "promote.moved",
        "promote.updated",
        "promote.index_renamed",
        "promote.landed",
    ],
)
def test_a_landing_that_was_killed_is_finished_once_and_the_operators_edits_survive(
    world: World, repo: Repo, point: str
) -> None:
    """Design section 8: finished forward or done again, never repeated, never undone."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", "changed by the worker\n")
    worker.write("new/file.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    repo.write("f2.txt", "edited by the operator\n")
    repo.write("f3.txt", "staged by the operator\n")
    repo.git("add", "f3.txt")
    repo.write("loose.txt", "untracked\n")
    assert world.lionwt("promote", "r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "promoted"
    assert repo.git("rev-list", "--merges", "--count", "work") == "1"
    assert repo.head() == answer.json["records"][0]["promoted_commit"]
    assert sorted(repo.status().splitlines()) == [" M f2.txt", "?? loose.txt", "M  f3.txt"]
    assert (repo.path / "f1.txt").read_text() == "changed by the worker\n"
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


def test_a_landing_that_was_undone_is_not_done_again_where_no_reflog_is_kept(world: World, repo: Repo) -> None:
    """core.logAllRefUpdates=false: the move makes the reflog that tells an undone landing from none."""
    repo.git("config", "core.logAllRefUpdates", "false")
    shutil.rmtree(repo.path / ".git" / "logs", ignore_errors=True)
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    repo.git("update-ref", "refs/heads/work", base)
    first = reconcile(world)
    assert (first.code, status_of(first, "w1")) == (4, "needs_resolution"), first
    assert repo.head("work") == base
    assert_idempotent(world, first)


@pytest.mark.parametrize("how", ["recreated", "moved back", "log deleted", "log begun anew"])
@pytest.mark.parametrize("logs", ["false", "true"])
def test_a_landing_is_never_done_twice_whatever_became_of_the_reflog(
    world: World, repo: Repo, logs: str, how: str
) -> None:
    """Design section 8: target = expected, but it has held the merge → needs_resolution, never landed again."""
    repo.git("config", "core.logAllRefUpdates", logs)
    log = repo.path / ".git" / "logs" / "refs" / "heads" / "work"
    if logs == "false":
        log.unlink()
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    assert repo.head("work") == repo.head("refs/lionwt/r1/w1/landed") != base
    if how in ("recreated", "log begun anew"):
        repo.git("update-ref", "-d", "refs/heads/work")
    repo.git("update-ref", *(["--create-reflog"] if how == "log begun anew" else []), "refs/heads/work", base)
    if how == "log deleted":
        log.unlink()
    first = reconcile(world)
    assert (first.code, status_of(first, "w1")) == (4, "needs_resolution"), first
    assert first.json["error"]["code"] == "target_moved"
    assert repo.head("work") == base
    assert repo.git("for-each-ref", "refs/lionwt", "refs/heads/lionagi") == ""
    assert not (repo.path / ".git" / "index.lock").exists()
    assert_idempotent(world, first)


def test_a_landing_whose_ref_could_not_be_moved_leaves_no_sign_of_it(world: World, repo: Repo) -> None:
    """The sign and the move are one transaction: refused together, and done together the next time."""
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    lock = repo.path / ".git" / "refs" / "heads" / "work.lock"
    lock.touch()
    refused = world.promote("r1")
    assert (refused.code, refused.error) == (8, "git_failed"), refused
    assert repo.git("for-each-ref", "--format=%(refname)", "refs/lionwt").split() == [
        "refs/lionwt/r1/w1/candidate",
        "refs/lionwt/r1/w1/head",
    ]
    assert repo.head("work") == base
    lock.unlink()
    done = world.promote("r1")
    assert done.code == 0, done
    assert len(repo.merges()) == 1
    assert repo.git("for-each-ref", "refs/lionwt") == ""


@pytest.mark.parametrize("dies", ["git", "git and lionwt"])
def test_a_landing_broken_off_between_its_sign_and_the_move_is_never_landed_twice(
    world: World, repo: Repo, tmp_path: Path, dies: str
) -> None:
    """The sign comes first: its absence proves that nothing moved. Alone it proves nothing, and a person looks."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    lock = repo.path / ".git" / "refs" / "heads" / "work.lock"
    tools = tmp_path / "tools"
    tools.mkdir()
    real = shutil.which("git")
    (tools / "git").write_text(
        "#!/bin/sh\n"
        'case "$*" in *update-ref*create-reflog*)\n'
        f"  {'kill -9 $PPID' if dies == 'git and lionwt' else ':'}\n"
        f'  exec strace -o /dev/null -P {lock} -e trace=rename -e inject=rename:signal=KILL {real} "$@";;\n'
        f'esac\nexec {real} "$@"\n'
    )
    (tools / "git").chmod(0o755)
    broken = world.lionwt("promote", "r1", "--json", env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert broken.code == (8 if dies == "git" else -9), broken
    lock_is_left = wait_until(lock.exists)
    assert lock_is_left and repo.head("work") == base
    signs = repo.git("for-each-ref", "refs/lionwt/r1/w1/landed")
    if dies == "git":  # lionwt has seen that nothing moved
        assert signs == ""
        for left in (lock, repo.path / ".git" / "HEAD.lock"):
            left.unlink(missing_ok=True)
        assert world.promote("r1").code == 0
        assert len(repo.merges()) == 1
        return
    first = reconcile(world)
    assert (first.code, status_of(first, "w1")) == (4, "needs_resolution"), first
    assert repo.head("work") == base
    assert_idempotent(world, first)


@pytest.mark.parametrize("has_log", [True, False])
def test_a_landing_that_never_moved_the_target_is_done_unless_the_reflog_has_gone(
    world: World, repo: Repo, has_log: bool
) -> None:
    """Without a reflog before, none now says that nothing moved; one that has gone says nothing."""
    logs = repo.path / ".git" / "logs" / "refs" / "heads" / "work"
    if not has_log:
        repo.git("config", "core.logAllRefUpdates", "false")
        logs.unlink()
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.intended:kill"}).code == -9
    logs.unlink(missing_ok=True)
    answer = reconcile(world)
    if has_log:
        assert (answer.code, status_of(answer, "w1")) == (4, "needs_resolution"), answer
        assert repo.head("work") == base
    else:
        assert (answer.code, status_of(answer, "w1")) == (0, "promoted"), answer
        assert len(repo.merges()) == 1


@pytest.mark.parametrize("point", ["freeze.captured", "freeze.evidence", "freeze.anchored"])
def test_a_running_worker_is_frozen_for_diagnostics_and_ended_as_failed(world: World, repo: Repo, point: str) -> None:
    """ADR-0091 D5: a running lease has no proof that worker actions completed."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "half done\n")
    killed = world.lionwt("freeze", "r1", "w1", "--succeeded", env={"LIONWT_FAULT": f"{point}:kill"})
    assert killed.code == -9
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "discarded"
    patch = (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    assert b"half done" in patch
    assert repo.head("work") == answer.json["records"][0]["lease"]["base_sha"]
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


@pytest.mark.parametrize(
    "point", ["teardown.intended", "teardown.trashed", "teardown.retired", "teardown.branch_deleted"]
)
def test_a_teardown_that_was_killed_is_finished(world: World, repo: Repo, point: str) -> None:
    """Design section 7: repeating a teardown is safe."""
    worker = world.lease("r1", "w1", policy="patch_only")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.lionwt("promote", "r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "discarded"
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


def test_a_worktree_deleted_by_hand_does_not_pin_its_branch_and_its_commits_are_saved(world: World, repo: Repo) -> None:
    """Case 100: directory absent and matching registration: that entry goes, then the branch, each recorded."""
    worker = world.lease("r1", "w1")["w1"]
    tip = worker.commit("work of w1", **{"kept.txt": "kept\n"})
    shutil.rmtree(worker.path)
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "discarded"
    bundle = world.evidence("r1", "w1") / "commits.bundle"
    assert tip in repo.git("bundle", "list-heads", str(bundle))
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


def test_commits_that_only_head_remembers_are_saved_where_the_worktree_was_deleted(world: World, repo: Repo) -> None:
    """Invariant 8: a detached HEAD and its reflog go with the registration."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("switch", "-q", "--detach")
    tip = worker.commit("detached", **{"kept.txt": "kept\n"})
    shutil.rmtree(worker.path)
    assert reconcile(world).code == 0
    bundle = world.evidence("r1", "w1") / "commits.bundle"
    assert tip in repo.git("bundle", "list-heads", str(bundle))
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize(
    "where", ["reset", "branch log", "autostash", "worktree ref", "staged", "split index", "unmerged"]
)
def test_whatever_the_registration_remembers_is_saved_before_it_goes(world: World, repo: Repo, where: str) -> None:
    """Invariant 8: reflogs, unfinished operations and the index go with the lease, and hold work."""
    worker = world.lease("r1", "w1")["w1"]
    base = worker.head()
    content = "only here\n"
    if where in ("staged", "split index"):
        if where == "split index":
            worker.git("update-index", "--split-index")
        worker.write("kept.txt", content)
        worker.git("add", "kept.txt")
    elif where == "unmerged":
        worker.git("switch", "-q", "-c", "other")
        worker.commit("theirs", **{"f1.txt": "theirs\n"})
        worker.git("switch", "-q", "-")
        worker.commit("ours", **{"f1.txt": "ours\n"})
        worker.git("merge", "-q", "other", check=False)
        worker.write("kept.txt", content)
        worker.git("add", "kept.txt")
        assert "UU f1.txt" in worker.status()
    elif where == "autostash":
        worker.commit("one", **{"f1.txt": "one\n"})
        worker.git("branch", "other", base)
        repo.git("update-ref", "refs/heads/other", repo.git("commit-tree", "-p", base, "-m", "o", f"{base}^{{tree}}"))
        worker.write("f2.txt", content)
        worker.git("rebase", "-q", "--autostash", "--exec", "false", "other", check=False)
        assert Path(worker.git("rev-parse", "--git-path", "rebase-merge/autostash")).is_file()
    else:
        worker.commit("work", **{"kept.txt": content})
        if where == "worktree ref":
            worker.git("update-ref", "refs/worktree/mine", "HEAD")
        worker.git("reset", "-q", "--hard", base)
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    if where == "worktree ref":
        shutil.rmtree(admin / "logs")
        (repo.path / ".git" / "logs" / "refs" / "heads" / "lionagi" / "r1" / "w1").unlink()
    shutil.rmtree(worker.path)
    if where == "branch log":
        shutil.rmtree(admin)
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert world.leftovers("r1", repo) == []
    clean = Repo(repo.path, repo.env)
    clean.git("clone", "-q", "--bare", "--no-local", repo.path, world.root / "clean")
    clean.git(
        "fetch",
        "-q",
        world.evidence("r1", "w1") / "commits.bundle",
        "refs/heads/*:refs/saved/*",
        cwd=world.root / "clean",
    )
    heads = clean.git("for-each-ref", "--format=%(objectname)", "refs/saved", cwd=world.root / "clean").split()
    name = {"autostash": "f2.txt", "unmerged": "merged/kept.txt"}.get(where, "kept.txt")
    found = [clean.git("show", f"{oid}:{name}", check=False, cwd=world.root / "clean") for oid in heads]
    assert content.strip() in found
    if where == "unmerged":  # each side of what was not resolved, and the base
        oid = heads[found.index(content.strip())]
        sides = [clean.git("show", f"{oid}:{side}/f1.txt", cwd=world.root / "clean") for side in ("ours", "theirs")]
        assert sides == ["ours", "theirs"] and clean.git("show", f"{oid}:base/f1.txt", cwd=world.root / "clean")
    assert_idempotent(world, answer)


def test_what_was_staged_and_cannot_be_saved_any_more_is_said(world: World, repo: Repo) -> None:
    """Invariant 8: an index whose objects are gone holds nothing that could be saved, and that is told."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("kept.txt", "only here\n")
    worker.git("add", "kept.txt")
    oid = worker.git("rev-parse", ":kept.txt")
    (repo.path / ".git/objects" / oid[:2] / oid[2:]).unlink()
    shutil.rmtree(worker.path)
    answer = reconcile(world)
    assert (answer.code, status_of(answer, "w1")) == (0, "discarded"), answer
    notes = {note["code"]: note["message"] for note in world.lease_file("r1", "w1")["diagnostics"]}
    assert oid in notes["staged_lost"], notes
    assert_idempotent(world, answer)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_worktree_that_is_gone_is_ended_once_however_often_reconcile_dies(
    world: World, repo: Repo, frozen: bool
) -> None:
    """Invariants 8, 19 and 20: killed at each step, nothing is made twice, what was frozen stays, nothing is lost."""
    worker = world.lease("r1", "w1")["w1"]
    first = worker.commit("first", **{"kept.txt": "kept\n"})
    if frozen:
        world.freeze_now("r1", "w1")
    names = ("candidate.patch", "manifest.json", "commits.bundle") if frozen else ()
    evidence = world.evidence("r1", "w1")
    before = {name: (evidence / name).read_bytes() for name in names}
    tip = worker.commit("second", **{"more.txt": "more\n"})
    shutil.rmtree(worker.path)
    for point in (
        "gone.saved",
        "gone.saved",
        "teardown.intended",
        "teardown.trashed",
        "teardown.set_aside",
        "teardown.retired",
        "teardown.branch_deleted",
    ):
        died = world.lionwt("reconcile", "r1", "--takeover", env={"LIONWT_FAULT": f"{point}:kill"})
        assert died.code == -9, (point, died)
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert status_of(answer, "w1") == "discarded"
    assert {name: (evidence / name).read_bytes() for name in names} == before
    bundles = sorted(path.name for path in evidence.glob("*.bundle"))
    assert bundles == (["commits.bundle", "late-1.bundle"] if frozen else ["commits.bundle"])
    listed = repo.git("bundle", "list-heads", str(evidence / bundles[-1]))
    assert tip in listed and first in listed
    notes = [note["ref"] for note in world.lease_file("r1", "w1")["diagnostics"] if note["code"] == "commits_saved"]
    assert notes == [f".lionwt/w1/{bundles[-1]}"]
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


@pytest.mark.parametrize("how", ["deleted", "emptied", "whole"])
def test_commits_whose_frozen_bundle_is_not_whole_are_saved_anew(world: World, repo: Repo, how: str) -> None:
    """Invariant 8: that a freeze has bundled them counts only while the bundle holds them."""
    worker = world.lease("r1", "w1")["w1"]
    tip = worker.commit("work", **{"kept.txt": "kept\n"})
    world.freeze_now("r1", "w1")
    bundle = world.evidence("r1", "w1") / "commits.bundle"
    if how == "deleted":
        bundle.unlink()
    elif how == "emptied":  # the names are all there, the objects are not
        head, _, _ = bundle.read_bytes().partition(b"\n\n")
        pack = b"PACK\0\0\0\2\0\0\0\0"
        bundle.write_bytes(head + b"\n\n" + pack + hashlib.sha1(pack).digest())
    shutil.rmtree(worker.path)
    assert reconcile(world).code == 0
    anew = sorted(path.name for path in bundle.parent.glob("*.bundle") if path != bundle or how == "deleted")
    assert anew == {"deleted": ["commits.bundle"], "emptied": ["late-1.bundle"], "whole": []}[how]
    if anew:
        assert tip in repo.git("bundle", "list-heads", str(bundle.parent / anew[0]))


def test_a_bundle_is_recognised_whatever_the_repository_s_path_holds(world: World) -> None:
    """Variables of git's that list paths are split at colons, and a quote begins one that is quoted."""
    repo = world.repo('"a:b\\c\n')
    worker = world.lease("r1", "w1", cwd=repo.path)["w1"]
    worker.commit("work", **{"kept.txt": "kept\n"})
    world.freeze_now("r1", "w1")
    shutil.rmtree(worker.path)
    assert reconcile(world).code == 0
    assert [path.name for path in world.evidence("r1", "w1").glob("*.bundle")] == ["commits.bundle"]


def test_a_frozen_worker_whose_worktree_was_deleted_is_not_called_interrupted(world: World, repo: Repo) -> None:
    """Design section 8: what is recorded is what happened."""
    worker = world.frozen("r1", {"w1": {"new.txt": "new\n"}})["w1"]
    shutil.rmtree(worker.path)
    reconcile(world)
    assert "lost its worktree" in world.lease_file("r1", "w1")["outcome"]["message"]


def test_what_was_removed_whole_by_somebody_else_is_recorded_as_discarded(world: World, repo: Repo) -> None:
    """ADR-0091 D5: unless both the branch and worktree are provably already removed."""
    worker = world.lease("r1", "w1")["w1"]
    repo.git("worktree", "remove", "-f", "-f", str(worker.path))
    repo.git("branch", "-q", "-D", "lionagi/r1/w1")
    answer = reconcile(world)
    assert answer.code == 0, answer
    record = world.record("r1", "w1")
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("discarded", True, True)
    assert_idempotent(world, answer)


def test_a_frozen_candidate_is_completed_under_the_pinned_policy_in_order(world: World, repo: Repo) -> None:
    """ADR-0091 D5: a frozen candidate can resume completion when patch and manifest still match."""
    first = world.lease("r1", "a")["a"]
    second = world.lease("r1", "b", args=("--after", "a"))["b"]
    first.write("a.txt", "a\n")
    second.write("b.txt", "b\n")
    for worker in ("b", "a"):
        assert world.freeze("r1", worker).code == 0
    answer = reconcile(world)
    assert answer.code == 0, answer
    subjects = repo.git("log", "--merges", "--reverse", "--format=%s", "work").splitlines()
    assert subjects == ["Merge worker a of run r1", "Merge worker b of run r1"]


def test_a_frozen_candidate_whose_patch_was_changed_needs_a_person(world: World, repo: Repo) -> None:
    """Design section 8: frozen, patch or manifest changed or gone → needs_resolution."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    (world.evidence("r1", "w1") / "candidate.patch").write_bytes(b"something else")
    head = repo.head("work")
    answer = reconcile(world)
    assert answer.code == 4
    assert answer.error == "patch_changed"
    assert status_of(answer, "w1") == "needs_resolution"
    assert repo.head("work") == head
    assert_idempotent(world, answer)


def test_orphans_and_torn_files_are_findings_and_are_not_touched(world: World, repo: Repo) -> None:
    """ADR-0091 D5: an unrecorded matching worktree is ambiguous; it is not adopted."""
    worker = world.lease("r1", "w1")["w1"]
    world.lease("r1", "w2")
    torn = world.state("r1") / "workspaces" / "w1.json"
    torn.write_bytes(b'{"schema": "lionwt/lease@1", "ser')
    os.unlink(world.state("r1") / "workspaces" / "w2.json")
    answer = reconcile(world)
    assert answer.code == 7, answer
    assert {(finding["code"], finding["worker_id"]) for finding in answer.json["findings"]} == {
        ("state_unreadable", "w1"),
        ("orphan", "w2"),
    }
    assert torn.read_bytes().endswith(b'"ser')
    assert worker.path.exists()
    assert repo.head("lionagi/r1/w2") == repo.head("work")
    refused = world.lionwt("lease", "r1", "-w", "w2", "--owner-pid", "none", "--json")
    assert refused.code == 3
    assert refused.error == "name_taken"


def owned_lease(world: World) -> subprocess.Popen[bytes]:
    """Lease ``w1`` for an owner of its own, which is returned alive."""
    owner = subprocess.Popen(["sleep", "300"])
    answer = world.lionwt(
        *("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", str(owner.pid))
    )
    assert answer.code == 0, answer
    return owner


def test_reconcile_is_busy_while_the_owner_lives_and_lease_is_refused_after_it_died(world: World, repo: Repo) -> None:
    """Design section 8: busy while the owner is alive; section 7: lease answers run_interrupted until reconciled."""
    with owned_lease(world) as owner:
        try:
            busy = world.lionwt("reconcile", "r1", "--json")
            assert (busy.code, busy.error) == (6, "owner_alive")
            assert world.lionwt("lease", "r1", "-w", "w2", "--owner-pid", str(owner.pid)).code == 0
        finally:
            owner.kill()
    interrupted = world.lionwt("lease", "r1", "-w", "w3", "--owner-pid", "none", "--json")
    assert (interrupted.code, interrupted.error) == (6, "run_interrupted")
    assert interrupted.json["next"] == ["lionwt reconcile r1"]
    assert world.lionwt("reconcile", "r1", "--json").code == 0
    assert world.lionwt("lease", "r1", "-w", "w3", "--owner-pid", "none").code == 0


def test_reconcile_is_busy_while_a_worker_lives_and_a_takeover_stops_it(world: World, repo: Repo) -> None:
    """Design section 8: any process that carries a worker's ids makes it busy, unless --takeover."""
    with owned_lease(world) as owner:
        owner.kill()
    assert world.lionwt("start", "r1", "w1").code == 0
    ids: dict[str, str | None] = {"LIONAGI_RUN_ID": "r1", "LIONAGI_WORKER_ID": "w1"}
    with subprocess.Popen(["sleep", "300"], env=world.environment(ids)) as worker:
        try:
            busy = world.lionwt("reconcile", "r1", "--json")
            assert (busy.code, busy.error) == (6, "worker_alive")
            assert reconcile(world).code == 0
            assert worker.wait(20) == -15
        finally:
            worker.kill()


def test_without_an_owner_only_a_takeover_reconciles(world: World, repo: Repo) -> None:
    """Design section 7: none declares no owner, and then only --takeover may reconcile what is not terminal."""
    world.lease("r1", "w1")
    refused = world.lionwt("reconcile", "r1", "--json")
    assert (refused.code, refused.error) == (6, "owner_alive")
    assert "--takeover" in refused.json["error"]["hint"]
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"


def test_a_dry_run_says_what_would_be_done_and_why_and_changes_nothing(world: World, repo: Repo) -> None:
    """``reconcile --dry-run``."""
    world.lease("r1", "w1")
    before, seen = files_of(world), repo.snapshot()
    answer = reconcile(world, "--dry-run")
    assert answer.code == 0, answer
    assert [step["worker_id"] for step in answer.json["steps"]] == ["w1"]
    assert all(step["found"] and step["action"] for step in answer.json["steps"])
    assert (files_of(world), repo.snapshot()) == (before, seen)


def conflict_retained(world: World, repo: Repo, duration: str) -> Repo:
    worker = world.lease("r1", "w1", args=("--retain-for", duration))["w1"]
    worker.write("f1.txt", "theirs\n")
    assert world.freeze("r1", "w1").code == 0
    repo.commit("moves the target", **{"f1.txt": "mine\n"})
    assert world.promote("r1").code == 4
    return worker


def set_back(world: World, **changes: float) -> None:
    """Edit the times of a stored record, as a clock would have written them."""
    path = world.state("r1") / "workspaces" / "w1.json"
    loaded: dict[str, Any] = json.loads(path.read_bytes())
    for key, value in changes.items():
        for holder in (loaded["record"], loaded["policy"], loaded["lease"], loaded["record"]["lease"]):
            if key in holder:
                holder[key] = value
    path.write_text(json.dumps(loaded))


def test_what_is_done_is_told_in_the_past_and_what_would_be_in_the_future(world: World, repo: Repo) -> None:
    """Invariant 15, in words: done is said of what was done, and not of what is still pending."""
    waits, ends = world.lease("r1", "waits", "ends").values()
    waits.write("f1.txt", "new\n")
    world.freeze_now("r1", "waits")
    repo.write("f1.txt", "mine\n")
    dry = world.lionwt("reconcile", "r1", "--takeover", "--dry-run").out.splitlines()
    assert dry == [
        "ends: nothing proves that it finished; would freeze it for diagnostics, end it as failed",
        "waits: it is frozen; would complete it under merge_validated",
    ]
    out = world.lionwt("reconcile", "r1", "--takeover").out.splitlines()
    assert out[:2] == [
        "ends: nothing proves that it finished; froze it for diagnostics, ended it as failed",
        "waits: it is frozen",
    ]
    assert "1 file of yours is in the way" in "\n".join(out)
    assert not ends.path.exists() and waits.path.exists()


def test_a_worker_cancelled_before_it_started_is_said_to_have_ended(world: World, repo: Repo) -> None:
    """Section 5: a short human answer, not the name of a state."""
    world.lease("r1", "w1", start=False)
    answer = world.lionwt("freeze", "r1", "w1", "--cancelled")
    assert answer.code == 0, answer
    assert answer.out.startswith("w1: discarded, ended before it started"), answer


def test_a_mistyped_worker_or_run_is_answered_with_what_there_is(world: World, repo: Repo) -> None:
    """House style: what to type next, for the person who mistyped at night."""
    world.lease("nightly", "parser", "printer")
    worker = world.lionwt("start", "nightly", "parsr", "--json")
    assert worker.error == "lease_unknown"
    assert "did you mean 'parser'? its workers: parser, printer; " in worker.json["error"]["hint"]
    assert worker.json["next"] == ["lionwt status nightly"]
    run = world.lionwt("status", "nightl", "--json")
    assert run.error == "run_unknown" and "did you mean 'nightly'?" in run.json["error"]["hint"]
    world.lease("nightly", *(f"w{n}" for n in range(8)), start=False)
    hint = world.lionwt("start", "nightly", "zzz", "--json").json["error"]["hint"]
    assert "did you mean" not in hint and "parser" not in hint


def test_reap_tears_down_what_has_expired_and_nothing_else(world: World, repo: Repo) -> None:
    """Design section 8: retained, expired → torn down; the record keeps its outcome."""
    worker = conflict_retained(world, repo, "2h")
    assert world.record("r1", "w1")["status"] == "retained"
    assert world.lionwt("reap", "r1", "--json").json["records"] == []
    assert worker.path.exists()
    set_back(world, retention_until=time.time() - 1)
    dry = world.lionwt("reap", "--all", "--dry-run", "--json")
    assert [step["worker_id"] for step in dry.json["steps"]] == ["w1"]
    assert worker.path.exists()
    answer = world.lionwt("reap", "--all", "--json")
    assert answer.code == 0, answer
    record = world.record("r1", "w1")
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("needs_resolution", True, True)
    assert world.leftovers("r1", repo) == []


def test_reap_is_busy_while_a_process_stands_in_what_has_expired(world: World, repo: Repo) -> None:
    """Invariants 8 and 26: what it writes would go with its directory; a repetition finishes it."""
    worker = conflict_retained(world, repo, "2h")
    set_back(world, retention_until=time.time() - 1)
    with subprocess.Popen(["sleep", "60"], cwd=worker.path, env=world.environment()) as shell:
        try:
            busy = world.lionwt("reap", "r1", "--json")
            assert (busy.code, busy.error) == (6, "worker_alive"), busy
            assert worker.path.exists() and shell.poll() is None
        finally:
            shell.kill()
    assert world.lionwt("reap", "r1", "--json").code == 0
    assert world.record("r1", "w1")["status"] == "needs_resolution" and world.leftovers("r1", repo) == []


def test_a_clock_that_runs_backwards_deletes_nothing(world: World, repo: Repo) -> None:
    """Design section 8: retained, clock before created_at → refused."""
    worker = conflict_retained(world, repo, "2h")
    set_back(world, retention_until=time.time() - 10, created_at=time.time() + 3600)
    for answer in (world.lionwt("reap", "r1", "--json"), reconcile(world)):
        assert answer.code == 7, answer
        assert "clock_wrong" in {finding["code"] for finding in answer.json["findings"]}
    assert worker.path.exists()


def test_lease_tears_down_what_has_expired_before_it_allocates(world: World, repo: Repo) -> None:
    """ADR-0091 D5: expired retained worktrees are torn down before new allocation; nothing else of the run is."""
    worker = conflict_retained(world, repo, "2h")
    again = ("lease", "r1", "--json", "--owner-pid", "none", "-w")
    assert world.lionwt(*again, "w2").code == 0
    assert worker.path.exists()  # its time has not come
    set_back(world, retention_until=time.time() - 1)
    assert world.lionwt(*again, "w1").error == "id_reused"
    assert worker.path.exists()  # a refused call tears nothing down
    with subprocess.Popen(["sleep", "60"], cwd=worker.path, env=world.environment()) as shell:
        try:
            busy = world.lionwt(*again, "w3")
            assert (busy.code, busy.error) == (6, "worker_alive"), busy
            assert "nothing was made" in busy.json["error"]["message"]
        finally:
            shell.kill()
    assert not (world.state("r1") / "workspaces" / "w3.json").exists()
    answer = world.lionwt(*again, "w3")
    assert answer.code == 0, answer
    record = world.record("r1", "w1")
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("needs_resolution", True, True)
    assert not worker.path.exists()
    assert repo.git("for-each-ref", "--format=%(refname)", "refs/heads/lionagi", "refs/lionwt").split() == [
        "refs/heads/lionagi/r1/w2",
        "refs/heads/lionagi/r1/w3",
    ]


def test_lease_is_refused_where_the_clock_cannot_say_what_has_expired(world: World, repo: Repo) -> None:
    """Design section 8: retained, clock before created_at → refused: the clock is wrong."""
    worker = conflict_retained(world, repo, "2h")
    set_back(world, retention_until=time.time() - 10, created_at=time.time() + 3600)
    answer = world.lionwt("lease", "r1", "--json", "--owner-pid", "none", "-w", "w2")
    assert (answer.code, answer.error) == (7, "clock_wrong"), answer
    assert worker.path.exists()


def test_status_says_what_blocks_each_lease_and_what_to_type(world: World, repo: Repo) -> None:
    """Design section 5: ``status`` shows every lease: state, age, what blocks it, what to type next."""
    world.lease("r1", "a", start=False)
    world.lease("r1", "b")
    world.lease("r1", "c", args=("--after", "b"))
    assert world.freeze("r1", "c").code == 0
    rows = {row["worker_id"]: row for row in world.lionwt("status", "r1", "--json").json["leases"]}
    assert [rows[name]["state"] for name in "abc"] == ["allocated", "running", "frozen"]
    assert rows["a"]["next"] == "lionwt start r1 a"
    assert rows["b"]["next"] == "lionwt freeze r1 b --succeeded"
    assert rows["c"]["blocked_by"] == "comes after b"
    text = world.lionwt("status").out
    assert all(word in text for word in ("allocated", "running", "frozen", "→ lionwt start r1 a"))


def gits_of_reconcile(world: World) -> tuple[Answer, int]:
    """What reconcile answers, and how many git processes it started."""
    counted = world.root / "git.log"
    wrapper = world.root / "bin" / "git"
    wrapper.parent.mkdir(exist_ok=True)
    wrapper.write_text(f'#!/bin/sh\necho . >>{counted}\nexec {shutil.which("git")} "$@"\n')
    wrapper.chmod(0o755)
    counted.write_text("")
    answer = world.lionwt("reconcile", "r1", "--json", env={"PATH": f"{wrapper.parent}:{world.env['PATH']}"})
    return answer, len(counted.read_text().splitlines())


def test_the_number_of_git_processes_does_not_grow_with_the_orphans(world: World, repo: Repo) -> None:
    """Design section 8: registrations are files, which are read; no git is asked about each."""
    counts = []
    for workers in (["a"], ["b", "c", "d", "e", "f"]):
        for worker in world.lease("r1", *workers).values():
            shutil.rmtree(worker.path)
        for worker_id in workers:
            os.unlink(world.state("r1") / "workspaces" / f"{worker_id}.json")
        answer, count = gits_of_reconcile(world)
        assert answer.code == 4, answer
        counts.append((count, len(answer.json["findings"])))
    assert [found for _, found in counts] == [1, 6]
    assert counts[0][0] == counts[1][0] <= 2


def test_the_number_of_git_processes_does_not_grow_with_the_leases(world: World, repo: Repo) -> None:
    """Design section 8: decides with a number of git processes that does not grow with the number of leases."""
    counts = []
    for workers in (["a"], ["b", "c", "d", "e", "f"]):
        world.lease("r1", *workers, policy="patch_only")
        for worker in workers:
            assert world.freeze("r1", worker, "--failed").code == 0
        assert world.promote("r1").code == 0
        answer, count = gits_of_reconcile(world)
        assert answer.code == 0, answer
        counts.append(count)
    assert counts[0] == counts[1] <= 2


@pytest.mark.parametrize("write", [1, 2, 3, 4, 5])
def test_what_a_killed_write_left_is_swept(world: World, repo: Repo, write: int) -> None:
    """Nothing is left behind: temporary files go with the next reconcile."""
    world.lease("r1", "w0")
    for arguments in (("lease", "r1", "-w", "w1", "--owner-pid", "none"), ("freeze", "r1", "w0", "--failed")):
        world.lionwt(*arguments, env={"LIONWT_FAULT": f"store.written:kill:{write}"})
    (world.state("r1") / f".workspaces.json.{'0' * 16}.tmp").write_text("torn")
    reconcile(world)
    left = [*world.state("r1").rglob("*.tmp"), *(repo.path / ".git" / "info").glob(".exclude.*")]
    assert left == []


def test_reconcile_and_reap_are_refused_to_a_worker(world: World, repo: Repo) -> None:
    """Design section 5: called_by_worker."""
    world.lease("r1", "w1")
    for verb in ("reconcile", "reap"):
        answer = world.lionwt(verb, "r1", "--json", env={"LIONAGI_WORKER_ID": "w1"})
        assert (answer.code, answer.error) == (3, "called_by_worker")


def test_reap_goes_on_past_a_run_whose_state_root_cannot_be_read(world: World, repo: Repo) -> None:
    """One torn ``run.json`` is a finding and stops no other run."""
    conflict_retained(world, repo, "1s")
    torn = world.lionagi_home / "runs" / "a-torn"
    torn.mkdir()
    (torn / "workspaces.json").write_text("{")
    (torn / "run.json").write_text("{")
    time.sleep(1.1)
    answer = world.lionwt("reap", "--all", "--json")
    assert answer.code != 0, answer
    assert world.record("r1", "w1")["status"] == "needs_resolution"
    assert any("a-torn" in finding["message"] for finding in answer.json["findings"])


def test_every_file_of_the_evidence_is_on_disk_before_its_name_is(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that git wrote is synced before it is moved to where the record names it."""
    from lionwt import names, session
    from lionwt.reconcile import reconcile as reconcile_now

    worker = world.lease("r1", "w1")["w1"]
    worker.commit("kept", **{"kept.txt": "kept\n"})
    shutil.rmtree(worker.path)
    synced = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setenv("LIONAGI_HOME", str(world.lionagi_home))
    reconcile_now(session.load(names.run_paths("r1", os.environ)), takeover=True)
    bundles = list(world.evidence("r1", "w1").glob("*.bundle"))
    assert len(bundles) == 1
    assert {path.stat().st_ino for path in (*bundles, bundles[0].parent)} <= synced


def test_a_registration_that_only_carries_a_copied_nonce_is_not_removed(world: World, repo: Repo) -> None:
    """Design section 8: what is undone is the lease's own for certain, otherwise it is left and named."""
    other = world.root / "other"
    repo.git("worktree", "add", "-q", "--detach", other)
    killed = world.lionwt(
        *("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none"),
        env={"LIONWT_FAULT": "lease.registered:kill"},
    )
    assert killed.code == -9
    registrations = repo.path / ".git/worktrees"
    forged = registrations / "other" / "locked"
    forged.write_bytes((registrations / "w1" / "locked").read_bytes())
    answer = reconcile(world)
    assert answer.code == 7 and str(registrations / "other") in answer.out, answer
    assert repo.git("-C", other, "status", "--porcelain") == "" and (registrations / "w1").exists()
    forged.unlink()
    assert reconcile(world).code == 0
    assert not (registrations / "w1").exists() and repo.git("-C", other, "status", "--porcelain") == ""


@pytest.mark.parametrize("point", ["teardown.recorded", "trash.emptied"])
def test_what_a_teardown_left_that_died_after_its_record_is_swept(world: World, repo: Repo, point: str) -> None:
    """Nothing is left behind: the record is on disk before the last things go."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    assert world.record("r1", "w1")["status"] == "promoted" and world.leftovers("r1", repo) != []
    answer = reconcile(world)
    assert (answer.code, answer.json["steps"]) == (0, []), answer
    assert world.leftovers("r1", repo) == []


def test_a_registration_that_an_undone_allocation_had_set_aside_is_swept(world: World, repo: Repo) -> None:
    """A crash between retiring a registration and deleting it leaves nothing for good."""
    killed = ("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none")
    assert world.lionwt(*killed, env={"LIONWT_FAULT": "lease.registered:kill"}).code == -9
    undoing = world.lionwt("reconcile", "r1", "--takeover", env={"LIONWT_FAULT": "teardown.set_aside:kill"})
    assert undoing.code == -9 and list((repo.path / ".git" / "lionwt").glob("retired.*"))
    assert reconcile(world).code == 0
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("point", ["teardown.trashed", "teardown.set_aside"])
def test_an_allocation_that_could_only_be_undone_in_part_is_undone_later(world: World, repo: Repo, point: str) -> None:
    """Design section 8: a failed teardown is tried again; what the nonce had found is found again without it."""
    world.config("filter.broken.smudge", "false")
    world.config("filter.broken.clean", "cat")
    world.config("filter.broken.required", "true")
    repo.commit("a filter", **{".gitattributes": "f3.txt filter=broken\n"})
    failed = world.lionwt(
        *("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none", "--json"),
        env={"LIONWT_FAULT": f"{point}:nospace"},
    )
    assert failed.code == 8 and world.record("r1", "w1")["status"] == "teardown_failed"
    answer = reconcile(world)
    assert (answer.code, world.record("r1", "w1")["status"]) == (0, "discarded"), answer
    assert world.leftovers("r1", repo) == []
    assert_idempotent(world, answer)


def killed_after_the_move(world: World, repo: Repo, point: str = "promote.moved") -> None:
    """A landing that died after its commit point, and whose index lock the operator took away."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n", "f2.txt": "new\n", "added.txt": "new\n"}})
    assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    (repo.path / ".git/index.lock").unlink(missing_ok=True)


def test_a_landing_that_was_taken_back_since_is_a_finding(world: World, repo: Repo) -> None:
    """Design 8, row 4: where HEAD does not hold the merge's version any more it is told and left alone."""
    killed_after_the_move(world, repo)
    repo.git("commit", "-q", "-a", "-m", "commits what the checkout shows")
    head = repo.head()
    answer = reconcile(world)
    assert (answer.code, answer.error) == (4, "landed_then_reverted"), answer
    message = answer.json["error"]["message"]
    assert all(name in message for name in ("f1.txt", "f2.txt", "added.txt"))
    assert answer.json["records"][0]["status"] == "promoted" and repo.head() == head and repo.status() == ""
    merge = answer.json["records"][0]["promoted_commit"]
    assert answer.json["next"] == [f"git -C {repo.path} log {merge}..work"]
    assert_idempotent(world, answer)


def test_a_later_change_of_the_same_file_is_no_finding(world: World, repo: Repo) -> None:
    """Design 8: only what holds again what was before the landing was taken back."""
    killed_after_the_move(world, repo, "promote.index_renamed")
    repo.commit("goes on", **{"f1.txt": "newer still\n"})
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert (repo.path / "f1.txt").read_text() == "newer still\n" and repo.status() == ""


def test_what_a_dead_landing_wrote_into_another_branch_s_checkout_is_told(world: World, repo: Repo) -> None:
    """Nothing is left behind without a word: the files stand where the operator is now."""
    killed_after_the_move(world, repo, "promote.files_written")
    repo.git("switch", "-q", "-f", "main")
    answer = reconcile(world)
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert "added.txt" in answer.json["error"]["message"] and "f1.txt" not in answer.json["error"]["message"]
    assert repo.status() == "?? added.txt"
    assert_idempotent(world, answer)


def test_reap_says_of_what_it_could_not_tear_down_that_it_is_not_gone(world: World, repo: Repo) -> None:
    """Invariant 15: done is said of what a look finds, and exit 5 says why and what to type."""
    worker = conflict_retained(world, repo, "2h")
    late = worker.git("commit", "-q", "--allow-empty", "-m", "late") or worker.head()
    set_back(world, retention_until=time.time() - 1)
    told = world.lionwt("reap", "r1")
    assert told.code == 5 and "tore it down" not in told.out, told
    assert "branch" in told.out and "lionwt reconcile r1" in told.out
    assert repo.head("lionagi/r1/w1") == late


def test_what_was_retained_and_is_gone_is_not_said_to_be_kept(world: World, repo: Repo) -> None:
    """Invariants 15 and 17: retained means that both are there."""
    worker = conflict_retained(world, repo, "2h")
    repo.git("worktree", "remove", "-f", "-f", str(worker.path))
    repo.git("branch", "-q", "-D", "lionagi/r1/w1")
    row = world.lionwt("status", "r1", "--json").json["leases"][0]
    assert "gone" in row["blocked_by"] and row["next"] == "lionwt reconcile r1"
    answer = reconcile(world)
    assert answer.json["records"][0]["status"] == "needs_resolution", answer
    assert answer.json["records"][0]["worktree_removed"] and answer.json["records"][0]["branch_deleted"]
    assert_idempotent(world, answer)


def test_a_reap_that_died_is_finished_by_the_next_reconcile(world: World, repo: Repo) -> None:
    """Design 8: what was decided is finished, also where a record stands already."""
    conflict_retained(world, repo, "2h")
    set_back(world, retention_until=time.time() - 1)
    assert world.lionwt("reap", "r1", env={"LIONWT_FAULT": "teardown.trashed:kill"}).code == -9
    row = world.lionwt("status", "r1", "--json").json["leases"][0]
    assert row["next"] == "lionwt reconcile r1" and "died" in row["blocked_by"]
    answer = reconcile(world)
    assert answer.json["records"][0]["status"] == "needs_resolution", answer
    assert world.leftovers("r1", repo) == []


def test_a_lost_scratch_directory_is_made_again(world: World, repo: Repo) -> None:
    """It holds nothing that counts between two commands."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    shutil.rmtree(world.state("r1") / "git/lionwt")
    answer = reconcile(world)
    assert answer.code == 0 and answer.json["records"][0]["status"] == "promoted", answer


def test_one_lease_that_the_system_refuses_keeps_no_other(world: World, repo: Repo) -> None:
    """Section 5: the error names the lease and what was done of it, whatever refused."""
    world.frozen("r1", {"w1": {}, "w2": {"f2.txt": "new\n"}})
    answer = reconcile_with(world, "teardown.intended:nospace")
    assert (answer.code, answer.error) == (8, "no_space"), answer
    assert "'w1'" in answer.json["error"]["message"]
    assert [entry["worker_id"] for entry in answer.json["pending"]] == ["w1"]
    assert [record["status"] for record in answer.json["records"]] == ["promoted"]
    assert reconcile(world).code == 0


def reconcile_with(world: World, fault: str) -> Answer:
    return world.lionwt("reconcile", "r1", "--takeover", "--json", env={"LIONWT_FAULT": fault})


def test_a_landing_that_the_system_stops_after_its_move_says_so(world: World, repo: Repo) -> None:
    """Past the commit point the error says that the target has moved and that git is held."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    answer = world.promote("r1", env={"LIONWT_FAULT": "promote.moved:nospace"})
    assert (answer.code, answer.error) == (8, "no_space"), answer
    assert "was moved to" in answer.json["error"]["message"]
    assert (repo.path / ".git/index.lock").exists()
    assert reconcile(world).code == 0 and repo.status() == "" and repo.git("show", "work:f1.txt") == "new"


def test_a_lease_file_from_a_backup_does_not_deny_a_landing(world: World, repo: Repo) -> None:
    """Invariant 11: the target holds the merge, whatever an older file knows of it."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}, "w2": {"f2.txt": "new\n"}})
    path = world.state("r1") / "workspaces/w1.json"
    backup = path.read_bytes()
    assert world.promote("r1", "w1").code == 0
    merge = repo.head()
    path.write_bytes(backup)
    answer = reconcile(world)
    assert answer.code == 0, answer
    assert {record["lease"]["worker_id"]: record["status"] for record in answer.json["records"]} == {
        "w1": "promoted",
        "w2": "promoted",
    }
    assert world.record("r1", "w1")["promoted_commit"] == merge and len(repo.merges()) == 2
    assert_idempotent(world, answer)


def test_a_takeover_is_offered_with_what_it_ends(world: World, repo: Repo) -> None:
    """Section 5: what is to be typed next ends no healthy worker unawares."""
    world.lease("r1", "busy")
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    assert world.promote("r1", "w1", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    rows = {row["worker_id"]: row for row in world.lionwt("status", "r1", "--json").json["leases"]}
    assert rows["w1"]["next"] == "lionwt promote r1 w1"
    refused = world.lionwt("reconcile", "r1", "--json")
    assert (refused.code, refused.error) == (6, "owner_alive")
    assert "every unfinished lease of the run (busy, w1)" in refused.json["error"]["hint"]
    assert world.promote("r1", "w1").code == 0 and repo.status() == ""
    assert world.lease_file("r1", "busy")["lease"]["state"] == "running"


def test_a_dry_run_tells_the_steps_and_why_they_would_be_refused(world: World, repo: Repo) -> None:
    """``--dry-run`` says what it would do and why; its exit code is the real run's where that can be known."""
    world.lease("r1", "w1")
    (world.state("r1") / "workspaces/torn.json").write_text("{")
    answer = world.lionwt("reconcile", "r1", "--dry-run", "--json")
    assert answer.code == 7 and [step["worker_id"] for step in answer.json["steps"]] == ["w1"], answer
    assert {finding["code"] for finding in answer.json["findings"]} == {"owner_alive", "state_unreadable"}


# Orphans: what no lease file speaks of


def orphans(answer: Answer) -> list[dict[str, str]]:
    return [finding for finding in answer.json["findings"] if finding["code"] == "orphan"]


def remove_as_told(world: World, finding: dict[str, str]) -> None:
    """Type what an orphan's hint says: the look first, then the removal."""
    removal, _, look = finding["hint"].removeprefix("if nobody wants it, ").partition(" removes it; ")
    if look.startswith("look at it first: "):
        world.typed(look.removeprefix("look at it first: "))
    world.typed(removal)


ONLY_THE_FILE = "its lease file"
LOST: dict[str, tuple[str, ...]] = {
    ONLY_THE_FILE: (),
    "its directory": ("directory",),
    "all directories": ("directories",),
    "its directory and its branch": ("directory", "branch"),
    "all but its registration": ("directory", "branch", "anchors"),
    "its registration": ("registration",),
    "the link to its registration": ("link",),
    "its registration and its branch": ("registration", "branch"),
}


@pytest.mark.parametrize("lost", LOST)
def test_what_an_orphan_left_is_found_and_goes_by_what_the_hint_says(world: World, lost: str) -> None:
    """Design section 8, row 2: named whatever is left of it, and one command removes it, in an order that works."""
    repo = world.repo("it's a place/repo")
    worker = world.frozen("r1", {"w1": {"new.txt": "new\n"}}, cwd=repo.path)["w1"]
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    for part in LOST[lost]:
        if part == "directory":
            shutil.rmtree(worker.path)
        elif part == "directories":
            shutil.rmtree(repo.path / ".worktrees")
        elif part == "branch":
            repo.git("update-ref", "-d", "refs/heads/lionagi/r1/w1")
        elif part == "anchors":
            for name in ("candidate", "head"):
                repo.git("update-ref", "-d", f"refs/lionwt/r1/w1/{name}")
        elif part == "registration":
            shutil.rmtree(admin)
        else:
            (worker.path / ".git").write_text("gitdir: /nowhere\n")
    os.unlink(world.state("r1") / "workspaces" / "w1.json")
    before = repo.refs(), os.listdir(worker.path) if worker.path.exists() else None
    answer = reconcile(world)
    assert answer.code == 4, answer
    [finding] = orphans(answer)
    assert finding["worker_id"] == "w1"
    assert (repo.refs(), os.listdir(worker.path) if worker.path.exists() else None) == before
    remove_as_told(world, finding)
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    assert not worker.path.exists() and not admin.exists()
    answer = reconcile(world)
    assert answer.code == 0 and not answer.json["findings"], answer


def test_a_worktree_inside_an_orphan_goes_before_it(world: World, repo: Repo) -> None:
    """What a worker registered inside its worktree keeps no branch of its own, and is not forgotten."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("worktree", "add", "-q", "--detach", "inner")
    os.unlink(world.state("r1") / "workspaces" / "w1.json")
    [finding] = orphans(reconcile(world))
    remove_as_told(world, finding)
    assert repo.git("worktree", "list", "--porcelain").count("worktree ") == 1
    assert reconcile(world).code == 0


@pytest.mark.parametrize(
    "name", ["$(touch${IFS}pwned)", "a;touch${IFS}pwned", "`touch${IFS}pwned`", "it's&touch|pwned"]
)
def test_shell_code_in_the_name_of_a_branch_is_only_a_name_in_what_to_type(world: World, repo: Repo, name: str) -> None:
    """A worker names branches as it likes; the operator types what lionwt says."""
    world.lease("r1", "w1")
    repo.git("update-ref", f"refs/heads/lionagi/r1/{name}", "work")
    answer = reconcile(world)
    [finding] = orphans(answer)
    assert len(answer.json["next"]) == 1, answer
    world.typed(answer.json["next"][0])
    remove_as_told(world, finding)
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""
    assert reconcile(world).json["findings"] == []


@pytest.mark.parametrize("name", ["$(touch pwned)", " -rf ", "x: rm -rf kept; git", "-rf", "a\nb"])
def test_shell_code_in_the_name_of_a_directory_is_only_a_name_in_what_to_type(
    world: World, repo: Repo, name: str
) -> None:
    """A directory that lies among a run's worktrees may have any name."""
    worker = world.lease("r1", "w1")["w1"]
    (worker.path.parent / name / "sub").mkdir(parents=True)
    assert world.freeze("r1", "w1", "--failed").code == 0
    answer = reconcile(world)
    [finding] = orphans(answer)
    assert answer.json["next"] == []
    remove_as_told(world, finding)
    assert os.listdir(repo.path / ".worktrees" / "lionagi" / "r1") == []


def test_a_lease_whose_path_is_still_registered_is_refused_before_anything_is_made(world: World, repo: Repo) -> None:
    """Design section 4: git would refuse it once the lease is written, and the id would be burnt."""
    worker = world.lease("r1", "w1")["w1"]
    shutil.rmtree(worker.path)
    repo.git("update-ref", "-d", "refs/heads/lionagi/r1/w1")
    os.unlink(world.state("r1") / "workspaces" / "w1.json")
    before, state = repo.snapshot(), files_of(world)
    words = ("lease", "r1", "-w", "w0", "-w", "w1", "--owner-pid", "none", "--json")
    answer = world.lionwt(*words)
    assert (answer.code, answer.error) == (3, "name_taken"), answer
    assert (repo.snapshot(), files_of(world)) == (before, state)
    [command] = answer.json["next"]
    world.typed(command)
    assert world.lionwt(*words).code == 0


def test_a_retained_worktree_that_was_moved_is_not_gone(world: World, repo: Repo) -> None:
    """Invariant 15: it is named with the way back, whatever verb looks; nothing of it is ended or removed."""
    worker = conflict_retained(world, repo, "2h")
    repo.git("worktree", "move", "-f", "-f", str(worker.path), str(world.root / "moved"))
    answer = reconcile(world)
    assert (answer.code, answer.error) == (7, "worktree_moved"), answer
    assert Repo(world.root / "moved", repo.env).git("rev-parse", "HEAD")
    assert world.record("r1", "w1")["status"] == "retained"
    done = subprocess.run(answer.json["next"][0], shell=True, env=repo.env, capture_output=True, check=False)
    assert done.returncode == 0, done
    assert reconcile(world).code == 4 and worker.status() == " M f1.txt"


def test_a_merge_that_a_person_made_of_a_candidate_is_not_called_a_landing(world: World, repo: Repo) -> None:
    """Invariants 9 to 11: promoted is said of lionwt's own merge alone."""
    worker = world.frozen("r1", {"w1": {"f1.txt": "new\n"}})["w1"]
    repo.git("merge", "-q", "--no-ff", "-m", "by hand", "refs/lionwt/r1/w1/candidate")
    repo.git("worktree", "remove", "-f", "-f", str(worker.path))
    answer = reconcile(world)
    assert answer.json["records"][0]["status"] == "discarded", answer
    assert answer.json["records"][0]["promoted_commit"] is None


def test_a_landing_is_settled_while_the_operator_is_on_a_branch_without_a_commit(world: World, repo: Repo) -> None:
    """Design 8, row 4: where the operator has gone hinders no end; what stands there is told."""
    killed_after_the_move(world, repo, "promote.files_written")
    repo.git("switch", "-q", "--orphan", "fresh", "--discard-changes")
    answer = reconcile(world)
    assert answer.json["records"][0]["status"] == "promoted" and answer.json["pending"] == [], answer
    assert_idempotent(world, answer)
