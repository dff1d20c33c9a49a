"""Histories that nobody thought of: verbs, edits, commits and crashes in any order, all invariants after each step.

The machine draws what happens next; the checker of :mod:`tests.crash.invariants`
decides whether it may have happened. At the end of every history ``reconcile``
must bring every lease to its end, twice as once.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lionwt.faults import POINTS
from tests.crash.forking import Forker
from tests.crash.leases import expire
from tests.crash.recovery import DOCUMENTED, require_ended
from tests.crash.scenes import LEASE, Stage
from tests.crash.world import CrashWorld

_MOST_WORKERS = 5
_ENDS = frozenset({"promoted", "discarded", "needs_resolution", "retained"})
_AFTER_OPENING = ("freeze.", "promote.", "store.", "teardown.", "trash.")
_numbers = itertools.count()


class History(RuleBasedStateMachine):
    """One repository, one run, one operator."""

    def __init__(self, forker: Forker, room: Path) -> None:
        super().__init__()
        self.world = CrashWorld(room / f"h{next(_numbers)}", forker)
        repo, checker = self.world.operated()
        self.stage = Stage(self.world, repo, checker)
        self.names: list[str] = []
        self.interrupted = False
        self.options: tuple[str, ...] = ()

    @initialize(
        policy=st.sampled_from(["merge_validated", "merge_validated", "patch_only"]),
        retain=st.booleans(),
        conflicting=st.booleans(),
        landed=st.sampled_from([False, False, True]),
    )
    def open(self, policy: str, retain: bool, conflicting: bool, landed: bool) -> None:
        self.options = ("--target", "work", "--policy", policy, *(("--retain-for", "1h") if retain else ()))
        self.names = ["w0", "w1"]
        self._call(*LEASE, "-w", "w0", "-w", "w1", *self.options)
        for position in (0, 1):
            self.start(position)
            self.work(position, "f1.txt" if conflicting or not position else "own", commits=bool(position))
        self.freeze(0, "--succeeded")
        if landed:  # and what conflicts with it is kept for a person
            self.freeze(1, "--succeeded")
            self.promote(5, False)

    def _call(self, *arguments: str, point: str | None = None, nth: int = 1) -> int:
        env: dict[str, str | None] = {"LIONWT_FAULT": f"{point}:kill:{nth}"} if point else {}
        answer = self.world.lionwt(*arguments, env=env)
        if point and answer.code == -9:
            self.interrupted = True
        else:
            assert answer.code in DOCUMENTED, answer
            assert answer.json["error"] is None or answer.error != "bug", answer
        return answer.code

    def _worker(self, position: int) -> str:
        return self.names[position % len(self.names)]

    @precondition(lambda self: len(self.names) < _MOST_WORKERS)
    @rule(after=st.booleans(), point=st.sampled_from([None, None, "lease.intended", "lease.registered"]))
    def lease(self, after: bool, point: str | None) -> None:
        name = f"w{len(self.names)}"
        chain = ("--after", self.names[-1]) if after else ()
        if self._call(*LEASE, "-w", name, *chain, *self.options, point=point) in (0, -9):
            self.names.append(name)

    @rule(position=st.integers(0, 4))
    def start(self, position: int) -> None:
        self._call("start", "r1", self._worker(position), "--json")

    @rule(position=st.integers(0, 4), name=st.sampled_from(["f1.txt", "own"]), commits=st.booleans())
    def work(self, position: int, name: str, commits: bool) -> None:
        """A worker that runs writes, in a file of its own or in one that others change too."""
        worker = self._worker(position)
        place = self.stage.repo.path / ".worktrees/lionagi/r1" / worker
        if self._state(worker) != "running" or not (place / ".git").exists():
            return
        self.stage.work[worker] = f"work of {worker}"
        (place / (f"{worker}.txt" if name == "own" else name)).write_text(f"work of {worker}\n")
        if commits:
            self.stage.repo.run_git("add", "-A", cwd=place)
            self.stage.repo.run_git("commit", "-q", "-m", worker, cwd=place, check=False)

    def _state(self, worker: str) -> str | None:
        found = [lease for lease in self.stage.checker.leases() if lease.worker == worker]
        return str(found[0].data["lease"]["state"]) if found else None

    @rule(
        position=st.integers(0, 4), verdict=st.sampled_from(["--succeeded", "--succeeded", "--failed", "--cancelled"])
    )
    def freeze(self, position: int, verdict: str) -> None:
        self._call("freeze", "r1", self._worker(position), verdict, "--json")

    @rule(position=st.integers(0, 5), keep=st.sampled_from([False, False, True]))
    def promote(self, position: int, keep: bool) -> None:
        which = () if position == 5 else (self._worker(position),)
        self._call("promote", "r1", *which, "--json", *(("--policy", "patch_only") if keep else ()))

    @rule(
        verb=st.sampled_from(["freeze", "promote", "promote", "promote", "reconcile"]),
        position=st.integers(0, 4),
        data=st.data(),
        nth=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def crash(self, verb: str, position: int, data: st.DataObject, nth: int) -> None:
        """Kill a verb at a point that it may pass; it then leaves whatever was done until then."""
        families = {"freeze": ("freeze.", "store."), "promote": ("promote.", "teardown."), "reconcile": _AFTER_OPENING}
        point = data.draw(st.sampled_from([point for point in POINTS if point.startswith(families[verb])]))
        worker = self._worker(position)
        command = {
            "freeze": ("freeze", "r1", worker, "--succeeded", "--json"),
            "promote": ("promote", "r1", worker, "--json"),
            "reconcile": ("reconcile", "r1", "--takeover", "--json"),
        }[verb]
        self._call(*command, point=point, nth=nth)

    @rule()
    def reconcile(self) -> None:
        self._call("reconcile", "r1", "--takeover", "--json")
        self.interrupted = False

    @rule()
    def reap(self) -> None:
        self._call("reap", "r1", "--json")

    @rule()
    def time_passes(self) -> None:
        """What is retained expires."""
        for lease in self.stage.checker.leases():
            if lease.record is not None and lease.record["status"] == "retained" and lease.intent is None:
                self.stage.checker.note_expiry(expire(lease.path))

    @rule(content=st.integers(0, 9), name=st.sampled_from(["mine.txt", "untracked.txt", "build.log"]))
    def operator_edits(self, content: int, name: str) -> None:
        self.stage.repo.write(name, f"the operator's edit {content}\n")
        self.stage.checker.note_file(name.encode())

    @precondition(lambda self: not self.interrupted)
    @rule(on_target=st.booleans())
    def operator_commits(self, on_target: bool) -> None:
        """On the target, which the run must notice, or on a branch that is nobody's business."""
        repo = self.stage.repo
        if on_target:
            repo.git("commit", "-q", "--allow-empty", "-m", "the operator's", "--only")
        else:
            made = repo.git("commit-tree", "-p", "main", "-m", "elsewhere", "main^{tree}")
            repo.git("update-ref", "refs/heads/elsewhere", made)
        self.stage.checker.note_operator()

    @invariant()
    def holds(self) -> None:
        self.stage.check()

    def teardown(self) -> None:
        try:
            answer = self.world.reconcile()
            require_ended(self.stage, answer, _ENDS, "the end")
            second = self.world.reconcile()
            assert second.json["steps"] == [], f"19: {answer} then {second}"
            self.stage.check(settled=True, about="the end")
        finally:
            self.world.end()
            shutil.rmtree(self.world.root)


def run_histories(forker: Forker, room: Path, *, seed: int, examples: int, steps: int = 14) -> int:
    """Make up and run histories; raises with the steps of the one that violates an invariant."""

    def history() -> History:
        return History(forker, room)

    hypothesis.seed(seed)(history)
    run_state_machine_as_test(
        history,  # type: ignore[arg-type]  # anything that makes one serves
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return examples


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.mark.parametrize("seed", [1, 2, 3, 16])  # in the last one retention expires
def test_whatever_happens_in_whatever_order_the_invariants_hold(forker: Forker, tmp_path: Path, seed: int) -> None:
    """Design section 10 as a whole, after every step of made-up histories; the campaign makes up more."""
    run_histories(forker, tmp_path, seed=seed, examples=6)
