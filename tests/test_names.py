"""Ids, targets, the protected fence, and what a RUN argument names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lionwt import LionwtError, names, repository
from tests.conftest import Answer, Repo, World


def opening(world: World, *arguments: str, run: str = "r1", **options: object) -> Answer:
    return world.lionwt(
        "lease",
        run,
        "--json",
        "--owner-pid",
        "none",
        "-w",
        "w1",
        *arguments,
        **options,  # type: ignore[arg-type]
    )


# --- ids -------------------------------------------------------------------------------------------------------------

BAD_IDS = [
    *("", ".", "..", "-", "-w", "_x", ".hidden", "a..b", "a.", "a.lock", "a.LOCK", "HEAD", "a/b", "/a", "a/", "../a"),
    *(
        "a b",
        "a\n",
        "a\0",
        "a\x1b[31m",
        "a\u202eb",
        "ä",
        "\uff41",
        "a~",
        "a^",
        "a:",
        "a?",
        "a*",
        "a[",
        "a\\",
        "a@{b",
        "@",
    ),
    *("a" * 65, "a\ud800", "a,b", "a=b", "$a", "%2e"),
]


@pytest.mark.parametrize("kind", ["run", "worker"])
def test_an_id_is_accepted_as_it_stands_or_refused(kind: str) -> None:
    """Design section 4: nothing is rewritten; a path component and a ref component at once."""
    for good in ("a", "0", "A1", "a.b-c_d", "20260711T101112-a1b2c3", "a" * 64, "head", "a.locked", "a--b"):
        assert names.check_id(good, kind) == good
    for bad in BAD_IDS:
        with pytest.raises(LionwtError) as refused:
            names.check_id(bad, kind)
        assert (refused.value.code, refused.value.exit_code) == ("id_invalid", 3), bad


@pytest.mark.parametrize("bad", ["HEAD", "a..b", "-w2", "ä\x1b"])
def test_a_bad_worker_id_is_refused_before_the_run_is_opened(world: World, repo: Repo, bad: str) -> None:
    """ADR-0091 D2: both ids must first pass the path-component guard and the ref component validator."""
    refused = opening(world, f"--worker={bad}", "--target", "work")
    assert (refused.code, refused.error) == (3, "id_invalid"), refused
    assert not world.lionagi_home.exists()


@pytest.mark.parametrize("bad", ["HEAD", "a.lock"])
def test_a_bad_run_id_is_refused(world: World, repo: Repo, bad: str) -> None:
    """ADR-0091 D2: run_id passes the same guards."""
    refused = opening(world, "--target", "work", run=bad)
    assert (refused.code, refused.error) == (3, "id_invalid"), refused
    assert not world.lionagi_home.exists()


def test_every_accepted_pair_has_a_branch_and_a_path_of_its_own(tmp_path: Path) -> None:
    """ADR-0091 D2: the normalized pair must be injective."""
    ids = ["a", "b", "a-b", "a.b", "a_b", "0", "a--b", "ab"]
    pairs = [(run, worker) for run in ids for worker in ids]
    assert len({names.worker_branch(*pair) for pair in pairs}) == len(pairs)
    assert len({names.worktree_path(tmp_path, *pair) for pair in pairs}) == len(pairs)
    assert len({names.anchor_prefix(*pair) for pair in pairs}) == len(pairs)
    assert names.fold("Worker") == names.fold("wORKER")


# --- targets ---------------------------------------------------------------------------------------------------------


def test_a_target_is_the_name_of_an_existing_branch_and_nothing_else(world: World, repo: Repo) -> None:
    """Design section 4: HEAD, @, expressions and missing branches are refused."""
    origin = world.repo("origin")
    origin.git("branch", "theirs")
    repo.git("remote", "add", "origin", origin.path)
    repo.git("fetch", "-q", "origin")
    repo.git("tag", "only-a-tag")
    repo.git("update-ref", "refs/heads/HEAD", "work")
    repo.git("update-ref", "refs/heads/@", "work")
    repo.git("symbolic-ref", "refs/heads/dangling", "refs/heads/nowhere")
    repo.git("symbolic-ref", "refs/heads/to-tag", "refs/tags/only-a-tag")
    before = repo.snapshot()
    bad = [
        "",
        "HEAD",
        "@",
        "@{0}",
        "work~0",
        "work^",
        "work^{commit}",
        "work@{0}",
        ":/base",
        "missing",
        "wor*",
        "work/",
    ]
    bad += ["origin/theirs", "theirs", "refs/remotes/origin/theirs", "only-a-tag", "refs/tags/only-a-tag", "tags/work"]
    bad += ["-work", "refs/heads/", "refs/heads/HEAD", repo.head(), repo.head()[:8], "dangling", "to-tag", "WORK"]
    for target in bad:
        with pytest.raises(LionwtError) as resolved:
            repository.resolve_target(str(repo.path / ".git"), target)
        assert resolved.value.code == "target_invalid", target
    for target in ("", "HEAD", "@", "work~0", "missing", "origin/theirs", "to-tag", "-work"):
        refused = opening(world, f"--target={target}")
        assert (refused.code, refused.error) == (3, "target_invalid"), (target, refused)
        assert "nothing was made" in refused.json["error"]["message"]
    assert not world.lionagi_home.exists()
    assert repo.snapshot() == before


def test_a_branch_is_meant_even_where_a_tag_or_remote_has_its_name(world: World, repo: Repo) -> None:
    """Design section 4: resolved to its full name; a short name that is ambiguous is never guessed."""
    tagged = repo.git("commit-tree", "-m", "another", "work^{tree}")
    repo.git("tag", "work", tagged)
    repo.git("update-ref", "refs/remotes/work/HEAD", tagged)
    repo.git("branch", "heads/work", "main")
    repo.git("branch", "origin/x", "refs/heads/work")
    branch = repo.head("refs/heads/work")
    for number, (given, target) in enumerate(
        {
            "work": "work",
            "refs/heads/work": "work",
            "heads/work": "heads/work",
            "refs/heads/heads/work": "heads/work",
            "origin/x": "origin/x",
        }.items()
    ):
        run = opening(world, "--target", given, run=f"r{number}").json["run"]
        expected = repo.head(f"refs/heads/{target}")
        assert (run["target_branch"], run["base_sha"]) == (target, expected), given
    repo.git("branch", "-D", "heads/work")
    assert opening(world, "--target", "heads/work", run="short").json["run"]["base_sha"] == branch


def test_a_symbolic_branch_is_resolved_to_the_branch_it_stands_for(world: World, repo: Repo) -> None:
    """Design section 4: resolved through symrefs to its full name before any rule applies to it."""
    repo.git("symbolic-ref", "refs/heads/alias", "refs/heads/second")
    repo.git("symbolic-ref", "refs/heads/second", "refs/heads/work")
    answer = opening(world, "--target", "alias", "--policy", "merge_validated")
    assert answer.code == 0, answer
    assert answer.json["run"]["target_branch"] == "work"
    assert world.lionwt("lease", "r1", "-w", "w2", "--target", "alias").code == 0
    assert world.lionwt("lease", "r1", "-w", "w3", "--target", "work").code == 0


# --- the fence -------------------------------------------------------------------------------------------------------


def test_a_landing_never_targets_a_protected_branch_under_any_of_its_names(world: World, repo: Repo) -> None:
    """ADR-0091 A1.3: the default branch and any release branch are refused fail-closed, whatever is configured."""
    repo.git("branch", "master")
    repo.git("branch", "releases")
    repo.git("branch", "release/1.0")
    repo.git("branch", "Release-2")
    repo.git("branch", "Master2")
    repo.git("branch", "trunk")
    repo.git("branch", "theirs")
    repo.git("branch", "prod/eu")
    repo.git("branch", "Frozen")
    repo.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    repo.git("symbolic-ref", "refs/heads/chain", "refs/heads/alias")
    repo.git("symbolic-ref", "refs/heads/to-prod", "refs/heads/prod/eu")
    repo.git("config", "--global", "init.defaultBranch", "trunk")
    repo.git("update-ref", "refs/remotes/origin/theirs", "theirs")
    repo.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/theirs")
    world.lionagi_home.mkdir()
    operators = world.lionagi_home / "lionwt.toml"
    operators.write_text('protected_branches = ["prod/*", "refs/heads/frozen"]\n')
    before = repo.snapshot()
    protected = ["main", "MAIN", "heads/main", "refs/heads/main", "master", "releases", "release/1.0", "Release-2"]
    protected += ["RELEASED", "trunk", "theirs", "prod/eu", "Frozen", "alias", "chain", "to-prod"]
    common = str(repo.path / ".git")
    fence = ["trunk", *repository.default_branches(common), "prod/*", "refs/heads/frozen"]
    for target in set(protected) - {"MAIN", "RELEASED"}:
        assert names.is_protected(repository.resolve_target(common, target).full, fence), target
    for target in (
        "MAIN",
        "heads/main",
        "refs/heads/main",
        "Release-2",
        "trunk",
        "theirs",
        "prod/eu",
        "Frozen",
        "chain",
    ):
        refused = opening(world, "--target", target, "--policy", "merge_validated")
        assert (refused.code, refused.error) == (3, "protected_target"), (target, refused)
        assert "nothing was" in refused.json["error"]["message"]
    assert not (world.lionagi_home / "runs").exists()
    assert repo.snapshot() == before
    for number, target in enumerate(("work", "Master2")):
        assert opening(world, "--target", target, "--policy", "merge_validated", run=f"m{number}").code == 0
    for number, target in enumerate(("main", "release/1.0", "prod/eu", "chain")):
        assert opening(world, "--target", target, run=f"p{number}").code == 0


@pytest.mark.parametrize(
    ("name", "protected"),
    [
        *((name, True) for name in ("main", "Main", "refs/heads/main", "ｍain", "master", "release", "releases/x")),
        *((name, True) for name in ("RELEASE-1", "x/y", "X/z", "exact", "Exact")),
        *((name, False) for name in ("mainline", "feature/main", "work", "pre-release", "exact2", "heads/main", "y/x")),
    ],
)
def test_the_fence_folds_names_and_nothing_takes_one_away(name: str, protected: bool) -> None:
    """Design section 7: anything whose folded short name begins with release; the operator only ever adds."""
    assert names.is_protected(name, ["x/*", "exact", "!main"]) is protected


# --- RUN, session and where state lies -------------------------------------------------------------------------------


def test_a_run_is_named_by_its_id_its_state_root_or_the_environment(world: World, repo: Repo) -> None:
    """Design section 3: a RUN argument is a run id, or the path of a run's state root; default $LIONAGI_RUN_ID."""
    env: dict[str, str | None] = {"LIONAGI_RUN_ID": "r1", "LIONAGI_SESSION_ID": "from-env"}
    by_env = world.lionwt("lease", "-w", "w1", "--target", "work", "--json", env=env)
    assert by_env.json["run"]["run_id"] == "r1"
    assert by_env.json["bindings"][0]["env"]["LIONAGI_SESSION_ID"] == "from-env"
    state = world.state("r1")
    for argument in (str(state), f"{state}/", os.path.relpath(state, repo.path), f"{state}/../r1"):
        assert world.lionwt("start", argument, "w1", "--json").code == 0, argument
    elsewhere = world.root / "elsewhere/run-7"
    by_path = world.lionwt("lease", elsewhere, "-w", "w1", "--target", "work", "--json")
    assert by_path.json["run"]["run_id"] == "run-7"
    assert by_path.json["run"]["session_id"] == "run-7"
    assert by_path.json["leases"][0]["state_path"] == str(elsewhere / "workspaces/w1.json")
    assert by_path.json["leases"][0]["artifact_path"] == str(elsewhere / "artifacts/w1")
    nameless = world.lionwt("lease", "-w", "w1", "--target", "work", "--json")
    assert (nameless.code, nameless.error) == (2, "usage")


