"""What ``promote`` lands, what it refuses, and in which order."""

from __future__ import annotations

import json
import os
import secrets
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Repo, World

Spoil = Callable[[World, Repo], None]


def commit_tree(repo: Repo, message: str, *parents: str) -> str:
    """A commit of the present tree, on no branch."""
    flags = [flag for parent in parents for flag in ("-p", parent)]
    return repo.git("commit-tree", "HEAD^{tree}", *flags, "-m", message)


# --- the six conditions, each refused alone -------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("--failed",), "worker_failed", id="the worker failed"),
        pytest.param(("--cancelled",), "worker_failed", id="the worker was cancelled"),
        pytest.param((), "validation_missing", id="a declared validation is missing"),
        pytest.param(("--validation", "lint=pass"), "validation_missing", id="another one is there instead"),
        pytest.param(("--validation", "tests=fail,exit=1"), "validation_failed", id="a declared validation is red"),
        pytest.param(
            ("--validation", "tests=pass", "--validation", "lint=fail"), "validation_failed", id="an extra one is red"
        ),
    ],
)
def test_a_worker_that_did_not_succeed_whole_is_discarded(
    world: World, repo: Repo, arguments: tuple[str, ...], code: str
) -> None:
    """ADR-0091 D4, conditions 1 and 2: never attempts a merge; evidence is kept, cleanup runs, discarded."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}}, *arguments, args=("--require", "tests"))
    before = repo.untouched()
    evidence = (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    answer = world.promote("r1", "w1")
    assert (answer.code, answer.error) == (3, code), answer
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("discarded", None)
    assert record["worktree_removed"] and record["branch_deleted"]
    assert b"new.txt" in evidence and (world.evidence("r1", "w1") / "candidate.patch").read_bytes() == evidence
    assert repo.untouched() == before
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""


def test_an_extra_green_validation_is_no_obstacle(world: World, repo: Repo) -> None:
    """ADR-0091 D4, condition 2: *at least* the declared validations are present."""
    world.frozen(
        "r1",
        {"w1": {"new.txt": "new\n"}},
        "--validation",
        "tests=pass,exit=0",
        "--validation",
        "lint=pass",
        args=("--require", "tests"),
    )
    assert world.promote("r1").code == 0
    assert world.record("r1", "w1")["status"] == "promoted"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize("name", ["candidate.patch", "manifest.json"])
def test_evidence_that_is_not_what_was_frozen_is_never_landed(world: World, repo: Repo, name: str) -> None:
    """ADR-0091 D4, condition 3, and D5: the patch hash and the manifest must still match."""
    ways: dict[str, tuple[Callable[[Path], None], str]] = {
        "flipped": (flip, "patch_changed"),
        "truncated": (truncate, "patch_changed"),
        "linked": (link, "patch_changed"),
        "gone": (Path.unlink, "patch_missing"),
    }
    world.frozen("r1", {worker: {f"{worker}.txt": "new\n"} for worker in ways})
    before = repo.untouched()
    for worker, (spoil, code) in ways.items():
        spoil(world.evidence("r1", worker) / name)
        answer = world.promote("r1", worker)
        assert (answer.code, answer.error) == (4, code), (worker, answer)
        record = world.record("r1", worker)
        assert (record["status"], record["promoted_commit"]) == ("needs_resolution", None)
        assert record["worktree_removed"] and record["branch_deleted"]
    assert repo.untouched() == before


def test_a_directory_in_the_patch_s_place_is_not_what_was_frozen(world: World, repo: Repo) -> None:
    """ADR-0091 D4, condition 3: something else there is a change, and not called gone."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    before = repo.untouched()
    patch = world.evidence("r1", "w1") / "candidate.patch"
    patch.rename(patch.with_name("aside"))
    patch.mkdir()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "patch_changed"), answer
    assert world.record("r1", "w1")["status"] == "needs_resolution" and repo.untouched() == before


# --- the target's head ------------------------------------------------------------------------


def by_a_commit(world: World, repo: Repo) -> None:
    repo.commit("mine", **{"mine.txt": "mine\n"})


def by_a_reset_back(world: World, repo: Repo) -> None:
    repo.git("reset", "-q", "--hard", "HEAD~1")


def by_an_amend(world: World, repo: Repo) -> None:
    repo.git("commit", "-q", "--amend", "-m", "amended")


def by_another_run(world: World, repo: Repo) -> None:
    world.frozen("r2", {"w1": {"second.txt": "second\n"}})
    assert world.promote("r2").code == 0


