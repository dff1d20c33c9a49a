"""The verb ``freeze``: states, verdicts, repeats, who may call it, stopping, and what is left when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lionwt.capture import Capturer
from tests.conftest import Repo, World, files_of, unprivileged, wait_until

#: Processes are known by these ids all over the machine, so no other test may have them.
RUN = f"run-{uuid.uuid4().hex}"
IDS = {"LIONAGI_RUN_ID": RUN, "LIONAGI_SESSION_ID": RUN, "LIONAGI_WORKER_ID": "w1"}


# States, verdicts, repeats ---------------------------------------------------


def test_freeze_turns_running_into_frozen_and_anchors_what_it_proved(world: World, repo: Repo) -> None:
    """ADR-0091 D3: patch, file list, manifest and validations captured before the state is frozen."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    serial = world.lease_file("r1", "w1")["serial"]
    before = world.standing("r1", "w1")
    given = "--validation", "tests=pass,exit=0,evidence=w1/log.txt", "--validation", "lint=fail,exit=-9"
    answer = world.freeze("r1", "w1", *given)
    assert answer.code == 0, answer
    assert world.standing("r1", "w1") == before
    file = world.lease_file("r1", "w1")
    assert file["serial"] == serial + 1
    assert [step["state"] for step in file["history"]] == ["allocated", "running", "frozen"]
    candidate = answer.json["candidate"]
    assert candidate == file["candidate"]
    assert candidate["lease"] == file["lease"]
    assert candidate["worker_succeeded"] is True and candidate["cancelled"] is False
    assert candidate["validations"] == [
        {"name": "tests", "passed": True, "exit_code": 0, "evidence_ref": "w1/log.txt"},
        {"name": "lint", "passed": False, "exit_code": -9, "evidence_ref": None},
    ]
    assert candidate["files_changed"] == ["new.txt"]
    evidence, manifest = file["evidence"], world.manifest("r1", "w1")
    assert repo.head("refs/lionwt/r1/w1/candidate") == evidence["commit"] == manifest["commit"]
    assert repo.head("refs/lionwt/r1/w1/head") == evidence["head"] == repo.head("work")
    assert repo.git("rev-parse", f"{evidence['commit']}^{{tree}}") == evidence["tree"]
    assert repo.git("rev-parse", f"{evidence['commit']}^") == repo.head("work")
    assert repo.git("log", "-1", "--format=%an <%ae>", evidence["commit"]) == "Operator <operator@example.invalid>"
    world.round_trip("r1", "w1")


