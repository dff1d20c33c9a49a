"""``lease``: one base for every worker, exact places, all or nothing, and an untouched checkout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lionwt import LionwtError
from lionwt.snapshot import read_operator_config
from tests.conftest import Answer, Repo, World, wait_until


def lease(world: World, *arguments: str, run: str = "r1", **options: object) -> Answer:
    return world.lionwt("lease", run, "--json", "--owner-pid", "none", *arguments, **options)  # type: ignore[arg-type]


def opening(world: World, *arguments: str, **options: object) -> Answer:
    return lease(world, "-w", "w1", "--target", "work", *arguments, **options)


def traces(world: World, repo: Repo) -> list[str]:
    """Everything of lionwt's that stands: state, refs, worktrees, artifacts. Lock files are never unlinked."""
    found = repo.git("for-each-ref", "--format=%(refname)", "refs/heads/lionagi", "refs/lionwt").splitlines()
    found += [str(path) for path in (repo.path / ".worktrees").rglob("*")]
    found += [str(path) for path in (repo.path / ".git").glob("worktrees/*")]
    for run in (world.lionagi_home / "runs").glob("*"):
        for path in run.rglob("*"):
            if path != run / "workspaces" and path.suffix != ".lock":
                found.append(str(path))
    return found


def without_lionwt(snapshot: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """A snapshot without the branches of workers."""
    own = (".git/refs/heads/lionagi/", ".git/logs/refs/heads/lionagi/")
    return {name: seen for name, seen in snapshot.items() if not name.startswith(own)}


# --- what a lease is -------------------------------------------------------------------------------------------------


def test_a_lease_lies_where_the_decision_says_and_is_bound_exactly(world: World, repo: Repo) -> None:
    """ADR-0091 D2: the concrete layout, the branch name, the environment and provider binding are exact."""
    answer = opening(world, "--session", "s1")
    assert answer.code == 0, answer
    tree, state = repo.path / ".worktrees/lionagi/r1/w1", world.state("r1")
    artifacts = state / "artifacts/w1"
    (given,), (binding,) = answer.json["leases"], answer.json["bindings"]
    created = given.pop("created_at")
    assert abs(created - time.time()) < 60
    assert given == {
        "run_id": "r1",
        "session_id": "s1",
        "worker_id": "w1",
        "target_branch": "work",
        "base_sha": repo.head("work"),
        "expected_target_sha": repo.head("work"),
        "branch_name": "lionagi/r1/w1",
        "worktree_path": str(tree),
        "artifact_path": str(artifacts),
        "state_path": str(state / "workspaces/w1.json"),
        "state": "allocated",
    }
    assert binding == {
        "cwd": str(tree),
        "provider_repo": str(tree),
        "source_roots": [str(tree)],
        "writable_artifact_root": str(artifacts),
        "env": {"LIONAGI_RUN_ID": "r1", "LIONAGI_SESSION_ID": "s1", "LIONAGI_WORKER_ID": "w1"},
    }
    worker = Repo(tree, world.environment())
    assert worker.git("symbolic-ref", "HEAD") == "refs/heads/lionagi/r1/w1"
    assert worker.head() == repo.head("work")
    assert artifacts.is_dir()
    stored = world.lease_file("r1", "w1")
    assert {**stored["lease"]} == {**given, "created_at": created}
    assert (stored["schema"], stored["intent"], stored["record"]) == ("lionwt/lease@1", None, None)


def test_every_worker_starts_from_the_one_base_while_the_target_moves(world: World, repo: Repo) -> None:
    """ADR-0091 D2: every worker in the run starts from this same SHA."""
    base = repo.head("work")
    assert opening(world).code == 0
    repo.commit("the operator goes on", **{"f1.txt": "moved\n"})
    answer = lease(world, "-w", "w2", "-w", "w3")
    assert answer.code == 0, answer
    for given in answer.json["leases"]:
        assert given["base_sha"] == given["expected_target_sha"] == base
        worker = Repo(Path(given["worktree_path"]), world.environment())
        assert (worker.head(), worker.git("rev-parse", "HEAD^{tree}")) == (
            base,
            repo.git("rev-parse", f"{base}^{{tree}}"),
        )
        assert (worker.path / "f1.txt").read_text().startswith("line 0")


def test_many_workers_are_leased_in_one_call_and_all_are_clean_at_once(world: World, repo: Repo) -> None:
    """Design section 7: the worker's own git status is clean at once."""
    script = repo.write("run.sh", "#!/bin/sh\n")
    script.chmod(0o755)
    (repo.path / "link").symlink_to("f1.txt")
    repo.commit("a program and a link")
    workers = [f"w{number}" for number in range(12)]
    found = world.lease("r1", *workers, start=False)
    assert list(found) == workers
    for worker in found.values():
        assert worker.status() == ""
        assert worker.git("ls-files", "-v").count("H ") == len(repo.git("ls-files").splitlines())
        assert os.access(worker.path / "run.sh", os.X_OK)
        assert os.readlink(worker.path / "link") == "f1.txt"
        assert worker.git("rev-parse", "--show-toplevel") == str(worker.path)
    assert len(repo.git("worktree", "list", "--porcelain").split("\n\n")) == 13


def test_a_worker_sees_every_file_though_the_operators_checkout_is_sparse(world: World, repo: Repo) -> None:
    """Design section 7: inherited sparse settings are dropped from the worktree's admin directory."""
    repo.git("sparse-checkout", "set", "--no-cone", "/sub/")
    assert not (repo.path / "f1.txt").exists()
    worker = world.lease("r1", "w1", start=False)["w1"]
    assert (worker.path / "f1.txt").exists()
    assert worker.status() == ""
    assert not (repo.path / "f1.txt").exists()


def test_a_lease_called_inside_a_linked_worktree_lies_in_the_main_worktree(world: World, repo: Repo) -> None:
    """ADR-0091 D2: <repo>/.worktrees; never a worktree nested in another, which would die with it."""
    linked = world.root / "linked"
    repo.git("worktree", "add", "-q", "-b", "side", linked)
    answer = lease(world, "-w", "w1", "--target", "side", cwd=linked / "sub")
    assert answer.code == 0, answer
    assert answer.json["leases"][0]["worktree_path"] == str(repo.path / ".worktrees/lionagi/r1/w1")
    assert answer.json["run"]["checkout"] == str(linked)


def test_a_lease_called_from_a_git_hook_uses_its_own_repository(world: World, repo: Repo) -> None:
    """Design section 6: no GIT_* is inherited; the environment of a hook leads elsewhere."""
    other = world.repo("other")
    leading = {"GIT_DIR": str(other.path / ".git"), "GIT_WORK_TREE": str(other.path), "GIT_INDEX_FILE": "/nowhere"}
    before = other.snapshot()
    answer = opening(world, env=leading)
    assert answer.code == 0, answer
    assert answer.json["run"]["repository"] == str(repo.path)
    assert other.snapshot() == before


# --- policy ----------------------------------------------------------------------------------------------------------


def test_the_isolated_default_keeps_patches_and_retains_nothing(world: World, repo: Repo) -> None:
    """ADR-0091 D1: patch_only is the isolated-mode default; the default is not to retain the worktree."""
    assert opening(world).json["run"]["policy"] == {
        "mode": "worktree_per_worker",
        "completion": "patch_only",
        "retain_worktree_on_resolution": False,
        "retention_until": None,
    }
    assert world.lease_file("r1", "w1")["policy"]["completion"] == "patch_only"


def test_retention_needs_an_absolute_future_expiry_and_the_policy_is_resolved_first(world: World, repo: Repo) -> None:
    """ADR-0091 D1: retention_until must be in the future; policy is resolved before the base SHA is read."""
    before = repo.snapshot()
    past = lease(world, "-w", "w1", "--target", "no-such-branch", "--retain-until", "1")
    assert (past.code, past.error) == (2, "usage")
    assert "future" in past.json["error"]["message"]
    for wrong in (["--retain-for", "0s"], ["--retain-for", "soon"], ["--retain-until", "tomorrow"]):
        assert opening(world, *wrong).code == 2
    both = opening(world, "--retain-for", "1h", "--retain-until", "2999-01-01T00:00:00+00:00")
    assert (both.code, both.error) == (2, "usage")
    assert opening(world, "--policy", "merge").code == 2
    assert traces(world, repo) == []
    assert repo.snapshot() == before
    for run, option in (("r1", ["--retain-for", "2h"]), ("r2", ["--retain-until", "2999-01-01T00:00:00+00:00"])):
        policy = opening(world, *option, run=run).json["run"]["policy"]
        assert policy["retain_worktree_on_resolution"] is True
        assert policy["retention_until"] > time.time() + 7000


def test_a_lease_stays_readable_after_its_policy_has_expired(world: World, repo: Repo) -> None:
    """Design section 2: an expiry is checked when a policy is resolved, not when a stored one is read back."""
    assert opening(world, "--retain-for", "1h").code == 0
    for path in (world.state("r1") / "workspaces.json", world.state("r1") / "workspaces/w1.json"):
        stored = json.loads(path.read_bytes())
        stored["policy"]["retention_until"] = 1000.0
        path.write_text(json.dumps(stored))
    assert world.lionwt("start", "r1", "w1", "--json").code == 0
    assert lease(world, "-w", "w2").code == 0


def test_a_policy_of_shared_host_allocates_nothing_and_nothing_falls_back_to_it() -> None:
    """ADR-0091 D1: shared_host remains the default of the contract; a selected mode never changes."""
    from pydantic import ValidationError

    from lionwt import WorkspacePolicy

    default = WorkspacePolicy()
    assert (default.mode, default.completion) == ("shared_host", "patch_only")
    assert (default.retain_worktree_on_resolution, default.retention_until) == (False, None)
    for wrong in (
        {"retain_worktree_on_resolution": True},
        {"retain_worktree_on_resolution": True, "retention_until": time.time() - 1},
        {"retention_until": time.time() - 1},
        {"completion": "merge"},
        {"mode": "worktree"},
        {"retain_for": 3600},
    ):
        with pytest.raises(ValidationError):
            WorkspacePolicy.model_validate(wrong)


def test_the_port_allocates_nothing_under_shared_host(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ADR-0091 D1: shared_host allocates no worktree lease."""
    import asyncio

    from lionwt import WorktreeCoordinator
    from lionwt.names import RunPaths

    monkeypatch.setenv("LIONAGI_HOME", str(world.lionagi_home))
    run = RunPaths("r1", world.state("r1"), world.state("r1") / "artifacts")
    allocation = WorktreeCoordinator(repo=repo.path).allocate(
        run=run, session_id="s1", worker_id="w1", target_branch="work", base_sha=repo.head("work")
    )
    with pytest.raises(LionwtError) as refused:
        asyncio.run(allocation)
    assert refused.value.code == "shared_host"
    assert traces(world, repo) == []


# --- what a run pins -------------------------------------------------------------------------------------------------


def test_later_calls_omit_what_is_pinned_or_repeat_it_equal(world: World, repo: Repo) -> None:
    """Design section 5: later calls omit what is pinned, or repeat it equal."""
    pins = ["--target", "work", "--session", "s1", "--policy", "merge_validated", "--retain-for", "2h"]
    pins += ["--require", "tests", "--require", "lint", "--repo", str(repo.path)]
    first = lease(world, "-w", "w1", *pins)
    run_file = (world.state("r1") / "workspaces.json").read_bytes()
    omitted = lease(world, "-w", "w2", cwd=world.root)
    repeated = lease(world, "-w", "w3", *pins, cwd=world.root)
    assert (first.code, omitted.code, repeated.code) == (0, 0, 0), (omitted, repeated)
    assert first.json["run"] == omitted.json["run"] == repeated.json["run"]
    assert world.lease_file("r1", "w2")["required_validations"] == ["tests", "lint"]
    assert (world.state("r1") / "workspaces.json").read_bytes() == run_file
    for spelling in ("refs/heads/work", "heads/work"):
        assert lease(world, "-w", f"by-{len(spelling)}", "--target", spelling).code == 0


def test_a_later_call_that_differs_from_the_pins_is_refused_and_changes_nothing(world: World, repo: Repo) -> None:
    """ADR-0091 D1: the policy is resolved once per run; design section 5: pins are repeated equal or refused."""
    world.repo("other")
    assert opening(world, "--session", "s1", "--require", "tests").code == 0
    before = (repo.snapshot(), traces(world, repo))
    run_file = (world.state("r1") / "workspaces.json").read_bytes()
    for option, code in (
        (["--policy", "merge_validated"], "policy_mismatch"),
        (["--retain-for", "3h"], "policy_mismatch"),
        (["--retain-until", "2999-01-01T00:00:00+00:00"], "policy_mismatch"),
        (["--target", "main"], "run_mismatch"),
        (["--target", "missing"], "run_mismatch"),
        (["--session", "other"], "run_mismatch"),
        (["--require", "tests", "--require", "lint"], "run_mismatch"),
        (["--repo", "../other"], "run_mismatch"),
    ):
        refused = lease(world, "-w", "w2", *option)
        assert (refused.code, refused.error) == (3, code), (option, refused)
        assert "nothing was made" in refused.json["error"]["message"]
    assert (repo.snapshot(), traces(world, repo)) == before
    assert (world.state("r1") / "workspaces.json").read_bytes() == run_file
    assert lease(world, "-w", "w2").code == 0


def test_the_first_call_needs_a_target_and_every_call_a_worker(world: World, repo: Repo) -> None:
    """Design section 5: the first call opens the run, and a worker is always named (section 3)."""
    untargeted = lease(world, "-w", "w1")
    assert (untargeted.code, untargeted.error) == (2, "usage")
    assert "--target" in untargeted.json["error"]["message"]
    nobody = lease(world, "--target", "work")
    assert (nobody.code, nobody.error) == (2, "usage")
    unknown = opening(world, "--after", "w0")
    assert (unknown.code, unknown.error) == (3, "lease_unknown")
    itself = opening(world, "--after", "w1")
    assert (itself.code, itself.error) == (2, "usage")
    assert traces(world, repo) == []


# --- the operator's checkout -----------------------------------------------------------------------------------------


def test_the_operators_checkout_stays_as_it_is_apart_from_one_exclude_line(world: World, repo: Repo) -> None:
    """Design section 7: the operator's checkout stays byte-identical, apart from the one exclude line."""
    exclude = repo.path / ".git/info/exclude"
    exclude.write_bytes(b"mine\n# last line without an end")
    exclude.chmod(0o640)
    repo.write("f2.txt", "dirty\n")
    repo.git("add", "f2.txt")
    repo.write("f3.txt", "unstaged\n")
    repo.write("untracked", "untracked\n")
    repo.write("ignored/secret", "ignored\n")
    before = repo.snapshot()
    status = repo.status()
    world.lease("r1", "w1")
    world.lease("r1", "w2")
    world.lease("r2", "w1", start=False)
    after = without_lionwt(repo.snapshot())
    mode, content = after.pop(".git/info/exclude")
    assert (mode & 0o777, content) == (0o640, b"mine\n# last line without an end\n/.worktrees/\n")
    before.pop(".git/info/exclude")
    assert after == before
    assert repo.status() == status


@pytest.mark.parametrize("content", [None, b"", b"/.worktrees/\n", b"mine\n/.worktrees/", b"/.worktrees/\r\n"])
def test_the_exclude_line_is_there_once_and_works(world: World, repo: Repo, content: bytes | None) -> None:
    """Design section 3: /.worktrees/ goes once into the common info/exclude. git takes CR for part of a pattern."""
    exclude = repo.path / ".git/info/exclude"
    if content is None:
        exclude.unlink()
        exclude.parent.rmdir()
    else:
        exclude.write_bytes(content)
    world.lease("r1", "w1", start=False)
    assert exclude.read_bytes().split(b"\n").count(b"/.worktrees/") == 1
    assert repo.status() == ""


def test_a_linked_exclude_is_not_written_through(world: World, repo: Repo) -> None:
    """Design section 7: lionwt writes one line into the repository's own file, never through a link."""
    exclude, shared = repo.path / ".git/info/exclude", world.root / "shared-exclude"
    shared.write_bytes(b"mine\n")
    exclude.unlink()
    exclude.symlink_to(shared)
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "path_unsafe")
    assert shared.read_bytes() == b"mine\n"
    assert traces(world, repo) == []
    shared.write_bytes(b"mine\n/.worktrees/\n")
    assert opening(world).code == 0
    assert exclude.is_symlink()
    assert shared.read_bytes() == b"mine\n/.worktrees/\n"


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        (".worktrees", "link"),
        (".worktrees", "dangling"),
        (".worktrees", "file"),
        (".worktrees/lionagi", "link"),
        (".worktrees/lionagi/r1", "link"),
    ],
)
def test_worktrees_are_never_made_or_removed_through_something_else(
    world: World, repo: Repo, level: str, kind: str
) -> None:
    """Design section 7: refused before anything is made; what a link leads to keeps every file."""
    elsewhere = world.root / "elsewhere"
    (elsewhere / ".trash/precious").mkdir(parents=True)
    (elsewhere / ".trash/precious/file").write_text("precious\n")
    (elsewhere / "lionagi/r1").mkdir(parents=True)
    place = repo.path / level
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        place.write_text("a file\n")
    else:
        place.symlink_to(elsewhere if kind == "link" else world.root / "nowhere")
    seen = sorted(elsewhere.rglob("*"))
    before = repo.snapshot()
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "path_unsafe"), refused
    assert str(place) in refused.json["error"]["message"]
    assert sorted(elsewhere.rglob("*")) == seen
    assert repo.snapshot() == before
    assert not (world.state("r1") / "workspaces.json").exists()
    assert not (world.root / "nowhere").exists()