def by_a_symref(world: World, repo: Repo) -> None:
    repo.git("branch", "other")
    repo.git("symbolic-ref", "refs/heads/work", "refs/heads/other")


def by_a_symref_to_main(world: World, repo: Repo) -> None:
    repo.git("branch", "-f", "main", "work")
    repo.git("symbolic-ref", "refs/heads/work", "refs/heads/main")


def by_its_deletion(world: World, repo: Repo) -> None:
    repo.git("update-ref", "-d", "refs/heads/work")


@pytest.mark.parametrize(
    "move",
    [
        by_a_commit,
        by_a_reset_back,
        by_an_amend,
        by_another_run,
        by_a_symref,
        by_a_symref_to_main,
        by_its_deletion,
    ],
)
def test_a_target_that_moved_otherwise_needs_a_person(world: World, repo: Repo, move: Spoil) -> None:
    """ADR-0091 D4, condition 5: unexpected movement yields needs_resolution; no merge, no rebase."""
    repo.commit("second", **{"second-base.txt": "x\n"})
    base = repo.head()
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    move(world, repo)
    before, refs = repo.untouched(), repo.refs()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "target_moved"), answer
    assert base in answer.json["error"]["message"]
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("needs_resolution", None)
    assert record["lease"]["base_sha"] == record["lease"]["expected_target_sha"] == base
    assert repo.untouched() == before
    ours = ("refs/heads/lionagi", "refs/lionwt")
    assert repo.refs() == "\n".join(line for line in refs.splitlines() if not line.startswith(ours))


def test_a_target_that_came_back_is_where_it_was(world: World, repo: Repo) -> None:
    """ADR-0091 D4, condition 5 compares the head, and nothing else."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    repo.commit("mine", **{"mine.txt": "mine\n"})
    repo.git("reset", "-q", "--hard", "HEAD~1")
    assert world.promote("r1").code == 0


def test_a_symref_in_the_target_s_place_is_named_as_one(world: World, repo: Repo) -> None:
    """Style: an error says what happened: the branch is not gone, it stands for another."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    by_a_symref_to_main(world, repo)
    message = world.promote("r1").json["error"]["message"]
    assert "symbolic" in message and "refs/heads/main" in message


# --- the fence ----------------------------------------------------------------------------------


