"""The asynchronous port of ADR-0091 over real repositories."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lionwt import (
    LionwtError,
    ValidationResult,
    WorkerPathBinding,
    WorkerWorktreeLease,
    WorkspacePolicy,
    WorktreeCoordinator,
    locks,
)
from tests.conftest import Repo, World

T = TypeVar("T")

MERGE = WorkspacePolicy(mode="worktree_per_worker", completion="merge_validated")
PATCH = WorkspacePolicy(mode="worktree_per_worker")


@dataclass(frozen=True)
class Run:
    """What the port needs of a run, and no more."""

    run_id: str
    state_root: Path
    artifact_root: Path


@pytest.fixture
def run(world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of this process, which sees the same home as the command would."""
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    state = world.state("r1")
    return Run("r1", state, state / "artifacts")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, bounded."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(bounded())


def allocating(
    port: WorktreeCoordinator, run: Run, repo: Repo, worker: str = "w1", **options: Any
) -> Coroutine[Any, Any, WorkerWorktreeLease]:
    arguments = {"session_id": "s1", "target_branch": "work", "base_sha": repo.head("work"), **options}
    return port.allocate(run=run, worker_id=worker, **arguments)


LIONAGI = """
import asyncio, json, sys
from pathlib import Path
from lionagi.cli._runs import RunDir, allocate_run
from lionwt import ValidationResult, WorkspacePolicy, WorktreeCoordinator

async def life(repo, base):
    run = allocate_run()
    assert type(run) is RunDir
    policy = WorkspacePolicy(mode="worktree_per_worker", completion="merge_validated")
    port = WorktreeCoordinator(repo=repo, policy=policy, required=("tests",))
    lease = await port.allocate(run=run, session_id="s1", worker_id="w1", target_branch="work", base_sha=base)
    lease = await port.mark_running(lease)
    (lease.worktree_path / "new.txt").write_text("new")
    run.agent_artifact_dir("w1")  # lionagi's own idea of where the artifacts lie
    (run.agent_artifact_dir("w1") / "notes.md").write_text("notes")
    passed = ValidationResult(name="tests", passed=True, exit_code=0)
    candidate = await port.freeze(lease, worker_succeeded=True, cancelled=False, validations=(passed,))
    record = await port.complete(candidate, policy)
    return {"run": run.run_id, "state": str(run.state_root), "record": record.model_dump(mode="json")}

print(json.dumps(asyncio.run(life(sys.argv[1], sys.argv[2]))))
"""


def test_lionagis_own_run_serves_as_it_is(world: World, repo: Repo) -> None:
    """Design 2: the port's run argument is structural, so lionagi's own RunDir serves unchanged."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIONAGI, repo.path, repo.head()],
        cwd=world.root,
        env=world.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    record = found["record"]
    assert (record["status"], record["promoted_commit"]) == ("promoted", repo.head("work"))
    assert (repo.path / "new.txt").read_text() == "new"
    assert Path(found["state"]) == world.state(found["run"])
    assert json.loads((world.state(found["run"]) / "run.json").read_bytes())["run_id"] == found["run"]
    assert world.manifest(found["run"], "w1")["artifacts"], "the worker's artifacts are listed"
    # The command line finds the same run by its id.
    assert world.promote(found["run"]).json["records"] == [record]


def test_a_life_over_the_port_equals_one_over_the_command(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D3: the coordinator owns every transition and persists it before the next phase."""
    base = repo.head()
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)

    async def life() -> None:
        lease = await allocating(port, run, repo)
        assert (lease.state, lease.base_sha, lease.session_id) == ("allocated", base, "s1")
        assert lease == WorkerWorktreeLease.model_validate(world.lease_file("r1", "w1")["lease"])
        running = await port.mark_running(lease, WorkerPathBinding.of(lease))
        assert running == lease.model_copy(update={"state": "running"})
        assert world.lease_file("r1", "w1")["lease"]["state"] == "running"
        (lease.worktree_path / "new.txt").write_text("new")
        red = ValidationResult(name="lint", passed=True)
        candidate = await port.freeze(running, worker_succeeded=True, cancelled=False, validations=(red,))
        assert candidate.files_changed == ("new.txt",)
        record = await port.complete(candidate, MERGE)
        assert record.status == "promoted"
        assert record.promoted_commit == repo.head("work")
        # Repeating a verb that has been done answers the same (design 5).
        assert await port.complete(candidate, MERGE) == record

    finish(life())
    assert repo.git("log", "--format=%s", "-1", "work^2") == "w1: change set of run r1"
    assert repo.status() == ""


