"""Lease files: replaced whole, private, ambiguous rather than absent; and the locks around them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from lionwt import LionwtError, locks, names, session
from lionwt.store import Store
from tests.conftest import Repo, World, unprivileged


def paths_of(world: World, run: str = "r1") -> names.RunPaths:
    return names.run_paths(str(world.state(run)), {})


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_state_is_private_whatever_the_umask_and_leaves_no_debris(world: World, repo: Repo, umask: int) -> None:
    """Design section 3: mode 0600, directories 0700; a temporary name never stays."""
    child = world.popen("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", umask=umask)
    assert child.wait(60) == 0, child.communicate()
    child.communicate()
    for path in [world.state("r1"), *world.state("r1").rglob("*")]:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path
        assert not path.name.endswith(".tmp")
    tree = repo.path / ".worktrees/lionagi/r1/w1/f1.txt"
    assert stat.S_IMODE(tree.stat().st_mode) == 0o666 & ~umask  # git children keep the caller's umask


def test_the_serial_rises_by_one_with_every_write(world: World, repo: Repo) -> None:
    """Invariant 1: serial + 1, transitions only along the ADR's arrows."""
    world.lease("r1", "w1", start=False)
    assert world.lease_file("r1", "w1")["serial"] == 2  # reserved, then allocated
    world.lionwt("start", "r1", "w1")
    assert world.lease_file("r1", "w1")["serial"] == 3
    world.lionwt("start", "r1", "w1")
    assert world.lease_file("r1", "w1")["serial"] == 3


@pytest.mark.parametrize(("action", "code"), [("raise", 1), ("nospace", 8), ("kill", -signal.SIGKILL)])
def test_a_write_that_is_interrupted_before_its_rename_leaves_the_old_file(
    world: World, repo: Repo, action: str, code: int
) -> None:
    """Design section 3: a reader sees the old file or the new one."""
    world.lease("r1", "w1", start=False)
    path = world.state("r1") / "workspaces/w1.json"
    before = (path.read_bytes(), path.stat().st_ino)
    child = world.popen("start", "r1", "w1", env={"LIONWT_FAULT": f"store.written:{action}"})
    child.communicate(timeout=60)
    assert child.returncode == code
    assert (path.read_bytes(), path.stat().st_ino) == before
    debris = [name for name in os.listdir(path.parent) if name.endswith(".tmp")]
    assert len(debris) == (1 if action == "kill" else 0)
    # What a killed writer left is nobody's lease and stops nothing.
    assert world.lionwt("start", "r1", "w1").code == 0
    assert world.lease_file("r1", "w1")["serial"] == 3
    world.lease("r1", "w2")


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    stored = json.loads(content)
    lease = stored["lease"]
    if kind == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "array":
        path.write_bytes(b"[]")
    elif kind == "deep":
        path.write_bytes(b"[" * 200_000)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind in ("link", "dangling"):
        path.rename(path.parent / "aside")
        path.symlink_to(path.parent / ("aside" if kind == "link" else "nowhere"))
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        if kind == "foreign-schema":
            stored["schema"] = "other/lease@1"
        elif kind == "no-schema":
            del stored["schema"]
        elif kind == "newer-schema":
            stored["schema"] = "lionwt/lease@2"
            stored["new"] = 1
        elif kind == "extra-field":
            stored["surprise"] = 1
        elif kind == "unknown-state":
            lease["state"] = "paused"
        elif kind == "other-worker":
            lease["worker_id"] = "w9"
        elif kind == "other-branch":
            lease["branch_name"] = "work"
        elif kind == "other-tree":
            lease["worktree_path"] = str(Path(lease["worktree_path"]).parent)
        elif kind == "other-artifacts":
            lease["artifact_path"] = "/"
        elif kind == "other-base":
            lease["base_sha"] = "0" * 40
        elif kind == "other-target":
            lease["target_branch"] = "main"
        path.write_text(json.dumps(stored))