@pytest.mark.parametrize("verdict", ["--failed", "--cancelled"])
def test_a_failed_or_cancelled_worker_is_frozen_with_its_patch(world: World, repo: Repo, verdict: str) -> None:
    """ADR-0091 D4: diagnostics and patch are kept, nothing is landed."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    head = repo.head()
    answer = world.freeze("r1", "w1", verdict)
    candidate = answer.json["candidate"]
    assert candidate["worker_succeeded"] is False
    assert candidate["cancelled"] is (verdict == "--cancelled")
    done = world.promote("r1")
    assert (done.code, done.error) == (3, "worker_failed")
    record = done.json["records"][0]
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("discarded", True, True)
    assert repo.head() == head
    assert b"new.txt" in (world.evidence("r1", "w1") / "candidate.patch").read_bytes()


@pytest.mark.parametrize("verdict", ["--failed", "--cancelled"])
def test_a_lease_that_never_started_ends_with_its_evidence(world: World, repo: Repo, verdict: str) -> None:
    """ADR-0091 D3: allocated → terminal, startup failure; what lies there is evidence all the same."""
    worker = world.lease("r1", "w1", start=False)["w1"]
    worker.write("early.txt", "early\n")
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (3, "wrong_state")
    assert world.lease_file("r1", "w1")["lease"]["state"] == "allocated"
    answer = world.freeze("r1", "w1", verdict)
    assert answer.code == 0, answer
    file = world.lease_file("r1", "w1")
    assert [step["state"] for step in file["history"]] == ["allocated", "terminal"]
    assert file["record"]["status"] == "discarded"
    assert file["record"]["patch_ref"] == ".lionwt/w1/candidate.patch"
    assert b"early.txt" in (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    assert not worker.path.exists()
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    written = world.lease_bytes("r1", "w1")
    assert world.freeze("r1", "w1", verdict).code == 0
    assert world.lease_bytes("r1", "w1") == written
    assert world.freeze("r1", "w1").code == 3
    assert world.lionwt("start", "r1", "w1").code == 3
    assert world.lease_bytes("r1", "w1") == written


def test_freeze_repeated_with_the_same_verdict_answers_the_same_and_with_another_is_refused(
    world: World, repo: Repo
) -> None:
    """Design 5: repeating a verb with the same arguments answers the same and changes nothing."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    given = ("--validation", "a=pass", "--validation", "b=fail,exit=1")
    first = world.freeze("r1", "w1", *given)
    written = world.lease_bytes("r1", "w1")
    patch = (world.evidence("r1", "w1") / "candidate.patch").read_bytes()
    worker.write("late.txt", "late\n")
    again = world.freeze("r1", "w1", *given[2:], *given[:2])
    assert again.code == 0
    assert again.json["candidate"] == first.json["candidate"]
    for other in (
        given[:2],
        (*given, "--failed"),
        (*given, "--cancelled"),
        ("--validation", "a=pass", *given[2:3], "b=pass"),
    ):
        refused = world.freeze("r1", "w1", *other)
        assert (refused.code, refused.error) == (3, "already_done"), refused
    assert world.lease_bytes("r1", "w1") == written
    assert (world.evidence("r1", "w1") / "candidate.patch").read_bytes() == patch
    assert world.promote("r1").code == 3
    written = world.lease_bytes("r1", "w1")
    assert world.freeze("r1", "w1", *given).json["candidate"] == first.json["candidate"]
    assert world.freeze("r1", "w1", "--failed").error == "already_done"
    assert world.lease_bytes("r1", "w1") == written


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One running lease, for refusals that change nothing."""
    from pytest_console_scripts import ScriptRunner

    path = tmp_path_factory.mktemp("shared")
    found = World(path, ScriptRunner("subprocess", path, print_result=False))
    found.repo()
    found.lease("r1", "w1")
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--succeeded --failed",
        "--failed --cancelled",
        "--succeeded --accept-incomplete",
        "--succeeded --validation a=pass --validation a=pass",
        "--succeeded --validation a=maybe",
        "--succeeded --validation a",
        "--succeeded --validation =pass",
        "--succeeded --validation a=pass,exit=1",
        "--succeeded --validation a=pass,exit=x",
        "--succeeded --validation a=pass,evidence=/etc/passwd",
        "--succeeded --validation a=pass,evidence=../x",
        "--succeeded --validation a=pass,exit=0,exit=0",
        "--succeeded --validation a=pass,colour=red",
        "--succeeded --stop-after -1",
        "--succeeded --stop-after soon",
    ],
)
def test_a_verdict_that_cannot_be_understood_is_refused_whole(shared: World, arguments: str) -> None:
    """Design 5: usage errors exit 2, as one JSON object, and change nothing."""
    written = shared.lease_bytes("r1", "w1")
    answer = shared.lionwt("freeze", "r1", "w1", "--json", *arguments.split())
    assert (answer.code, answer.error) == (2, "usage"), answer
    assert "nothing was changed" in answer.json["error"]["message"]
    assert shared.lease_bytes("r1", "w1") == written
    assert not shared.evidence("r1", "w1").exists()


@pytest.mark.parametrize(
    ("run", "worker", "code"),
    [("r9", "w1", "run_unknown"), ("r1", "w9", "lease_unknown"), ("r1", "../w1", "id_invalid")],
)
def test_freezing_what_does_not_exist_is_refused(shared: World, run: str, worker: str, code: str) -> None:
    """Design 5: error.code is a stable word."""
    answer = shared.freeze(run, worker)
    assert (answer.code, answer.error) == (3, code)
    assert [path.name for path in (shared.state("r1") / "workspaces").glob("*.json")] == ["w1.json"]


@pytest.mark.parametrize("who", ["w1", "w2"])
def test_no_worker_completes_itself_or_another(shared: World, who: str) -> None:
    """ADR-0091 D3: workers have no reference to the coordinator's methods."""
    written = shared.lease_bytes("r1", "w1")
    for verb in (("freeze", "r1", "w1", "--succeeded"), ("promote", "r1")):
        answer = shared.lionwt(*verb, "--json", env={"LIONAGI_WORKER_ID": who})
        assert (answer.code, answer.error) == (3, "called_by_worker")
    assert shared.lease_bytes("r1", "w1") == written


def test_the_run_may_come_from_the_environment(world: World, repo: Repo) -> None:
    """Design 3: RUN defaults to $LIONAGI_RUN_ID."""
    world.lease("r1", "w1")
    assert world.lionwt("freeze", "w1", "--succeeded", env={"LIONAGI_RUN_ID": "r1"}).code == 0
    assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"