def test_a_target_that_became_the_default_branch_is_refused_and_can_be_kept_as_a_patch(
    world: World, repo: Repo
) -> None:
    """ADR-0091 A1.3: refused fail-closed at promotion too; the candidate stays frozen and can be narrowed."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    repo.git("update-ref", "refs/remotes/origin/work", "HEAD")
    repo.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/work")
    before, leases = repo.snapshot(), world.state_bytes("r1")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (3, "protected_target"), answer
    assert "--policy patch_only" in answer.json["error"]["hint"]
    assert [entry["code"] for entry in answer.json["pending"]] == ["protected_target"]
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)
    assert world.promote("r1", "--policy", "patch_only").code == 0
    assert world.record("r1", "w1")["status"] == "discarded"
    assert repo.head() == repo.head("main")


# --- the landing itself -------------------------------------------------------------------------


def test_a_landing_is_a_merge_of_the_expected_head_and_the_worker_s_own_line(world: World, repo: Repo) -> None:
    """ADR-0091 D4: --no-ff into the verified target even where a fast-forward would do; design 7, freeze 5."""
    base = repo.head()
    worker = world.lease("r1", "w1")["w1"]
    worker.commit("one", **{"one.txt": "1\n"})
    second = worker.commit("two", **{"two.txt": "2\n"})
    worker.write("three.txt", "3\n")  # never committed by the worker
    world.freeze_now("r1", "w1")
    evidence = world.lease_file("r1", "w1")["evidence"]
    answer = world.promote("r1")
    assert answer.code == 0, answer
    landing = world.lease_file("r1", "w1")["outcome"]["landing"]
    merge = world.record("r1", "w1")["promoted_commit"]
    assert repo.head("work") == merge == landing["merge"]
    assert repo.parents(merge) == [base, evidence["commit"]] == [landing["expected"], landing["candidate"]]
    assert repo.head(f"{merge}^{{tree}}") == evidence["tree"] == landing["tree"]
    assert repo.parents(evidence["commit"]) == [second]
    assert repo.git("log", "--format=%s", f"{base}..{second}") == "two\none"
    message = repo.git("log", "-1", "--format=%B", merge)
    assert "Lionwt-Run: r1" in message and "Lionwt-Worker: w1" in message
    assert repo.git("log", "-1", "--format=%an %ae %cn", merge) == "Operator operator@example.invalid Operator"
    assert "lionwt promote r1" in repo.git("reflog", "-1", "work")
    assert repo.status() == ""


def test_the_expected_head_advances_over_the_landings_of_the_run(world: World, repo: Repo) -> None:
    """ADR-0091 D2: expected_target_sha advances only to a commit promoted earlier by the same run."""
    base = repo.head()
    world.frozen("r1", {f"w{n}": {f"new{n}.txt": f"{n}\n"} for n in range(3)})
    for named in (("w1",), ()):
        assert world.promote("r1", *named).code == 0
    order = ["w1", "w0", "w2"]
    merges = [world.record("r1", worker)["promoted_commit"] for worker in order]
    assert list(reversed(repo.merges())) == merges
    expected = base
    for worker, merge in zip(order, merges, strict=True):
        lease = world.record("r1", worker)["lease"]
        assert (lease["expected_target_sha"], lease["base_sha"]) == (expected, base)
        assert repo.parents(merge) == [expected, world.lease_file("r1", worker)["evidence"]["commit"]]
        expected = merge
    assert repo.status() == "" and all((repo.path / f"new{n}.txt").exists() for n in range(3))


# --- order --------------------------------------------------------------------------------------


def diamond(world: World) -> None:
    """a; b and c after a; d after b and c. Frozen in the reverse order."""
    leased = world.lease("r1", "a")
    leased |= world.lease("r1", "b", args=("--after", "a"))
    leased |= world.lease("r1", "c", args=("--after", "a"))
    leased |= world.lease("r1", "d", args=("--after", "b", "--after", "c"))
    for worker in ("d", "c", "b", "a"):
        leased[worker].write(f"{worker}.txt", worker)
        world.freeze_now("r1", worker)
    for age, worker in enumerate("dcba"):  # the clock was set back between the calls
        path = world.state("r1") / "workspaces" / f"{worker}.json"
        stored = json.loads(path.read_bytes())
        stored["lease"]["created_at"] = 1000.0 + age
        path.write_text(json.dumps(stored))


def test_promotion_follows_the_dependencies_and_not_the_time_of_completion(world: World, repo: Repo) -> None:
    """ADR-0091 D4: ordering follows DAG dependency order, not worker completion time."""
    diamond(world)
    answer = world.promote("r1", "d", "b")
    assert (answer.code, answer.error) == (6, "predecessor_pending"), answer
    assert {entry["worker_id"]: entry["code"] for entry in answer.json["pending"]} == {
        "d": "predecessor_pending",
        "b": "predecessor_pending",
    }
    assert answer.json["records"] == [] and repo.merges() == []
    answer = world.promote("r1")
    assert answer.code == 0, answer
    landed = [repo.git("log", "-1", "--format=%(trailers:key=Lionwt-Worker,valueonly)", m) for m in repo.merges()]
    assert [worker.strip() for worker in reversed(landed)] == ["a", "b", "c", "d"]


def test_a_predecessor_that_failed_ends_all_that_come_after_it(world: World, repo: Repo) -> None:
    """Design 7, promote 2: any other makes it needs_resolution (predecessor_failed, exit 3); the rest lands."""
    leased = world.lease("r1", "a", "free")
    leased |= world.lease("r1", "b", args=("--after", "a"))
    leased |= world.lease("r1", "c", args=("--after", "b"))
    for worker in leased:
        leased[worker].write(f"{worker}.txt", worker)
        world.freeze_now("r1", worker, *(("--failed",) if worker == "a" else ()))
    answer = world.promote("r1")
    assert answer.code == 3, answer
    ended = {record["lease"]["worker_id"]: record["status"] for record in answer.json["records"]}
    assert ended == {"a": "discarded", "b": "needs_resolution", "c": "needs_resolution", "free": "promoted"}
    codes = {entry["worker_id"]: entry["code"] for entry in answer.json["outcomes"]}
    assert codes == {"a": "worker_failed", "b": "predecessor_failed", "c": "predecessor_failed"}
    assert len(repo.merges()) == 1
    assert (world.promote("r1", "b").code, world.promote("r1", "b").error) == (3, "predecessor_failed")


def test_a_conflict_stops_what_depends_on_it_and_nothing_else(world: World, repo: Repo) -> None:
    """ADR-0091 D4: it does not continue later promotions that depend on this worker."""
    leased = world.lease("r1", "first", "clash", "free")
    leased |= world.lease("r1", "after", args=("--after", "clash"))
    for worker, name in (("first", "f1.txt"), ("clash", "f1.txt"), ("free", "free.txt"), ("after", "after.txt")):
        leased[worker].write(name, worker)
        world.freeze_now("r1", worker)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "merge_conflict"), answer
    ended = {record["lease"]["worker_id"]: record["status"] for record in answer.json["records"]}
    assert ended == {
        "first": "promoted",
        "clash": "needs_resolution",
        "free": "promoted",
        "after": "needs_resolution",
    }
    assert repo.status() == "" and (repo.path / "f1.txt").read_text() == "first"


@pytest.mark.parametrize("verdict", ["--succeeded", "--failed"])
def test_an_empty_predecessor_satisfies_only_when_it_succeeded(world: World, repo: Repo, verdict: str) -> None:
    """Design 7, promote 2: a predecessor that landed, or that succeeded with an empty patch."""
    leased = world.lease("r1", "empty")
    leased |= world.lease("r1", "after", args=("--after", "empty"))
    leased["after"].write("after.txt", "after\n")
    world.freeze_now("r1", "empty", verdict)
    world.freeze_now("r1", "after")
    answer = world.promote("r1")
    assert answer.code == (0 if verdict == "--succeeded" else 3), answer
    assert world.record("r1", "empty")["status"] == "discarded"
    assert world.record("r1", "after")["status"] == ("promoted" if verdict == "--succeeded" else "needs_resolution")


# --- empty patches, patch_only, repetition --------------------------------------------------------


def test_an_empty_patch_is_discarded_without_a_commit(world: World, repo: Repo) -> None:
    """ADR-0091 D4: an empty patch never creates an empty promotion commit; design 5: exit 0."""
    head = repo.head()
    world.frozen("r1", {"w1": {}})
    before = repo.untouched()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (0, None)
    record = world.record("r1", "w1")
    assert (record["status"], record["patch_ref"]) == ("discarded", ".lionwt/w1/candidate.patch")
    assert (world.evidence("r1", "w1") / "candidate.patch").read_bytes() == b""
    assert repo.head() == head and repo.untouched() == before


def test_patch_only_keeps_the_patch_and_commits_nothing(world: World, repo: Repo) -> None:
    """ADR-0091 D4, patch_only: worker success does not change the outcome; design 5: exit 0 for any worker."""
    leased = world.lease("r1", "won", "lost", "stopped", policy="patch_only")
    verdicts = {"won": "--succeeded", "lost": "--failed", "stopped": "--cancelled"}
    for worker, verdict in verdicts.items():
        leased[worker].write("new.txt", worker)
        world.freeze_now("r1", worker, verdict)
    repo.commit("moved on", **{"mine.txt": "mine\n"})  # no condition of patch_only
    before, head = repo.untouched(), repo.head()
    answer = world.promote("r1")
    assert (answer.code, answer.json["pending"]) == (0, []), answer
    for worker in verdicts:
        record = world.record("r1", worker)
        assert (record["status"], record["policy"], record["promoted_commit"]) == ("discarded", "patch_only", None)
        assert record["worktree_removed"] and record["branch_deleted"]
        assert worker.encode() in (world.evidence("r1", worker) / "candidate.patch").read_bytes()
    assert repo.untouched() == before and repo.head() == head
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""


def test_widening_the_policy_is_refused(world: World, repo: Repo) -> None:
    """Design 5: --policy equals the pinned one, or narrows it to patch_only."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}}, policy="patch_only")
    before, leases = repo.snapshot(), world.state_bytes("r1")
    answer = world.promote("r1", "--policy", "merge_validated")
    assert (answer.code, answer.error) == (3, "policy_mismatch"), answer
    assert world.promote("r1", "--policy", "shared_host").code == 2
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)


