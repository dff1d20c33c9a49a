"""However an orchestration ends, every lease ends truthfully; what cannot be kept in leases is refused beforehand."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from lionwt.errors import LionwtError
from lionwt.lionagi import beforehand
from tests.conftest import LIONWT, Repo, World, assert_nothing_left, wait_until
from tests.lionagi.conftest import LI, Lionagi, lives

FANOUT = ("o", "fanout", "claude/sonnet", "all of it", "-n", "2", "--yolo")
JOBS = {f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"], ["wait", f"job-{n}"]] for n in (1, 2)}


def wait_for_work(lionagi: Lionagi, child: subprocess.Popen[str]) -> None:
    """Until every worker has written its file, and waits."""
    reached = [lionagi.root / f"{job}.reached" for job in JOBS]
    wait_until(lambda: all(path.exists() for path in reached) or child.poll() is not None, 60)
    assert child.poll() is None, child.communicate()


@pytest.mark.parametrize(
    ("number", "group", "times"),
    [(signal.SIGINT, False, 1), (signal.SIGTERM, False, 1), (signal.SIGINT, True, 1), (signal.SIGINT, True, 20)],
)
def test_a_signal_ends_the_workers_and_every_lease_as_cancelled(
    world: World, repo: Repo, lionagi: Lionagi, number: int, group: bool, times: int
) -> None:
    """ADR-0091 D3: finally-style completion; what was done so far is kept as a patch, and nothing lands.

    Ctrl-C reaches the whole group of a terminal, and people press it more than once.
    """
    lionagi.plan(*JOBS)
    lionagi.jobs(JOBS)
    before = repo.head()
    child = lionagi.popen("li", "--policy", "merge_validated", *FANOUT, program=LIONWT, start_new_session=group)
    wait_for_work(lionagi, child)
    run = lionagi.run()
    for _ in range(times):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number) if group else child.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
    out, err = child.communicate(timeout=60)
    plain = {signal.SIGINT: 130, signal.SIGTERM: 1}[signal.Signals(number)]
    # Whoever goes on pressing it may hit li when all is done, and nothing but its exit is left.
    assert child.returncode in ((plain,) if times == 1 else (plain, -number)), (child.returncode, out, err)
    for worker, name in (("implementer", "new-1.txt"), ("implementer-2", "new-2.txt")):
        assert world.record(run, worker)["status"] == "discarded"
        assert world.lease_file(run, worker)["candidate"]["cancelled"] is True, err
        assert (world.applied(run, worker).path / name).exists()
    assert repo.head() == before
    assert_nothing_left(world, repo, run)


def test_a_timeout_of_lionagi_ends_every_lease(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D3: cancellation is an ending like any other."""
    lionagi.plan(*JOBS)
    lionagi.jobs(JOBS)
    answer = lionagi.li("li", *FANOUT, "--timeout", "6", program=LIONWT)
    assert answer.code == 124, answer
    run = lionagi.run()
    assert [world.record(run, worker)["status"] for worker in ("orchestrator", "implementer")] == ["discarded"] * 2
    assert_nothing_left(world, repo, run)


