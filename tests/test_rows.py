"""Every row of design section 8, found by ``reconcile`` after the owner has died, and by ``--takeover``.

The row → the scene that makes it:

repository moved, replaced → ``test_a_repository_that_is_elsewhere_is_refused_and_nothing_is_changed``;
file ambiguous → ``torn file``, ``newer file``; no file → ``orphan``;
intent to allocate → ``reserved``, ``registered``, ``populated``;
promotion intent, target holds the merge → ``moved``, ``updated``; target as expected → ``intended``;
anything else → ``landed and taken back``, ``moved elsewhere``;
outcome decided → ``landed``; something else in its place → ``replaced``, ``unlocked``;
worktree gone → ``deleted``, ``deleted whole``; registration gone → ``registration gone``;
allocated → ``not started``; running → ``running``; frozen → ``frozen``, ``patch changed``;
teardown failed → ``branch moved``; retained → tests of ``reap`` in ``test_reconcile.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Answer, Repo, World


@dataclass
class Scene:
    """What is done to ``w1``, and what reconcile says of it: exit code, status (None: the lease stands), finding."""

    make: Callable[[World, Repo, Path], None]
    code: int = 0
    status: str | None = "discarded"
    finding: str | None = None
    #: What the dry run says is found.
    found: str = ""
    state: str = "running"
    #: Whether the worker's work must be found in its evidence, or in the target.
    kept: str | None = "evidence"


def _file(world: World) -> Path:
    return world.state("r1") / "workspaces" / "w1.json"


def _tear(world: World, _repo: Repo, _worktree: Path) -> None:
    _file(world).write_bytes(_file(world).read_bytes()[:200])


def _renew(world: World, _repo: Repo, _worktree: Path) -> None:
    _file(world).write_bytes(_file(world).read_bytes().replace(b"lionwt/lease@1", b"lionwt/lease@2"))


def _forget(world: World, _repo: Repo, _worktree: Path) -> None:
    _file(world).unlink()


def _killed(point: str) -> Callable[[World, Repo, Path], None]:
    def kill(world: World, _repo: Repo, _worktree: Path) -> None:
        assert world.promote("r1", "w1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9

    return kill


def _taken_back(world: World, repo: Repo, worktree: Path) -> None:
    base = repo.head("work")
    _killed("promote.moved")(world, repo, worktree)
    repo.git("update-ref", "refs/heads/work", base)


def _elsewhere(world: World, repo: Repo, worktree: Path) -> None:
    base = repo.head("work")
    _killed("promote.moved")(world, repo, worktree)
    repo.git("update-ref", "refs/heads/work", repo.git("commit-tree", "-p", base, "-m", "other", f"{base}^{{tree}}"))


def _replace(world: World, _repo: Repo, worktree: Path) -> None:
    worktree.rename(world.root / "aside")
    worktree.mkdir()
    (worktree / "operators.txt").write_text("of the operator's\n")


def _unlock(_world: World, repo: Repo, worktree: Path) -> None:
    repo.git("worktree", "unlock", worktree)


def _delete(_world: World, _repo: Repo, worktree: Path) -> None:
    shutil.rmtree(worktree)


def _delete_whole(world: World, repo: Repo, worktree: Path) -> None:
    shutil.rmtree(worktree)
    _unregister(world, repo, worktree)
    repo.git("update-ref", "-d", "refs/heads/lionagi/r1/w1")


def _unregister(world: World, _repo: Repo, _worktree: Path) -> None:
    shutil.rmtree(world.lease_file("r1", "w1")["identity"]["admin_dir"])


def _nothing(_world: World, _repo: Repo, _worktree: Path) -> None:
    pass


def _change_patch(world: World, _repo: Repo, _worktree: Path) -> None:
    patch = world.evidence("r1", "w1") / "candidate.patch"
    patch.write_bytes(patch.read_bytes() + b"more\n")


def _move_branch(_world: World, repo: Repo, _worktree: Path) -> None:
    repo.git("update-ref", "refs/heads/lionagi/r1/w1", "main")


_PROMOTED = {"status": "promoted", "state": "frozen", "kept": "target"}

SCENES = {
    "torn file": Scene(_tear, 7, None, "state_unreadable"),
    "newer file": Scene(_renew, 7, None, "schema_newer"),
    "orphan": Scene(_forget, 4, None, "orphan"),
    "intended": Scene(_killed("promote.intended"), found="a landing was begun", **_PROMOTED),
    "moved": Scene(_killed("promote.moved"), found="a landing was begun", **_PROMOTED),
    "updated": Scene(_killed("promote.updated"), found="a landing was begun", **_PROMOTED),
    "landed": Scene(_killed("promote.landed"), found="its outcome (promoted) was decided", **_PROMOTED),
    "landed and taken back": Scene(_taken_back, 4, "needs_resolution", found="a landing was begun", state="frozen"),
    "moved elsewhere": Scene(_elsewhere, 4, "needs_resolution", found="a landing was begun", state="frozen"),
    "replaced": Scene(_replace, 7, None, "worktree_moved"),
    "unlocked": Scene(_unlock, 7, None, "worktree_moved"),
    "deleted": Scene(_delete, found="its worktree is gone", kept="bundle"),
    "deleted whole": Scene(_delete_whole, found="worktree, registration and branch are gone", kept=None),
    "registration gone": Scene(_unregister, found="its registration is gone"),
    "not started": Scene(_nothing, found="it was never started", state="allocated"),
    "running": Scene(_nothing, found="nothing proves that it finished"),
    "frozen": Scene(_nothing, found="it is frozen", **_PROMOTED),
    "patch changed": Scene(_change_patch, 4, "needs_resolution", found="it is frozen", state="frozen"),
    "branch moved": Scene(_move_branch, 5, "teardown_failed", found="it is frozen", state="frozen", kept="target"),
}


def _files(world: World) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(world.state("r1").rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def _leased(world: World, repo: Repo, scene: Scene, owner: str) -> Path:
    answer = world.lionwt(
        *("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated"),
        *("--owner-pid", owner, "--json"),
    )
    assert answer.code == 0, answer
    lease = answer.json["leases"][0]
    worker = Repo(Path(lease["worktree_path"]), repo.env)
    if scene.state != "allocated":
        world.start_now(lease)
    worker.commit("own", **{"own.txt": "committed by w1\n"})
    worker.write("f1.txt", "work of w1\n")
    if scene.state == "frozen":
        world.freeze_now("r1", "w1")
    return worker.path


def _require_kept(world: World, repo: Repo, scene: Scene) -> None:
    evidence = world.evidence("r1", "w1")
    if scene.kept == "target":
        assert repo.git("show", "work:f1.txt") == "work of w1"
        assert (repo.path / "f1.txt").read_text() == "work of w1\n" and repo.status() == ""
    elif scene.kept == "bundle":
        assert (evidence / "commits.bundle").stat().st_size
    elif scene.kept == "evidence":
        assert any(b"work of w1" in path.read_bytes() for path in evidence.glob("*.patch"))


@pytest.mark.parametrize("how", ["owner died", "takeover"])
@pytest.mark.parametrize("name", SCENES)
def test_what_is_found_is_told_first_done_once_and_told_as_it_is(world: World, repo: Repo, name: str, how: str) -> None:
    """Design section 8: the dry run says what the real one does, and a second one has nothing to do."""
    scene = SCENES[name]
    with subprocess.Popen(["sleep", "300"]) as owner:
        try:
            worktree = _leased(world, repo, scene, str(owner.pid) if how == "owner died" else "none")
            scene.make(world, repo, worktree)
            told = world.lionwt("reconcile", "r1", "--json")
            if name not in ("torn file", "newer file", "orphan", "replaced", "unlocked"):
                assert (told.code, told.error) == (6, "owner_alive"), told
        finally:
            owner.kill()
    words = ("reconcile", "r1", *(["--takeover"] if how == "takeover" else []))
    before = _files(world)
    dry = world.lionwt(*words, "--dry-run", "--json")
    assert _files(world) == before
    assert [step["found"] for step in dry.json["steps"]] == ([scene.found] if scene.found else []), dry
    answer = world.lionwt(*words, "--json")
    assert answer.json["steps"] == dry.json["steps"]
    _require_told(answer, scene)
    if scene.status is not None:
        record = world.record("r1", "w1")
        assert record["status"] == scene.status
        assert record["worktree_removed"] is not os.path.lexists(worktree)
        assert record["branch_deleted"] is (repo.git("for-each-ref", "refs/heads/lionagi") == "")
        _require_kept(world, repo, scene)
        if scene.status != "teardown_failed":
            assert world.leftovers("r1", repo) == []
    else:
        assert os.path.lexists(worktree) and repo.head("lionagi/r1/w1")
    after = _files(world)
    again = world.lionwt(*words, "--json")
    assert (again.code, _files(world)) == (answer.code, after), again
    shown = world.lionwt(*words)
    if scene.code:
        assert "→ " in shown.out, "what is left for a person says what to type"
        assert scene.finding is None or "all ended" not in shown.out.splitlines()[0] or name == "orphan", shown


def _require_told(answer: Answer, scene: Scene) -> None:
    assert answer.code == scene.code, answer
    findings = answer.json["findings"]
    assert {finding["code"] for finding in findings} == ({scene.finding} if scene.finding else set()), answer
    assert all(finding["hint"] for finding in findings), answer
    error = answer.json["error"]
    assert (error is None) is (scene.code == 0) and (error is None or error["hint"]), answer
    commands = " ".join(answer.json["next"])
    assert "branch -D" not in commands and "remove" not in commands and "rm " not in commands, commands


@pytest.mark.parametrize("point", ["lease.intended", "lease.branched", "lease.registered", "lease.populated"])
def test_an_allocation_whose_owner_died_as_well_is_undone(world: World, repo: Repo, point: str) -> None:
    """Design section 8, intent to allocate: without ``--takeover``, and the run goes on afterwards."""
    with subprocess.Popen(["sleep", "300"]) as owner:
        try:
            leased = ("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--owner-pid", str(owner.pid))
            assert world.lionwt(*leased, env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
        finally:
            owner.kill()
    refused = world.lionwt("lease", "r1", "-w", "w3", "--owner-pid", "none", "--json")
    assert (refused.code, refused.error) == (6, "run_interrupted"), refused
    answer = world.lionwt("reconcile", "r1", "--json")
    assert answer.code == 0, answer
    assert [record["status"] for record in answer.json["records"]] == ["discarded", "discarded"]
    assert world.leftovers("r1", repo) == []
    assert world.lionwt("lease", "r1", "-w", "w3", "--owner-pid", "none", "--json").code == 0


@pytest.mark.parametrize("state", ["with a file", "empty", "a clone"])
def test_what_somebody_put_in_the_place_of_a_half_made_worktree_is_left(world: World, repo: Repo, state: str) -> None:
    """Design section 8, intent to allocate: undone is what carries the nonce, and no directory but git's own."""
    words = ("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none")
    assert world.lionwt(*words, env={"LIONWT_FAULT": "lease.registered:kill"}).code == -9
    path = repo.path / ".worktrees/lionagi/r1/w1"
    path.rename(world.root / "aside")
    if state == "a clone":
        repo.git("clone", "-q", repo.path, path)
    else:
        path.mkdir()
    if state != "empty":
        (path / "mine.txt").write_text("the operator's\n")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    if state == "empty":
        assert answer.code == 0 and not path.exists()
        return
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer
    assert (path / "mine.txt").read_text() == "the operator's\n"
    path.rename(world.root / "moved-away")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.json["records"][0]["status"]) == (0, "discarded"), answer
    assert world.leftovers("r1", repo) == []