def test_narrowing_to_patch_only_lands_nothing_and_is_final(world: World, repo: Repo) -> None:
    """Design 5: narrowed to patch_only; repeated with other arguments it is refused, with none it stays true."""
    head = repo.head()
    world.frozen("r1", {"w1": {"one.txt": "1\n"}, "w2": {"two.txt": "2\n"}})
    assert world.promote("r1", "w1", "--policy", "patch_only").code == 0
    assert world.record("r1", "w1")["policy"] == "patch_only"
    assert repo.head() == head
    leases = world.state_bytes("r1")
    answer = world.promote("r1", "w1")
    assert (answer.code, answer.error) == (3, "already_done"), answer
    assert world.state_bytes("r1") == leases
    answer = world.promote("r1")  # all that are frozen: w1 is no part of that
    assert (answer.code, answer.json["pending"]) == (0, []), answer
    assert [record["status"] for record in answer.json["records"]] == ["discarded", "promoted"]
    answer = world.promote("r1", "w2", "--policy", "patch_only")
    assert (answer.code, answer.error) == (3, "already_done"), answer


def test_promote_repeated_answers_the_same_and_changes_nothing(world: World, repo: Repo) -> None:
    """Design 5: repeating a verb with the same arguments answers the same and changes nothing."""
    leased = world.lease("r1", "lands", "clash", "fails", "empty")
    for worker, name in (("lands", "f1.txt"), ("clash", "f1.txt"), ("fails", "x.txt")):
        leased[worker].write(name, worker)
    for worker in leased:
        world.freeze_now("r1", worker, *(("--failed",) if worker == "fails" else ()))
    first = world.promote("r1")
    before, leases, refs = repo.snapshot(), world.state_bytes("r1"), repo.refs()
    again = world.promote("r1")
    assert again.out == first.out and again.code == first.code == 4
    for worker, code in (("lands", 0), ("clash", 4), ("fails", 3), ("empty", 0)):
        assert world.promote("r1", worker).code == code
    assert (repo.snapshot(), world.state_bytes("r1"), repo.refs()) == (before, leases, refs)