def test_after_kill_9_reconcile_with_lionagis_run_id_alone_ends_every_lease(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D5: busy while the providers live on, as they do; then each is frozen and ended as failed."""
    lionagi.plan(*JOBS)
    lionagi.jobs(JOBS)
    child = lionagi.popen("li", "--policy", "merge_validated", *FANOUT, program=LIONWT)
    wait_for_work(lionagi, child)
    [state] = (world.lionagi_home / "runs").glob("*/run.json")
    run = state.parent.name
    workers = [call["pid"] for call in lionagi.calls() if call["job"] in JOBS]
    child.kill()
    child.communicate(timeout=30)
    try:
        busy = world.lionwt("reconcile", run, "--json")
        assert (busy.code, busy.error) == (6, "worker_alive")
        assert busy.json["error"]["hint"].endswith(f"have it stopped: lionwt reconcile {run} --takeover")
        assert (repo.path / ".worktrees/lionagi" / run / "implementer/new-1.txt").exists()
    finally:
        for job in JOBS:
            (lionagi.root / f"{job}.go").touch()
    wait_until(lambda: not any(lives(pid) for pid in workers))
    answer = world.lionwt("reconcile", run, "--json")
    assert answer.code == 0, answer
    for worker, name in (("implementer", "new-1.txt"), ("implementer-2", "new-2.txt")):
        assert world.record(run, worker)["status"] == "discarded"
        assert world.lease_file(run, worker)["candidate"]["worker_succeeded"] is False
        assert (world.applied(run, worker).path / name).exists()
    assert world.record(run, "orchestrator")["status"] == "discarded"
    assert repo.merges() == []
    assert_nothing_left(world, repo, run)
    again = world.lionwt("reconcile", run, "--json")
    assert (again.code, again.json["records"]) == (0, answer.json["records"])


def test_a_takeover_stops_what_lives_on_after_kill_9(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """Design 8: the workers' processes are found by the ids that the adapter pinned."""
    lionagi.plan(*JOBS)
    lionagi.jobs(JOBS)
    child = lionagi.popen("li", *FANOUT, program=LIONWT)
    wait_for_work(lionagi, child)
    run = lionagi.run()
    child.kill()
    child.communicate(timeout=30)
    assert world.lionwt("reconcile", run, "--takeover", "--json").code == 0
    assert not any(lives(call["pid"]) for call in lionagi.calls())
    assert_nothing_left(world, repo, run)


def test_work_that_could_not_be_captured_is_no_success_and_is_not_lost(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D3: missing capture is a completion failure; the lease stays, is told of, and reconcile ends it."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["write", "new.txt", "1\n"]]})
    fault = {"LIONWT_FAULT": "freeze.captured:nospace"}
    answer = lionagi.li("li", *FANOUT, program=LIONWT, env=fault)
    assert answer.code == 1, answer
    run = lionagi.run()
    assert "[no_space]" in answer.err
    assert world.lease_file(run, "implementer")["lease"]["state"] == "running"
    assert (repo.path / ".worktrees/lionagi" / run / "implementer/new.txt").exists()
    assert world.lionwt("reconcile", run, "--json").code == 0
    assert (world.applied(run, "implementer").path / "new.txt").exists()
    assert_nothing_left(world, repo, run)


@pytest.mark.parametrize("how", ['rm -rf "$PWD"', 'mv "$PWD" "$PWD.moved"', 'git worktree remove -f -f "$PWD"'])
def test_a_worker_that_removes_its_own_worktree_has_a_record_when_li_ends(
    world: World, repo: Repo, lionagi: Lionagi, how: str
) -> None:
    """ADR-0091 D3: every lease ends through the finally path, whatever the worker did; the others land in order."""
    gone = f"git commit -q --allow-empty -m kept && {how}; setsid sleep 300 >/dev/null 2>&1 </dev/null &"
    lionagi.plan("job-1", "job-2")
    lionagi.jobs({"job-1": [["run", gone]], "job-2": [["write", "new.txt", "2\n"]]})
    answer = lionagi.li("li", "--policy", "merge_validated", *FANOUT, program=LIONWT)
    assert answer.code == 1, answer
    run = lionagi.run()
    assert world.lease_file(run, "implementer")["record"], answer
    assert world.record(run, "implementer")["status"] == "discarded", answer
    assert "lionwt: implementer: discarded; " in answer.err
    assert "which was leased to 'implementer', is gone" in answer.err
    assert world.record(run, "implementer-2")["status"] == "promoted"
    assert list(world.evidence(run, "implementer").glob("*.bundle"))
    named = {"LIONAGI_RUN_ID": run, "LIONAGI_WORKER_ID": "implementer"}
    assert not [process.pid for process in psutil.process_iter() if named.items() <= surroundings(process).items()]
    again = world.lionwt("reconcile", run, "--json")
    if "mv " in how:
        shutil.rmtree(repo.path / f".worktrees/lionagi/{run}/implementer.moved")
    else:
        assert again.code == 0, again
        assert_nothing_left(world, repo, run)


def surroundings(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


# Refused before anything runs


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("version.py", "0.36.", "0.37.", "lionagi 0.37.0 is not one of the releases"),
        ("operations/node.py", "self.branch_id = branch.id", "self.branch_id = (branch.id)", "Operation._invoke"),
        ("providers/pi/cli.py", "    ndjson_from_cli,\n", "    ndjson_from_cli as ndjson_from_cli_,\n", "pi.cli"),
        ("cli/orchestrate/fanout.py", "    setup_orchestration,\n", "    setup_orchestration as so,\n", "fanout"),
    ],
)
def test_another_release_or_a_changed_seam_is_refused_in_one_sentence(
    world: World, repo: Repo, lionagi: Lionagi, file: str, old: str, new: str, said: str
) -> None:
    """ADR-0091 D1: no fallback to shared_host after the mode was selected: nothing runs."""
    lionagi.plan("job-1")
    environment = lionagi.edited((file, old, new))
    answer = lionagi.li("li", *FANOUT, program=LIONWT, env=environment)
    assert answer.code == 3, answer
    assert answer.out == ""
    first, hint = answer.err.splitlines()
    assert re.fullmatch(r"lionwt: lionagi 0\.\S+ .*; nothing was run \[lionagi_unsupported\]", first), answer.err
    assert said in first
    assert hint.startswith("  → ")
    assert (lionagi.calls(), lionagi.runs()) == ([], [])
    as_json = lionagi.li("li", "--json", *FANOUT, program=LIONWT, env=environment)
    assert as_json.json["error"]["code"] == "lionagi_unsupported"


def test_without_lionagi_the_command_says_what_to_install(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """The extra is named; nothing else of lionwt needs it."""
    (world.root / "site").mkdir()
    (world.root / "site" / "lionagi.py").write_text("raise ImportError('no lionagi')\n")
    answer = lionagi.li("li", *FANOUT, program=LIONWT, env={"PYTHONPATH": str(world.root / "site")})
    assert answer.code == 3, answer
    assert "pip install 'lionwt[lionagi]'" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("o", "flow", "claude/sonnet", "x", "--team-mode", "t"), "team mode"),
        (("o", "fanout", "claude/sonnet", "x", "--team-mode", "t"), "team mode"),
        (("o", "flow", "claude/sonnet", "x", "--save", "{out}", "--background"), "start itself once more"),
        (("o", "flow", "claude/sonnet", "x", "--save", "{inside}"), "inside the shared checkout"),
    ],
)
def test_what_no_lease_can_hold_is_refused(
    world: World, repo: Repo, lionagi: Lionagi, words: tuple[str, ...], said: str
) -> None:
    """ADR-0091 D1: nothing falls back to the shared checkout in silence."""
    lionagi.plan("job-1")
    given = [word.format(out=world.home / "out", inside=repo.path / "out") for word in words]
    answer = lionagi.li("li", *given, program=LIONWT)
    assert answer.code not in (0, 1), answer
    assert said in answer.err, answer
    assert "Traceback" not in answer.err
    assert lionagi.calls() == []
    assert repo.status() == ""
    assert not (repo.path / "out").exists()