# Stopping --------------------------------------------------------------------


@contextlib.contextmanager
def running(world: World, script: str, cwd: Path | None = None, **ids: str) -> Iterator[subprocess.Popen[str]]:
    """A shell script with ``ids`` in its environment, which says "ready" first; ended in any case."""
    process = subprocess.Popen(
        ["sh", "-c", script],
        env={**world.environment(), **ids},
        cwd=cwd or world.root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_workers_processes_are_asked_first_and_killed_after_the_time_they_get(world: World, repo: Repo) -> None:
    """Design 7, freeze 1: asked to stop, then killed; what they wrote until then is captured."""
    worker = world.lease(RUN, "w1")["w1"]
    polite = f"trap 'echo last > {worker.path}/last.txt; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    stubborn = "trap '' TERM; echo ready; exec sleep 1000"
    leaving = "setsid sh -c 'echo $$ > pid; exec sleep 1000' & until [ -s pid ]; do sleep 0.01; done; echo ready"
    with (
        contextlib.ExitStack() as ending,
        running(world, polite, **IDS) as one,
        running(world, stubborn, cwd=worker.path, **IDS) as two,
        running(world, leaving, **IDS) as three,
    ):
        three.wait(30)
        grandchild = int((world.root / "pid").read_text())
        ending.callback(lambda: alive(grandchild) and os.kill(grandchild, signal.SIGKILL))
        assert alive(grandchild)
        answer = world.freeze(RUN, "w1", "--stop-after", "1")
        assert answer.code == 0, answer
        assert not alive(grandchild)
        assert one.wait(30) == 0
        assert two.wait(30) == -signal.SIGKILL
    assert answer.json["candidate"]["files_changed"] == ["last.txt"]


def test_with_no_time_to_stop_the_answer_is_busy_and_names_them(world: World, repo: Repo) -> None:
    """Design 7, freeze 1: ``--stop-after 0`` stops nothing."""
    world.lease(RUN, "w1")
    with running(world, "echo ready; exec sleep 1000", **IDS) as process:
        written, standing = world.lease_bytes(RUN, "w1"), world.standing(RUN, "w1")
        answer = world.freeze(RUN, "w1", "--stop-after", "0")
        assert (answer.code, answer.error) == (6, "worker_alive")
        assert f"sleep (pid {process.pid})" in answer.json["error"]["message"]
        assert alive(process.pid)
        assert world.lease_bytes(RUN, "w1") == written
        assert world.standing(RUN, "w1") == standing


def test_nobody_elses_process_is_stopped(world: World, repo: Repo) -> None:
    """Design 10, invariant 26: no process outside the lease is killed."""
    world.lease(RUN, "w1", "w2")
    wait = "echo ready; exec sleep 1000"
    others = [
        {**IDS, "LIONAGI_WORKER_ID": "w2"},
        {**IDS, "LIONAGI_RUN_ID": f"{RUN}x"},
        {"LIONAGI_WORKER_ID": "w1"},
        {"LIONAGI_RUN_ID": RUN, "LIONAGI_SESSION_ID": RUN},
        {**IDS, "LIONAGI_WORKER_ID": "w11"},
    ]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running(world, wait, **ids)) for ids in others]
        assert world.freeze(RUN, "w1").code == 0
        assert [process.poll() for process in started] == [None] * len(others)


@pytest.mark.parametrize("where", [".", "sub/dir"])
def test_a_process_that_merely_stands_in_the_worktree_makes_it_busy_and_lives_on(
    world: World, repo: Repo, where: str
) -> None:
    """Design 7, freeze 1: somebody's shell is never killed."""
    worker = world.lease(RUN, "w1")["w1"]
    with running(world, "echo ready; exec sleep 1000", cwd=worker.path / where) as process:
        written, standing = world.lease_bytes(RUN, "w1"), world.standing(RUN, "w1")
        answer = world.freeze(RUN, "w1", "--stop-after", "0.1")
        assert (answer.code, answer.error) == (6, "worker_alive")
        assert str(process.pid) in answer.json["error"]["message"]
        assert process.poll() is None
        assert world.lease_bytes(RUN, "w1") == written
        assert world.standing(RUN, "w1") == standing
    assert world.freeze(RUN, "w1").code == 0