def test_only_what_was_named_is_completed_and_what_is_not_frozen_is_busy(world: World, repo: Repo) -> None:
    """Design 5: without names every frozen one; a named one that is not frozen yet is exit 6."""
    leased = world.lease("r1", "done", "other", "busy")
    world.lease("r1", "fresh", start=False)
    for worker in ("done", "other"):
        leased[worker].write(f"{worker}.txt", worker)
        world.freeze_now("r1", worker)
    leases = world.state_bytes("r1")
    for worker, state in (("busy", "running"), ("fresh", "allocated")):
        answer = world.promote("r1", worker)
        assert (answer.code, answer.error) == (6, "not_frozen"), answer
        assert state in answer.json["error"]["message"]
    assert world.state_bytes("r1") == leases
    assert [r["lease"]["worker_id"] for r in world.promote("r1", "done").json["records"]] == ["done"]
    answer = world.promote("r1")
    assert answer.code == 0
    assert sorted(entry["worker_id"] for entry in answer.json["pending"]) == ["busy", "fresh"]
    assert sorted(r["lease"]["worker_id"] for r in answer.json["records"]) == ["done", "other"]


def test_unknown_workers_and_runs_are_refused_before_anything_happens(world: World, repo: Repo) -> None:
    """Design 5: an unknown name is a refusal of the whole call."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    before, leases = repo.snapshot(), world.state_bytes("r1")
    for arguments, code in (
        (("r1", "w1", "w9"), "lease_unknown"),
        (("r1", "w1", "../w1"), "id_invalid"),
        (("r9",), "run_unknown"),
    ):
        answer = world.promote(*arguments)
        assert (answer.code, answer.error) == (3, code), answer
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)
    assert not list((world.state("r1") / "workspaces").glob(".w9*"))


def test_a_worker_never_promotes_itself(world: World, repo: Repo) -> None:
    """ADR-0091 D3: workers cannot merge, discard or retain."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    before, leases = repo.snapshot(), world.state_bytes("r1")
    for worker in ("w1", "w2"):
        answer = world.promote("r1", env={"LIONAGI_WORKER_ID": worker})
        assert (answer.code, answer.error) == (3, "called_by_worker")
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)


def test_a_worker_that_runs_again_is_waited_for(world: World, repo: Repo) -> None:
    """Design 5: a living worker is busy (exit 6), and nothing of it is touched."""
    run = f"alive-{secrets.token_hex(8)}"  # a freeze of r1 beside this test would stop the process
    leased = world.frozen(run, {"w1": {"new.txt": "new\n"}})
    leases = world.state_bytes(run)
    env = world.environment({"LIONAGI_RUN_ID": run, "LIONAGI_WORKER_ID": "w1"})
    with subprocess.Popen(["sleep", "60"], env=env, cwd=leased["w1"].path) as sleeper:
        try:
            answer = world.promote(run)
            assert (answer.code, answer.error) == (6, "worker_alive"), answer
            assert str(sleeper.pid) in answer.json["error"]["message"]
            assert sleeper.poll() is None and world.state_bytes(run) == leases
        finally:
            sleeper.kill()
    assert world.promote(run).code == 0


