"""``start``: a worker runs only when what was granted is its lease's binding, and only from allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lionwt import LionwtError, names, session
from lionwt.start import start as start_verb
from tests.conftest import Answer, Repo, World


@pytest.fixture
def binding(world: World, repo: Repo) -> dict[str, Any]:
    """The binding of a leased worker, as ``lease`` printed it."""
    answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none", "--json")
    found = answer.json["bindings"][0]
    assert isinstance(found, dict)
    return found


def lease_bytes(world: World) -> bytes:
    return (world.state("r1") / "workspaces/w1.json").read_bytes()


def start(world: World, grants: Any = None) -> Answer:
    if grants is None:
        return world.lionwt("start", "r1", "w1", "--json")
    text = grants if isinstance(grants, str) else json.dumps(grants)
    return world.lionwt("start", "r1", "w1", "--json", "--grants", "-", stdin=text)


def test_a_worker_runs_once_its_grants_equal_the_binding(world: World, repo: Repo, binding: dict[str, Any]) -> None:
    """ADR-0091 D3: mark_running occurs only after provider and tool path grants match the lease."""
    before = repo.snapshot()
    path = world.root / "grants.json"
    path.write_text(json.dumps(binding))
    answer = world.lionwt("start", "r1", "w1", "--json", "--grants", path)
    assert answer.code == 0, answer
    assert answer.json["lease"]["state"] == "running"
    assert answer.json["binding"] == binding
    stored = world.lease_file("r1", "w1")
    assert (stored["lease"]["state"], stored["serial"]) == ("running", 3)
    assert [step["state"] for step in stored["history"]] == ["allocated", "running"]
    assert repo.snapshot() == before
    content = lease_bytes(world)
    assert start(world, binding).json == answer.json
    assert start(world).json == answer.json
    assert lease_bytes(world) == content


def test_grants_that_differ_in_any_field_are_refused_and_the_lease_stays(
    world: World, repo: Repo, binding: dict[str, Any]
) -> None:
    """ADR-0091 D2: the environment and provider binding are exact; the shared checkout is never granted."""
    before = lease_bytes(world)
    env = binding["env"]
    wrong: dict[str, Any] = {
        "cwd": {**binding, "cwd": str(repo.path)},
        "provider_repo": {**binding, "provider_repo": str(repo.path)},
        "source_roots": {**binding, "source_roots": [*binding["source_roots"], str(repo.path)]},
        "writable_artifact_root": {**binding, "writable_artifact_root": str(world.state("r1") / "artifacts")},
        "env": {**binding, "env": {**env, "LIONAGI_SESSION_ID": "other"}},
        "env ": {**binding, "env": {**env, "EXTRA": "1"}},
        "add_dir": {**binding, "add_dir": []},
        "cwd ": {name: value for name, value in binding.items() if name != "cwd"},
        "env  ": {**binding, "env": "none"},
    }
    run = session.load(names.run_paths(str(world.state("r1")), {}))
    for field, grants in wrong.items():
        with pytest.raises(LionwtError) as mismatch:
            start_verb(run, "w1", grants)
        assert mismatch.value.code == "grants_mismatch"
        assert field.strip() in mismatch.value.message
        if field not in ("source_roots", "add_dir"):
            continue
        refused = start(world, grants)
        assert (refused.code, refused.error) == (3, "grants_mismatch"), (field, refused)
        assert field.strip() in refused.json["error"]["message"]
        assert "stays allocated" in refused.json["error"]["message"]
    assert lease_bytes(world) == before


def test_grants_that_are_no_object_are_a_usage_error(world: World, binding: dict[str, Any]) -> None:
    """Design section 5: a malformed argument is exit 2, with one JSON object on stdout."""
    before = lease_bytes(world)
    for text in ("", "{", "[]", "null"):
        refused = start(world, text)
        assert (refused.code, refused.error) == (2, "usage")
    missing = world.lionwt("start", "r1", "w1", "--json", "--grants", world.root / "missing.json")
    assert (missing.code, missing.error) == (2, "usage")
    assert lease_bytes(world) == before


def test_a_running_worker_with_other_grants_is_refused(world: World, binding: dict[str, Any]) -> None:
    """Design section 5: a verb that has been done is refused when it is repeated with different arguments."""
    assert start(world, binding).code == 0
    before = lease_bytes(world)
    refused = start(world, {**binding, "cwd": "/"})
    assert (refused.code, refused.error) == (3, "grants_mismatch")
    assert "stays running" in refused.json["error"]["message"]
    assert lease_bytes(world) == before


def test_a_lease_that_ended_before_it_ran_cannot_be_started(world: World, binding: dict[str, Any]) -> None:
    """ADR-0091 D3: the persisted state machine has no arrow from terminal."""
    assert world.freeze("r1", "w1", "--failed").code == 0
    before = lease_bytes(world)
    refused = start(world)
    assert (refused.code, refused.error) == (3, "wrong_state")
    assert lease_bytes(world) == before


def test_a_start_repeated_after_the_freeze_answers_and_changes_nothing(world: World, binding: dict[str, Any]) -> None:
    """Design section 5: repeating a verb that has been done changes nothing."""
    assert start(world).code == 0
    assert world.freeze("r1", "w1").code == 0
    before = lease_bytes(world)
    again = start(world)
    assert (again.code, again.json["lease"]["state"]) == (0, "frozen")
    assert lease_bytes(world) == before


def test_an_allocation_that_was_never_finished_cannot_be_started(world: World, repo: Repo) -> None:
    """ADR-0091 D3: the coordinator never starts a worker with an unrecorded lease."""
    arguments = ["lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none"]
    killed = world.popen(*arguments, env={"LIONWT_FAULT": "lease.populated:kill"})
    killed.communicate(timeout=60)
    before = lease_bytes(world)
    refused = start(world)
    assert (refused.code, refused.error) == (3, "wrong_state")
    assert "reconcile r1" in refused.json["error"]["hint"]
    assert lease_bytes(world) == before


@pytest.mark.parametrize("kind", ["link", "directory", "copy", "gone", "file", "parent-link", "registration"])
def test_a_worktree_that_is_not_the_leased_directory_is_refused(
    world: World, repo: Repo, binding: dict[str, Any], kind: str
) -> None:
    """Design section 7: the directory is identified by device and inode; a symlink is never followed."""
    tree, aside = Path(binding["cwd"]), world.root / "aside"
    if kind == "registration":
        (repo.path / ".git/worktrees/w1/locked").write_text("somebody else's\n")
    elif kind == "parent-link":
        tree.parent.rename(aside)
        tree.parent.symlink_to(aside)
    else:
        tree.rename(aside)
        if kind == "link":
            tree.symlink_to(aside)
        elif kind == "file":
            tree.write_text("a file\n")
        elif kind in ("directory", "copy"):
            tree.mkdir()
        if kind == "copy":
            (tree / ".git").write_bytes((aside / ".git").read_bytes())
    before = lease_bytes(world)
    refused = start(world)
    assert (refused.code, refused.error) == (7, "worktree_moved"), refused
    assert lease_bytes(world) == before


def test_an_unknown_run_or_worker_is_refused_and_nothing_is_made_for_it(
    world: World, repo: Repo, binding: dict[str, Any]
) -> None:
    """Design section 3: a worker is always named; an unknown one leaves no trace, not even a lock file."""
    seen = sorted(world.lionagi_home.rglob("*"))
    for arguments, code, error in (
        (["r1", "w2"], 3, "lease_unknown"),
        (["r2", "w1"], 3, "run_unknown"),
        (["r1", "../w1"], 3, "id_invalid"),
        (["r1"], 3, "run_unknown"),
        (["r1", "w1", "w2"], 2, "usage"),
    ):
        env: dict[str, str | None] = {"LIONAGI_RUN_ID": "r9"}
        refused = world.lionwt("start", *arguments, "--json", env=env)
        assert (refused.code, refused.error) == (code, error), refused
    assert sorted(world.lionagi_home.rglob("*")) == seen
    assert world.lionwt("start", "w1", "--json", env={"LIONAGI_RUN_ID": "r1"}).code == 0


def test_start_says_in_words_where_the_worker_runs_and_what_comes_next(world: World, binding: dict[str, Any]) -> None:
    """Design section 5: without --json a short human answer, with what to type next."""
    answer = world.lionwt("start", "r1", "w1")
    assert answer.out.splitlines() == [
        f"w1 is running in {binding['cwd']}",
        "  LIONAGI_RUN_ID=r1",
        "  LIONAGI_SESSION_ID=r1",
        "  LIONAGI_WORKER_ID=w1",
        "next: lionwt freeze r1 w1 --succeeded",
    ]
    assert answer.err == ""