KINDS = ["torn", "empty", "array", "deep", "binary", "link", "dangling", "directory", "fifo"]
KINDS += ["foreign-schema", "no-schema", "newer-schema", "extra-field", "unknown-state", "other-worker"]
KINDS += ["other-branch", "other-tree", "other-artifacts", "other-base", "other-target"]


def seen(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    content: object = None
    if path.is_symlink():
        content = os.readlink(path)
    elif path.is_file():
        content = path.read_bytes()
    return (found.st_ino, found.st_mode, found.st_mtime_ns, content)


def test_a_lease_file_that_is_ambiguous_is_named_left_and_never_no_lease(world: World, repo: Repo) -> None:
    """Design section 3: unreadable, torn, a symlink, of a newer schema, or edited paths: left byte for byte."""
    workers = [f"{kind}-1" for kind in KINDS]
    world.lease("r1", "sound", *workers, start=False)
    files = {worker: world.state("r1") / f"workspaces/{worker}.json" for worker in workers}
    before = {}
    for kind, (worker, path) in zip(KINDS, files.items(), strict=True):
        damage(path, kind)
        before[worker] = seen(path)
    run = session.load(paths_of(world))
    for kind, (worker, path) in zip(KINDS, files.items(), strict=True):
        expected = "schema_newer" if kind == "newer-schema" else "state_unreadable"
        with pytest.raises(LionwtError) as ambiguous:
            run.lease(worker)
        assert (ambiguous.value.code, ambiguous.value.exit_code) == (expected, 7), kind
        if kind not in ("torn", "link", "directory", "newer-schema", "other-tree"):
            continue
        refused = world.lionwt("start", "r1", worker, "--json")
        assert (refused.code, refused.error) == (7, expected), (kind, refused)
        assert str(path) in refused.json["error"]["message"]
        assert "nothing was changed" in refused.json["error"]["message"]
        assert refused.json["error"]["hint"]
    found, ambiguous_files = run.store.leases(run.file)
    assert [file.worker_id for file in found] == ["sound"]
    assert sorted(entry.worker_id for entry in ambiguous_files) == sorted(workers)
    for worker in ("dangling-1", "directory-1", "TORN-1"):
        refused = world.lionwt("lease", "r1", "-w", worker, "--json")
        assert (refused.code, refused.error) == (3, "id_reused"), refused
    world.lease("r1", "another")
    assert world.lionwt("start", "r1", "sound").code == 0
    assert {worker: seen(path) for worker, path in files.items()} == before


def test_a_run_file_that_is_ambiguous_is_never_a_run_to_be_opened(world: World, repo: Repo) -> None:
    """Design section 3: the same holds for the run as lionwt opened it."""
    world.lease("r1", "w1", start=False)
    path = world.state("r1") / "workspaces.json"
    sound, store = path.read_bytes(), Store(paths_of(world))
    edits = {"newer-schema": ("schema", "lionwt/run@2"), "other-run": ("run_id", "r9"), "extra": ("x", 1)}
    for kind in ("torn", "empty", "array", *edits, "link", "directory"):
        if kind in edits:
            key, value = edits[kind]
            path.write_text(json.dumps({**json.loads(sound), key: value}))
        else:
            damage_run(path, kind)
        before, snapshot = seen(path), repo.snapshot()
        expected = "schema_newer" if kind == "newer-schema" else "state_unreadable"
        with pytest.raises(LionwtError) as ambiguous:
            store.read_run()
        assert (ambiguous.value.code, ambiguous.value.exit_code) == (expected, 7), kind
        if kind in ("torn", "newer-schema", "directory"):
            for arguments in (["lease", "r1", "-w", "w2", "--target", "work"], ["start", "r1", "w1"]):
                refused = world.lionwt(*arguments, "--json")
                assert (refused.code, refused.error) == (7, expected), refused
                assert str(path) in refused.json["error"]["message"]
        assert (seen(path), repo.snapshot()) == (before, snapshot)
        if kind != "directory":
            path.unlink()
            path.write_bytes(sound)
    assert not (world.state("r1") / "workspaces/w2.json").exists()


def damage_run(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "link":
        path.rename(path.parent / "aside")
        path.symlink_to("aside")
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"torn": content[:100], "empty": b"", "array": b"[]"}[kind])