def test_of_several_endings_the_first_of_the_order_is_the_exit_code(world: World, repo: Repo) -> None:
    """Design 5: several records: the first present of 1, 8, 7, 5, 4, 3, 6, 0."""
    leased = world.lease("r1", "lands", "clash", "fails", "moved", "busy")
    for worker, name in (("lands", "f1.txt"), ("clash", "f1.txt"), ("fails", "x.txt"), ("moved", "y.txt")):
        leased[worker].write(name, worker)
        world.freeze_now("r1", worker, *(("--failed",) if worker == "fails" else ()))
    # Committed after its freeze: the branch is kept, and the teardown is not whole.
    leased["moved"].git("commit", "-q", "--allow-empty", "-m", "late")
    assert world.promote("r1", "busy", "lands").code == 6  # 6 before 0
    assert world.promote("r1", "busy", "fails", "lands").code == 3  # 3 before 6
    assert world.promote("r1", "clash", "fails", "busy").code == 4  # 4 before 3
    answer = world.promote("r1", "moved", "clash", "fails", "busy", "lands")
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer  # 5 before 4
    torn = world.state("r1") / "workspaces" / "busy.json"
    torn.write_bytes(torn.read_bytes()[:100])
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (7, "state_unreadable"), answer  # 7 before 5


# --- conflicts ----------------------------------------------------------------------------------


def remove(repo: Repo, name: str) -> None:
    (repo.path / name).unlink()


def rename(repo: Repo, old: str, new: str) -> None:
    (repo.path / new).parent.mkdir(exist_ok=True, parents=True)
    (repo.path / old).rename(repo.path / new)


CONFLICTS: dict[str, tuple[Callable[[Repo], object], Callable[[Repo], object]]] = {
    "content": (lambda r: r.write("f1.txt", "ours\n"), lambda r: r.write("f1.txt", "theirs\n")),
    "add-add": (lambda r: r.write("n.txt", "ours\n"), lambda r: r.write("n.txt", "theirs\n")),
    "modify-delete": (lambda r: r.write("f1.txt", "ours\n"), lambda r: remove(r, "f1.txt")),
    "delete-modify": (lambda r: remove(r, "f1.txt"), lambda r: r.write("f1.txt", "theirs\n")),
    "rename-rename": (lambda r: rename(r, "f1.txt", "a.txt"), lambda r: rename(r, "f1.txt", "b.txt")),
    "file-directory": (lambda r: r.write("n", "file\n"), lambda r: r.write("n/inner.txt", "inner\n")),
    "binary": (lambda r: r.write("b.bin", b"\0ours"), lambda r: r.write("b.bin", b"\0theirs")),
    "symlinks": (lambda r: (r.path / "l").symlink_to("f1.txt"), lambda r: (r.path / "l").symlink_to("f2.txt")),
}


def test_every_kind_of_conflict_is_evidence_and_touches_nothing(world: World, repo: Repo) -> None:
    """ADR-0091 D4: a conflict captures diagnostics and yields needs_resolution; no resolution is chosen."""
    for number, (kind, (ours, theirs)) in enumerate(CONFLICTS.items()):
        run = f"r{number}"
        leased = world.lease(run, "ours", "theirs")
        ours(leased["ours"])
        theirs(leased["theirs"])
        for worker in leased:
            world.freeze_now(run, worker)
        assert world.promote(run, "ours").code == 0, kind
        before, head = repo.untouched(), repo.head()
        answer = world.promote(run, "theirs")
        assert (answer.code, answer.error) == (4, "merge_conflict"), (kind, answer)
        assert (repo.untouched(), repo.head()) == (before, head), kind
        assert not (repo.path / ".git" / "MERGE_HEAD").exists() and repo.status() == ""
        details = json.loads((world.evidence(run, "theirs") / "conflict.json").read_bytes())
        evidence = world.lease_file(run, "theirs")["evidence"]
        assert (details["expected"], details["candidate"]) == (head, evidence["commit"])
        assert details["base"] == world.record(run, "theirs")["lease"]["base_sha"]
        assert details["paths"] and all(stage["path"] in details["paths"] for stage in details["stages"])
        assert any("CONFLICT" in message for message in details["messages"]), details
        notes = world.lease_file(run, "theirs")["diagnostics"]
        assert [note["ref"] for note in notes if note["code"] == "merge_conflict"] == [".lionwt/theirs/conflict.json"]
        assert stat.S_IMODE((world.evidence(run, "theirs") / "conflict.json").stat().st_mode) == 0o600
        assert details["paths"][0] in answer.json["error"]["message"]
        repo.git("reset", "-q", "--hard", "main")


