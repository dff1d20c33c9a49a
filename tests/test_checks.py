"""Checks that a run declares: in the worktree at freeze, and on the merged tree before it lands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.conftest import Answer, Repo, World, answer_of, wait_until


def carrying(marker: str) -> list[int]:
    """The living processes whose command line holds ``marker``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if marker in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def landed(world: World, worker: str) -> bool:
    return bool(world.record("r1", worker)["status"] == "promoted")


def notes(world: World, worker: str, code: str) -> list[dict[str, str]]:
    return [note for note in world.lease_file("r1", worker)["diagnostics"] if note["code"] == code]


def test_a_check_becomes_a_validation_with_its_log_as_evidence(world: World, repo: Repo) -> None:
    """Design 7, freeze 2: green lands, and repeating the freeze runs nothing and answers the same."""
    worker = world.lease("r1", "w1", args=("--require", "tests"))["w1"]
    worker.write("new.txt", "new\n")
    arguments = (
        "--check",
        "tests=cat new.txt; printf '\\033[31mred\\n'; echo x >> $HOME/ran",
        "--validation",
        "lint=pass",
    )
    frozen = world.lionwt("freeze", "r1", "w1", "--succeeded", *arguments)
    assert frozen.code == 0, frozen
    assert "\033" not in frozen.out + frozen.err and "red" not in frozen.out + frozen.err
    results = {result["name"]: result for result in world.lease_file("r1", "w1")["candidate"]["validations"]}
    assert results["tests"] == {
        "name": "tests", "passed": True, "exit_code": 0, "evidence_ref": ".lionwt/w1/check-1.log"
    }  # fmt: skip
    log = world.state("r1") / "artifacts" / results["tests"]["evidence_ref"]
    assert log.read_bytes() == b"new\n\033[31mred\n"
    assert log.stat().st_mode & 0o777 == 0o600
    before = world.lease_bytes("r1", "w1")
    assert world.freeze("r1", "w1", *arguments).code == 0
    assert (world.lease_bytes("r1", "w1"), (world.home / "ran").read_text()) == (before, "x\n")
    other = world.freeze("r1", "w1", "--check", "more=true", "--validation", "lint=pass")
    assert (other.code, other.error) == (3, "already_done")
    assert world.promote("r1").code == 0
    assert landed(world, "w1")


def test_a_red_check_is_not_landed(world: World, repo: Repo) -> None:
    """ADR-0091 D4: every declared validation has passed."""
    base = repo.head("work")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    frozen = world.lionwt("freeze", "r1", "w1", "--succeeded", "--check", "tests=echo why; exit 3")
    assert frozen.code == 0 and "'tests' ended with exit code 3" in frozen.out, frozen
    (result,) = world.lease_file("r1", "w1")["candidate"]["validations"]
    assert (result["passed"], result["exit_code"]) == (False, 3)
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (3, "validation_failed"), answer
    assert repo.head("work") == base
    assert (world.evidence("r1", "w1") / "check-1.log").read_text() == "why\n"


def test_what_a_check_writes_is_never_taken_for_the_workers_work(world: World, repo: Repo) -> None:
    """Design 7, freeze 2: the worktree must not have changed; what git ignores may come."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    before = world.lease_bytes("r1", "w1")
    answer = world.freeze("r1", "w1", "--check", "format=echo formatted > new.txt; echo x > 'odd\x1b.txt'")
    assert (answer.code, answer.error) == (3, "check_wrote"), answer
    assert "'new.txt'" in answer.json["error"]["message"]
    assert world.lease_bytes("r1", "w1") == before
    assert not (world.evidence("r1", "w1") / "candidate.patch").exists()
    assert repo.git("for-each-ref", "refs/lionwt") == ""
    worker.write("new.txt", "new\n")
    (worker.path / "odd\x1b.txt").unlink()
    assert world.freeze("r1", "w1", "--check", "tests=echo x > cache.log").code == 0
    assert [row["path"] for row in world.manifest("r1", "w1")["ignored"]] == ["cache.log"]


@pytest.mark.parametrize("how", ["hangs", "leaves something", "leaves the group"])
def test_a_check_is_bounded_and_nothing_of_it_goes_on(world: World, repo: Repo, how: str) -> None:
    """Invariant 24: its process group is ended, and whatever else carries the lease's ids."""
    marker = f"{os.getpid()}{abs(hash(how))}"
    sleeper = f"python3 -c 'import time; time.sleep(600)' {marker}"
    command = {
        "hangs": f"trap '' TERM; echo begun; {sleeper}; {sleeper}",
        "leaves something": f"{sleeper} & echo begun",
        "leaves the group": f"setsid {sleeper} & echo begun; sleep 0.2",
    }[how]
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    answer = world.freeze("r1", "w1", "--check", f"tests={command}", "--check-timeout", "2s")
    assert answer.code == 0, answer
    assert carrying(marker) == []
    (result,) = world.lease_file("r1", "w1")["candidate"]["validations"]
    assert (result["passed"], result["exit_code"]) == ((False, None) if how == "hangs" else (True, 0))
    assert (world.evidence("r1", "w1") / "check-1.log").read_text() == "begun\n"


