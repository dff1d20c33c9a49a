"""``lionwt li o fanout``: every worker works in a lease of its own, and what became of it is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import LIONWT, Answer, Repo, World, assert_nothing_left, wait_until
from tests.lionagi.conftest import Lionagi, lives

#: Each reads the file, waits until all have read it, and writes it with a line of its own.
EDIT = {f"job-{number}": [["edit", "f1.txt", f"from {number}\n", "all", 4]] for number in range(1, 5)}
FANOUT = ("o", "fanout", "claude/sonnet", "all of it", "-n", "4", "--yolo")
FOUR = ("implementer", "implementer-2", "implementer-3", "implementer-4")


def leased(lionagi: Lionagi, *before: str, more: tuple[str, ...] = ()) -> Answer:
    return lionagi.li("li", *before, *FANOUT, *more, program=LIONWT)


def test_without_the_adapter_four_workers_overwrite_each_other_in_the_shared_checkout(
    repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 P1, D1: shared_host stays what it is when nobody asks for anything else."""
    lionagi.plan(*EDIT)
    lionagi.jobs(EDIT)
    before = (repo.path / "f1.txt").read_text()
    assert lionagi.li(*FANOUT).code == 0
    lines = (repo.path / "f1.txt").read_text().removeprefix(before).splitlines()
    assert len(lines) == 1  # three of four edits are lost
    assert lionagi.runs() == []
    assert not (repo.path / ".worktrees").exists()
    for call in lionagi.calls():
        assert str(repo.path) in call["arguments"] or call["cwd"] == str(repo.path)
        assert not {"LIONAGI_RUN_ID", "LIONAGI_WORKER_ID"} & set(call["env"])