def test_a_submodule_conflict_is_one_too(world: World, repo: Repo) -> None:
    """ADR-0091 D4, for two workers that point one gitlink at different commits."""
    library = world.repo("library", branch="main")
    repo.git("submodule", "--quiet", "add", str(library.path), "lib")
    repo.commit("with a submodule")
    leased = world.lease("r1", "ours", "theirs")
    for worker, tree in leased.items():
        tip = commit_tree(library, worker, library.head())
        library.git("update-ref", f"refs/heads/{worker}", tip)
        repo.git("-C", "lib", "fetch", "-q", "origin", f"{worker}:{worker}")
        tree.git("submodule", "--quiet", "update", "--init")
        tree.git("-C", "lib", "fetch", "-q", "origin", worker)
        tree.git("-C", "lib", "checkout", "-q", tip)
        world.freeze_now("r1", worker)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "merge_conflict"), answer
    assert [r["status"] for r in answer.json["records"]] == ["promoted", "needs_resolution"]
    assert json.loads((world.evidence("r1", "theirs") / "conflict.json").read_bytes())["paths"] == ["lib"]


def test_attributes_of_the_target_that_merge_by_union_hold(world: World, repo: Repo) -> None:
    """Design 7, promote 3: merge-tree with the expected tree's .gitattributes, so merge=union works."""
    repo.commit("attributes", **{"sub/.gitattributes": "log.txt merge=union\n", "sub/log.txt": "start\n"})
    world.frozen("r1", {worker: {"sub/log.txt": f"start\n{worker}\n"} for worker in ("one", "two")})
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert sorted((repo.path / "sub/log.txt").read_text().split()) == ["one", "start", "two"]


# --- what the operator has configured -------------------------------------------------------------


def test_settings_and_hooks_of_the_repository_have_no_say_in_a_landing(
    world: World, repo: Repo, tmp_path: Path
) -> None:
    """Design 7, promote 6: porcelain is not used, its result depends on config; git-facts: hooks, signing, rerere."""
    marker = tmp_path / "ran"
    hang = tmp_path / "hang"
    hang.write_text(f"#!/bin/sh\necho $0 >> {marker}\nexec sleep 600\n")
    hang.chmod(0o755)
    hooks = tmp_path / "hooks"
    for directory in (hooks, repo.path / ".git" / "hooks"):
        directory.mkdir(exist_ok=True)
        for name in (
            "pre-commit", "commit-msg", "prepare-commit-msg", "post-commit", "pre-merge-commit", "post-merge",
            "post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc", "post-rewrite",
        ):  # fmt: skip
            (directory / name).write_text(f"#!/bin/sh\necho {name} >> {marker}\nexit 1\n")
            (directory / name).chmod(0o755)
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\necho hung >> {marker}\nexec sleep 600\n")
    for scope in ("--global", "--local"):
        for key, value in (
            ("commit.gpgSign", "true"),
            ("gpg.program", str(hang)),
            ("user.signingKey", "none"),
            ("merge.ff", "only"),
            ("merge.autoStash", "true"),
            ("merge.conflictStyle", "diff3"),
            ("merge.renames", "false"),
            ("rerere.enabled", "true"),
            ("rerere.autoUpdate", "true"),
            ("branch.work.mergeOptions", "--squash --no-commit --strategy=ours"),
            ("core.fsmonitor", str(hang)),
            ("core.editor", str(hang)),
            ("log.showSignature", "true"),
            ("core.hooksPath", str(hooks)),
        ):
            repo.git("config", scope, key, value)
    base = repo.head()
    leased = world.lease("r1", "lands", "clash")
    leased["lands"].write("f1.txt", "ours\n")
    leased["clash"].write("f1.txt", "theirs\n")
    for worker in leased:
        world.freeze_now("r1", worker)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "merge_conflict"), answer
    merge = world.record("r1", "lands")["promoted_commit"]
    assert repo.parents(merge)[0] == base and "gpgsig" not in repo.git("cat-file", "commit", merge)
    assert (repo.path / "f1.txt").read_text() == "ours\n"
    assert not marker.exists(), marker.read_text()
    assert not (repo.path / ".git" / "rr-cache").exists() or not list((repo.path / ".git" / "rr-cache").iterdir())