def test_a_check_sees_no_git_variable_and_no_lock(world: World, repo: Repo) -> None:
    """Design 6: the caller's environment without GIT_* and LIONWT_*, and the lease's three ids."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    answer = world.lionwt(
        "freeze", "r1", "w1", "--json", "--succeeded", "--check", "env=env; pwd; ls -l /proc/self/fd",
        env={"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "LIONWT_DB": "/nowhere", "MINE": "kept"},
    )  # fmt: skip
    assert answer.code == 0, answer
    said = (world.evidence("r1", "w1") / "check-1.log").read_text()
    assert "GIT_" not in said and "LIONWT_" not in said and ".lock" not in said
    for line in ("MINE=kept", "LIONAGI_RUN_ID=r1", "LIONAGI_WORKER_ID=w1", "LIONAGI_SESSION_ID=r1", str(worker.path)):
        assert line in said.splitlines()
    refused = world.lionwt(
        "promote", "r1", "--json", env={"LIONAGI_WORKER_ID": "w1"}
    )  # a check cannot complete what it checks
    assert refused.error == "called_by_worker"


def test_a_log_is_bounded(world: World, repo: Repo) -> None:
    """A check that talks without end fills no disk, and ends all the same."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1", "--check", "loud=head -c 40000000 /dev/zero").code == 0
    assert (world.evidence("r1", "w1") / "check-1.log").stat().st_size == 16 << 20


MERGED = "test ! -e a.txt || test ! -e b.txt"


def test_a_clean_merge_that_breaks_the_program_does_not_land(world: World, repo: Repo) -> None:
    """Case 73: each is fine alone; what lands is what was tested."""
    arguments = ("--check-merged", f"tests=pwd; git rev-parse HEAD 'HEAD^{{tree}}' HEAD^1 HEAD^2; env; {MERGED}")
    world.frozen("r1", {"w1": {"a.txt": "a\n"}, "w2": {"b.txt": "b\n"}}, args=arguments)
    base = repo.head("work")
    answer = world.promote("r1", env={"GIT_DIR": "/nowhere"})
    assert (answer.code, answer.error) == (3, "validation_failed"), answer
    assert landed(world, "w1") and world.record("r1", "w2")["status"] == "discarded"
    assert repo.parents("work")[0] == base and len(repo.merges()) == 1
    log = (world.evidence("r1", "w1") / "merged-1.log").read_text().splitlines()
    assert log[1] != repo.head("work")
    assert log[2] == repo.head("work^{tree}")
    assert log[3:5] == repo.parents("work")
    assert not Path(log[0]).exists() and not Path(log[0]).is_relative_to(repo.path)
    assert "GIT_" not in "\n".join(log)
    (told,) = notes(world, "w2", "merge_checked")
    assert (world.state("r1") / "artifacts" / told["ref"]).is_file()
    assert world.leftovers("r1", repo) == []
    again = world.promote("r1", "w2")
    assert (again.code, again.error) == (3, "validation_failed")


def test_the_merge_checks_are_pinned_with_the_run(world: World, repo: Repo) -> None:
    """Design 3 and 5: declared at opening; later calls omit them or repeat them equal."""
    world.lease("r1", "w1", args=("--check-merged", "tests=true"))
    for value, code in (("tests=false", "run_mismatch"), ("tests", "usage"), ("=true", "usage"), ("tests=true", None)):
        answer = world.lionwt("lease", "r1", "-w", "w2", "--json", "--owner-pid", "none", "--check-merged", value)
        assert answer.error == code, answer
    twice = world.lionwt("lease", "r2", "-w", "w", "--json", "--check-merged", "a=true", "--check-merged", "a=true")
    assert twice.error == "usage"


def begin(world: World) -> subprocess.Popen[str]:
    """``promote`` of w1, in a merge check that runs until the file ``go`` is there."""
    wait = "touch $HOME/begun; for i in $(seq 600); do test -e $HOME/go && exit 0; sleep 0.05; done; exit 9"
    world.frozen("r1", {"w1": {"a.txt": "a\n"}, "w2": {"b.txt": "b\n"}}, args=("--check-merged", f"tests={wait}"))
    child = world.popen("promote", "r1", "w1", "--json")
    wait_until((world.home / "begun").exists)
    return child


def finish(world: World, child: subprocess.Popen[str]) -> Answer:
    (world.home / "go").touch()
    return answer_of(child)


def test_a_landing_of_the_same_run_meanwhile_makes_the_merge_anew(world: World, repo: Repo) -> None:
    """Design 7, promote 4: head and tree are compared again; another landing of this run is no movement."""
    child = begin(world)
    base = repo.head("work")
    child.send_signal(signal.SIGSTOP)
    (world.home / "go").touch()
    first = world.promote("r1", "w2")
    child.send_signal(signal.SIGCONT)
    second = finish(world, child)
    assert (first.code, second.code) == (0, 0), (first, second)
    merges = repo.merges()
    assert len(merges) == 2 and repo.parents(merges[-1])[0] == base
    tested = {worker: notes(world, worker, "merge_checked") for worker in ("w1", "w2")}
    assert (world.home / "begun").exists()
    for worker, told in tested.items():
        landing = world.lease_file("r1", worker)["outcome"]["landing"]
        assert landing["tree"] in told[-1]["message"]


def test_a_commit_of_somebody_else_meanwhile_needs_a_person(world: World, repo: Repo) -> None:
    """ADR-0091 D4: unexpected target movement is never merged over, and the lock is free while a check runs."""
    child = begin(world)
    mine = repo.commit("mine", **{"mine.txt": "mine\n"})
    answer = finish(world, child)
    assert (answer.code, answer.error) == (4, "target_moved"), answer
    assert repo.head("work") == mine


def test_a_promote_killed_in_its_check_lands_nothing_and_can_be_repeated(world: World, repo: Repo) -> None:
    """Invariant 20: before the commit point everything can be dropped."""
    child = begin(world)
    base = repo.head("work")
    child.kill()
    child.wait(timeout=30)
    assert repo.head("work") == base
    busy = world.promote("r1", "w1")
    assert (busy.code, busy.error) == (6, "worker_alive"), busy
    (world.home / "go").touch()

    def again() -> Answer | None:
        answer = world.promote("r1", "w1")
        return answer if answer.code != 6 else None

    assert wait_until(again).code == 0
    assert len(repo.merges()) == 1