def test_a_place_that_becomes_a_link_later_is_not_followed_either(world: World, repo: Repo) -> None:
    """Design section 7: the same holds for the calls after the first."""
    assert opening(world).code == 0
    elsewhere = world.root / "elsewhere"
    (elsewhere / ".trash").mkdir(parents=True)
    (elsewhere / ".trash/precious").write_text("precious\n")
    (repo.path / ".worktrees").rename(world.root / "moved")
    (repo.path / ".worktrees").symlink_to(elsewhere)
    refused = lease(world, "-w", "w2")
    assert (refused.code, refused.error) == (3, "path_unsafe")
    assert (elsewhere / ".trash/precious").read_text() == "precious\n"
    assert not (world.state("r1") / "workspaces/w2.json").exists()


@pytest.mark.parametrize(
    "ignored", ["*\n!*/\n!*.txt\n!.gitignore\n", "!.worktrees\n", "!*\n", "!*/\n!**/w1/\n!**/w1/**\n"]
)
def test_worktrees_stay_out_of_sight_where_the_repository_lists_what_is_not_ignored(
    world: World, repo: Repo, ignored: str
) -> None:
    """Invariant 13: a .gitignore counts before the exclude line; the operator adds no worker as a gitlink."""
    repo.write(".gitignore", ignored)
    repo.git("add", "-f", ".gitignore")
    repo.git("commit", "-q", "-m", "whitelist")
    workers = world.lease("r1", "w1", "w2")
    assert repo.status() == ""
    repo.git("add", "-A")
    repo.git("clean", "-q", "-fd")
    assert repo.status() == ""
    workers["w1"].write("new.txt", "new\n")
    assert workers["w1"].status() == "?? new.txt"
    for worker in workers:
        world.freeze_now("r1", worker)
    assert world.promote("r1").code == 0
    assert repo.git("show", "work:new.txt") == "new"
    assert world.leftovers("r1", repo) == []