def test_whoever_calls_lionwt_may_stand_in_the_worktree_and_carry_the_ids(world: World, repo: Repo) -> None:
    """Design 7, freeze 1: lionwt and its ancestors are exempt."""
    worker = world.lease(RUN, "w1")["w1"]
    wrapper = ("sh", "-c", 'env -u LIONAGI_WORKER_ID "$@"; exit $?', "sh")
    answer = world.lionwt("freeze", RUN, "w1", "--succeeded", cwd=worker.path, env={**IDS}, wrapper=wrapper)
    assert answer.code == 0, answer


def test_a_writer_without_ids_is_noticed_and_nothing_is_recorded(world: World, repo: Repo) -> None:
    """Case 65: captures that do not agree are no candidate."""
    worker = world.lease(RUN, "w1")["w1"]
    busy = (
        "import contextlib, os, time\n"
        "with contextlib.suppress(OSError): os.nice(-20)\n"
        f"file = open({str(worker.path / 'busy.txt')!r}, 'ab', 0)\n"
        "print('ready', flush=True)\n"
        "while True: file.write(b'x'); time.sleep(0.001)\n"
    )
    with running(world, f"exec {sys.executable} -c {shlex.quote(busy)}"):
        written = world.lease_bytes(RUN, "w1")
        answer = world.freeze(RUN, "w1")
        assert (answer.code, answer.error) == (6, "worktree_changing")
        assert world.lease_bytes(RUN, "w1") == written
        assert list(world.evidence(RUN, "w1").iterdir()) == []
    assert world.freeze(RUN, "w1").code == 0
    world.round_trip(RUN, "w1")


def test_a_file_that_changes_between_the_capture_and_its_evidence_is_no_candidate(world: World, repo: Repo) -> None:
    """Case 65: what is hashed and kept raw is what was captured."""
    worker = world.lease(RUN, "w1")["w1"]
    worker.write("new.txt", "new\n")
    written = world.lease_bytes(RUN, "w1")
    process = world.popen("freeze", RUN, "w1", "--succeeded", "--json", env={"LIONWT_FAULT": "freeze.captured:stop"})
    try:
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        worker.write("new.txt", "newer\n")
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert json.loads(out)["error"]["code"] == "worktree_changing"
    assert process.returncode == 6
    assert world.lease_bytes(RUN, "w1") == written
    assert world.freeze(RUN, "w1").code == 0
    world.round_trip(RUN, "w1")


# What is written after the freeze --------------------------------------------


@pytest.mark.parametrize("policy", ["merge_validated", "patch_only"])
def test_what_is_written_after_the_freeze_is_saved_before_anything_is_removed(
    world: World, repo: Repo, policy: str
) -> None:
    """Case 65, ADR-0091 D5: late work is no part of the candidate, and is not lost."""
    worker = world.lease("r1", "w1", policy=policy)["w1"]
    worker.write("early.txt", "early\n")
    worker.write("early.log", "ignored\n")
    assert world.freeze("r1", "w1").code == 0
    worker.write("early.txt", "late edit\n")
    worker.write("late.bin", b"\0late")
    worker.write("late.log", "ignored, late\n")
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert not worker.path.exists()
    if policy == "merge_validated":
        assert (repo.path / "early.txt").read_text() == "early\n"
        assert not (repo.path / "late.bin").exists()
    notes = [note for note in world.lease_file("r1", "w1")["diagnostics"] if note["code"] == "late_writes"]
    assert [note["ref"] for note in notes] == [".lionwt/w1/late-1.patch"]
    clean = world.applied("r1", "w1")
    clean.git("apply", "--index", "--binary", world.evidence("r1", "w1") / "late-1.patch")
    found = files_of(clean.path)
    assert found[b"early.txt"][1] == b"late edit\n"
    assert found[b"late.bin"][1] == b"\0late"
    listed = subprocess.run(
        ["tar", "-xOf", world.evidence("r1", "w1") / "late-1.tar", "late.log"], capture_output=True, check=True
    )
    assert listed.stdout == b"ignored, late\n"