def test_lionagis_own_manifest_decides_the_artifact_root_and_is_never_written(world: World, repo: Repo) -> None:
    """Design section 3: run.json decides artifact_root when it is there; read, never written."""
    state, artifacts = world.state("r1"), world.root / "saved/artifacts"
    state.mkdir(parents=True)
    artifacts.mkdir(parents=True)
    link = world.root / "link"
    link.symlink_to(artifacts)
    manifest = state / "run.json"
    content = json.dumps({"run_id": "r1", "state_root": str(state), "artifact_root": str(link), "cwd": "/"}).encode()
    manifest.write_bytes(content)
    answer = opening(world, "--target", "work")
    assert answer.code == 0, answer
    assert answer.json["leases"][0]["artifact_path"] == str(artifacts / "w1")
    assert answer.json["run"]["artifact_root"] == str(artifacts)
    assert manifest.read_bytes() == content
    assert not (state / "artifacts").exists()
    # The artifact root of an open run does not wander.
    manifest.write_text(json.dumps({"run_id": "r1", "artifact_root": str(world.root / "other")}))
    refused = world.lionwt("lease", "r1", "-w", "w2", "--json")
    assert (refused.code, refused.error) == (7, "state_unreadable")


def test_a_manifest_that_cannot_be_understood_is_named_and_nothing_is_made(world: World, repo: Repo) -> None:
    """Design section 3: what is unreadable is ambiguous, never taken for nothing."""
    world.state("r1").mkdir(parents=True)
    manifest = world.state("r1") / "run.json"
    env = {"LIONAGI_HOME": str(world.lionagi_home)}
    for content in (b"", b"{", b"[]", b'{"run_id": 7}', b'{"artifact_root": ["a"]}', b'{"run_id": "other"}', b"\xff"):
        manifest.write_bytes(content)
        with pytest.raises(LionwtError) as unreadable:
            names.run_paths("r1", env)
        assert (unreadable.value.code, unreadable.value.exit_code) == ("state_unreadable", 7), content
        assert str(manifest) in unreadable.value.message
    refused = opening(world, "--target", "work")
    assert (refused.code, refused.error) == (7, "state_unreadable"), refused
    assert list(world.state("r1").iterdir()) == [manifest]