def test_a_lease_that_is_undone_takes_what_hid_its_worktree_with_it(world: World, repo: Repo) -> None:
    """Design section 7: any failure undoes exactly what the call made; reconcile does it where it was killed."""
    repo.commit("whitelist", **{".gitignore": "!.worktrees\n"})
    assert opening(world, env={"LIONWT_FAULT": "lease.populated:nospace"}).code
    assert not (repo.path / ".worktrees").exists()
    assert opening(world, env={"LIONWT_FAULT": "lease.branched:kill"}).code == -9
    assert (repo.path / ".worktrees/.gitignore").exists()
    assert world.lionwt("reconcile", "r1", "--takeover", "--json").code == 0
    assert world.leftovers("r1", repo) == []


def test_a_lease_is_refused_where_the_operators_own_list_would_show_its_worktree(world: World, repo: Repo) -> None:
    """Nothing of the operator's is written over."""
    repo.commit("whitelist", **{".gitignore": "!.worktrees\n"})
    own = repo.write(".worktrees/.gitignore", "!lionagi\n")
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "path_unsafe"), refused
    assert own.read_text() == "!lionagi\n" and os.listdir(own.parent) == [".gitignore"]
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""


def test_nothing_is_written_into_the_worktrees_directory_where_the_exclude_line_suffices(
    world: World, repo: Repo
) -> None:
    repo.commit("some", **{".gitignore": "*.log\n!keep.log\n"})
    world.lease("r1", "w1")
    assert os.listdir(repo.path / ".worktrees") == ["lionagi"] and repo.status() == ""