def test_four_workers_edit_the_same_file_at_once_in_four_worktrees_and_leave_four_candidates(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D1, D2: the shared checkout is untouched while they run; each leaves a patch of its own."""
    lionagi.plan(*EDIT)
    lionagi.jobs({job: [*steps, ["wait", job]] for job, steps in EDIT.items()})
    untouched, base = repo.untouched(), repo.head()
    child = lionagi.popen("li", *FANOUT, program=LIONWT)
    wait_until(lambda: all((lionagi.root / f"{job}.reached").exists() for job in EDIT), 60)
    run = lionagi.run()
    assert {name: seen for name, seen in repo.untouched().items() if name != ".git/info/exclude"} == {
        name: seen for name, seen in untouched.items() if name != ".git/info/exclude"
    }
    assert repo.status() == ""
    states = {lease["worker_id"]: lease["state"] for lease in world.lionwt("status", run, "--json").json["leases"]}
    assert states == dict.fromkeys(("orchestrator", *FOUR), "running")
    for job in EDIT:
        (lionagi.root / f"{job}.go").touch()
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, (out, err)
    worktrees = {call["cwd"] for call in lionagi.calls()}
    assert worktrees == {str(repo.path / ".worktrees/lionagi" / run / name) for name in ("orchestrator", *FOUR)}
    for worker, job in zip(FOUR, EDIT, strict=True):
        applied = world.applied(run, worker)
        assert applied.head() == base
        assert (
            (applied.path / "f1.txt").read_text().endswith(f"20 of 1\nfrom {job[-1]}\n" if False else EDIT[job][0][2])
        )
        assert world.record(run, worker)["status"] == "discarded"
        patch = world.evidence(run, worker) / "candidate.patch"
        assert f"lionwt: {worker}: discarded, the patch of 1 file is kept in {patch}\n" in err
    assert "lionwt: orchestrator: discarded, it changed nothing\n" in err
    assert f"lionwt status {run}" in err
    assert repo.head() == base
    assert_nothing_left(world, repo, run)


def test_landings_come_in_the_order_of_the_plan(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D4: merge_validated lands each candidate, independent of who was done first."""
    jobs = {f"job-{n}": [["meet", "all", 4], ["write", f"new-{n}.txt", f"{n}\n"]] for n in range(1, 5)}
    lionagi.plan(*jobs)
    lionagi.jobs(jobs)
    base = repo.head()
    answer = leased(lionagi, "--target", "work", "--policy", "merge_validated")
    assert answer.code == 0, answer
    run = lionagi.run()
    commits = [world.record(run, worker)["promoted_commit"] for worker in FOUR]
    assert repo.merges() == commits[::-1]
    assert repo.head(f"{commits[0]}^1") == base
    assert [(repo.path / f"new-{n}.txt").read_text() for n in range(1, 5)] == ["1\n", "2\n", "3\n", "4\n"]
    assert repo.status() == ""
    assert f"lionwt: implementer-2: promoted as {commits[1][:12]} on work" in answer.err
    assert_nothing_left(world, repo, run)


def test_a_landing_that_was_asked_for_and_did_not_come_is_in_the_exit_code(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D4: of four changes to one line the first lands; the others need a person, and keep their patches."""
    lionagi.plan(*EDIT)
    lionagi.jobs(EDIT)
    answer = leased(lionagi, "--policy", "merge_validated")
    assert answer.code == 4, answer
    run = lionagi.run()
    assert [world.record(run, worker)["status"] for worker in FOUR] == ["promoted", *["needs_resolution"] * 3]
    assert (repo.path / "f1.txt").read_text().endswith("line 19 of 1\nfrom 1\n")
    assert len(repo.merges()) == 1
    for worker in FOUR[1:]:
        assert (world.evidence(run, worker) / "candidate.patch").stat().st_size
    assert_nothing_left(world, repo, run)


@pytest.mark.parametrize("how", ["fails", "crashes"])
def test_a_worker_that_fails_ends_as_failed_and_the_others_land(
    world: World, repo: Repo, lionagi: Lionagi, how: str
) -> None:
    """ADR-0091 D3: every lease ends in a record, whatever the worker did; a failed one never lands."""
    end = ["fail", 3] if how == "fails" else ["die", 9]
    jobs = {"job-1": [["write", "bad.txt", "bad\n"], end], "job-2": [["write", "good.txt", "good\n"]]}
    lionagi.plan(*jobs)
    lionagi.jobs(jobs)
    answer = leased(lionagi, "--policy", "merge_validated")
    run = lionagi.run()
    assert answer.code == 1, answer
    assert world.record(run, "implementer")["status"] == "discarded"
    assert world.lease_file(run, "implementer")["candidate"]["worker_succeeded"] is False
    assert (world.applied(run, "implementer").path / "bad.txt").read_text() == "bad\n"
    assert world.record(run, "implementer-2")["status"] == "promoted"
    assert not (repo.path / "bad.txt").exists()
    assert (repo.path / "good.txt").exists()
    assert_nothing_left(world, repo, run)


def test_synthesis_works_in_a_lease_of_its_own(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D2: planning and synthesis are workers too; no provider ever stands in the shared checkout."""
    jobs = {"job-1": [["say", "one"]], "Original task": [["write", "summary.md", "all\n"], ["say", "summed up"]]}
    lionagi.plan("job-1")
    lionagi.jobs(jobs)
    answer = leased(lionagi, "--policy", "merge_validated", more=("--with-synthesis",))
    assert answer.code == 0, answer
    run = lionagi.run()
    [call] = lionagi.calls("Original task")
    assert call["cwd"] == str(repo.path / ".worktrees/lionagi" / run / "synthesis")
    assert world.lease_file(run, "synthesis")["predecessors"] == ["implementer"]
    assert world.record(run, "synthesis")["status"] == "promoted"
    assert (repo.path / "summary.md").exists()


def test_the_run_and_session_of_lionagi_are_used_and_the_environment_says_who_works(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: one identity; the three variables are pinned, and the directory is the worker's."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": []})
    session = "11111111-2222-4333-8444-555555555555"
    surroundings = {"LIONAGI_SESSION_ID": session, "GIT_DIR": str(repo.path / ".git"), "GIT_AUTHOR_NAME": "A"}
    answer = lionagi.li("li", *FANOUT, program=LIONWT, env=surroundings)
    assert answer.code == 0, answer
    run = lionagi.run()
    assert (world.state(run) / "run.json").exists()
    [call] = lionagi.calls("job-1")
    env = call["env"]
    assert (env["LIONAGI_RUN_ID"], env["LIONAGI_SESSION_ID"], env["LIONAGI_WORKER_ID"]) == (run, session, "implementer")
    assert env["PWD"] == call["cwd"]
    assert "GIT_DIR" not in env
    assert env["GIT_AUTHOR_NAME"] == "A"
    lease = world.lease_file(run, "implementer")["lease"]
    assert (lease["session_id"], lease["artifact_path"]) == (session, str(world.state(run) / "artifacts/implementer"))
    assert Path(call["cwd"]) == Path(lease["worktree_path"])


def test_checks_are_run_for_every_worker_and_on_every_merged_tree(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D4: a red validation never lands; what lands is what was tested."""
    jobs = {"job-1": [["write", "red.txt", "1\n"]], "job-2": [["write", "green.txt", "2\n"]]}
    lionagi.plan(*jobs)
    lionagi.jobs(jobs)
    checks = ("--check", "tests=test ! -e red.txt", "--check-merged", "whole=test -e f1.txt", "--check-timeout", "1m")
    answer = leased(lionagi, "--policy", "merge_validated", *checks)
    assert answer.code == 3, answer
    run = lionagi.run()
    red, green = (world.lease_file(run, worker) for worker in FOUR[:2])
    assert (red["record"]["status"], red["outcome"]["code"]) == ("discarded", "validation_failed")
    assert green["record"]["status"] == "promoted"
    assert [check["name"] for check in green["candidate"]["validations"]] == ["tests"]
    assert (world.evidence(run, "implementer-2") / "merged-1.log").exists()
    assert "lionwt: implementer: discarded, the patch of 1 file is kept in" in answer.err
    assert "; worker 'implementer': tests failed" in answer.err


def test_a_landing_that_the_checkout_blocks_stays_pending_and_can_be_made_later(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D3: the operator's files survive; the candidate stays frozen, and what to type is told."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["write", "new.txt", "the worker's\n"]]})
    repo.write("new.txt", "the operator's\n")
    answer = leased(lionagi, "--policy", "merge_validated")
    assert answer.code == 4, answer
    run = lionagi.run()
    assert "lionwt: implementer: pending; " in answer.err
    assert (repo.path / "new.txt").read_text() == "the operator's\n"
    (repo.path / "new.txt").unlink()
    assert world.promote(run).code == 0
    assert (repo.path / "new.txt").read_text() == "the worker's\n"
    assert_nothing_left(world, repo, run)


def test_what_a_worker_left_running_is_stopped_before_its_work_is_captured(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D3: freeze stops new operations first; they are found by the ids that the adapter pinned."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["leave", "while :; do date > clock.txt; sleep 0.01; done"]]})
    answer = leased(lionagi)
    assert answer.code == 0, answer
    run = lionagi.run()
    [pid] = [int(path.read_text()) for path in lionagi.root.glob("left-*")]
    assert not lives(pid)
    assert (world.applied(run, "implementer").path / "clock.txt").exists()
    assert_nothing_left(world, repo, run)


def test_a_worker_that_may_leave_nothing_running_and_does_has_failed(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """Design 7: with --stop-after 0 a freeze is busy, naming them; the lease is ended all the same."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["leave", "while :; do date > clock.txt; sleep 0.01; done"]]})
    answer = leased(lionagi, "--stop-after", "0")
    assert answer.code == 1, answer
    run = lionagi.run()
    [told] = [line for line in answer.err.splitlines() if line.startswith("lionwt: implementer: ")]
    assert "[worker_alive]" in told
    assert world.lease_file(run, "implementer")["candidate"]["worker_succeeded"] is False
    assert world.record(run, "implementer")["status"] == "discarded"
    assert_nothing_left(world, repo, run)


def test_status_tells_who_failed_and_where_what_was_done_is_kept(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D3: under patch_only nothing lands, so the patches are what there is to tell."""
    lionagi.plan("job-1", "job-2", "job-3")
    lionagi.jobs({"job-1": [["write", "a", "1\n"]], "job-2": [["write", "b", "2\n"], ["fail", 2]]})
    answer = leased(lionagi)
    assert answer.code == 1, answer
    run = lionagi.run()
    told = {line.split(": ")[1]: line for line in answer.err.splitlines() if line.startswith("lionwt: impl")}
    assert {worker: line.endswith("; it failed") for worker, line in told.items()} == {
        "implementer": False,
        "implementer-2": True,
        "implementer-3": False,
    }
    kept = {worker: f"  its patch is kept in {world.evidence(run, worker) / 'candidate.patch'}" for worker in FOUR}
    lines = [line for line in world.lionwt("status", run).out.splitlines() if "its patch" in line or "worker" in line]
    assert lines == ["  the worker failed", kept["implementer"], "  the worker failed", kept["implementer-2"]]


def test_a_worktree_that_needs_a_person_is_kept_for_the_time_that_was_asked_for(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D4: retention is pinned when the run is opened, once for all of its workers."""
    lionagi.plan(*EDIT)
    lionagi.jobs(EDIT)
    before = time.time()
    answer = leased(lionagi, "--policy", "merge_validated", "--retain-for", "2h")
    assert answer.code == 4, answer
    run = lionagi.run()
    assert [world.record(run, worker)["status"] for worker in FOUR] == ["promoted", *["retained"] * 3]
    for worker in FOUR[1:]:
        until = world.record(run, worker)["retention_until"]
        assert before + 7200 <= until <= time.time() + 7200
        assert (repo.path / ".worktrees/lionagi" / run / worker / "f1.txt").read_text().endswith(f"from {worker[-1]}\n")
    assert f"{repo.path}/.worktrees/lionagi/{run}/implementer-2 is kept until " in world.lionwt("status", run).out


def test_two_orchestrations_at_once_share_a_repository_and_neither_a_lease(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: the same workers' names in two runs; what the operator has not committed stays as it is."""
    repo.write("f2.txt", "not committed\n")
    repo.write("new.txt", "not tracked\n")
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["edit", "f1.txt", "mine\n", "all", 2]]})
    children = [lionagi.popen("li", *FANOUT, program=LIONWT) for _ in range(2)]
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, (out, err)
    runs = lionagi.runs()
    assert len(runs) == 2
    for run in runs:
        assert world.lease_file(run, "implementer")["candidate"]["files_changed"] == ["f1.txt"]
        assert_nothing_left(world, repo, run)
    assert repo.status().split() == ["M", "f2.txt", "??", "new.txt"]


@pytest.mark.parametrize("said", ["", "no json\n", '{"type": "result"\n', "\x00\xff\n" * 5000])
def test_a_provider_that_writes_rubbish_ends_with_a_record(
    world: World, repo: Repo, lionagi: Lionagi, said: str
) -> None:
    """ADR-0091 D3: what it did until then is kept, whatever it said."""
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["write", "new.txt", "1\n"], ["rubbish", said]]})
    answer = leased(lionagi)
    run = lionagi.run()
    assert "Traceback" not in answer.err
    assert world.record(run, "implementer")["status"] == "discarded"
    assert (world.applied(run, "implementer").path / "new.txt").exists()
    assert_nothing_left(world, repo, run)


def test_a_refused_lease_fails_its_worker_alone_and_nothing_falls_back(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D1: failure to allocate is a worker startup failure, never a start in the shared checkout."""
    lionagi.plan("job-1", "job-2")
    lionagi.jobs(
        {"plan": [["run", "git branch lionagi/$LIONAGI_RUN_ID/implementer"]], "job-2": [["write", "n", "2\n"]]}
    )
    answer = leased(lionagi, "--policy", "merge_validated")
    assert answer.code == 1, answer
    run = lionagi.run()
    assert lionagi.calls("job-1") == []
    assert "lionwt: implementer: had no lease; " in answer.err
    assert "[name_taken]" in answer.err
    assert world.record(run, "implementer-2")["status"] == "promoted"
    assert not (world.state(run) / "workspaces/implementer.json").exists()
    assert repo.status() == ""