def test_a_late_repository_that_cannot_be_saved_keeps_the_worktree(world: World, repo: Repo) -> None:
    """Design 7: what cannot be saved whole stays."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    worker.git("init", "-q", "late")
    worker.write("late/code.txt", "code\n")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (5, "teardown_failed")
    record = answer.json["records"][0]
    assert record["promoted_commit"] == repo.head("work")
    assert record["worktree_removed"] is False
    assert (worker.path / "late/code.txt").read_text() == "code\n"


# Faults ----------------------------------------------------------------------

BEFORE = ("freeze.stopped", "freeze.captured", "store.written", "freeze.evidence", "freeze.anchored", "store.written:2")


@pytest.mark.parametrize(("action", "code"), [("raise", 1), ("nospace", 8), ("kill", -signal.SIGKILL)])
def test_a_freeze_that_dies_anywhere_leaves_the_lease_running_and_can_be_repeated(
    world: World, repo: Repo, action: str, code: int
) -> None:
    """Design 7 and 10, invariants 5 and 20: repeated, it comes one step further every time."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.write("a.log", "ignored\n")
    written, standing = world.lease_bytes("r1", "w1"), world.standing("r1", "w1")

    def freeze(at: str) -> None:
        name, _, nth = at.partition(":")
        fault = f"{name}:{action}" + (f":{nth}" if nth else "")
        done = world.lionwt("freeze", "r1", "w1", "--succeeded", "--json", env={"LIONWT_FAULT": fault})
        assert done.code == code, (at, done)
        if action == "nospace":
            assert done.error == "no_space"

    for at in BEFORE:
        freeze(at)
        assert world.lease_bytes("r1", "w1") == written, at
        assert world.standing("r1", "w1") == standing, at
    freeze("freeze.recorded")
    assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
    assert world.freeze("r1", "w1").code == 0
    assert world.standing("r1", "w1") == standing
    world.round_trip("r1", "w1", without=(b"a.log",))
    assert world.promote("r1").json["records"][0]["status"] == "promoted"