def test_a_checkout_of_the_operators_own_beside_the_workers_worktrees_is_one_like_any_other(
    world: World, repo: Repo
) -> None:
    """Design section 3: of .worktrees only lionagi and .trash are lionwt's."""
    repo.git("switch", "-q", "main")
    repo.git("worktree", "add", "-q", ".worktrees/feature", "work")
    feature = Repo(repo.path / ".worktrees/feature", repo.env)
    worker = world.lease("r1", "w1", cwd=feature.path)["w1"]
    worker.write("new.txt", "new\n")
    refused = opening(world, run="r2", cwd=worker.path)
    assert (refused.code, refused.error) == (3, "path_unsafe"), refused
    world.freeze_now("r1", "w1")
    assert world.promote("r1").code == 0
    assert (feature.path / "new.txt").read_text() == "new\n" and feature.status() == ""
    assert os.listdir(feature.path.parent) == ["feature"]


# --- collisions ------------------------------------------------------------------------------------------------------


def test_a_pair_is_never_used_twice_in_any_state(world: World, repo: Repo) -> None:
    """ADR-0091 D5: the pair is never reused, including after terminal cleanup; D2: nor what folds to it."""
    states = {"w1": "allocated", "w2": "running", "w3": "frozen", "w4": "terminal", "w5": "terminal"}
    world.lease("r1", *states, start=False, policy="patch_only")
    for worker in ("w2", "w3", "w4"):
        assert world.lionwt("start", "r1", worker).code == 0
    for worker in ("w3", "w4"):
        assert world.freeze("r1", worker).code == 0
    assert world.promote("r1", "w4").code == 0
    assert world.freeze("r1", "w5", "--failed").code == 0
    assert {worker: world.lease_file("r1", worker)["lease"]["state"] for worker in states} == states
    files = [world.state("r1") / f"workspaces/{worker}.json" for worker in states]
    before = [path.read_bytes() for path in files]
    for worker in (*states, "W4"):
        refused = lease(world, "-w", "fresh", "-w", worker)
        assert (refused.code, refused.error) == (3, "id_reused"), refused
    assert [path.read_bytes() for path in files] == before
    assert lease(world, "-w", "fresh").code == 0


