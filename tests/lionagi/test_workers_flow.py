"""``lionwt li o flow``: planned, dependent, spawned, retried and resumed workers, each in a lease of its own."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.conftest import LIONWT, Answer, Repo, World, assert_nothing_left
from tests.lionagi.conftest import Lionagi

FLOW = ("o", "flow", "claude/sonnet", "all of it", "--yolo")
LAND = ("--policy", "merge_validated")
SYNTHESIS = "Synthesize"


def leased(lionagi: Lionagi, *before: str, words: tuple[str, ...] = FLOW) -> Answer:
    return lionagi.li("li", *before, *words, program=LIONWT)


def spoken(**request: Any) -> list[Any]:
    """A worker's answer that asks its orchestrator for something."""
    return ["say", "```json\n" + json.dumps(request) + "\n```"]


def places(lionagi: Lionagi) -> dict[str, list[str]]:
    """The worker as which each job was done, by the last part of where it stood."""
    found: dict[str, list[str]] = {}
    for call in lionagi.calls():
        assert call["cwd"] == call["env"]["PWD"]
        assert call["cwd"].rpartition("/")[2] == call["env"]["LIONAGI_WORKER_ID"]
        found.setdefault(call["job"], []).append(call["env"]["LIONAGI_WORKER_ID"])
    return found