def test_no_space_for_the_evidence_refuses_the_freeze(world: World, repo: Repo) -> None:
    """Design 5: exit 8, no_space; the lease stays running, and freeze can be repeated."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("big.bin", os.urandom(200_000))
    written, standing = world.lease_bytes("r1", "w1"), world.standing("r1", "w1")
    hidden = world.evidence("r1", "w1").parent
    hidden.mkdir(mode=0o700)
    small = f'mount -t tmpfs -o size=64k,mode=700 none {hidden} && exec "$@"'
    answer = world.lionwt(
        "freeze", "r1", "w1", "--json", "--succeeded", wrapper=("unshare", "--mount", "sh", "-ec", small, "sh")
    )
    if "{" not in answer.out:
        pytest.skip(f"no mount name space here: {answer.err}")
    assert (answer.code, answer.error) == (8, "no_space"), answer
    assert world.lease_bytes("r1", "w1") == written
    assert world.standing("r1", "w1") == standing
    assert world.freeze("r1", "w1").code == 0


def test_the_operator_reads_what_happened_and_what_to_type_next(world: World, repo: Repo) -> None:
    """Design 5: an error says what happened, what was left untouched, and what to type next."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("init", "-q", "in\x1b[31mner")
    worker.write("in\x1b[31mner/code.txt", "code\n")
    answer = world.lionwt("freeze", "r1", "w1", "--succeeded")
    assert answer.code == 4
    assert "\x1b" not in answer.err + answer.out
    assert "in\\x1b[31mner is a repository of its own" in answer.err
    assert "the lease and the worktree are as they were" in answer.err
    assert "--failed --accept-incomplete" in answer.err


def test_a_patch_that_changes_while_it_is_recorded_is_no_candidate(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded is the hash of what was proven, or nothing."""
    import lionwt
    from lionwt import evidence

    worker = world.lease(RUN, "w1")["w1"]
    worker.write("new.txt", "new\n")
    written = world.lease_bytes(RUN, "w1")
    write = evidence.write_manifest

    def write_and_spoil(path: Path, manifest: dict[str, object]) -> str:
        with open(path.with_name("candidate.patch"), "ab") as patch:
            patch.write(b"spoiled\n")
        return write(path, manifest)

    with monkeypatch.context() as patched:
        patched.setattr(evidence, "write_manifest", write_and_spoil)
        with pytest.raises(lionwt.LionwtError) as caught:
            world.freeze_now(RUN, "w1")
    assert caught.value.code == "patch_missing"
    assert world.lease_bytes(RUN, "w1") == written
    assert world.freeze(RUN, "w1").code == 0
    world.round_trip(RUN, "w1")


def test_a_saved_index_that_is_not_whole_is_made_anew(world: World, repo: Repo) -> None:
    """A crash may leave it cut off; the base gives the same."""
    worker = world.lease(RUN, "w1")["w1"]
    worker.write("new.txt", "new\n")
    saved = world.state(RUN) / "git" / "lionwt" / "w1.index"
    saved.write_bytes(saved.read_bytes()[:40])
    answer = world.freeze(RUN, "w1")
    assert answer.code == 0, answer
    world.round_trip(RUN, "w1")


def test_evidence_and_artifacts_are_never_followed_through_a_symlink(world: World, repo: Repo) -> None:
    """A worker that can write beside its artifacts must not direct what lionwt writes, or reads, elsewhere."""
    world.lease("r1", "w1")
    victim = world.root / "victim"
    victim.mkdir()
    (victim / "secret").write_text("secret\n")
    evidence = world.evidence("r1", "w1")
    evidence.parent.mkdir(parents=True, exist_ok=True)
    evidence.symlink_to(victim)
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (3, "path_unsafe"), refused
    assert [path.name for path in victim.iterdir()] == ["secret"]
    evidence.unlink()
    artifacts = world.state("r1") / "artifacts" / "w1"
    artifacts.rmdir()
    artifacts.symlink_to(victim)
    assert world.freeze("r1", "w1").code == 0
    assert world.manifest("r1", "w1")["artifacts"] == [{"path": ".", "link": str(victim)}]


def test_nobody_else_reads_the_evidence_whatever_the_umask(world: World, repo: Repo) -> None:
    """Design section 3: mode 0600; a bundle is git's to make, and keeps the caller's umask until it is moved."""
    worker = world.lease("r1", "w1")["w1"]
    worker.commit("kept", **{"kept.txt": "kept\n"})
    worker.write("ignored/secret", "secret\n")
    old = os.umask(0)
    try:
        assert world.freeze("r1", "w1").code == 0
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.evidence("r1", "w1").iterdir()}
    assert {"candidate.patch", "manifest.json", "saved.tar", "commits.bundle"} == set(modes)
    assert set(modes.values()) == {0o600}, modes


def test_a_file_that_comes_between_the_looks_is_in_the_candidate(
    world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design 7, freeze 2: looks are repeated until two agree; no command line can hit that moment for sure."""
    worker = world.lease("r1", "w1")["w1"]
    settle = Capturer._settle

    def settle_and_write(self: Capturer) -> object:
        settled = settle(self)
        worker.write("late.txt", "late\n")
        return settled

    monkeypatch.setattr(Capturer, "_settle", settle_and_write)
    world.freeze_now("r1", "w1")
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["late.txt"]


@pytest.mark.parametrize("line", ["[garbage", "[core]\n\tabbrev = 3"])
def test_a_configuration_that_git_cannot_read_is_told_with_what_was_left(world: World, repo: Repo, line: str) -> None:
    """Design 5: what happened, what was left untouched, what to type next; here for every verb."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    config = repo.path / ".git" / "config"
    whole = config.read_text()
    for verb, left in (
        (("freeze", "r1", "w1", "--succeeded"), "the lease and the worktree are as they were"),
        (("promote", "r1"), "the candidate stays frozen"),
        (("reconcile", "r1", "--takeover"), "nothing was changed"),
    ):
        before = world.state_bytes("r1")
        config.write_text(f"{whole}{line}\n")
        error = world.lionwt(*verb, "--json").json["error"]
        assert error["code"] == "git_failed" and left in error["message"], error
        assert "mend or remove what git names" in (error["hint"] or ""), error
        assert world.state_bytes("r1") == before
        config.write_text(whole)
        if verb[0] == "freeze":
            assert world.lionwt(*verb).code == 0
    assert world.promote("r1").code == 0


def test_objects_that_may_not_be_written_are_no_permission(world: World, repo: Repo) -> None:
    """Design 5: no permission is exit 8 with a word of its own, whoever found it out."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    objects = repo.path / ".git" / "objects"

    def refused(*verb: str) -> str:
        before = world.state_bytes("r1")
        modes = {path: path.stat().st_mode for path in (objects, *objects.iterdir()) if path.is_dir()}
        try:
            for path in modes:
                path.chmod(0o555)
            answer = world.lionwt(*verb, "--json", wrapper=unprivileged())
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        assert (answer.code, answer.error) == (8, "permission"), answer
        assert "who owns it" in answer.json["error"]["hint"] and world.state_bytes("r1") == before
        return str(answer.json["error"]["message"])

    freeze = ("freeze", "r1", "w1", "--succeeded")
    assert "the lease and the worktree are as they were" in refused(*freeze)
    assert world.lionwt(*freeze).code == 0
    assert "the candidate stays frozen" in refused("promote", "r1")
    assert world.promote("r1").code == 0
