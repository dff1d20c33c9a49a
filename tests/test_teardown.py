"""Teardown is observed and not assumed: what is gone, what stays, and why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import LIONWT, Answer, Repo, World, go_on, unprivileged, wait_until

NEW = {"new.txt": "new\n"}
RECONCILE = ("reconcile", "r1", "--json", "--takeover")


def admin_dir(world: World, run: str = "r1", worker: str = "w1") -> Path:
    return Path(world.lease_file(run, worker)["identity"]["admin_dir"])


def torn_down_in_part(world: World, answer: Answer, *, worktree: bool, branch: bool, run: str = "r1") -> list[str]:
    """Assert a landing whose teardown is not whole; returns what the record says was left."""
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer
    record = world.record(run, "w1")
    assert record["status"] == "teardown_failed"
    assert (record["worktree_removed"], record["branch_deleted"]) == (worktree, branch)
    assert record["promoted_commit"] == world.lease_file(run, "w1")["outcome"]["landing"]["merge"]
    errors = record["teardown_errors"]
    assert errors and all(error in answer.json["error"]["message"] for error in errors)
    return [str(error) for error in errors]


def test_a_branch_that_moved_after_the_freeze_is_kept(world: World, repo: Repo) -> None:
    """ADR-0091 D4 and D5: a landing with incomplete cleanup is teardown_failed and keeps promoted_commit."""
    leased = world.frozen("r1", {"w1": NEW})
    late = leased["w1"].commit("late", **{"late.txt": "late\n"})
    answer = world.promote("r1")
    errors = torn_down_in_part(world, answer, worktree=True, branch=False)
    assert "moved" in errors[0] and late in errors[0]
    assert repo.head("lionagi/r1/w1") == late
    assert repo.head("work") == world.record("r1", "w1")["promoted_commit"] and repo.status() == ""
    leases = world.state_bytes("r1")
    assert world.promote("r1").out == answer.out and world.state_bytes("r1") == leases
    assert b"late.txt" in (world.evidence("r1", "w1") / "late-1.patch").read_bytes()


def test_a_branch_that_is_checked_out_elsewhere_is_kept(world: World, repo: Repo) -> None:
    """ADR-0091 D5: a resource occupied by another worktree is an error, not already clean."""
    world.frozen("r1", {"w1": NEW})
    other = world.root / "other"
    repo.git("worktree", "add", "-q", "-f", other, "lionagi/r1/w1")
    errors = torn_down_in_part(world, world.promote("r1"), worktree=True, branch=False)
    assert str(other) in errors[0]
    assert repo.git("-C", other, "status", "--porcelain") == "" and repo.head("lionagi/r1/w1")


def test_a_branch_that_the_checkout_itself_has_through_a_symlink_is_kept(world: World, repo: Repo) -> None:
    """The same for the main worktree, and for a HEAD as core.preferSymlinkRefs makes it."""
    world.frozen("r1", {"w1": NEW}, policy="patch_only")
    repo.git("-c", "core.preferSymlinkRefs=true", "symbolic-ref", "HEAD", "refs/heads/lionagi/r1/w1")
    assert (repo.path / ".git" / "HEAD").is_symlink()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer
    assert f"checked out at {repo.path}" in answer.json["error"]["message"]
    repo.git("symbolic-ref", "HEAD", "refs/heads/work")
    assert world.lionwt(*RECONCILE).code == 0 and world.leftovers("r1", repo) == []


def test_a_branch_of_rubbish_is_not_said_to_be_deleted(world: World, repo: Repo) -> None:
    """ADR-0091 D5: removal is observed; a ref file that git cannot read is still there."""
    world.frozen("r1", {"w1": NEW}, policy="patch_only")
    ref = repo.path / ".git" / "refs" / "heads" / "lionagi" / "r1" / "w1"
    ref.write_text("rubbish\n")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (5, "teardown_failed"), answer
    assert str(ref) in answer.json["error"]["message"] and ref.read_text() == "rubbish\n"
    assert not world.record("r1", "w1")["branch_deleted"]
    ref.unlink()
    assert world.lionwt(*RECONCILE).code == 0 and world.leftovers("r1", repo) == []


def test_what_is_absent_already_counts_as_removed(world: World, repo: Repo) -> None:
    """ADR-0091 D5: repeated teardown treats already-absent, record-matching resources as successful; case 100."""
    leased = world.frozen("r1", {name: {f"{name}.txt": "x\n"} for name in ("tree", "registration", "branch", "all")})
    for name in ("tree", "all"):
        shutil.rmtree(leased[name].path)
    for name in ("registration", "all"):
        shutil.rmtree(admin_dir(world, worker=name))
    for name in ("branch", "all"):
        repo.git("update-ref", "-d", f"refs/heads/lionagi/r1/{name}")
    answer = world.promote("r1")
    assert answer.code == 0, answer
    for record in answer.json["records"]:
        assert (record["status"], record["teardown_errors"]) == ("promoted", [])
        assert record["worktree_removed"] and record["branch_deleted"]
    assert world.leftovers("r1", repo) == []


def test_late_work_is_saved_even_where_the_registration_is_gone(world: World, repo: Repo) -> None:
    """Design 7: what a worker still wrote after its freeze is evidence before anything is removed."""
    leased = world.frozen("r1", {"kept": NEW, "lost": NEW}, policy="patch_only")
    shutil.rmtree(admin_dir(world, worker="lost"))
    for name, worker in leased.items():
        worker.write("late.txt", f"late {name}\n")
        worker.write("late.log", f"ignored {name}\n")
    assert world.promote("r1").code == 0
    for name in leased:
        evidence = world.evidence("r1", name)
        assert f"late {name}".encode() in (evidence / "late-1.patch").read_bytes()
        assert f"ignored {name}".encode() in (evidence / "late-1.tar").read_bytes()
        notes = world.lease_file("r1", name)["diagnostics"]
        assert [note["ref"] for note in notes if note["code"] == "late_writes"] == [f".lionwt/{name}/late-1.patch"]
    assert world.leftovers("r1", repo) == []


def test_a_symlink_in_the_worktree_s_place_is_never_followed(world: World, repo: Repo) -> None:
    """Design 7, teardown; case 10: the directory is identified by device and inode; the victim is untouched."""
    leased = world.frozen("r1", {"w1": NEW})
    path, aside, victim = leased["w1"].path, world.root / "aside", world.root / "victim"
    shutil.copytree(path, victim, symlinks=True)
    (victim / "precious.txt").write_text("precious\n")
    path.rename(aside)
    path.symlink_to(victim)
    before = sorted(map(str, victim.rglob("*")))
    errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert str(path) in errors[0]
    assert sorted(map(str, victim.rglob("*"))) == before and path.is_symlink()
    assert (aside / "new.txt").exists() and repo.head("lionagi/r1/w1")
    assert repo.status() == "" and (repo.path / "new.txt").exists()


def test_another_directory_in_the_worktree_s_place_is_left(world: World, repo: Repo) -> None:
    """Invariant 16: removal never leaves the recorded inode."""
    leased = world.frozen("r1", {"w1": NEW})
    path = leased["w1"].path
    path.rename(world.root / "aside")
    path.mkdir()
    (path / "precious.txt").write_text("precious\n")
    torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert (path / "precious.txt").read_text() == "precious\n" and (world.root / "aside" / "new.txt").exists()


def test_a_link_in_the_trash_s_place_is_never_followed(world: World, repo: Repo) -> None:
    """Design 7, teardown: the tree is renamed into lionwt's own trash, or left where it is."""
    leased = world.frozen("r1", {"w1": NEW})
    victim = world.root / "victim"
    victim.mkdir()
    (victim / "precious.txt").write_text("precious\n")
    (repo.path / ".worktrees" / ".trash").symlink_to(victim)
    torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert os.listdir(victim) == ["precious.txt"] and (leased["w1"].path / "new.txt").exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, for root may write everywhere")
