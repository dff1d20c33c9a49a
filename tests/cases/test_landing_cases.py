"""Landings that were claimed, lost, repeated or half done."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import LIONWT, Repo, World, answer_of, go_on

#: Whatever porcelain would heed when it merges, commits or updates a checkout.
MERGING = [
    ("merge.ff", "only"), ("merge.conflictStyle", "zdiff3"), ("merge.renormalize", "true"), ("merge.renames", "false"),
    ("merge.renameLimit", "1"), ("merge.directoryRenames", "true"), ("merge.verifySignatures", "true"),
    ("merge.autoStash", "true"), ("merge.log", "true"), ("merge.stat", "false"), ("merge.suppressDest", "*"),
    ("merge.guitool", "false"), ("merge.verbosity", "0"), ("pull.rebase", "true"), ("pull.ff", "only"),
    ("rebase.autoStash", "true"), ("rerere.enabled", "true"), ("rerere.autoUpdate", "true"),
    ("commit.gpgSign", "true"),
    ("tag.gpgSign", "true"), ("gpg.format", "ssh"), ("gpg.program", "false"), ("gpg.ssh.program", "false"),
    ("user.signingKey", "none"), ("user.useConfigOnly", "true"), ("commit.verbose", "true"),
    ("commit.cleanup", "scissors"),
    ("core.editor", "false"), ("core.commentChar", "L"), ("core.logAllRefUpdates", "always"),
    ("core.sharedRepository", "0"),
    ("core.safecrlf", "true"), ("core.ignoreStat", "true"), ("core.preferSymlinkRefs", "false"),
    ("receive.denyCurrentBranch", "refuse"), ("branch.work.mergeOptions", "--squash --no-commit -s ours"),
    ("branch.work.rebase", "true"), ("checkout.workers", "8"), ("checkout.guess", "false"),
    ("submodule.recurse", "true"),
    ("transfer.hideRefs", "refs/heads"), ("receive.denyDeletes", "true"), ("receive.denyNonFastForwards", "true"),
    ("log.showSignature", "true"), ("diff.external", "false"), ("color.ui", "always"), ("advice.diverging", "false"),
    ("core.alternateRefsCommand", "false"), ("extensions.worktreeConfig", "false"), ("index.sparse", "true"),
    ("core.splitIndex", "true"), ("core.untrackedCache", "true"), ("core.fsync", "none"),
    ("feature.experimental", "true"),
]  # fmt: skip


@pytest.mark.parametrize("scope", ["--global", "--local"])
def test_no_setting_changes_what_lands_or_what_a_conflict_leaves(world: World, repo: Repo, scope: str) -> None:
    """An old rerere answer resolved a conflict in silence; a squash option made the merge succeed without moving.

    Design 7, promote 3 and 6: merged in memory, moved by compare-and-swap; ``git merge`` porcelain is not used.
    """
    old = repo.head()
    repo.git("config", "--global", "rerere.enabled", "true")
    for side, text in (("ours", "1\n"), ("theirs", "2\n")):
        repo.git("switch", "-q", "-C", side, old)
        repo.commit(side, **{"f1.txt": text})
    repo.run_git("merge", "ours", check=False)
    repo.write("f1.txt", "answered long ago\n")
    repo.commit("answered")
    repo.git("switch", "-q", "work")
    repo.git("branch", "-q", "-D", "ours", "theirs")
    leased = world.lease("r1", "ours", "theirs", "moved")
    leased["ours"].write("f1.txt", "1\n")
    leased["theirs"].write("f1.txt", "2\n")
    (leased["moved"].path / "f2.txt").rename(leased["moved"].path / "renamed.txt")
    for worker in leased:
        world.freeze_now("r1", worker)
    for key, value in MERGING:
        repo.git("config", scope, key, value)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "merge_conflict"), answer
    assert [world.record("r1", worker)["status"] for worker in leased] == ["promoted", "needs_resolution", "promoted"]
    plain = {"env": {**repo.env, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_COUNT": "0"}}
    assert repo.git("rev-list", "--merges", "--count", f"{old}..work", **plain) == "2"
    assert repo.git("diff-tree", "-r", "--name-status", "--no-renames", old, "work", **plain).split() == [
        "M", "f1.txt", "D", "f2.txt", "A", "renamed.txt"
    ]  # fmt: skip
    assert (repo.path / "f1.txt").read_text() == "1\n"
    for name in ("MERGE_HEAD", "MERGE_MSG", "MERGE_MODE", "AUTO_MERGE", "CHERRY_PICK_HEAD", "SQUASH_MSG", "index.lock"):
        assert not (repo.path / ".git" / name).exists(), name
    assert (world.evidence("r1", "theirs") / "conflict.json").exists()
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize(
    "spelling",
    ["main", "heads/main", "refs/heads/main", "MAIN", "alias", "to/alias", "release/1.0", "Release-2", "HEAD", "@",
     "work~0", "work@{0}", "origin/main", "-work", "refs/tags/v1", "v1", "", "work^{commit}",
     "refs/heads/../heads/main"],
)  # fmt: skip
def test_no_spelling_leads_a_landing_to_a_protected_branch_or_past_a_name(
    world: World, repo: Repo, spelling: str
) -> None:
    """``heads/main``, ``@`` or a symbolic ref was no "main" to the fence, and the landing reached it.

    Design 4 and ADR-0091 A1.3: the full name, through symrefs, before any rule applies.
    """
    repo.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    repo.git("symbolic-ref", "refs/heads/to/alias", "refs/heads/alias")
    for branch in ("release/1.0", "Release-2"):
        repo.git("branch", branch)
    repo.git("tag", "v1")
    repo.git("update-ref", "refs/remotes/origin/main", "main")
    before = repo.snapshot()
    answer = world.lionwt(
        "lease",
        "r1",
        "-w",
        "w1",
        f"--target={spelling}",
        "--policy",
        "merge_validated",
        "--owner-pid",
        "none",
        "--json",
    )
    assert answer.code in (2, 3) and answer.error in ("protected_target", "target_invalid", "usage"), answer
    assert repo.snapshot() == before and not world.lionagi_home.exists()


def test_a_target_that_has_a_tag_s_name_is_the_branch(world: World, repo: Repo) -> None:
    """A tag of the target's name gave its own commit as the base, with a warning that nobody read.

    Design 4: a target is the name of an existing branch; refs are fully qualified.
    """
    base = repo.commit("the branch's")
    repo.git("tag", "work", "main")
    repo.git("update-ref", "refs/remotes/work", "main")
    repo.git("update-ref", "refs/work", "main")
    repo.git("tag", "lionagi/r1/w1", "main")
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    assert world.lease_file("r1", "w1")["lease"]["base_sha"] == base
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert repo.parents(repo.head("refs/heads/work"))[0] == base
    assert repo.head("refs/tags/work") == repo.head("refs/tags/lionagi/r1/w1") == repo.head("main")


@pytest.mark.parametrize("landed", ["squash", "cherry-pick", "merge", "fast-forward"])
def test_what_somebody_landed_by_hand_is_not_landed_again_nor_claimed(world: World, repo: Repo, landed: str) -> None:
    """A squash-merged branch could not be deleted, and an unmerged one could because its upstream had it.

    Design 8: deleted by compare-and-swap on the recorded tip; movement of the target needs a person.
    """
    leased = world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    commit = world.lease_file("r1", "w1")["evidence"]["commit"]
    repo.git("config", "branch.lionagi/r1/w1.remote", ".")
    repo.git("config", "branch.lionagi/r1/w1.merge", "refs/heads/main")
    words = {
        "squash": ("merge", "-q", "--squash", commit), "cherry-pick": ("cherry-pick", commit),
        "merge": ("merge", "-q", "--no-ff", "-m", "by hand", commit),
        "fast-forward": ("merge", "-q", "--ff-only", commit),
    }  # fmt: skip
    repo.git(*words[landed])
    if landed == "squash":
        repo.git("commit", "-qm", "squashed")
    head, count = repo.head(), repo.git("rev-list", "--count", "work")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "target_moved"), answer
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("needs_resolution", None)
    assert record["branch_deleted"] and record["worktree_removed"] and not leased["w1"].path.exists()
    assert repo.head() == head and repo.git("rev-list", "--count", "work") == count
    assert repo.run_git("rev-parse", "-q", "--verify", "refs/heads/lionagi/r1/w1", check=False).returncode == 1


@pytest.mark.parametrize("after", ["commits", "merge", "other-branch-checked-out", "reset-to-the-merge"])
def test_a_landing_that_the_target_has_left_behind_is_still_known_as_landed(
    world: World, repo: Repo, after: str
) -> None:
    """The tip was no longer the merge, so the work was "not landed" and was dispatched again.

    Design 8: promotion intent, target is or descends from the intended merge → promoted.
    """
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.landed:kill"}).code == -9
    merge = repo.head()
    repo.git("checkout", "-q", "--", ".")
    if after == "commits":
        repo.commit("one", **{"one.txt": "1\n"})
        repo.commit("two", **{"new.txt": "changed\n"})
    elif after == "merge":
        repo.git("switch", "-q", "-c", "side", "main")
        repo.commit("side", **{"side.txt": "side\n"})
        repo.git("switch", "-q", "work")
        repo.git("merge", "-q", "-m", "side", "side")
    elif after == "other-branch-checked-out":
        repo.git("switch", "-q", "-c", "elsewhere")
    head = repo.head("work")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert answer.code == 0, answer
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("promoted", merge)
    assert repo.head("work") == head
    again = world.promote("r1")
    assert again.code == 0 and repo.head("work") == head


def test_a_target_that_is_checked_out_elsewhere_is_an_obstacle_and_no_sha_is_made_up(world: World, repo: Repo) -> None:
    """The checkout of the target failed, went unnoticed, and HEAD's commit was recorded as the landing.

    Design 7, promote 5: exit 4, pending, the candidate stays frozen, nothing touched.
    """
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    repo.git("switch", "-q", "main")
    repo.git("worktree", "add", "-q", world.root / "elsewhere", "work")
    before = repo.untouched()
    other = Repo(world.root / "elsewhere", repo.env)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert answer.json["records"] == [] and world.lease_file("r1", "w1")["record"] is None
    assert repo.untouched() == before and other.status() == ""
    repo.git("worktree", "remove", world.root / "elsewhere")
    repo.git("switch", "-q", "work")
    assert world.promote("r1").code == 0
    assert world.record("r1", "w1")["promoted_commit"] == repo.head("refs/heads/work")


def test_two_runs_that_land_at_once_lose_nothing(world: World, repo: Repo) -> None:
    """The second of two promoters wrote its ref over the first one's, and a landing was gone.

    ADR-0091 A1.1: one lock over the repository; design 7, promote 6: by compare-and-swap.
    """
    for run in ("r1", "r2"):
        world.frozen(run, {"w1": {f"{run}.txt": "new\n"}})
    with world.stopped("promote.intended", "promote", "r1", "--json") as first:
        busy = world.promote("r2", "--lock-timeout", "0.2")
        assert (busy.code, busy.error) == (6, "lock_timeout"), busy
        second = world.popen("promote", "r2", "--json")
        landed = go_on(first)
    moved = answer_of(second)
    assert landed.code == 0 and (moved.code, moved.error) == (4, "target_moved"), moved
    assert repo.merges() == [world.record("r1", "w1")["promoted_commit"]] and repo.status() == ""
    assert (world.evidence("r2", "w1") / "candidate.patch").stat().st_size


def test_the_checkout_of_the_operator_moves_with_the_ref(world: World, repo: Repo) -> None:
    """The ref moved under a checkout: status showed the inverse of the landing, and the next commit reverted it.

    Design 7, promote 6: the operator's checkout is updated with the ref, under its index lock.
    """
    repo.write("mine.txt", "untracked\n")
    repo.write("f3.txt", "edited\n")
    world.frozen("r1", {"w1": {"f1.txt": "landed\n", "new/new.txt": "new\n"}})
    assert world.promote("r1").code == 0
    assert repo.status().splitlines() == [" M f3.txt", "?? mine.txt"]
    repo.git("commit", "-qam", "the operator goes on")
    assert repo.git("show", "work:f1.txt") == "landed" and repo.git("show", "work:new/new.txt") == "new"
    assert (repo.path / "mine.txt").read_text() == "untracked\n"


@pytest.mark.parametrize("kind", ["dirty", "untracked", "ignored", "merging", "locked", "other-branch", "conflict"])
def test_the_reason_of_a_refused_landing_is_the_one_that_holds(world: World, repo: Repo, kind: str) -> None:
    """Exit 1 of a merge meant a conflict, a dirty tree, a hook or a lock alike, and all were reported as conflicts.

    Design 5: ``error.code`` is a stable word, decided by state.
    """
    leased = world.frozen("r1", {"w1": {"f1.txt": "worker\n", "new.txt": "new\n", "x.log": "log\n"}})
    assert leased
    if kind == "conflict":
        world.frozen("r1", {"w2": {"f1.txt": "other\n"}})
        assert world.promote("r1", "w2").code == 0
    elif kind == "dirty":
        repo.write("f1.txt", "operator\n")
    elif kind == "untracked":
        repo.write("new.txt", "operator\n")
    elif kind == "ignored":
        (repo.path / ".git/info/exclude").write_text("new.txt\n/.worktrees/\n")
        repo.write("new.txt", "operator\n")
    elif kind == "merging":
        repo.write(".git/MERGE_HEAD", repo.head() + "\n")
    elif kind == "locked":
        repo.write(".git/index.lock")
    elif kind == "other-branch":
        repo.git("switch", "-q", "main")
    before, head = repo.untouched(), repo.head("work")
    answer = world.promote("r1", "w1")
    wanted = "merge_conflict" if kind == "conflict" else "checkout_blocked"
    assert (answer.code, answer.error) == (4, wanted), answer
    assert answer.json["error"]["hint"]
    assert repo.untouched() == before and repo.head("work") == head
    assert (world.lease_file("r1", "w1")["record"] is None) == (kind != "conflict")


def test_a_landing_without_a_terminal_an_identity_or_a_signing_key_waits_for_nobody(world: World, repo: Repo) -> None:
    """A signing prompt held up a promotion for ever; without user.name it failed half way.

    Design 6: an environment built from nothing, no terminal, a timeout; ``commit-tree`` does not sign.
    """
    script = world.root / "prompt"
    script.write_text(f"#!/bin/sh\ntouch {world.root}/prompted\nexec sleep 1000\n")
    script.chmod(0o755)
    (world.home / ".gitconfig").write_text(
        "[user]\n\tuseConfigOnly = true\n[commit]\n\tgpgSign = true\n"
        f"[gpg]\n\tprogram = {script}\n[core]\n\teditor = {script}\n\taskPass = {script}\n"
        f"[credential]\n\thelper = !{script}\n"
    )
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert "gpgsig" not in repo.git("cat-file", "commit", "work")
    assert repo.git("log", "-1", "--format=%an", "work").strip()
    assert not (world.root / "prompted").exists()


def test_a_caller_that_has_lost_its_directory_can_still_land(world: World, repo: Repo) -> None:
    """The tool died in a directory that was gone, after it had half removed what it stood in.

    Design 6: absolute paths and directories named explicitly.
    """
    leased = world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    gone = world.root / "gone"
    gone.mkdir()
    landed = subprocess.run(
        ["sh", "-c", f'cd "{gone}" && rmdir "{gone}" && exec "$@"', "sh",
         LIONWT, "promote", "r1", "--json"],
        env=world.environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert landed.returncode == 0, landed
    assert not leased["w1"].path.exists() and (repo.path / "new.txt").exists()


def merge_of_two(world: World, repo: Repo, *declared: str) -> None:
    """Two changes that merge without a conflict and are wrong together: a name is renamed, and used anew."""
    repo.commit("a program", **{"tool.sh": "old() { :; }\n", "use.sh": ". ./tool.sh\nold\n"})
    leased = world.lease("r1", "renames", "uses", args=declared)
    leased["renames"].write("tool.sh", "new() { :; }\n")
    leased["renames"].write("use.sh", ". ./tool.sh\nnew\n")
    leased["uses"].write("more.sh", ". ./tool.sh\nold\n")
    for worker in leased:
        world.freeze_now("r1", worker)


def test_without_declared_checks_what_merges_cleanly_lands(world: World, repo: Repo) -> None:
    """Nobody is asked for a check of the merge result that no one has declared.

    Design 7, promote 4: ``--check-merged`` commands, if declared.
    """
    merge_of_two(world, repo)
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 2


def test_a_clean_merge_that_its_declared_check_finds_broken_does_not_land(world: World, repo: Repo) -> None:
    """Each of two workers' changes was green on its own base, the clean merge of both was broken, and it landed.

    Design 7, promote 4: what lands is what was tested; a red one means no landing.
    """
    merge_of_two(world, repo, "--check-merged", "runs=sh -ec 'for file in *.sh; do sh -e ./$file; done'")
    before = repo.head("work")
    answer = world.promote("r1")
    assert answer.code != 0 and len(repo.merges()) == 1, answer
    assert repo.parents(repo.head("work"))[0] == before and repo.status() == ""
    assert world.leftovers("r1", repo) == []