# --- retention ------------------------------------------------------------------------------------


def conflicting(world: World, *arguments: str) -> dict[str, Repo]:
    leased = world.frozen("r1", {"first": {"f1.txt": "1\n"}, "clash": {"f1.txt": "2\n"}}, args=arguments)
    assert world.promote("r1", "first").code == 0
    return leased


def test_a_conflict_is_retained_where_the_policy_says_so(world: World, repo: Repo) -> None:
    """ADR-0091 D1 and D4: retained only after confirming that worktree and branch still exist."""
    leased = conflicting(world, "--retain-for", "2h")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "merge_conflict"), answer
    record = world.record("r1", "clash")
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("retained", False, False)
    assert record["retention_until"] == world.lease_file("r1", "clash")["policy"]["retention_until"]
    assert record["retention_until"] > record["completed_at"]
    assert (leased["clash"].path / "f1.txt").read_text() == "2\n"
    assert repo.head("lionagi/r1/clash")
    assert not leased["first"].path.exists()  # success is not kept
    assert world.promote("r1").out == answer.out
    assert "kept until" in world.lionwt("promote", "r1").out


@pytest.mark.parametrize("gone", ["worktree", "branch"])
def test_nothing_is_retained_that_is_not_there(world: World, repo: Repo, gone: str) -> None:
    """ADR-0091 D4: retained only after confirming the worktree and branch still exist."""
    leased = conflicting(world, "--retain-for", "2h")
    if gone == "worktree":
        leased["clash"].path.rename(world.root / "elsewhere")
    else:
        repo.git("update-ref", "-d", "refs/heads/lionagi/r1/clash")
    assert world.promote("r1").code in (4, 5)
    record = world.record("r1", "clash")
    assert record["status"] != "retained" and record["retention_until"] is None
    assert "retention_refused" in [note["code"] for note in world.lease_file("r1", "clash")["diagnostics"]]


@pytest.mark.parametrize("when", ["before", "between"])
def test_an_expiry_that_has_passed_retains_nothing(world: World, repo: Repo, when: str) -> None:
    """Design 7 and invariant 17: retained means a future expiry, also for what a crash has interrupted."""
    leased = conflicting(world, "--retain-for", "1000s")
    if when == "between":
        crashed = world.promote("r1", env={"LIONWT_FAULT": "teardown.intended:kill"})
        assert crashed.code == -9
        assert world.lease_file("r1", "clash")["outcome"]["status"] == "retained"
    for path in (world.state("r1") / "workspaces" / "clash.json", world.state("r1") / "workspaces.json"):
        stored = json.loads(path.read_bytes())
        stored["policy"]["retention_until"] = 1000.0  # as it reads when the time has passed
        path.write_text(json.dumps(stored))
    answer = world.promote("r1")
    assert answer.code == 4, answer
    record = world.record("r1", "clash")
    assert (record["status"], record["retention_until"]) == ("needs_resolution", None)
    assert record["worktree_removed"] and not leased["clash"].path.exists()


# --- a failure of git -----------------------------------------------------------------------------


def test_a_locked_ref_leaves_everything_as_it_was(world: World, repo: Repo) -> None:
    """Design 5 and 7: git failed is exit 8, nothing is changed, and the same command works afterwards."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    lock = repo.path / ".git" / "refs" / "heads" / "work.lock"
    lock.write_bytes(b"")
    before, leases = repo.snapshot(), world.lease_file("r1", "w1")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (8, "git_failed"), answer
    assert repo.snapshot() == before
    after = world.lease_file("r1", "w1")
    for changing in ("serial", "lease"):
        leases.pop(changing), after.pop(changing)
    assert after == leases
    lock.unlink()
    assert world.promote("r1").code == 0


def test_a_branch_that_the_operator_protected_after_the_opening_is_not_landed_on(world: World, repo: Repo) -> None:
    """ADR-0091 A1.3: the fence is what was pinned and what stands in lionwt.toml today."""
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    base = repo.head("work")
    operators = world.lionagi_home / "lionwt.toml"
    operators.write_text('protected_branches = ["wor*"]\n')
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (3, "protected_target"), answer
    operators.write_text("protected_branches = [")
    answer = world.promote("r1")
    assert answer.error == "config_invalid", answer
    assert repo.head("work") == base
    assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
    operators.unlink()
    assert world.promote("r1").code == 0