def test_a_landing_that_was_taken_back_is_not_called_one_that_never_was(world: World, repo: Repo) -> None:
    """Design section 8: the operator reads where the merge went, and that it is not landed again."""
    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    _taken_back(world, repo, repo.path / ".worktrees/lionagi/r1/w1")
    merge = repo.head("refs/lionwt/r1/w1/landed")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.error) == (4, "target_moved"), answer
    message = answer.json["error"]["message"]
    assert merge in message and "not landed again" in message and "nothing was landed" not in message


def test_a_worktree_without_its_registration_is_evidence_and_never_lands(world: World, repo: Repo) -> None:
    """Design section 7: what HEAD and the index said is missing, so the capture is incomplete."""
    worker = world.lease("r1", "w1")["w1"]
    tip = worker.commit("own", **{"own.txt": "own\n"})
    worker.write("f1.txt", "work\n")
    _unregister(world, repo, worker.path)
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (4, "patch_missing"), refused
    assert "registration" in refused.json["error"]["message"]
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    assert world.manifest("r1", "w1")["complete"] is False
    world.round_trip("r1", "w1")
    assert tip in repo.git("bundle", "list-heads", str(world.evidence("r1", "w1") / "commits.bundle"))
    assert world.promote("r1").code == 3
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("how", ["moved", "replaced by a copy"])
def test_a_repository_that_is_elsewhere_is_refused_and_nothing_is_changed(world: World, repo: Repo, how: str) -> None:
    """Design section 8, first row; put back, the run goes on."""
    world.lease("r1", "w1")["w1"].write("f1.txt", "work\n")
    away = world.root / "away"
    repo.path.rename(away)
    if how == "replaced by a copy":
        shutil.copytree(away, repo.path, symlinks=True)
    before = _files(world)
    for words in (["reconcile", "r1", "--takeover", "--dry-run"], ["reconcile", "r1", "--takeover"], ["status", "r1"]):
        answer = world.lionwt(*words, "--json", cwd=world.root)
        assert (answer.code, answer.error) == (7, "repository_moved"), answer
    reaped = world.lionwt("reap", "r1", cwd=world.root)
    assert reaped.code == 7 and "→ put it back" in reaped.out, reaped
    assert _files(world) == before
    if how == "replaced by a copy":
        shutil.rmtree(repo.path)
    away.rename(repo.path)
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert world.leftovers("r1", repo) == []