def test_read_only_directories_are_removed(world: World, repo: Repo) -> None:
    """Design 7, teardown; git-facts: worktree remove fails on a read-only tree and drops the registration."""
    leased = world.frozen("r1", {"w1": {"a/b/c.txt": "c\n", **NEW}})
    for directory in ("a/b", "a"):
        (leased["w1"].path / directory).chmod(0o555)
    powers = "--bounding-set=-dac_override,-dac_read_search"
    done = subprocess.run(
        ["setpriv", powers, LIONWT, "promote", "r1", "--json"],
        cwd=repo.path,
        env=world.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = Answer(done.returncode, done.stdout, done.stderr)
    assert answer.code == 0, answer
    assert world.leftovers("r1", repo) == [] and (repo.path / "a/b/c.txt").exists()


def test_a_worktree_with_a_submodule_is_removed(world: World, repo: Repo) -> None:
    """Design 7, teardown; case 09: git refuses to remove it, lionwt looks into it and then removes it."""
    library = world.repo("library", branch="main")
    repo.git("submodule", "--quiet", "add", str(library.path), "lib")
    repo.commit("with a submodule")
    leased = world.lease("r1", "w1")
    leased["w1"].git("submodule", "--quiet", "update", "--init")
    leased["w1"].write("new.txt", "new\n")
    world.freeze_now("r1", "w1")
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert world.leftovers("r1", repo) == [] and repo.status() == "" and (repo.path / "lib" / "f1.txt").exists()


def test_a_process_that_stands_in_the_worktree_keeps_it_and_is_not_killed(world: World, repo: Repo) -> None:
    """Invariants 8 and 26: what it writes would go with its directory; the landing stands and is finished later."""
    leased = world.frozen("r1", {"w1": NEW})
    with subprocess.Popen(["sleep", "60"], cwd=leased["w1"].path, env=world.environment()) as shell:
        try:
            for attempt in (world.promote("r1"), world.promote("r1", "w1"), world.lionwt(*RECONCILE)):
                assert (attempt.code, attempt.error) == (6, "worker_alive"), attempt
                assert str(shell.pid) in attempt.json["error"]["message"]
            assert shell.poll() is None and leased["w1"].path.exists()
            assert len(repo.merges()) == 1 and (repo.path / "new.txt").exists()
        finally:
            shell.kill()
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 1 and world.leftovers("r1", repo) == []


def test_a_worker_that_runs_again_while_its_candidate_lands_keeps_its_worktree(world: World, repo: Repo) -> None:
    """Design 7, teardown: looked for again after the landing, where a removal would take its work."""
    leased = world.frozen("r1", {"w1": NEW})
    ids: dict[str, str | None] = {"LIONAGI_RUN_ID": "r1", "LIONAGI_WORKER_ID": "w1"}
    with (
        world.stopped("promote.landed", "promote", "r1", "--json") as landing,
        subprocess.Popen(["sleep", "60"], env=world.environment(ids)) as again,
    ):
        try:
            busy = go_on(landing)
            assert (busy.code, busy.error) == (6, "worker_alive"), busy
            assert leased["w1"].path.exists() and again.poll() is None
        finally:
            again.kill()
    assert world.promote("r1").code == 0 and world.leftovers("r1", repo) == []


def test_a_registration_is_known_by_its_nonce_and_not_by_its_name(world: World, repo: Repo) -> None:
    """Case 50: git de-duplicates admin directory names (w1, w11); each teardown retires its own."""
    first, second = world.frozen("r1", {"w1": NEW}), world.frozen("r2", {"w1": {"other.txt": "x\n"}, "w11": {}})
    names = [admin_dir(world, "r1").name, admin_dir(world, "r2").name, admin_dir(world, "r2", "w11").name]
    assert len(set(names)) == 3 and "w1" in names
    assert world.promote("r1", "--policy", "patch_only").code == 0
    assert not first["w1"].path.exists() and not admin_dir(world, "r1").exists()
    assert second["w1"].status() == "?? other.txt" and admin_dir(world, "r2").exists()
    assert world.promote("r2").code == 0
    assert world.leftovers("r2", repo) == []


def test_a_registration_that_another_took_over_is_left(world: World, repo: Repo) -> None:
    """ADR-0091 D5: a resource occupied by something unrelated is an error, not already clean."""
    world.frozen("r1", {"w1": NEW})
    admin = admin_dir(world)
    (admin / "locked").write_text("mine now\n")
    errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert str(admin) in errors[0] and (admin / "HEAD").exists() and repo.head("lionagi/r1/w1")


def test_a_repository_that_appeared_after_the_freeze_keeps_the_worktree(world: World, repo: Repo) -> None:
    """Invariant 8: nothing that cannot be saved is removed."""
    leased = world.frozen("r1", {"w1": NEW})
    leased["w1"].write("nested/work.txt", "work\n")
    leased["w1"].git("init", "-q", "nested")
    errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert "nested" in errors[0]
    assert (leased["w1"].path / "nested" / "work.txt").read_text() == "work\n"


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize(
    "point",
    [
        "teardown.intended",
        "teardown.trashed",
        "teardown.set_aside",
        "teardown.retired",
        "teardown.branch_deleted",
        "teardown.recorded",
    ],
)
def test_a_teardown_that_dies_at_any_step_is_finished(world: World, repo: Repo, point: str, action: str) -> None:
    """Invariants 15 and 20: killed anywhere and promoted again, the same outcome is complete, with nothing left."""
    leased = world.lease("r1", "lands", "fails")
    for worker in leased.values():
        worker.write("new.txt", "new\n")
    world.freeze_now("r1", "lands")
    world.freeze_now("r1", "fails", "--failed")
    repo.write("f2.txt", "mine\n")
    # fails takes teardown.intended, lands takes promote.landed in its place.
    for worker, code in (("fails", 3), ("lands", 0)):
        if (worker, point) == ("lands", "teardown.intended"):
            point = "promote.landed"
        died = world.promote("r1", worker, env={"LIONWT_FAULT": f"{point}:{action}"})
        assert died.code == (-9 if action == "kill" else 1), died
        decided = world.lease_file("r1", worker)["outcome"]
        answer = world.promote("r1", worker)
        assert answer.code == code, answer
        file = world.lease_file("r1", worker)
        record = file["record"]
        assert (record["status"], file["outcome"]) == ("promoted" if worker == "lands" else "discarded", decided)
        assert (record["worktree_removed"], record["branch_deleted"], record["teardown_errors"]) == (True, True, [])
        assert file["intent"] is None and file["lease"]["state"] == "terminal"
        assert not leased[worker].path.exists()
    assert repo.merges() == [record["promoted_commit"]]
    assert repo.status() == " M f2.txt" and world.leftovers("r1", repo) == []


def test_late_writes_are_saved_once_however_often_teardown_is_repeated(world: World, repo: Repo) -> None:
    """Design 7: repeating is safe; the saved late work is not taken for new late work."""
    leased = world.frozen("r1", {"w1": NEW})
    leased["w1"].write("late.txt", "late\n")
    assert world.promote("r1", env={"LIONWT_FAULT": "teardown.trashed:kill"}).code == -9
    assert world.promote("r1").code == 0
    assert [path.name for path in world.evidence("r1", "w1").glob("late-*.patch")] == ["late-1.patch"]
    assert not (repo.path / "late.txt").exists()


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("late-1.json", "altered"),
        ("late-1.json", "gone"),
        ("late-1.tar", "gone"),
        ("late-1.patch", "altered"),
        ("saved.tar", "altered"),
    ],
)
def test_saved_work_counts_as_saved_only_while_it_is_what_was_written(
    world: World, repo: Repo, what: str, how: str
) -> None:
    """ADR-0091 D5: evidence is known by its hash; what somebody altered is saved again before its last copy goes."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.write("first.log", "as it was frozen\n")
    world.freeze_now("r1", "w1")
    worker.write("late.txt", "late\n")
    worker.write("late.log", "late and ignored\n")
    locked = admin_dir(world) / "locked"
    lock = locked.read_bytes()
    locked.unlink()  # the worktree stays while nobody knows whose registration that is
    torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    evidence = world.evidence("r1", "w1")
    assert sorted(path.name for path in evidence.glob("late-*")) == ["late-1.json", "late-1.patch", "late-1.tar"]
    if how == "gone":
        (evidence / what).unlink()
    elif what == "late-1.json":
        forged = json.loads((evidence / what).read_bytes())
        worker.write("other.log", "claimed to be saved\n")
        seen = (worker.path / "other.log").stat()
        forged["ignored"].append({"path": "other.log", "bytes": seen.st_size, "mtime_ns": seen.st_mtime_ns})
        (evidence / what).write_text(json.dumps(forged))
    else:
        (evidence / what).write_bytes(b"altered")
    locked.write_bytes(lock)
    assert world.lionwt(*RECONCILE).code == 0
    assert not worker.path.exists()
    with tarfile.open(evidence / "late-2.tar") as tar:
        kept = tar.getnames()
    assert ("first.log" in kept) == (what == "saved.tar")
    if what != "saved.tar":
        assert "late.log" in kept
        assert b"+late\n" in (evidence / "late-2.patch").read_bytes()
    assert ("other.log" in kept) == (how == "altered" and what == "late-1.json")


def test_the_evidence_outlives_the_teardown(world: World, repo: Repo) -> None:
    """ADR-0091 D4: patch, manifest and diagnostics are retained in run artifacts."""
    leased = world.frozen("r1", {"w1": NEW}, policy="patch_only")
    (Path(world.lease_file("r1", "w1")["lease"]["artifact_path"]) / "notes.md").write_text("notes\n")
    assert world.promote("r1").code == 0
    assert not leased["w1"].path.exists()
    record = world.record("r1", "w1")
    patch = world.state("r1") / "artifacts" / record["patch_ref"]
    repo.git("apply", "--check", patch)
    assert json.loads((patch.parent / "manifest.json").read_bytes())["complete"] is True
    assert (world.state("r1") / "artifacts" / "w1" / "notes.md").read_text() == "notes\n"


def test_the_trash_is_not_emptied_under_the_locks_of_a_landing(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting large trees keeps no other landing waiting."""
    import fcntl

    from lionwt import names, promote, session, trash

    world.frozen("r1", {"w1": {"f1.txt": "one\n"}})
    monkeypatch.setenv("LIONAGI_HOME", str(world.lionagi_home))
    run = session.load(names.run_paths("r1", os.environ))
    clear, calls = trash.clear, []

    def noted(run: session.Run) -> list[str]:
        calls.append(run)
        for lock in (session.promotion_lock(run.common_dir), run.paths.lease_lock("w1")):
            with open(lock, "rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return clear(run)

    monkeypatch.setattr(trash, "clear", noted)
    _, completion = promote.promote(run)
    assert completion.pending == [] and len(calls) == 1
    assert not (repo.path / ".worktrees").exists()


@contextmanager
def bind_mounted(source: Path, target: Path) -> Iterator[None]:
    """``source`` seen at ``target`` too, of the same device; skips where mounting is not permitted."""
    done = subprocess.run(["mount", "--bind", source, target], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    try:
        yield
    finally:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            place = line.split()[4].replace("\\040", " ")  # wherever a rename has carried it
            if place.startswith(f"{source.parent}/"):
                subprocess.run(["umount", place], check=True)


def test_a_directory_that_is_mounted_inside_a_worktree_is_not_emptied(world: World, repo: Repo) -> None:
    """ADR-0091 D5: what is not the lease's own is left; the worktree stays and the mount is named."""
    leased = world.frozen("r1", {"w1": NEW})
    precious = world.root / "precious"
    precious.mkdir()
    (precious / "data").write_text("years of work\n")
    target = leased["w1"].path / "ignored" / "a place"
    target.mkdir(parents=True)
    with bind_mounted(precious, target):
        errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
        assert errors[0].endswith(f"umount '{target}'")
        assert (precious / "data").read_text() == "years of work\n" and (target / "data").exists()
    assert world.lionwt("reconcile", "r1").code == 0
    assert world.record("r1", "w1")["worktree_removed"] and not leased["w1"].path.exists()
    assert (precious / "data").exists()


@pytest.mark.parametrize("where", ["registration", "set aside", "scratch"])
def test_nothing_of_lionwts_own_is_removed_through_a_mount(world: World, repo: Repo, where: str) -> None:
    """Invariant 16: the registration, what a crash has set aside and scratch directories are looked at too."""
    precious = world.root / "precious"
    precious.mkdir()
    (precious / "data").write_text("data\n")
    leased = world.frozen("r1", {"w1": NEW})
    target = admin_dir(world)
    if where == "set aside":
        assert world.promote("r1", env={"LIONWT_FAULT": "teardown.set_aside:kill"}).code == -9
        (target,) = (repo.path / ".git" / "lionwt").glob("retired.*")
    elif where == "scratch":
        target = world.state("r1") / "git" / "lionwt" / "w1~abcdefgh"
    target = target / "inside"
    target.mkdir(parents=True)
    with bind_mounted(precious, target):
        answer = world.promote("r1")
        assert (precious / "data").read_text() == "data\n"
        if where == "scratch":
            assert answer.code == 0, answer
        else:
            errors = torn_down_in_part(world, answer, worktree=False, branch=False)
            assert any(f"umount {target}" in error for error in errors), errors
            assert leased["w1"].path.exists() == (where == "registration")
    assert world.lionwt(*RECONCILE).code == 0
    assert (precious / "data").exists()
    assert not leased["w1"].path.exists()


def test_a_mount_in_the_trash_is_left_and_named(world: World, repo: Repo) -> None:
    """ADR-0091 D5: a mount that came after the look is still nobody's to empty."""
    world.frozen("r1", {"w1": NEW})
    precious = world.root / "precious"
    precious.mkdir()
    (precious / "data").write_text("years of work\n")
    target = repo.path / ".worktrees" / ".trash" / "r0.w1.00000000" / "a" / "b" / "c"
    target.mkdir(parents=True)
    with bind_mounted(precious, target):
        assert world.promote("r1").code == 0
        assert (precious / "data").exists() and (target / "data").exists()
        reaped = world.lionwt("reap", "r1", "--json")
        assert f"umount {target}" in reaped.out and (precious / "data").exists()
    assert world.lionwt("reap", "r1").code == 0
    assert not target.exists() and (precious / "data").exists()


def test_a_worktree_whose_lock_was_taken_away_stays_whole_until_it_is_given_back(world: World, repo: Repo) -> None:
    """ADR-0091 D5: whose the registration is, is known before the first thing goes."""
    leased = world.frozen("r1", {"w1": NEW})
    nonce = world.lease_file("r1", "w1")["identity"]["nonce"]
    repo.git("worktree", "unlock", leased["w1"].path)
    errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
    assert f"worktree lock --reason 'lionwt {nonce}' {leased['w1'].path}" in errors[0]
    assert (leased["w1"].path / "new.txt").exists() and leased["w1"].status() != ""
    repo.git("worktree", "lock", "--reason", f"lionwt {nonce}", leased["w1"].path)
    assert world.lionwt("reconcile", "r1").code == 0
    assert world.record("r1", "w1")["worktree_removed"] and not leased["w1"].path.exists()


@pytest.mark.parametrize("verdict", ["--succeeded", "--failed"])
@pytest.mark.parametrize("lost", ["candidate.patch", "manifest.json", "."])
def test_a_change_whose_frozen_evidence_is_gone_is_saved_anew_before_its_last_copy_goes(
    world: World, repo: Repo, lost: str, verdict: str
) -> None:
    """Invariant 8: teardown removes worktree, branch and anchors; the object store still has the change until then."""
    world.frozen("r1", {"w1": NEW}, verdict)
    gone = world.evidence("r1", "w1") / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert world.promote("r1").code == (4 if verdict == "--succeeded" else 3)
    assert world.leftovers("r1", repo) == []
    recovered = world.evidence("r1", "w1") / "recovered.patch"
    repo.git("apply", "--check", recovered)
    assert b"+new\n" in recovered.read_bytes()
    notes = {note["code"]: note["ref"] for note in world.lease_file("r1", "w1")["diagnostics"]}
    assert notes["patch_recovered"] == ".lionwt/w1/recovered.patch"
    ref = "candidate.patch" if lost == "manifest.json" else "recovered.patch"
    assert world.record("r1", "w1")["patch_ref"] == f".lionwt/w1/{ref}"


def test_a_change_that_cannot_be_saved_anew_keeps_its_worktree(world: World, repo: Repo) -> None:
    """Invariant 8: nothing that cannot be saved is removed; the next reconcile tries again."""
    leased = world.frozen("r1", {"w1": NEW}, "--failed")
    (world.evidence("r1", "w1") / "candidate.patch").unlink()
    tree = world.lease_file("r1", "w1")["evidence"]["tree"]
    lost = repo.path / ".git" / "objects" / tree[:2] / tree[2:]
    aside = lost.rename(world.root / "aside")
    assert world.promote("r1").code == 5
    record = world.record("r1", "w1")
    assert record["status"] == "teardown_failed" and "could not be made anew" in record["teardown_errors"][0]
    assert (leased["w1"].path / "new.txt").exists() and repo.head("lionagi/r1/w1")
    aside.rename(lost)
    assert world.lionwt("reconcile", "r1", "--json").code == 0
    assert (world.evidence("r1", "w1") / "recovered.patch").exists() and world.leftovers("r1", repo) == []


def test_an_ignored_file_that_changed_after_the_freeze_is_saved_again(world: World, repo: Repo) -> None:
    """Design 7: known by its name is not known by its content."""
    leased = world.lease("r1", "w1")
    leased["w1"].write("notes.log", "first\n")
    world.freeze_now("r1", "w1")
    leased["w1"].write("notes.log", "second\n")
    assert world.promote("r1").code == 0
    assert b"second" in (world.evidence("r1", "w1") / "late-1.tar").read_bytes()


def test_an_ignored_file_too_large_to_save_keeps_the_worktree_only_where_it_is_late(world: World, repo: Repo) -> None:
    """Invariant 8: what the freeze named and nobody touched goes; what came later stays, and is named."""
    big = b"x" * ((1 << 20) + 1)
    leased = world.lease("r1", "same", "w1", "new")
    for name in ("same", "w1"):
        leased[name].write("big.log", big)
    for name in leased:
        world.freeze_now("r1", name)
    leased["w1"].write("big.log", big + b"y")
    leased["new"].write("big.log", big)
    assert world.promote("r1").code == 5
    assert world.record("r1", "same")["status"] == "discarded"
    for name in ("w1", "new"):
        record = world.record("r1", name)
        assert record["status"] == "teardown_failed" and "big.log" in record["teardown_errors"][0]
        (leased[name].path / "big.log").unlink()
    assert world.lionwt(*RECONCILE).code == 0 and world.leftovers("r1", repo) == []


@pytest.mark.parametrize("kind", ["commit", "dirty"])
def test_work_in_a_submodule_after_the_freeze_is_bundled_or_keeps_the_worktree(
    world: World, repo: Repo, kind: str
) -> None:
    """Invariant 8: a submodule's own store goes with the worktree."""
    library = world.repo("library", branch="main")
    repo.git("submodule", "--quiet", "add", str(library.path), "lib")
    repo.commit("with a submodule")
    leased = world.lease("r1", "w1")
    leased["w1"].git("submodule", "--quiet", "update", "--init")
    leased["w1"].write("new.txt", "new\n")
    world.freeze_now("r1", "w1")
    inside = Repo(leased["w1"].path / "lib", repo.env)
    inside.write("late.txt", "late\n")
    if kind == "dirty":
        errors = torn_down_in_part(world, world.promote("r1"), worktree=False, branch=False)
        assert "late.txt" in errors[0] and (inside.path / "late.txt").exists()
        return
    late = inside.commit("late")
    assert world.promote("r1").code == 0
    heads = repo.git("bundle", "list-heads", str(world.evidence("r1", "w1") / "late-1-submodule-0.bundle"))
    assert late in heads and world.leftovers("r1", repo) == []


def test_commits_made_after_the_freeze_are_bundled(world: World, repo: Repo) -> None:
    """Invariant 8: also those that no branch remembers, because HEAD moved on."""
    leased = world.frozen("r1", {"w1": NEW}, policy="patch_only")
    leased["w1"].git("switch", "-q", "--detach")
    late = leased["w1"].commit("late", **{"late.txt": "late\n"})
    leased["w1"].git("reset", "-q", "--hard", "HEAD~1")
    assert world.promote("r1").code == 0
    assert late in repo.git("bundle", "list-heads", str(world.evidence("r1", "w1") / "late-1.bundle"))
    assert world.leftovers("r1", repo) == []


def test_an_unreadable_file_that_could_not_be_saved_keeps_the_worktree(world: World, repo: Repo) -> None:
    """Invariant 8: given up at the freeze is not deleted; readable again, it is saved and the worktree goes."""
    leased = world.lease("r1", "w1")
    locked = leased["w1"].write("locked.txt", "locked\n")
    locked.chmod(0)
    assert world.lionwt(*RECONCILE, wrapper=unprivileged()).code == 5
    record = world.record("r1", "w1")
    assert record["status"] == "teardown_failed" and "locked.txt" in record["teardown_errors"][0]
    assert "locked.txt" in world.manifest("r1", "w1")["not_captured"]["not_saved"]
    locked.chmod(0o600)
    assert world.lionwt(*RECONCILE, wrapper=unprivileged()).code == 0
    assert b"+locked" in (world.evidence("r1", "w1") / "late-1.patch").read_bytes()
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_in_a_shared_repository_what_runs_share_is_the_groups_and_the_state_is_not(
    world: World, repo: Repo, is_shared: bool
) -> None:
    """core.sharedRepository: another user of the group can lease and land there; lease files stay the caller's."""
    if is_shared:
        repo.git("config", "core.sharedRepository", "group")
        subprocess.run(["chmod", "-R", "g+w", repo.path], check=True)
        subprocess.run(["find", repo.path, "-type", "d", "-exec", "chmod", "g+s", "{}", "+"], check=True)
    before = set(repo.path.rglob("*"))
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0

    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    common, trees = repo.path / ".git", repo.path / ".worktrees"
    assert mode(common / "lionwt") == (0o770 if is_shared else 0o700)
    assert mode(common / "lionwt" / "registration.lock") == (0o660 if is_shared else 0o600)
    if is_shared:
        assert [path for path in (trees, trees / "lionagi") if not mode(path) & 0o020] == []
    with world.stopped("teardown.set_aside", "promote", "r1"):
        assert mode(common / "lionwt" / "promotion.lock") == (0o660 if is_shared else 0o600)
        assert mode(trees / ".trash") == (0o770 if is_shared else 0o700)
    assert world.promote("r1").code == 0
    if is_shared:
        made = [path for path in (common / "objects").rglob("*") if path not in before and path.is_dir()]
        made += [common / "refs" / "heads" / "work", common / "logs" / "refs" / "heads" / "work"]
        assert [path for path in made if not mode(path) & 0o020] == []
    state = world.state("r1")
    assert {mode(path) for path in (state, state / "workspaces")} == {0o700}
    assert {mode(path) for path in (state / "workspaces").iterdir()} == {0o600}


def test_the_run_of_another_user_is_refused_as_theirs(world: World, repo: Repo) -> None:
    """Invariant 23: state is its owner's alone; who may not read it is told whose it is."""
    world.frozen("r1", {"w1": NEW})
    before = world.state_bytes("r1")
    state = world.state("r1")
    state.chmod(0)
    try:
        for verb in ("promote", "reconcile", "status"):
            answer = world.lionwt(verb, "r1", "--json", wrapper=unprivileged())
            assert (answer.code, answer.error) == (8, "permission"), answer
            assert "another user's" in answer.json["error"]["message"]
    finally:
        state.chmod(0o700)
    assert world.state_bytes("r1") == before


def test_what_still_writes_into_a_removed_tree_does_not_leave_it_behind(world: World, repo: Repo) -> None:
    """ADR-0091 D5: the git of a dead lease goes on for a while, in the tree that is being deleted."""
    arguments = ("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none")
    killed = world.lionwt(*arguments, env={"LIONWT_FAULT": "lease.populated:kill"})
    assert killed.code == -9
    writes = """
import os, time
ends = time.monotonic() + 3
for number in range(10**6):
    os.makedirs(f"d{number}/e")
    if time.monotonic() > ends:
        break
"""
    tree = repo.path / ".worktrees/lionagi/r1/w1"
    writer = subprocess.Popen([sys.executable, "-c", writes], cwd=tree, stderr=subprocess.DEVNULL)
    try:
        wait_until((tree / "d9").exists)
        assert world.lionwt(*RECONCILE).code == 0
    finally:
        writer.wait(30)
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("name", ["head", "candidate", "landed"])
def test_the_lock_of_an_anchor_that_a_dead_git_left_goes_with_the_lease(world: World, repo: Repo, name: str) -> None:
    """Section 7, teardown: it would keep the anchors for ever, and nothing else may be left of them either."""
    world.frozen("r1", {"w1": NEW}, policy="patch_only")
    lock = repo.path / f".git/refs/lionwt/r1/w1/{name}.lock"
    lock.write_bytes(b"")
    assert world.promote("r1").code == 0
    assert not (repo.path / ".git/refs/lionwt/r1").exists() and world.leftovers("r1", repo) == []