def test_the_same_file_edited_at_once_by_the_workers_of_a_flow(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D1: four worktrees, four candidates, and a shared checkout that nobody wrote to."""
    jobs = {f"job-{n}": [["edit", "f1.txt", f"from {n}\n", "all", 4]] for n in range(1, 5)}
    lionagi.plan(*jobs, roles=("implementer", "researcher"))
    lionagi.jobs(jobs)
    before = repo.untouched()
    answer = leased(lionagi)
    assert answer.code == 0, answer
    run = lionagi.run()
    workers = {job: worker for job, [worker] in places(lionagi).items() if job in jobs}
    assert len(set(workers.values())) == 4
    for job, worker in workers.items():
        assert (world.applied(run, worker).path / "f1.txt").read_text().endswith(f"line 19 of 1\nfrom {job[-1]}\n")
        assert f"{worker}  " in world.lionwt("status", run).out
    assert {name: seen for name, seen in repo.untouched().items() if name != ".git/info/exclude"} == {
        name: seen for name, seen in before.items() if name != ".git/info/exclude"
    }
    assert_nothing_left(world, repo, run)


def test_without_the_adapter_the_workers_of_a_flow_overwrite_each_other(repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 P1: the collision that the leases end."""
    jobs = {f"job-{n}": [["edit", "f1.txt", f"from {n}\n", "all", 4]] for n in range(1, 5)}
    lionagi.plan(*jobs)
    lionagi.jobs(jobs)
    assert lionagi.li(*FLOW).code == 0
    assert len([line for line in (repo.path / "f1.txt").read_text().splitlines() if line.startswith("from ")]) == 1


def test_dependents_land_after_what_they_depend_on(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D4: promotion follows the dependencies of the plan; all start from the one base."""
    lionagi.plan({"task": "job-1"}, {"task": "job-2", "depends_on": ["1"]}, {"task": "job-3", "depends_on": ["1", "2"]})
    lionagi.jobs({f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in (1, 2, 3)})
    base = repo.head()
    answer = leased(lionagi, *LAND)
    assert answer.code == 0, answer
    run = lionagi.run()
    files = [world.lease_file(run, worker) for [worker] in (places(lionagi)[f"job-{n}"] for n in (1, 2, 3))]
    assert [sorted(file["predecessors"]) for file in files] == [
        [],
        [files[0]["lease"]["worker_id"]],
        sorted(file["lease"]["worker_id"] for file in files[:2]),
    ]
    assert {file["lease"]["base_sha"] for file in files} == {base}
    assert repo.merges() == [file["record"]["promoted_commit"] for file in reversed(files)]


def test_a_dependent_of_a_worker_that_failed_does_not_land(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D4: condition 6; the other branch of the plan is not held up."""
    lionagi.plan({"task": "job-1"}, {"task": "job-2", "depends_on": ["1"]}, {"task": "job-3"})
    jobs: dict[str, list[list[Any]]] = {f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in (1, 2, 3)}
    jobs["job-1"].append(["fail", 2])
    lionagi.jobs(jobs)
    answer = leased(lionagi, *LAND)
    assert answer.code == 1, answer
    assert not (repo.path / "new-1.txt").exists()
    assert not (repo.path / "new-2.txt").exists()
    assert (repo.path / "new-3.txt").exists()
    assert_nothing_left(world, repo, lionagi.run())


def test_spawned_workers_and_synthesis_work_in_leases(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D2: a reactive worker gets a lease keyed by its emitted id; a clone does not inherit its parent's."""
    request = {"instruction": "job-2", "reason": "more", "operation": "operate"}
    dependent = spoken(spawn_request={**request, "assignee": "implementer", "independent": False})
    independent = spoken(spawn_request={**request, "instruction": "job-3", "independent": True})
    lionagi.plan("job-0", "job-1")
    lionagi.jobs(
        {
            "job-0": [["write", "new-0.txt", "0\n"], independent],
            "job-1": [["write", "new-1.txt", "1\n"], dependent],
            "job-2": [["write", "new-2.txt", "2\n"]],
            "job-3": [["write", "new-3.txt", "3\n"]],
        }
    )
    answer = leased(lionagi, *LAND)
    assert answer.code == 0, answer
    run = lionagi.run()
    done = places(lionagi)
    assert {*done["job-2"], *done["job-3"]} == {"spawn-1", "spawn-2"}, done
    [spawned] = done["job-2"]
    assert world.lease_file(run, spawned)["predecessors"] == done["job-1"]
    assert [(repo.path / f"new-{n}.txt").exists() for n in range(4)] == [True] * 4
    # Whoever was asked without a job planned or synthesised, in the orchestrator's worktree.
    assert set(done["plan"]) | set(done.get("", [])) == {"orchestrator"}
    assert_nothing_left(world, repo, run)


def test_a_retry_of_an_escalated_worker_has_a_lease_and_artifacts_of_its_own(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D5: a pair of run and worker is never used twice; the retry is named after what it retries."""
    lionagi.plan("job-1")
    lionagi.jobs(
        {
            "job-1": [
                ["write", "first.txt", "1\n"],
                spoken(escalation_request={"reason": "stuck", "urgency": "blocked", "context": {}}),
            ],
            "Original: job-1": [["write", "second.txt", "2\n"]],
        }
    )
    answer = leased(lionagi)
    run = lionagi.run()
    done = places(lionagi)
    assert "Original: job-1" in done, (done, answer)
    [first], [retry] = done["job-1"], done["Original: job-1"]
    assert retry == f"{first}-retry"
    assert world.record(run, retry)["status"] == "discarded"
    handed_in = world.applied(run, retry).path
    assert (handed_in / "second.txt").exists()
    assert not (handed_in / "first.txt").exists()
    [call] = lionagi.calls("Original: job-1")
    assert str(world.state(run) / "artifacts" / retry) in call["prompt"]
    assert_nothing_left(world, repo, run)


def test_a_worker_of_the_role_orchestrator_has_a_name_and_artifacts_of_its_own(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: one name for lease, artifacts and prompt, so that its dependents look where it writes."""
    lionagi.plan("job-1", {"task": "job-2", "depends_on": ["1"]}, roles=("orchestrator", "implementer"))
    lionagi.jobs({f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in (1, 2)})
    answer = leased(lionagi, *LAND)
    assert answer.code == 0, answer
    run = lionagi.run()
    assert places(lionagi)["job-1"] == ["orchestrator-2"]
    artifacts = str(world.state(run) / "artifacts")
    [first], [second] = lionagi.calls("job-1"), lionagi.calls("job-2")
    assert set(re.findall(re.escape(artifacts) + r"/([\w-]+)", first["prompt"])) == {"orchestrator-2"}
    assert set(re.findall(re.escape(artifacts) + r"/([\w-]+)", second["prompt"])) == {"orchestrator-2", "implementer"}
    assert [(repo.path / f"new-{n}.txt").exists() for n in (1, 2)] == [True] * 2
    assert_nothing_left(world, repo, run)


def test_a_flow_that_ran_without_leases_is_resumed_in_them_under_the_names_that_it_had(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: a worker that is called orchestrator keeps that name, and the planner takes another."""
    lionagi.plan("job-1", roles=("orchestrator",))
    lionagi.jobs({"job-1": [["fail", 2]]})
    assert lionagi.li(*FLOW).code == 1
    [state] = (world.lionagi_home / "runs").glob("*/checkpoint.json")
    lionagi.jobs({"job-1": [["write", "new.txt", "1\n"]]})
    answer = leased(lionagi, *LAND, words=("o", "flow", "--resume", state.parent.name, "--retry-failed"))
    assert answer.code == 0, answer
    run = lionagi.run()
    [call] = [call for call in lionagi.calls("job-1") if "LIONAGI_WORKER_ID" in call["env"]]
    assert call["env"]["LIONAGI_WORKER_ID"] == "orchestrator"
    assert world.record(run, "orchestrator")["status"] == "promoted"
    assert world.record(run, "orchestrator-2")["status"] == "discarded"
    assert_nothing_left(world, repo, run)


def test_a_resumed_flow_leases_only_what_is_still_to_be_done(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """ADR-0091 D5: a rerun uses a new run id; what was completed is not leased again."""
    lionagi.plan("job-1", {"task": "job-2", "depends_on": ["1"]})
    jobs: dict[str, list[list[Any]]] = {f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in (1, 2)}
    lionagi.jobs({**jobs, "job-2": [["fail", 2]]})
    assert leased(lionagi, *LAND).code == 1
    first = lionagi.run()
    assert (repo.path / "new-1.txt").exists()
    lionagi.jobs(jobs)
    answer = leased(lionagi, *LAND, words=("o", "flow", "--resume", first, "--retry-failed"))
    assert answer.code == 0, answer
    [second] = set(lionagi.runs()) - {first}
    leases = {lease["worker_id"]: lease for lease in world.lionwt("status", second, "--json").json["leases"]}
    assert set(leases) == {"orchestrator", *places(lionagi)["job-2"]}
    assert (repo.path / "new-2.txt").exists()
    for run in (first, second):
        assert_nothing_left(world, repo, run)