def test_an_existing_branch_path_or_record_is_refused_before_anything_is_made(world: World, repo: Repo) -> None:
    """ADR-0091 D2: existing worktree, branch or state-record collisions fail before the worker starts."""
    assert opening(world).code == 0
    repo.git("branch", "lionagi/r1/branch")
    repo.git("branch", "lionagi/r1/Folded")
    repo.git("branch", "lionagi/r1/deeper/branch")
    repo.git("update-ref", "refs/lionwt/r1/anchored/candidate", "work")
    (repo.path / ".worktrees/lionagi/r1/path").mkdir()
    (repo.path / ".worktrees/lionagi/r1/dangling").symlink_to("/nonexistent")
    world.evidence("r1", "evidence").mkdir(parents=True)
    (world.state("r1") / "workspaces/record.json").write_text("torn")
    before = (without_lionwt(repo.snapshot()), traces(world, repo))
    for worker, code in {
        "branch": "name_taken",
        "folded": "name_taken",
        "deeper": "name_taken",
        "anchored": "name_taken",
        "path": "name_taken",
        "dangling": "name_taken",
        "evidence": "name_taken",
        "record": "id_reused",
    }.items():
        refused = lease(world, "-w", "fine", "-w", worker)
        assert (refused.code, refused.error) == (3, code), refused
        assert "nothing was made" in refused.json["error"]["message"]
    assert (without_lionwt(repo.snapshot()), traces(world, repo)) == before
    assert lease(world, "-w", "fine").code == 0


@pytest.mark.parametrize("branch", ["lionagi", "lionagi/r1", "lionagi/R1"])
def test_a_branch_where_the_workers_branches_would_lie_is_refused(world: World, repo: Repo, branch: str) -> None:
    """Design section 4: branch prefix clashes are refused before anything is made."""
    repo.git("branch", branch)
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "name_taken"), refused
    assert branch in refused.json["error"]["message"]
    assert traces(world, repo) == [f"refs/heads/{branch}"]
    repo.git("branch", "-m", branch, "out-of-the-way")
    assert opening(world).code == 0


@pytest.mark.parametrize("trace", ["branch", "worktrees", "anchor", "other-case-branch", "other-case-run"])
def test_a_run_id_that_was_used_in_this_repository_is_refused(world: World, repo: Repo, trace: str) -> None:
    """Design section 4: two ids that fold to the same name collide; invariant 2: nothing of lionwt is adopted."""
    match trace:
        case "branch":
            repo.git("branch", "lionagi/r1/old")
        case "worktrees":
            (repo.path / ".worktrees/lionagi/r1/old").mkdir(parents=True)
        case "anchor":
            repo.git("update-ref", "refs/lionwt/r1/old/head", "work")
        case "other-case-branch":
            repo.git("branch", "lionagi/R1/old")
        case "other-case-run":
            world.state("R1").mkdir(parents=True)
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "id_reused"), refused
    assert not (world.state("r1") / "workspaces.json").exists()
    assert opening(world, run="r2").code == 0


def test_a_run_whose_own_file_is_gone_is_not_opened_anew_over_its_leases(world: World, repo: Repo) -> None:
    """Design section 3: what is ambiguous is never treated as "no lease"."""
    world.lease("r1", "w1")
    assert world.freeze("r1", "w1").code == 0
    world.promote("r1")
    (world.state("r1") / "workspaces.json").unlink()
    before = traces(world, repo)
    refused = lease(world, "-w", "w2", "--target", "work")
    assert (refused.code, refused.error) == (7, "state_unreadable"), refused
    assert traces(world, repo) == before


# --- all or nothing --------------------------------------------------------------------------------------------------