def test_a_repository_whose_path_is_no_text_round_trips(world: World) -> None:
    """Design section 3: JSON is ASCII with surrogate escapes, so any path round-trips."""
    repo = world.repo(os.fsdecode(b"re\xffpo \xc3\xa4\n"))
    answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--json", cwd=repo.path)
    assert answer.code == 0, answer
    assert answer.out.isascii()
    tree = Path(answer.json["leases"][0]["worktree_path"])
    assert tree == repo.path / ".worktrees/lionagi/r1/w1"
    assert tree.is_dir()
    assert (world.state("r1") / "workspaces/w1.json").read_bytes().isascii()
    grants = json.dumps(answer.json["bindings"][0])
    started = world.lionwt("start", "r1", "w1", "--json", "--grants", "-", stdin=grants, cwd=repo.path)
    assert started.code == 0, started
    told = world.lionwt("start", "r1", "w1", cwd=repo.path)
    assert told.code == 0
    assert "re\\udcffpo" in told.out.replace("\\\\", "\\")
    assert Repo(tree, world.environment()).status() == ""
    assert repo.status() == ""


# --- locks -----------------------------------------------------------------------------------------------------------


def held_locks(world: World, repo: Repo) -> set[str]:
    """Which of the locks somebody else holds right now."""
    paths, found = paths_of(world), set()
    candidates = {
        "promotion": session.promotion_lock(repo.path / ".git"),
        "lease": paths.lease_lock("w1"),
        "run": paths.run_lock,
        "registration": session.registration_lock(repo.path / ".git"),
    }
    for name, path in candidates.items():
        if not path.exists():
            continue
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(name)
    return found


@pytest.mark.parametrize(
    ("point", "held"),
    [
        ("lease.intended", {"lease", "run"}),
        ("lease.registered", {"lease", "registration"}),
        ("lease.populated", {"lease"}),
        ("lease.recorded", {"lease"}),
    ],
)
def test_each_step_of_a_lease_holds_the_locks_it_needs_and_no_other(
    world: World, repo: Repo, point: str, held: set[str]
) -> None:
    """Design section 3: lease for the whole verb; run only while opening; registration only around adding."""
    arguments = ["lease", "r1", "-w", "w1", "--target", "work"]
    with world.stopped(point, *arguments) as child:
        assert held_locks(world, repo) == held
        files = [paths_of(world).lease_lock("w1"), paths_of(world).run_lock]
        inodes = [path.stat().st_ino for path in files]
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=60)
    assert child.returncode == 0
    assert held_locks(world, repo) == set()
    assert [path.stat().st_ino for path in files] == inodes  # never unlinked


def test_a_verb_waits_for_a_held_lease_only_so_long(world: World, repo: Repo) -> None:
    """Invariant 24: every wait is bounded; a stopped holder is never robbed."""
    world.lease("r1", "w1", start=False)
    before = (world.state("r1") / "workspaces/w1.json").read_bytes()
    with world.stopped("store.written", "start", "r1", "w1") as child:
        run = session.load(paths_of(world))
        began = time.monotonic()
        with pytest.raises(LionwtError) as busy, run.locked("w1", wait=0.3):
            raise AssertionError("two holders of one lease")
        assert 0.3 <= time.monotonic() - began < 10
        assert (busy.value.code, busy.value.exit_code) == ("lock_timeout", 6)
        assert (world.state("r1") / "workspaces/w1.json").read_bytes() == before
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=60)
    assert child.returncode == 0