def test_one_lease_that_cannot_be_ended_keeps_no_other(world: World, repo: Repo) -> None:
    """Design section 8: what the system refuses about one lease is told of that one; the others end."""
    words = ("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--owner-pid", "none")
    assert world.lionwt(*words, env={"LIONWT_FAULT": "lease.registered:kill"}).code == -9
    index = world.state("r1") / "git/lionwt/w1.index"
    index.unlink(missing_ok=True)
    index.mkdir()  # a file is expected there; a directory is refused by the system
    (index / "x").touch()
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert answer.code == 8, answer
    assert [entry["worker_id"] for entry in answer.json["pending"]] == ["w1"]
    assert world.record("r1", "w2")["status"] == "discarded"
    shutil.rmtree(index)
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("how", ["unlocked", "locked by another"])
@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_a_registration_whose_lock_was_taken_is_given_back_by_what_the_hint_says(
    world: World, repo: Repo, how: str, gone: bool
) -> None:
    """Design section 8: an explicit refusal says what to type, and that works."""
    worker = world.lease("r1", "w1")["w1"]
    tip = worker.commit("own", **{"own.txt": "own\n"})
    repo.git("worktree", "unlock", worker.path)
    if how == "locked by another":
        repo.git("worktree", "lock", "--reason", "mine", worker.path)
    if gone:
        shutil.rmtree(worker.path)
    refused = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (refused.code, refused.error) == (7, "worktree_moved"), refused
    assert f"still in {worker.path}" in refused.json["error"]["hint"] or gone
    subprocess.run(refused.json["next"][0], shell=True, check=True, env=repo.env, cwd=world.root)
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.json["records"][0]["status"]) == (0, "discarded"), answer
    assert tip in repo.git("bundle", "list-heads", str(world.evidence("r1", "w1") / "commits.bundle"))
    assert world.leftovers("r1", repo) == []