FAULTS = [
    *(f"lease.{step}:raise" for step in ("intended", "registered", "populated", "recorded")),
    "lease.registered:nospace:2",
    "lease.recorded:nospace",
    # Six writes: the run, two reservations, the exclude, two leases.
    *(f"store.written:nospace:{nth}" for nth in range(1, 7)),
    *(f"store.replaced:nospace:{nth}" for nth in (1, 3, 6)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lease_that_fails_half_way_leaves_nothing_and_its_ids_free(world: World, repo: Repo, fault: str) -> None:
    """Design sections 4 and 7: all or nothing; a call that was undone completely leaves the ids free."""
    before = repo.snapshot()
    failed = lease(world, "-w", "w1", "-w", "w2", "--target", "work", env={"LIONWT_FAULT": fault})
    if ":raise" in fault:
        assert (failed.code, failed.error) == (1, "bug")
    else:
        assert (failed.code, failed.error) == (8, "no_space")
        assert "nothing was made" in failed.json["error"]["message"]
    assert traces(world, repo) == []
    assert repo.git("worktree", "list").count("\n") == 0
    assert not (repo.path / ".worktrees").exists()
    after = repo.snapshot()
    after[".git/info/exclude"] = before[".git/info/exclude"]
    assert after == before
    again = lease(world, "-w", "w1", "-w", "w2", "--target", "work")
    assert again.code == 0, again
    assert repo.status() == ""


def test_a_failure_in_an_open_run_leaves_the_run_and_its_other_leases(world: World, repo: Repo) -> None:
    """Design section 7: any failure undoes exactly what this call made."""
    assert opening(world).code == 0
    before, snapshot = traces(world, repo), without_lionwt(repo.snapshot())
    content = (world.state("r1") / "workspaces/w1.json").read_bytes()
    failed = lease(world, "-w", "w2", "-w", "w3", env={"LIONWT_FAULT": "lease.populated:nospace"})
    assert (failed.code, failed.error) == (8, "no_space")
    assert traces(world, repo) == before
    assert without_lionwt(repo.snapshot()) == snapshot
    assert (world.state("r1") / "workspaces/w1.json").read_bytes() == content


def test_one_bad_id_among_several_keeps_all_of_them_from_being_made(world: World, repo: Repo) -> None:
    """Design section 4: a lease call checks every id before it opens the run."""
    before = repo.snapshot()
    for workers, code in ((["w1", "-bad"], "id_invalid"), (["w1", "w1"], "id_reused"), (["a", "a"], "id_reused")):
        refused = lease(world, *(f"--worker={worker}" for worker in workers), "--target", "work")
        assert (refused.code, refused.error) == (3, code), refused
    folded = lease(world, "-w", "w1", "-w", "W1", "--target", "work")
    assert (folded.code, folded.error) == (3, "id_reused")
    assert not world.lionagi_home.exists()
    assert repo.snapshot() == before


def test_what_cannot_be_undone_ends_as_teardown_failed_and_is_named(world: World, repo: Repo) -> None:
    """ADR-0091 D3: the coordinator removes what it created or records teardown_failed."""
    trash = repo.path / ".worktrees/.trash"
    trash.parent.mkdir()
    trash.write_text("in the way\n")
    failed = opening(world, env={"LIONWT_FAULT": "lease.recorded:nospace"})
    assert (failed.code, failed.error) == (8, "no_space")
    assert str(trash) in failed.json["error"]["message"]
    assert "reconcile r1" in failed.json["error"]["hint"]
    stored = world.lease_file("r1", "w1")
    assert (stored["lease"]["state"], stored["record"]["status"]) == ("terminal", "teardown_failed")
    assert (stored["record"]["worktree_removed"], stored["record"]["branch_deleted"]) == (False, False)
    assert stored["serial"] == 3  # reserved, allocated, ended
    assert [step["state"] for step in stored["history"]] == ["allocated", "terminal"]
    assert (repo.path / ".worktrees/lionagi/r1/w1/f1.txt").exists()
    assert lease(world, "-w", "w1").error == "id_reused"


def test_a_branch_made_by_somebody_else_meanwhile_is_refused_and_left(world: World, repo: Repo) -> None:
    """Design section 7: exactly what this call made is undone, and nothing else."""
    with world.stopped("lease.intended", "lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--json") as child:
        repo.git("branch", "lionagi/r1/w2", "work")
        child.send_signal(signal.SIGCONT)
        out, _ = child.communicate(timeout=60)
    answer = json.loads(out)
    assert (answer["exit_code"], answer["error"]["code"]) == (3, "name_taken"), answer
    assert traces(world, repo) == ["refs/heads/lionagi/r1/w2"]
    assert not (repo.path / ".worktrees").exists()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_undoes_the_lease(world: World, repo: Repo, ending: signal.Signals) -> None:
    """Design sections 5 and 7: 128 + n, and any failure undoes exactly what this call made."""
    with world.stopped("lease.registered", "lease", "r1", "-w", "w1", "-w", "w2", "--target", "work") as child:
        child.send_signal(ending)
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=60)
    assert child.returncode == 128 + ending
    assert traces(world, repo) == []


def test_a_signal_ends_a_lease_whose_filters_hang(world: World, repo: Repo) -> None:
    """Invariant 24: every wait is bounded, also for what is done beside the one that the signal met."""
    marks = world.root / "marks"
    marks.mkdir()
    world.config("filter.slow.smudge", f"touch {marks}/$$; exec sleep 300")
    repo.commit(**{".gitattributes": "slow.txt filter=slow\n", "slow.txt": "1\n"})
    child = world.popen("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--json")
    try:
        wait_until(lambda: len(list(marks.iterdir())) == 2)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
    finally:
        child.kill()
        child.communicate()
        for mark in marks.iterdir():
            os.kill(int(mark.name), signal.SIGKILL)
    assert child.returncode == 128 + signal.SIGTERM
    assert traces(world, repo) == []


def test_a_failing_git_is_undone_and_its_words_are_passed_on(world: World, repo: Repo) -> None:
    """ADR-0091 D1: failure to allocate is a startup failure; there is no fallback."""
    (repo.path / ".git/worktrees").write_text("in the way of git\n")
    failed = lease(world, "-w", "w1", "-w", "w2", "--target", "work")
    assert (failed.code, failed.error) == (8, "git_failed"), failed
    assert "nothing was made" in failed.json["error"]["message"]
    assert traces(world, repo) == []
    assert (repo.path / ".git/worktrees").read_text() == "in the way of git\n"


# --- at once ---------------------------------------------------------------------------------------------------------


def all_at_once(world: World, calls: list[list[str]]) -> list[dict[str, object]]:
    """Run lease calls of one run beside each other; their answers in order."""
    children = [world.popen("lease", "r1", "--json", "--owner-pid", "none", *call) for call in calls]
    try:
        return [json.loads(child.communicate(timeout=120)[0]) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()


def test_eight_calls_at_once_open_one_run_and_lease_eight_workers(world: World, repo: Repo) -> None:
    """Design section 3: locks, one order; parallel worktree add without them fails often."""
    answers = all_at_once(world, [["-w", f"w{number}", "--target", "work"] for number in range(8)])
    assert [answer["exit_code"] for answer in answers] == [0] * 8, answers
    assert len({json.dumps(answer["run"]) for answer in answers}) == 1
    assert len(repo.git("for-each-ref", "refs/heads/lionagi/r1").splitlines()) == 8
    for number in range(8):
        worker = Repo(repo.path / f".worktrees/lionagi/r1/w{number}", world.environment())
        assert (worker.status(), worker.head()) == ("", repo.head("work"))
        stored = world.lease_file("r1", f"w{number}")
        assert Path(stored["identity"]["admin_dir"]) == Path(worker.git("rev-parse", "--absolute-git-dir"))
    assert (repo.path / ".git/info/exclude").read_bytes().count(b"/.worktrees/") == 1


def test_of_calls_that_race_for_one_id_exactly_one_wins(world: World, repo: Repo) -> None:
    """ADR-0091 D2: a pair of ids names one lease; all or nothing for the losers."""
    answers = all_at_once(world, [["-w", f"own{number}", "-w", "shared", "--target", "work"] for number in range(3)])
    codes = sorted((answer["exit_code"], (answer["error"] or {}).get("code")) for answer in answers)  # type: ignore[attr-defined]
    assert codes == [(0, None), (3, "id_reused"), (3, "id_reused")], answers
    (winner,) = (number for number, answer in enumerate(answers) if answer["ok"])
    assert sorted(os.listdir(repo.path / ".worktrees/lionagi/r1")) == [f"own{winner}", "shared"]
    left = [path.name for path in (world.state("r1") / "workspaces").glob("*.json")]
    assert sorted(left) == [f"own{winner}.json", "shared.json"]


@pytest.mark.parametrize("point", ["lease.unopened", "lease.planned"])
def test_a_run_that_another_call_opens_meanwhile_is_joined(world: World, repo: Repo, point: str) -> None:
    """Design section 5: the first call opens the run; one that then finds its branches made joins it."""
    with world.stopped(point, "lease", "r1", "-w", "w1", "--target", "work", "--json") as child:
        assert lease(world, "-w", "w2", "--target", "work").code == 0
        opened = (world.state("r1") / "workspaces.json").read_bytes()
        child.send_signal(signal.SIGCONT)
        answer = json.loads(child.communicate(timeout=60)[0])
    assert answer["exit_code"] == 0, answer
    assert (world.state("r1") / "workspaces.json").read_bytes() == opened
    assert len(repo.git("for-each-ref", "refs/heads/lionagi/r1").splitlines()) == 2


@pytest.mark.parametrize(
    ("point", "option"),
    [
        ("lease.unopened", ["--policy", "merge_validated"]),
        ("lease.planned", ["--policy", "merge_validated"]),
        ("lease.planned", ["--session", "s1"]),
    ],
)
def test_a_run_that_another_call_opens_otherwise_meanwhile_is_not_joined(
    world: World, repo: Repo, point: str, option: list[str]
) -> None:
    """ADR-0091 D1: the policy is resolved once per run; the call that comes second is refused."""
    arguments = ["lease", "r1", "-w", "w1", "--target", "work", "--json", *option]
    with world.stopped(point, *arguments) as child:
        assert lease(world, "-w", "w2", "--target", "work").code == 0
        before = traces(world, repo)
        child.send_signal(signal.SIGCONT)
        answer = json.loads(child.communicate(timeout=60)[0])
    assert answer["error"]["code"] in ("policy_mismatch", "run_mismatch"), answer
    assert traces(world, repo) == before


def test_an_opening_that_fails_keeps_the_run_that_another_call_has_joined(world: World, repo: Repo) -> None:
    """Design section 7: a failure undoes what this call made; what others hold meanwhile stays."""
    arguments = ["lease", "r1", "-w", "w1", "--target", "work", "--json"]
    with world.stopped("lease.populated", *arguments) as child:
        assert lease(world, "-w", "w2").code == 0
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert not (world.state("r1") / "workspaces/w1.json").exists()
    assert world.lionwt("start", "r1", "w2").code == 0
    assert lease(world, "-w", "w1").code == 0


# --- repository and settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["core.bare=true", "core.worktree=/nonexistent"])
@pytest.mark.parametrize("when", ["opening", "later", "linked"])
def test_a_shared_config_that_breaks_the_checkout_is_refused_and_named(
    world: World, repo: Repo, setting: str, when: str
) -> None:
    """Design section 6: a worker can write the shared config; lionwt never does, so a person has to."""
    linked = world.root / "linked"
    if when == "later":
        assert opening(world).code == 0
    if when == "linked":
        repo.git("worktree", "add", "-q", linked, "-b", "side")
    key, _, value = setting.partition("=")
    config = repo.path / ".git/config"
    saved = config.read_bytes()
    subprocess.run(["git", "config", "--file", config, key, value], check=True, env=repo.env)
    broken = config.read_bytes()
    arguments = ["-w", "w2"] if when == "later" else ["-w", "w2", "--target", "work"]
    refused = lease(world, *arguments, cwd=linked if when == "linked" else None)
    if when == "linked" and key == "core.worktree":
        assert refused.code == 0, refused  # git itself ignores it there, and lionwt names its work tree
        return
    assert (refused.code, refused.error) == (7, "repository_unsafe"), refused
    assert key in refused.json["error"]["message"] + refused.json["error"]["hint"]
    assert config.read_bytes() == broken
    assert not (world.state("r1") / "workspaces/w2.json").exists()
    config.write_bytes(saved)
    assert lease(world, *arguments).code == 0


@pytest.mark.parametrize("kind", ["none", "bare", "unborn", "inside"])
def test_a_repository_without_a_checkout_or_commit_is_refused(world: World, kind: str) -> None:
    """Design section 6: a bare or unborn repository is refused."""
    path = world.root / "place"
    path.mkdir()
    if kind == "inside":
        path = world.repo("place/repo").path / ".git"
    elif kind != "none":
        subprocess.run(["git", "init", "-q", *(["--bare"] if kind == "bare" else []), path], check=True, env=world.env)
    refused = opening(world, "--repo", str(path), cwd=world.root)
    assert (refused.code, refused.error) == (3, "repository_unsupported"), refused
    assert not world.lionagi_home.exists()


@pytest.mark.parametrize("setting", ["clean", "smudge", "process"])
def test_a_filter_that_only_the_repository_names_is_refused_until_the_operator_names_it(
    world: World, repo: Repo, setting: str
) -> None:
    """Design section 6: settings that name programs come from the operator, or lionwt.toml lists them."""
    repo.git("config", f"filter.my drv.{setting}", "cat")
    refused = opening(world)
    assert (refused.code, refused.error) == (3, "filter_untrusted"), refused
    assert "'my drv'" in refused.json["error"]["message"]
    assert traces(world, repo) == []
    world.lionagi_home.mkdir()
    (world.lionagi_home / "lionwt.toml").write_text('trusted_filters = ["my drv"]\n')
    assert opening(world).code == 0
    (world.lionagi_home / "lionwt.toml").unlink()
    repo.git("config", "--global", f"filter.my drv.{setting}", "cat")
    assert opening(world, run="r2").code == 0


def test_the_operators_own_filter_fills_the_worktree_and_a_hook_does_not_run(world: World, repo: Repo) -> None:
    """Design section 6: content work uses the operator's settings; hooks are off."""
    repo.git("config", "--global", "filter.upper.smudge", "tr a-z A-Z")
    repo.git("config", "--global", "filter.upper.clean", "tr A-Z a-z")
    repo.write(".gitattributes", "*.up filter=upper\n")
    repo.commit("filtered", **{"a.up": "text\n"})
    hook = repo.path / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {world.root}/hooked\nexit 1\n")
    hook.chmod(0o755)
    worker = world.lease("r1", "w1", start=False)["w1"]
    assert (worker.path / "a.up").read_text() == "TEXT\n"
    assert worker.status() == ""
    assert not (world.root / "hooked").exists()


def test_a_malformed_operator_file_is_refused_and_named(world: World, repo: Repo) -> None:
    """Design section 6: what the operator adds is read whole, or nothing is made."""
    world.lionagi_home.mkdir()
    path = world.lionagi_home / "lionwt.toml"
    for content in (
        b"protected_branches = [",
        b'protected = ["x"]\n',
        b'protected_branches = "x"\n',
        b"trusted_filters = [1]\n",
        b"[trusted_filters]\n",
        b"\xff\n",
    ):
        path.write_bytes(content)
        with pytest.raises(LionwtError) as malformed:
            read_operator_config(world.lionagi_home)
        assert (malformed.value.code, malformed.value.exit_code) == ("config_invalid", 2), content
    refused = opening(world)
    assert (refused.code, refused.error) == (2, "config_invalid"), refused
    assert str(path) in refused.json["error"]["message"]
    assert traces(world, repo) == []
    assert not (world.lionagi_home / "runs").exists()


def test_a_repository_that_was_moved_or_exchanged_is_refused(world: World, repo: Repo) -> None:
    """Design section 8, first row: not where or what the run recorded is exit 7, nothing changed."""
    assert opening(world).code == 0
    repo.path.rename(world.root / "moved")
    gone = lease(world, "-w", "w2", cwd=world.root)
    assert (gone.code, gone.error) == (7, "repository_moved"), gone
    other = world.repo("repo")
    exchanged = lease(world, "-w", "w2")
    assert (exchanged.code, exchanged.error) == (7, "repository_moved"), exchanged
    assert other.git("for-each-ref", "refs/heads/lionagi") == ""
    assert not (world.state("r1") / "workspaces/w2.json").exists()


def test_a_sha256_repository_and_packed_refs_are_leased_like_any_other(world: World) -> None:
    """Design section 6: SHA-1 and SHA-256; packed refs."""
    repo = world.repo(object_format="sha256")
    repo.git("pack-refs", "--all")
    worker = world.lease("r1", "w1", start=False)["w1"]
    assert len(worker.head()) == 64
    assert worker.status() == ""


def test_the_index_of_a_large_worktree_has_a_second_of_its_own(world: World, repo: Repo) -> None:
    """git reads every file of its index's own second again, at every look: a lease of many files waits it out."""
    for number in range(3000):
        repo.write(
            f"many/{number % 50:02d}/{number:04d}-with-a-name-of-some-length-for-a-large-index.txt", f"{number}\n"
        )
    repo.commit("many files")
    worker = world.lease("r1", "w1")["w1"]
    newest = max(int(os.stat(path).st_mtime) for path in worker.path.glob("many/*/*"))
    saved = world.state("r1") / "git/lionwt/w1.index"
    for index in (Path(world.lease_file("r1", "w1")["identity"]["admin_dir"], "index"), saved):
        assert int(os.stat(index).st_mtime) > newest
    assert world.freeze("r1", "w1").code == 0


@pytest.mark.parametrize("point", ["lease.intended", "lease.populated"])
def test_a_lease_that_a_bug_ends_is_undone_even_where_another_befalls_its_undoing(
    world: World, repo: Repo, point: str
) -> None:
    """Design section 7: any failure undoes what the call made; one that cannot be undone keeps no other."""
    world.lease("r1", "w0", start=False)
    env: dict[str, str | None] = {"LIONWT_FAULT": f"{point}:raise,readmodel.dropped:raise:1"}
    failed = world.lionwt("lease", "r1", "-w", "w1", "-w", "w2", "-w", "w3", "--owner-pid", "none", "--json", env=env)
    assert (failed.code, failed.error) == (1, "bug"), failed
    assert sorted(path.name for path in (world.state("r1") / "workspaces").glob("*.json")) == ["w0.json", "w1.json"]
    assert sorted(os.listdir(repo.path / ".worktrees/lionagi/r1")) == ["w0"]
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert world.record("r1", "w1")["status"] == "discarded"
    world.lease("r1", "w2", "w3")


def test_an_empty_directory_of_worktrees_takes_no_run_id(world: World, repo: Repo) -> None:
    """Design 4: a call that was undone leaves the id free, also where its last directory could not be removed."""
    left = repo.path / ".worktrees/lionagi/r1"
    left.mkdir(parents=True)
    (left / "somebody's").mkdir()
    refused = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--json")
    assert (refused.code, refused.error) == (3, "id_reused"), refused
    (left / "somebody's").rmdir()
    world.lease("r1", "w1")


def test_a_lease_that_is_undone_takes_with_it_what_a_dead_one_had_begun_to_write(world: World, repo: Repo) -> None:
    """Design 7, allocate: after a failure nothing is left, also of a call that died before the run was opened."""
    opening = ("lease", "r1", "-w", "w1", "--target", "work", "--json")
    assert world.lionwt(*opening, env={"LIONWT_FAULT": "store.written:kill"}).code == -9
    assert list(world.state("r1").glob("*.tmp")) or list(world.state("r1").glob(".*.tmp"))
    assert world.lionwt(*opening, env={"LIONWT_FAULT": "lease.populated:nospace"}).code == 8
    assert not [path for path in world.state("r1").rglob("*") if path.suffix == ".tmp"]
    assert not (repo.path / ".worktrees").exists() and repo.status() == ""
    world.lease("r1", "w1")