def test_a_checkout_on_no_branch_or_no_repository_is_refused(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """Design 4: the target is a branch; where none is named it is the one that is checked out."""
    repo.git("switch", "-q", "--detach")
    lionagi.plan("job-1")
    answer = lionagi.li("li", *FANOUT, program=LIONWT)
    assert answer.code == 3, answer
    assert "--target BRANCH" in answer.err
    assert lionagi.calls() == []
    assert lionagi.li("li", "--target", "work", *FANOUT, program=LIONWT).code == 0


@pytest.mark.parametrize(
    "words", [["/bin/li", "o", "flow", "x"], ["li", "orchestrate", "fanout"], ["python", "-m", "lionagi.cli", "o"]]
)
def test_an_orchestration_that_lionagi_starts_anew_is_refused(words: list[str]) -> None:
    """ADR-0091 D1: a schedule or a job server would start it without leases."""
    with pytest.raises(LionwtError, match="would start itself once more"):
        beforehand.refuse_unleased("subprocess.Popen", (words[0], words, None, None))
    for harmless in (["li", "monitor"], ["git", "o"], "li o flow", []):
        beforehand.refuse_unleased("subprocess.Popen", ("x", harmless, None, None))


# Everything else is lionagi's


def test_a_worker_that_no_lease_is_made_for_is_said_to_have_none(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """Design 5: no fallback in silence; li agent works where it always did."""
    answer = lionagi.li("li", "agent", "claude/sonnet", "job-1", "--yolo", program=LIONWT)
    assert answer.code == 0, answer
    assert "lionwt: claude works without a lease: only li o fanout and li o flow have them\n" in answer.err
    [call] = lionagi.calls()
    assert call["cwd"] == str(repo.path)
    assert lionagi.runs() == []


@pytest.mark.parametrize(
    "words", [("--help",), ("o", "fanout", "--help"), ("--version",), ("nonsense",), ("o", "fanout", "--nope")]
)
def test_what_li_answers_is_passed_through(world: World, repo: Repo, lionagi: Lionagi, words: tuple[str, ...]) -> None:
    """The command is li's: its options, help, output and exit code, untouched."""
    plain, through = lionagi.li(*words), lionagi.li("li", "--", *words, program=LIONWT)
    assert (through.code, through.out, through.err) == (plain.code, plain.out, plain.err)


def test_the_process_that_was_started_is_the_orchestrator(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """Signals reach it, and it is the owner of every lease."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["wait", "job-1"]]})
    child = lionagi.popen("li", *FANOUT, program=LIONWT)
    wait_until(lambda: (lionagi.root / "job-1.reached").exists(), 60)
    assert world.lease_file(lionagi.run(), "implementer")["owner"]["pid"] == child.pid
    (lionagi.root / "job-1.go").touch()
    child.communicate(timeout=60)
    assert child.returncode == 0


def test_li_without_the_command_is_as_it_was(lionagi: Lionagi) -> None:
    """ADR-0091 D1: shared_host stays the default; lionwt is not even imported."""
    done = lionagi.li("-X", "importtime", LI, "--help", program=sys.executable)
    assert done.code == 0
    assert "lionwt" not in done.err