def test_another_coordinator_can_go_on_with_what_one_began(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D3: in-memory session flags are not the source of truth; the lease file is."""

    async def life() -> None:
        lease = await allocating(WorktreeCoordinator(repo=repo.path, policy=MERGE), run, repo)
        running = await WorktreeCoordinator().mark_running(lease)
        (lease.worktree_path / "new.txt").write_text("new")
        candidate = await WorktreeCoordinator().freeze(running, worker_succeeded=True, cancelled=False, validations=())
        assert (await WorktreeCoordinator().complete(candidate, MERGE)).status == "promoted"

    finish(life())


@pytest.mark.parametrize("policy", [None, WorkspacePolicy(), WorkspacePolicy(completion="merge_validated")])
def test_shared_host_is_the_default_and_allocates_nothing(
    world: World, repo: Repo, run: Run, policy: WorkspacePolicy | None
) -> None:
    """ADR-0091 D1: shared_host allocates no worktree lease; isolation is opted into."""
    before = repo.snapshot()
    with pytest.raises(LionwtError) as refusal:
        finish(allocating(WorktreeCoordinator(repo=repo.path, policy=policy), run, repo))
    assert refusal.value.code == "shared_host"
    assert repo.snapshot() == before
    assert not world.lionagi_home.exists()
    assert not (repo.path / ".worktrees").exists()


def test_a_base_that_is_not_the_targets_commit_is_refused(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D2: base_sha is the commit resolved from target_branch before any allocation."""
    old = repo.head()
    repo.commit("moved")
    with pytest.raises(LionwtError) as refusal:
        finish(allocating(WorktreeCoordinator(repo=repo.path, policy=MERGE), run, repo, base_sha=old))
    assert refusal.value.code == "run_mismatch"
    assert not world.state("r1").exists()


def test_grants_that_differ_from_the_lease_keep_it_allocated(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D3: mark_running occurs only after provider and tool path grants match the lease."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)
    lease = finish(allocating(port, run, repo))
    wider = WorkerPathBinding.of(lease).model_copy(update={"source_roots": (lease.worktree_path, repo.path)})
    before = world.lease_file("r1", "w1")
    with pytest.raises(LionwtError, match="source_roots") as refusal:
        finish(port.mark_running(lease, wider))
    assert refusal.value.code == "grants_mismatch"
    assert world.lease_file("r1", "w1") == before


def test_a_candidate_that_is_not_the_frozen_one_is_refused(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D3: a frozen candidate gives completion immutable evidence; nobody hands in another."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)

    async def until_frozen() -> Any:
        running = await port.mark_running(await allocating(port, run, repo))
        (running.worktree_path / "new.txt").write_text("new")
        return await port.freeze(running, worker_succeeded=False, cancelled=False, validations=())

    candidate = finish(until_frozen())
    before = repo.snapshot(), world.lease_file("r1", "w1")
    for change in (
        {"worker_succeeded": True},
        {"files_changed": ()},
        {"patch_sha256": "0" * 64},
        {"validations": (ValidationResult(name="tests", passed=True),)},
    ):
        with pytest.raises(LionwtError) as refusal:
            finish(port.complete(candidate.model_copy(update=change), MERGE))
        assert refusal.value.code == "candidate_mismatch", change
    assert (repo.snapshot(), world.lease_file("r1", "w1")) == before
    assert finish(port.complete(candidate, MERGE)).status == "discarded"


def test_complete_may_narrow_to_a_patch_and_never_widen(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D1: policy is resolved once per run; merge_validated is the higher authority."""
    port = WorktreeCoordinator(repo=repo.path, policy=PATCH)

    async def until_frozen(of: WorktreeCoordinator, where: Run) -> Any:
        running = await of.mark_running(await allocating(of, where, repo))
        (running.worktree_path / "new.txt").write_text("new")
        return await of.freeze(running, worker_succeeded=True, cancelled=False, validations=())

    candidate = finish(until_frozen(port, run))
    with pytest.raises(LionwtError) as refusal:
        finish(port.complete(candidate, MERGE))
    assert refusal.value.code == "policy_mismatch"
    state = world.state("r2")
    other = WorktreeCoordinator(repo=repo.path, policy=MERGE)
    landable = finish(
        until_frozen(other, replace(run, run_id="r2", state_root=state, artifact_root=state / "artifacts"))
    )
    record = finish(other.complete(landable, PATCH))
    assert (record.status, record.policy, record.promoted_commit) == ("discarded", "patch_only", None)


def test_a_candidate_that_stays_frozen_is_raised_and_can_be_completed_again(world: World, repo: Repo, run: Run) -> None:
    """Design 7, promote 5: an obstacle leaves the candidate frozen; the operator clears it and promotes again."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)

    async def until_frozen() -> Any:
        running = await port.mark_running(await allocating(port, run, repo))
        (running.worktree_path / "new.txt").write_text("new")
        return await port.freeze(running, worker_succeeded=True, cancelled=False, validations=())

    candidate = finish(until_frozen())
    repo.git("switch", "-q", "main")
    with pytest.raises(LionwtError) as refusal:
        finish(port.complete(candidate, MERGE))
    assert refusal.value.code == "checkout_blocked"
    repo.git("switch", "-q", "work")
    assert finish(port.complete(candidate, MERGE)).status == "promoted"


def test_several_workers_at_once_all_land_in_one_line_of_merges(world: World, repo: Repo, run: Run) -> None:
    """Invariant 25: of concurrent promotions each lands exactly once, in order; one event loop drives them all."""
    base = repo.head()
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)
    workers = [f"w{number}" for number in range(1, 5)]

    async def life(worker: str) -> str:
        running = await port.mark_running(await allocating(port, run, repo, worker, base_sha=base))
        (running.worktree_path / f"{worker}.txt").write_text(worker)
        candidate = await port.freeze(running, worker_succeeded=True, cancelled=False, validations=())
        record = await port.complete(candidate, MERGE)
        assert record.status == "promoted", record
        return str(record.promoted_commit)

    async def together() -> list[str]:
        return await asyncio.gather(*map(life, workers))

    landed = finish(together())
    line = repo.git("rev-list", "--first-parent", f"{base}..work").split()
    assert sorted(line) == sorted(landed)
    assert len(set(landed)) == len(workers)
    assert [(repo.path / f"{worker}.txt").read_text() for worker in workers] == workers
    assert repo.status() == ""
    assert repo.git("worktree", "list").count("\n") == 0


def test_the_event_loop_goes_on_while_a_verb_works(world: World, repo: Repo, run: Run) -> None:
    """An orchestrator's loop is never blocked by git or by a lock."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)

    async def life() -> int:
        beats = 0
        with locks.held(repo.path / ".git" / "lionwt" / "registration.lock", "registration"):
            task = asyncio.ensure_future(allocating(port, run, repo))
            while not world.state("r1").joinpath("workspaces", "w1.json").exists():
                await asyncio.sleep(0.001)
                beats += 1
            assert not task.done()
        assert (await task).state == "allocated"
        return beats

    assert finish(life()) > 10


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_caller_leaves_no_unrecorded_lease(world: World, repo: Repo, run: Run, times: int) -> None:
    """ADR-0091 D3: an exception cannot abandon an allocated lease as an unrecorded side effect."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)
    recorded = world.state("r1") / "workspaces" / "w1.json"

    async def life() -> None:
        with locks.held(repo.path / ".git" / "lionwt" / "registration.lock", "registration"):
            task = asyncio.ensure_future(allocating(port, run, repo))
            while not recorded.exists():
                await asyncio.sleep(0.001)
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done(), "the caller must wait for the verb, or nobody knows what it made"
        with pytest.raises(asyncio.CancelledError):
            await task

    finish(life())
    # What was begun is finished and recorded: the caller's finally-path finds it.
    assert world.lease_file("r1", "w1")["lease"]["state"] == "allocated"
    assert world.lease_file("r1", "w1")["intent"] is None
    assert (repo.path / ".worktrees/lionagi/r1/w1/f1.txt").exists()
    assert world.freeze("r1", "w1", "--cancelled").code == 0
    assert world.record("r1", "w1")["status"] == "discarded"
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""


def test_a_failed_allocation_leaves_nothing(
    world: World, repo: Repo, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ADR-0091 D3: if persistence fails, the coordinator removes what it created."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)
    monkeypatch.setenv("LIONWT_FAULT", "lease.populated:nospace")
    with pytest.raises(LionwtError) as failure:
        finish(allocating(port, run, repo))
    assert failure.value.code == "no_space"
    assert not (world.state("r1") / "workspaces" / "w1.json").exists()
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""
    monkeypatch.delenv("LIONWT_FAULT")
    assert finish(allocating(port, run, repo)).state == "allocated"


def test_after_names_the_workers_to_land_before(world: World, repo: Repo, run: Run) -> None:
    """ADR-0091 D4: promotion ordering follows dependency order."""
    port = WorktreeCoordinator(repo=repo.path, policy=MERGE)

    async def life() -> None:
        await allocating(port, run, repo, "w1")
        running = await port.mark_running(await allocating(port, run, repo, "w2", after=("w1",)))
        (running.worktree_path / "new.txt").write_text("new")
        candidate = await port.freeze(running, worker_succeeded=True, cancelled=False, validations=())
        with pytest.raises(LionwtError) as refusal:
            await port.complete(candidate, MERGE)
        assert refusal.value.code == "predecessor_pending"

    finish(life())


def test_the_coordinator_is_the_port_for_a_strict_type_checker() -> None:
    """Design 2: the port is exactly ADR-0091's; checked by structure, without isinstance."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.10", here / "typed" / "port.py"],
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