def test_a_freeze_of_a_worktree_that_is_gone_says_so_and_what_ends_it(world: World, repo: Repo) -> None:
    """Case 48: what the operator swept away is told as it is, and the hint can be typed as it stands."""
    worker = world.lease("r1", "w1")["w1"]
    shutil.rmtree(worker.path)
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (7, "worktree_moved"), refused
    assert "is gone" in refused.json["error"]["message"]
    command = refused.json["next"][0].split()
    assert world.lionwt(*command[1:]).code == 0
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("kind", ["empty", "garbled"])
def test_an_object_that_a_loss_of_power_broke_is_named_with_the_way_on(world: World, repo: Repo, kind: str) -> None:
    """Git syncs no loose object of a worker's: its last ones may be empty; moved away, they are made anew."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", "work\n")
    oid = worker.git("hash-object", "-w", "f1.txt")
    path = repo.path / ".git/objects" / oid[:2] / oid[2:]
    path.chmod(0o600)
    path.write_bytes(b"" if kind == "empty" else b"garbled")
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.error) == (8, "git_failed"), answer
    assert "move the file that is named away" in answer.json["error"]["hint"], answer
    assert oid in answer.json["error"]["message"]
    assert worker.path.exists()
    path.unlink()
    assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    world.evidence("r1", "w1")
    assert b"work" in (world.evidence("r1", "w1") / "candidate.patch").read_bytes()


def test_trash_that_cannot_be_deleted_is_told_by_reconcile_and_what_was_deleted_by_reap(
    world: World, repo: Repo
) -> None:
    """Design section 8: what is left behind is named; a dry run says what would go."""
    world.lease("r1", "w1", start=False)
    trash = repo.path / ".worktrees/.trash"
    left = trash / "r1.w0.01234567"
    left.mkdir(parents=True)
    (left / "file").touch()
    dry = world.lionwt("reap", "r1", "--dry-run", "--json")
    assert (dry.code, dry.json["trash"]) == (0, [str(left)]), dry
    assert "trash: 1 removed tree; would delete" in world.lionwt("reap", "r1", "--dry-run").out
    assert left.exists()
    done = world.lionwt("reap", "r1", "--json")
    assert (done.code, done.json["trash"], left.exists()) == (0, [str(left)], False), done
    assert world.lionwt("reap", "r1").out.strip() == "nothing has expired"
    left.mkdir(parents=True)
    (left / "file").touch()
    if subprocess.run(["chattr", "+i", left / "file"], capture_output=True).returncode:
        pytest.skip("no immutable files here")
    try:
        answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
        assert (answer.code, answer.error) == (5, "teardown_failed"), answer
        assert str(left) in answer.json["error"]["message"] and "lionwt reap" in answer.json["error"]["hint"]
        assert world.record("r1", "w1")["status"] == "discarded"
        assert world.lionwt("reconcile", "r1", "--takeover", "--json").code == 5
        assert world.lionwt("reap", "r1", "--json").json["trash"] == []
    finally:
        subprocess.run(["chattr", "-i", left / "file"], check=True)
    assert world.lionwt("reap", "r1").code == 0 and not left.exists()


@pytest.mark.parametrize("how", ["gone", "made anew"])
def test_where_the_checkout_is_lost_the_answer_says_where_the_work_lies(world: World, repo: Repo, how: str) -> None:
    """Design section 8, first row: nothing is changed, and a person finds what the workers did."""
    repo.git("switch", "-q", "main")
    checkout = world.root / "checkout"
    repo.git("worktree", "add", "-q", checkout, "work")
    worker = world.lease("r1", "w1", cwd=checkout)["w1"]
    worker.write("f1.txt", "work\n")
    assert world.freeze("r1", "w1").code == 0
    repo.git("worktree", "remove", checkout)
    if how == "made anew":
        repo.git("worktree", "add", "-q", checkout, "work")
    for words in (("reconcile", "r1", "--takeover"), ("promote", "r1"), ("status", "r1")):
        answer = world.lionwt(*words, "--json", cwd=world.root)
        assert (answer.code, answer.error) == (7, "repository_moved"), answer
        hint = answer.json["error"]["hint"]
        assert str(worker.path.parent) in hint and str(world.evidence("r1", "w1").parent) in hint
    assert (worker.path / "f1.txt").read_text() == "work\n"