def test_a_lease_that_cannot_have_the_registration_lock_leaves_nothing(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design section 4: all or nothing, also when what would be needed to undo is what is held."""
    from lionwt.lease import lease
    from lionwt.opening import Request

    world.lease("r1", "w1")
    with world.stopped("lease.registered", "lease", "r1", "-w", "w2"):
        held = locks.held
        monkeypatch.setattr(locks, "held", lambda path, what, wait=0.3: held(path, what, wait))
        with pytest.raises(LionwtError) as busy:
            lease(paths_of(world), Request(workers=("w3", "w4")))
        assert (busy.value.code, busy.value.exit_code) == ("lock_timeout", 6)
        assert "nothing was" in busy.value.message
        left = sorted(path.name for path in (world.state("r1") / "workspaces").glob("*.json"))
        assert left == ["w1.json", "w2.json"]
        assert not (world.state("r1") / "artifacts/w3").exists()


def test_a_killed_holder_frees_its_lock_and_a_link_in_its_place_is_refused(world: World, repo: Repo) -> None:
    """Design section 3: the kernel frees a lock when its last descriptor closes; files are never followed elsewhere."""
    world.lease("r1", "w1", start=False)
    with world.stopped("store.written", "start", "r1", "w1") as child:
        child.kill()
        child.wait(30)
        assert world.lionwt("start", "r1", "w1").code == 0
    lock = paths_of(world).lease_lock("w1")
    victim = world.root / "victim"
    lock.unlink()
    lock.symlink_to(victim)
    refused = world.lionwt("start", "r1", "w1", "--json")
    assert refused.code == 8, refused
    assert str(lock) in refused.json["error"]["message"]
    assert not victim.exists()


def test_a_lease_that_is_forgotten_while_it_is_listed_is_no_ambiguous_file(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation that was undone between the listing and the reading has no file any more."""
    world.lease("r1", "w1")
    monkeypatch.setenv("LIONAGI_HOME", str(world.lionagi_home))
    run = session.load(names.run_paths("r1", os.environ))
    monkeypatch.setattr(Store, "worker_ids", lambda store: ["gone", "w1"])
    files, ambiguous = run.store.leases(run.file)
    assert ([file.worker_id for file in files], ambiguous) == (["w1"], [])


FROZEN: dict[str, object] = {
    "candidate": None,
    "evidence": None,
    "intent": {"kind": "promote", "at": 1.0, "nonce": None, "landing": None},
    "serial": 2**80,
    "candidate.patch_ref": "a\0b",
    "evidence.commit": "\ud800",
    "diagnostics": [{"at": float("nan"), "code": "x", "message": "y", "ref": None}],
    "lease.created_at": float("inf"),
    "lease.state": "terminal",
    "owner": {"host": "h", "boot": "b", "pid": 2**40, "started": 1.0},
}


def test_a_lease_file_that_contradicts_itself_is_ambiguous_and_stops_no_other(world: World, repo: Repo) -> None:
    """Design section 3: decided once, where the file is read; design section 8: nothing adopted, nothing deleted."""
    odd = [f"w{number}" for number in range(len(FROZEN))]
    world.frozen("r1", {worker: {f"{worker}.txt": "x\n"} for worker in odd})
    world.lease("r1", "sound", start=False)
    for worker, (where, value) in zip(odd, FROZEN.items(), strict=True):
        path = world.state("r1") / f"workspaces/{worker}.json"
        stored = json.loads(path.read_bytes())
        *parents, last = where.split(".")
        part = stored
        for parent in parents:
            part = part[parent]
        part[last] = value
        path.write_text(json.dumps(stored))
    before = {worker: world.lease_bytes("r1", worker) for worker in odd}
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.error) == (7, "state_unreadable"), answer
    assert sorted(row["worker_id"] for row in answer.json["findings"] if row["code"] == "state_unreadable") == odd
    assert world.record("r1", "sound")["status"] == "discarded"
    refused = world.lionwt("promote", "r1", odd[0], "--json")
    assert (refused.code, refused.error) == (7, "state_unreadable"), refused
    shown = world.lionwt("status", "r1", "--json")
    json.loads(shown.out, parse_constant=pytest.fail)
    assert {worker: world.lease_bytes("r1", worker) for worker in odd} == before