def test_state_and_artifacts_never_lie_among_the_worktrees(world: World, repo: Repo) -> None:
    """Design section 3: a worktree that held them would be captured and removed with them."""
    inside = repo.path / ".worktrees/lionagi/x"
    state = world.lionwt("lease", inside / "r1", "-w", "w1", "--target", "work", "--json")
    assert (state.code, state.error) == (3, "path_unsafe"), state
    (world.root / "link").symlink_to(repo.path)
    linked = world.root / "link/.worktrees"
    world.state("r1").mkdir(parents=True)
    (world.state("r1") / "run.json").write_text(json.dumps({"run_id": "r1", "artifact_root": str(linked)}))
    artifacts = opening(world, "--target", "work")
    assert (artifacts.code, artifacts.error) == (3, "path_unsafe"), artifacts
    assert not (repo.path / ".worktrees").exists()
    assert [path.name for path in world.state("r1").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"artifact_root": "\\u0000x"}', '{"artifact_root": "\\ud800"}', '{"run_id": 7}']
)
def test_a_manifest_that_is_not_lionagis_is_unreadable_state_and_never_a_bug(
    world: World, repo: Repo, content: str
) -> None:
    """Design section 5: exit 7, state unreadable."""
    world.state("r1").mkdir(parents=True)
    (world.state("r1") / "run.json").write_text(content)
    answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--json")
    assert (answer.code, answer.error) == (7, "state_unreadable")
    assert repo.git("worktree", "list", "--porcelain").count("worktree ") == 1


