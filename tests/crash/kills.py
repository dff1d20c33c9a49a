"""``kill -9`` at random moments of a change of thousands of files, and of the reconcile that follows.

One repository serves for all: each round leases a worker that changes every
file, kills its promotion (or, more seldom, its lease or freeze) at a moment drawn
from the whole of its duration, and recovers; what stands then is where the next
round begins. Half of the kills
hit the process, half its whole group, so that its git dies too.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import Answer, Repo
from tests.crash.forking import Call, Forker
from tests.crash.recovery import require_ended
from tests.crash.scenes import LEASE, RECONCILE, Stage
from tests.crash.world import CrashWorld

#: Files of one directory; a change takes whole directories.
_WIDTH = 100
#: Every so many rounds all objects are read, and what nobody refers to is collected.
_DEEP = 20


@dataclass
class Kills:
    """What a series of kills did."""

    seed: int
    done: int = 0
    hit: int = 0
    landed_before: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass
class Field:
    """A repository of many files, and one frozen candidate after the other that changes all of them."""

    forker: Forker
    room: Path
    files: int
    rng: random.Random
    rounds: int = 0
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        world = CrashWorld(self.room, self.forker)
        repo, checker = world.operated(
            {f"d{number // _WIDTH}/f{number}.txt": f"line {number}\n" * 9 for number in range(self.files)}
        )
        self.stage = Stage(world, repo, checker)

    def next_run(self) -> str:
        self.rounds += 1
        self.stage.checker.deep = self.rounds % _DEEP == 0
        return f"k{self.rounds}"

    def work(self, run: str) -> None:
        """Lease and start a worker that changes, adds, removes and retypes files."""
        worker = self.stage.world.lease(run, "w1")["w1"]
        for number in range(self.files):
            path = worker.path / f"d{number // _WIDTH}/f{number}.txt"
            turn = (number + self.rounds) % 23
            if turn == 0 and path.exists():
                path.unlink()
            elif turn == 1:
                path.unlink(missing_ok=True)
                path.symlink_to(f"f{number + 1}.txt")
            else:
                if path.is_symlink():
                    path.unlink()
                path.write_text(f"round {self.rounds}, file {number}\n" * (1 + (number * 7 + self.rounds) % 30))
        worker.write(f"new{self.rounds}/large.bin", self.rng.randbytes(1 << 19))

    def renew(self) -> None:
        """The operator takes what stands now for the beginning of the next round."""
        self.stage.checker.note_operator()
        # What has ended is looked at once; a look at a thousand runs would cost more than the kill.
        shutil.rmtree(self.stage.world.lionagi_home / "runs", ignore_errors=True)
        self.stage.checker.forget()
        if self.stage.checker.deep:
            self.stage.repo.git("gc", "-q", "--prune=now")

    def close(self) -> None:
        self.stage.world.end()
        shutil.rmtree(self.room)


def measure(ground: Field) -> dict[str, float]:
    """Seconds that each verb takes undisturbed."""
    run = ground.next_run()
    took = {}
    for verb in ("lease", "freeze", "promote"):
        if verb == "freeze":
            ground.work(f"{run}-worked")
            run = f"{run}-worked"
        began = time.monotonic()
        answer = ground.stage.world.lionwt(*COMMANDS[verb](run))
        took[verb] = time.monotonic() - began
        assert answer.code == 0, answer
    for name in (run.removesuffix("-worked"), run):
        ground.stage.world.reconcile(name)
    ground.stage.check(settled=True, about="undisturbed")
    ground.renew()
    return took


COMMANDS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "lease": lambda run: (LEASE[0], run, *LEASE[2:], "-w", "w1", "--target", "work", "--policy", "merge_validated"),
    "freeze": lambda run: ("freeze", run, "w1", "--succeeded", "--json"),
    "promote": lambda run: ("promote", run, "--json"),
}
#: What a worker may have become after its verb was killed and reconciled.
ENDS = {"lease": {"discarded"}, "freeze": {"discarded", "promoted"}, "promote": {"promoted"}}


def reconcile(run: str) -> tuple[str, ...]:
    return (RECONCILE[0], run, *RECONCILE[2:])


def killed_at(call: Call, moment: float, *, group: bool) -> bool:
    """Kill a call after ``moment`` seconds; False where it had ended by itself."""
    if call.has_ended(moment):
        call.answer()
        return False
    call.kill(group=group)
    return call.answer().code == -9


def series(forker: Forker, room: Path, *, files: int, seed: int, deadline: float, most: int) -> Iterator[Kills]:
    """Kill ``most`` promotions, or until ``deadline`` (monotonic); yields the tally after each."""
    rng = random.Random(seed)
    kills = Kills(seed)
    ground = Field(forker, room, files, rng)
    try:
        took = measure(ground)
        while kills.done < most and time.monotonic() < deadline:
            try:
                one_kill(ground, kills, took)
            except AssertionError as error:
                kills.violations.append(f"seed {seed}, kill {kills.done + 1}: {error}")
                return
            finally:
                kills.done += 1
                yield kills
    finally:
        ground.close()


def one_kill(ground: Field, kills: Kills, took: dict[str, float]) -> None:
    """Kill a verb, most often promote; in every third round kill the reconcile too; then recover and check."""
    stage, rng = ground.stage, ground.rng
    world, repo = stage.world, stage.repo
    run, verb = ground.next_run(), rng.choice(["promote"] * 6 + ["lease", "freeze"])
    if verb != "lease":
        ground.work(run)
    if verb == "promote":
        assert world.freeze(run, "w1").code == 0
    before = repo.head("work")
    moment, group = rng.uniform(0, took[verb] * 1.1), rng.random() < 0.5
    about = f"seed {kills.seed}, {run}: {verb}, {'group' if group else 'process'} after {moment:.3f} s"
    if killed_at(world.begin(*COMMANDS[verb](run)), moment, group=group):
        kills.hit += 1
    if rng.random() < 0.3:
        _edit(stage, rng)
    stage.checker.require(about=about)
    kills.landed_before += repo.head("work") != before
    if rng.random() < 0.33:
        killed_at(world.begin(*reconcile(run)), rng.uniform(0, took["promote"] * 1.1), group=rng.random() < 0.5)
        stage.checker.require(about=f"{about}, reconcile killed")
    answer = when_its_git_has_ended(world, run)
    if verb == "lease" and not (world.state(run) / "workspaces/w1.json").exists():
        assert answer.error in (None, "run_unknown"), f"[{about}] {answer}"  # killed before it was written
    elif answer.error != "run_unknown":
        require_ended(stage, answer, ENDS[verb], about)
        second = world.reconcile(run)
        assert (second.code, second.json["steps"]) == (answer.code, []), f"[{about}] 19: {answer} then {second}"
        merge = world.record(run, "w1")["promoted_commit"]
        if merge is None:
            assert repo.head("work") == before, f"[{about}] 11: nothing landed, {before} moved"
        else:
            _require_landed(repo, before, merge, about)
    else:
        assert verb == "lease", f"[{about}] {answer}"
    stage.check(settled=True, about=about)
    ground.renew()


def when_its_git_has_ended(world: CrashWorld, run: str) -> Answer:
    """Reconcile; a git child that outlives a killed freeze stands in the worktree and makes that busy."""
    deadline = time.monotonic() + 60
    while (answer := world.reconcile(run)).error in ("worker_alive", "worktree_changing"):
        assert time.monotonic() < deadline, answer
    return answer


def _require_landed(repo: Repo, before: str, merge: str, about: str) -> None:
    assert repo.head("work") == merge and repo.parents(merge)[0] == before, f"[{about}] 11: {before} -> {merge}"


def _edit(stage: Stage, rng: random.Random) -> None:
    """What the operator writes in that very moment, beside the landing, is theirs too."""
    name = rng.choice(["mine.txt", "untracked.txt", "both.txt", "build.log"])
    stage.repo.write(name, f"edited right after the kill {rng.random()}\n")
    stage.checker.note_file(os.fsencode(name))
