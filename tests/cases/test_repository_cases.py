"""Repositories, environments and places in which tools like this one went astray."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Repo, World, answer_of, go_on, wait_until, whole_life

LEASE = ("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none", "--json")


def test_no_variable_of_gits_reaches_a_git_that_lionwt_starts(world: World, repo: Repo) -> None:
    """Called from a hook, a tool committed into the repository that the hook's variables named.

    Design 6: children get an environment built from nothing (no inherited ``GIT_*``).
    """
    victim = world.repo("victim")
    before = victim.snapshot()
    ran = world.root / "ran"
    hostile = world.root / "hostile"
    hostile.write_text(f"#!/bin/sh\necho $0 >>{ran}\nexit 1\n")
    hostile.chmod(0o755)
    local = repo.git("rev-parse", "--local-env-vars").split()
    env: dict[str, str | None] = dict.fromkeys(local, "1")
    env |= {
        "GIT_DIR": str(victim.path / ".git"), "GIT_COMMON_DIR": str(victim.path / ".git"),
        "GIT_WORK_TREE": str(victim.path), "GIT_INDEX_FILE": str(victim.path / ".git/index"),
        "GIT_OBJECT_DIRECTORY": str(victim.path / ".git/objects"), "GIT_PREFIX": "sub/", "GIT_NAMESPACE": "evil",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(victim.path / ".git/objects"), "GIT_SHALLOW_FILE": str(hostile),
        "GIT_GRAFT_FILE": str(hostile), "GIT_REPLACE_REF_BASE": "refs/heads/",
        "GIT_CEILING_DIRECTORIES": str(world.root),
        "GIT_DISCOVERY_ACROSS_FILESYSTEM": "0", "GIT_CONFIG": str(hostile),
        "GIT_CONFIG_PARAMETERS": "'core.bare'='true'",
        "GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "core.bare", "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_KEY_1": "core.hooksPath", "GIT_CONFIG_VALUE_1": str(world.root), "GIT_ATTR_SOURCE": "main",
        "GIT_EXTERNAL_DIFF": str(hostile), "GIT_DIFF_OPTS": "-u0", "GIT_EDITOR": str(hostile),
        "GIT_PAGER": str(hostile),
        "GIT_SEQUENCE_EDITOR": str(hostile), "GIT_SSH_COMMAND": str(hostile), "GIT_PROXY_COMMAND": str(hostile),
        "GIT_ASKPASS": str(hostile), "SSH_ASKPASS": str(hostile), "PAGER": str(hostile), "EDITOR": str(hostile),
        "GIT_TEMPLATE_DIR": str(world.root), "GIT_EXEC_PATH": str(world.root), "GIT_DEFAULT_HASH": "sha256",
        "GIT_DEFAULT_REF_FORMAT": "reftable", "GIT_AUTHOR_NAME": "Evil", "GIT_AUTHOR_EMAIL": "evil@x",
        "GIT_COMMITTER_NAME": "Evil", "GIT_COMMITTER_EMAIL": "evil@x", "GIT_AUTHOR_DATE": "1999-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "1999-01-01T00:00:00Z", "GIT_GLOB_PATHSPECS": "1", "GIT_ICASE_PATHSPECS": "1",
        "GIT_NOGLOB_PATHSPECS": "1", "GIT_LITERAL_PATHSPECS": "1", "GIT_OPTIONAL_LOCKS": "1", "GIT_FLUSH": "0",
        "GIT_TRACE": str(ran), "GIT_TRACE2": str(ran), "GIT_TRACE2_EVENT": str(ran), "GIT_TRACE_SETUP": str(ran),
        "GIT_REDIRECT_STDERR": str(ran), "GIT_TEST_SPLIT_INDEX": "1", "GIT_INDEX_VERSION": "2",
        "GIT_QUARANTINE_PATH": "/x",
        "GIT_NO_LAZY_FETCH": "0", "GIT_ALLOW_PROTOCOL": "ext:file", "GIT_MERGE_VERBOSITY": "5",
        "GIT_REFLOG_ACTION": "evil",
        "LANG": "C", "LC_ALL": "C", "LANGUAGE": "de", "CDPATH": "/", "COLUMNS": "10", "TERM": "xterm",
    }  # fmt: skip
    assert {"GIT_DIR", "GIT_INDEX_FILE", "GIT_SHALLOW_FILE"} <= set(local)
    world.env |= {key: value for key, value in env.items() if value is not None}
    repo.env = world.git_environment()
    whole_life(world, repo)
    assert victim.snapshot() == before and not ran.exists()
    assert repo.git("log", "-1", "--format=%an %cn", "work") == "Operator Operator"
    assert "evil" not in repo.git("reflog", "show", "--format=%gs", "work", "--")


@pytest.mark.parametrize(
    "locked", ["HEAD.lock", "config.lock", "packed-refs.lock", "index.lock", "refs/heads/work.lock"]
)
def test_a_lock_that_a_killed_git_left_costs_a_wait_or_an_answer_and_never_work(
    world: World, repo: Repo, locked: str
) -> None:
    """A killed git left a lock file; every later write failed, half of the work was recorded, and the lock was broken.

    Design 7: a lock of somebody else's is never taken; what is refused is named, left as it was, and done afterwards.
    """
    repo.git("pack-refs", "--all")
    lock = repo.write(f".git/{locked}", "")
    leased = world.lionwt(*LEASE)
    assert leased.code == 0, leased
    worker = Repo(Path(leased.json["leases"][0]["worktree_path"]), repo.env)
    assert world.lionwt("start", "r1", "w1").code == 0
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    worker.write("new.txt", "new\n")
    theirs = [admin / "index.lock", admin / "HEAD.lock"]
    for path in theirs:
        path.touch()
    assert world.freeze("r1", "w1").code == 0
    assert all(path.exists() for path in theirs)
    head = repo.head("work")
    answer = world.promote("r1")
    assert lock.exists() and lock.read_bytes() == b""
    if answer.code:
        assert answer.code in (4, 5, 8), answer
        assert locked.rpartition("/")[2] in answer.out and answer.json["error"]["hint"]
        if answer.code != 5:
            assert repo.head("work") == head and world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
        lock.unlink()
        verb = ("reconcile", "r1", "--takeover") if answer.code == 5 else ("promote", "r1")
        answer = world.lionwt(*verb, "--json")
    assert answer.code == 0, answer
    lock.unlink(missing_ok=True)
    assert world.record("r1", "w1")["status"] == "promoted" and len(repo.merges()) == 1
    assert repo.status() == "" and world.leftovers("r1", repo) == []


@pytest.mark.parametrize("point", ["lease.registered", "lease.populated"])
def test_a_worktree_that_is_being_made_outlives_prune_repair_and_gc(world: World, repo: Repo, point: str) -> None:
    """``git worktree prune``, run by somebody else's gc, reclaimed an entry that was being made.

    Design 7: ``worktree add --lock``; under one lock; never ``worktree prune``.
    """
    config = (repo.path / ".git/config").read_bytes()
    with world.stopped(point, *LEASE) as child:
        repo.git("worktree", "prune", "--expire=now", "-v")
        repo.run_git("worktree", "repair", check=False)
        repo.git("gc", "-q", "--prune=now")
        answer = go_on(child)
    assert answer.code == 0, answer
    assert (repo.path / ".git/config").read_bytes() == config
    worker = Repo(Path(answer.json["leases"][0]["worktree_path"]), repo.env)
    assert worker.status() == "" and worker.head() == repo.head()


@pytest.mark.parametrize("how", ["clean -fdx", "clean -ffdx", "worktree remove", "worktree prune", "rm"])
def test_what_the_operator_sweeps_away_is_told_as_it_is(world: World, repo: Repo, how: str) -> None:
    """``git clean -ffdx`` took the worktrees, and the tool went on to report what had been in them as saved.

    Design 3: state lies outside of the checkout; design 8: worktree gone, something remains.
    """
    swept, kept = world.lease("r1", "w1", "w2").values()
    tip = swept.commit("own", **{"own.txt": "own\n"})
    kept.write("kept.txt", "kept\n")
    if how.startswith("clean"):
        repo.git(*how.split())
    elif how == "worktree remove":
        repo.git("worktree", "remove", "-f", "-f", swept.path)
    else:
        subprocess.run(["rm", "-rf", swept.path], check=True)
        repo.git("worktree", "prune", "--expire=now")
    assert (world.state("r1") / "workspaces/w1.json").exists()
    if how != "clean -ffdx":
        assert (kept.path / "kept.txt").exists(), "only a forced clean takes a worktree"
    if how == "clean -fdx":
        assert (swept.path / "own.txt").exists()
        return
    frozen = world.freeze("r1", "w1")
    assert (frozen.code, frozen.error) == (7, "worktree_moved"), frozen
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("discarded", None)
    assert record["worktree_removed"] is True and record["branch_deleted"] is True, answer
    saved = [note["ref"] for note in world.lease_file("r1", "w1")["diagnostics"] if note["code"] == "commits_saved"]
    assert saved and tip in repo.git("bundle", "list-heads", str(world.state("r1") / "artifacts" / saved[0]))
    assert world.leftovers("r1", repo) == [] and repo.status() == ""
    if how != "clean -ffdx":
        assert "kept.txt" in world.lease_file("r1", "w2")["candidate"]["files_changed"]


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
@pytest.mark.parametrize("branch", ["lionagi/r1/w1", "lionagi/r1/w1/below", "lionagi/r1", "lionagi", "lionagi/R1/w9"])
def test_a_branch_in_the_way_is_named_before_anything_is_made(
    world: World, repo: Repo, branch: str, packed: bool
) -> None:
    """A ref is a file or a directory: with ``a/b`` there, ``a`` cannot be made, and half a worktree was left.

    Design 4: branch prefix clashes, an existing branch: refused before anything is made; read from git, not from files.
    """
    repo.git("branch", branch, "main")
    if packed:
        repo.git("pack-refs", "--all", "--prune")
        assert not (repo.path / ".git/refs/heads" / branch).exists()
    before = repo.snapshot()
    answer = world.lionwt(*LEASE)
    assert answer.code == 3 and answer.error in ("name_taken", "id_reused"), answer
    assert branch in answer.json["error"]["message"]
    assert repo.snapshot() == before and not (repo.path / ".worktrees").exists()
    assert not (repo.path / ".git/worktrees").exists() and not (world.state("r1") / "workspaces/w1.json").exists()


def test_a_worker_starts_from_the_named_target_and_nothing_else(world: World, repo: Repo) -> None:
    """A worker started from a default branch that was weeks behind, because nobody had named a base.

    ADR-0091 D1: target and base are explicit, printed and stored.
    """
    upstream = world.repo("upstream", branch="main")
    repo.git("remote", "add", "origin", str(upstream.path))
    repo.git("fetch", "-q", "origin")
    repo.git("remote", "set-head", "origin", "main")
    repo.git("branch", "--set-upstream-to=origin/main", "work")
    for key, value in (
        ("init.defaultBranch", "main"),
        ("checkout.defaultRemote", "origin"),
        ("push.default", "upstream"),
        ("branch.autoSetupMerge", "always"),
        ("branch.autoSetupRebase", "always"),
        ("worktree.guessRemote", "true"),
    ):
        world.config(key, value)
    tip = repo.commit("ahead of every remote", **{"ahead.txt": "ahead\n"})
    repo.git("switch", "-q", "--detach", "HEAD~1")
    config = (repo.path / ".git/config").read_bytes()
    unnamed = world.lionwt("lease", "r1", "-w", "w1", "--json")
    assert (unnamed.code, unnamed.error) == (2, "usage") and "--target" in unnamed.json["error"]["message"]
    answer = world.lionwt(*LEASE)
    assert answer.code == 0, answer
    assert answer.json["run"]["base_sha"] == answer.json["leases"][0]["base_sha"] == tip
    assert tip in (world.state("r1") / "workspaces/w1.json").read_text()
    worker = Repo(Path(answer.json["leases"][0]["worktree_path"]), repo.env)
    assert worker.head() == tip and (worker.path / "ahead.txt").exists()
    assert (repo.path / ".git/config").read_bytes() == config, "no branch tracks anything"
    repo.git("switch", "-q", "work")
    assert tip in world.lionwt("status", "r1", "--json").out


def test_every_spelling_of_a_place_leads_to_the_same_lease(world: World, repo: Repo) -> None:
    """A worktree reached through a link was "not mine", and its work stayed behind.

    Design 3: paths and identity are real ones; a run is named by its id or the path of its state root.
    """
    (world.root / "link").symlink_to(world.root)
    (world.root / "home-link").symlink_to(world.lionagi_home)
    through = world.root / "link"
    world.env["LIONAGI_HOME"] = str(through / "lionagi")
    answer = world.lionwt(*LEASE, "--repo", str(through / "repo/sub/../"), cwd=world.home)
    assert answer.code == 0, answer
    assert answer.json["leases"][0]["worktree_path"] == str(repo.path / ".worktrees/lionagi/r1/w1")
    world.env["LIONAGI_HOME"] = str(world.lionagi_home)
    assert world.lionwt("start", str(world.root / "home-link/runs/r1"), "w1", cwd=through).code == 0
    Repo(through / "repo/.worktrees/lionagi/r1/w1", repo.env).commit("own", **{"own.txt": "own\n"})
    assert world.lionwt("freeze", str(through / "lionagi/runs/r1/"), "w1", "--succeeded", cwd=world.home).code == 0
    assert world.promote("r1", cwd=through / "repo").code == 0
    assert repo.status() == "" and world.leftovers("r1", repo) == []


def test_another_repository_s_lock_on_a_worktree_says_nothing_about_whose_it_is(world: World, repo: Repo) -> None:
    """``git worktree lock`` has no owner: a stale lock pinned a tree for ever, and ``-f -f`` removed a live one.

    Design 7: ownership is the lease's alone; the registration that is retired is the one with its nonce.
    """
    repo.git("worktree", "add", "-q", "-b", "side", world.root / "side")
    repo.git("worktree", "lock", "--reason", "lionwt 0123456789abcdef", world.root / "side")
    repo.git("worktree", "add", "-q", "-b", "other", world.root / "w1")
    repo.git("worktree", "lock", world.root / "w1")
    listed = repo.git("worktree", "list", "--porcelain")
    whole_life(world, repo)
    assert repo.git("worktree", "list", "--porcelain").split("\n\n", 1)[1] == listed.split("\n\n", 1)[1]
    assert (world.root / "side/f1.txt").exists() and (world.root / "w1/f1.txt").exists()


def test_hooks_of_every_kind_are_neither_run_nor_needed(world: World, repo: Repo) -> None:
    """A post-checkout hook that failed made the lease "failed" though it was there; one that hung, hung it.

    Design 6: hooks nowhere, whatever git calls them and wherever they lie.
    """
    ran = world.root / "ran"
    kinds = [
        "applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg",
        "commit-msg", "post-commit", "pre-rebase", "post-checkout", "post-merge", "pre-push", "pre-receive", "update",
        "proc-receive", "post-receive", "post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc",
        "post-rewrite", "sendemail-validate", "fsmonitor-watchman", "post-index-change",
    ]  # fmt: skip
    for folder in (repo.path / ".git/hooks", world.root / "global-hooks", repo.path / "tracked-hooks"):
        folder.mkdir(exist_ok=True)
        for kind in kinds:
            (folder / kind).write_text(f"#!/bin/sh\necho {kind} >>{ran}\nexec sleep 1000\n")
            (folder / kind).chmod(0o755)
    world.git_env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": "/dev/null"}
    repo.env.update(world.git_env)
    repo.commit("hooks in the tree")
    world.config("core.hooksPath", str(world.root / "global-hooks"))
    repo.git("config", "core.hooksPath", str(repo.path / "tracked-hooks"))
    repo.git("config", "core.fsmonitor", str(repo.path / ".git/hooks/fsmonitor-watchman"))
    repo.env.update({"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_1": "core.fsmonitor", "GIT_CONFIG_VALUE_1": "false"})
    world.git_env.update({key: value for key, value in repo.env.items() if key.startswith("GIT_CONFIG_")})
    whole_life(world, repo)
    assert not ran.exists(), ran.read_text()


def test_leases_at_once_beside_gits_own_worktrees_all_stand(world: World, repo: Repo) -> None:
    """Parallel ``worktree add`` failed on a half-made sibling or on config.lock, and left branches behind.

    Design 7: under the registration lock, from a bare oid, nothing tracked.
    """
    world.config("branch.autoSetupMerge", "always")
    assert world.lionwt(*LEASE).code == 0
    children = [
        world.popen("lease", "r1", "-w", f"a{number}", "-w", f"b{number}", "--owner-pid", "none", "--json")
        for number in range(4)
    ]
    answers = [answer_of(child) for child in children]
    assert [answer.code for answer in answers] == [0] * 4, answers
    listed = repo.git("worktree", "list", "--porcelain")
    branches = repo.git("for-each-ref", "--format=%(refname:short) %(upstream)", "refs/heads/lionagi").splitlines()
    assert listed.count("\nlocked lionwt ") == len(branches) == 9
    assert all(branch.endswith(" ") for branch in branches)
    for answer in answers:
        for lease in answer.json["leases"]:
            assert Repo(Path(lease["worktree_path"]), repo.env).status() == ""


def test_a_worker_s_config_in_the_shared_file_is_told_and_changes_no_commit(world: World, repo: Repo) -> None:
    """A worker's ``git config user.email`` was the operator's from then on, and its hooks path skipped the gate.

    Design 6: shared config and hooks are compared at freeze: a change is a diagnostic; commits carry an own identity.
    """
    workers = world.lease("r1", "w1", "quiet")
    assert world.freeze("r1", "quiet").code == 0
    worker = workers["w1"]
    for key, value in (
        ("user.name", "Bot"),
        ("user.email", "bot@agent"),
        ("author.name", "Bot"),
        ("committer.name", "Bot"),
        ("core.hooksPath", "/dev/null"),
        ("alias.st", "!false"),
        ("include.path", "../evil"),
        ("remote.origin.url", "ext::false"),
        ("url.x.insteadOf", "y"),
    ):
        worker.git("config", key, value)
    worker.write("new.txt", "new\n")
    config = (repo.path / ".git/config").read_bytes()
    assert world.freeze("r1", "w1").code == 0
    assert "shared_config_changed" in {note["code"] for note in world.lease_file("r1", "w1")["diagnostics"]}
    assert "shared_config_changed" not in {note["code"] for note in world.lease_file("r1", "quiet")["diagnostics"]}
    assert world.promote("r1").code == 0
    assert (repo.path / ".git/config").read_bytes() == config
    assert repo.git("log", "-2", "--format=%an %ae %cn %ce", "work").splitlines()[0] == (
        "Operator operator@example.invalid Operator operator@example.invalid"
    )


def test_a_signal_during_the_making_leaves_no_branch_for_a_retry_to_start_from(world: World, repo: Repo) -> None:
    """A failed add left its branch; the retry attached to it and started from a stale base.

    Design 7: any failure undoes exactly what this call made.
    """
    child = world.popen(*LEASE, env={"LIONWT_FAULT": "lease.registered:stop"})
    wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert repo.git("for-each-ref", "refs/heads/lionagi") != ""
    answer = go_on(child, signal.SIGTERM)
    assert answer.code == 128 + signal.SIGTERM
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    tip = repo.commit("moved on", **{"moved.txt": "moved\n"})
    again = world.lionwt(*LEASE)
    assert again.code == 0 and again.json["leases"][0]["base_sha"] == tip, again
    assert os.path.exists(Path(again.json["leases"][0]["worktree_path"]) / "moved.txt")