@pytest.mark.parametrize("worker", ["run", "RUN"])
def test_a_worker_may_be_called_run(world: World, repo: Repo, worker: str) -> None:
    """Design section 3: its lease's lock is not the run's own."""
    world.lease("r1", worker)
    workspaces = world.state("r1") / "workspaces"
    assert {path.name for path in workspaces.glob("*.lock")} >= {".run.lock", "..run.lock"}
    assert world.freeze("r1", worker).code == 0
    assert [row["worker_id"] for row in world.lionwt("status", "r1", "--json").json["leases"]] == [worker]


@pytest.mark.parametrize(("home", "found"), [("file", (7, "state_unreadable")), ("/proc/x", (8, "system"))])
def test_a_home_where_nothing_can_be_made_is_what_the_hint_speaks_of(
    world: World, repo: Repo, home: str, found: tuple[int, str]
) -> None:
    """Design section 5: what happened, what was left untouched, what to type next."""
    (world.root / "file").write_text("mine\n")
    before = repo.snapshot()
    where = str(world.root / home)
    answer = world.lionwt(
        "lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none", "--json", env={"LIONAGI_HOME": where}
    )
    assert (answer.code, answer.error) == found
    error = answer.json["error"]
    assert where in error["message"] and error["message"].rpartition("; nothing was ")[2] in ("made", "changed")
    assert "LIONAGI_HOME" in error["hint"] and "lionagi writes" not in error["hint"]
    assert repo.snapshot() == before