def test_a_run_file_with_what_no_path_can_be_is_ambiguous(world: World, repo: Repo) -> None:
    """Design section 3: the run's own file is read by the same rules."""
    world.lease("r1", "w1", start=False)
    path = world.state("r1") / "workspaces.json"
    sound = json.loads(path.read_bytes())
    for key, value in (("checkout_git_dir", "/a\0b"), ("user_name", "\udfff"), ("opened_at", float("nan"))):
        path.write_text(json.dumps({**sound, key: value}))
        refused = world.lionwt("start", "r1", "w1", "--json")
        assert (refused.code, refused.error) == (7, "state_unreadable"), refused


def test_a_file_whose_name_is_no_workers_is_ambiguous_and_named(world: World, repo: Repo) -> None:
    """Design section 3: a copy that somebody made beside a lease is named, and not taken for a typed id."""
    world.frozen("r1", {"w1": {"a": "b\n"}})
    copy = world.state("r1") / "workspaces/w1 copy.json"
    copy.write_bytes(world.lease_bytes("r1", "w1"))
    for arguments in (["promote", "r1"], ["reconcile", "r1", "--takeover"]):
        answer = world.lionwt(*arguments, "--json")
        assert (answer.code, answer.error) == (7, "state_unreadable"), answer
        assert str(copy) in answer.json["error"]["message"]
    assert copy.exists()


@pytest.mark.parametrize("how", ["file", "mode"])
def test_a_run_whose_leases_cannot_be_listed_is_named_and_hides_no_other(world: World, repo: Repo, how: str) -> None:
    """Design section 3: ambiguous, never "no lease"; the other runs are shown and reaped."""
    world.lease("broken", "w1", start=False)
    world.lease("sound", "w1", start=False)
    directory = world.state("broken") / "workspaces"
    if how == "file":
        directory.rename(directory.with_name("aside"))
        directory.write_text("")
    else:
        directory.chmod(0)
    for arguments in (["status"], ["reap", "--all"], ["reap", "broken", "sound"]):
        answer = world.lionwt(*arguments, "--json", wrapper=unprivileged())
        assert (answer.code, answer.error) == (7, "state_unreadable"), answer
        assert str(directory) in answer.json["error"]["message"] and answer.json["error"]["hint"]
        if arguments == ["status"]:
            assert [row["run_id"] for row in answer.json["leases"]] == ["sound"]
            assert answer.json["gone"] == []
    for arguments in (["status", "broken"], ["reconcile", "broken"], ["lease", "broken", "-w", "w2"]):
        answer = world.lionwt(*arguments, "--json", wrapper=unprivileged())
        assert (answer.code, answer.error) == (7, "state_unreadable"), answer
    if how == "mode":
        directory.chmod(0o700)


def test_a_run_whose_own_file_is_gone_is_not_called_unopened(world: World, repo: Repo) -> None:
    """Design section 3: its leases are there, so every verb says what is missing."""
    world.lease("r1", "w1", start=False)
    (world.state("r1") / "workspaces.json").unlink()
    for arguments in (["status", "r1"], ["reconcile", "r1"], ["lease", "r1", "-w", "w2", "--target", "work"]):
        answer = world.lionwt(*arguments, "--json")
        assert (answer.code, answer.error) == (7, "state_unreadable"), answer
        assert "is gone, but leases of run 'r1' are in" in answer.json["error"]["message"]


def test_a_time_that_no_calendar_knows_is_told_as_it_is(world: World, repo: Repo) -> None:
    """Design section 5: one lease's odd expiry stops no status."""
    world.frozen("r1", {"w1": {"f1.txt": "worker\n"}}, args=("--retain-for", "2h"))
    repo.commit("operator", **{"f1.txt": "operator\n"})
    assert world.promote("r1").code == 4
    path = world.state("r1") / "workspaces/w1.json"
    stored = json.loads(path.read_bytes())
    assert stored["record"]["status"] == "retained"
    stored["record"]["retention_until"] = 1e18
    path.write_text(json.dumps(stored))
    shown = world.lionwt("status")
    assert shown.code == 0 and "Unix second 1000000000000000000" in shown.out, shown
