"""Eight processes at once over the same and other leases, an operator at work, a worker that writes while frozen.

Nothing is forced here: whatever order the machine chooses, only outcomes that the
invariants allow may come of it. Orders that matter are forced one by one in
``tests/test_promotion_races.py``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Repo, is_stopped, wait_until
from tests.crash.forking import Call, Forker
from tests.crash.recovery import DOCUMENTED, require_ended
from tests.crash.scenes import LEASE, RECONCILE, Stage
from tests.crash.world import CrashWorld

_ANY = frozenset({"promoted", "discarded", "needs_resolution"})


def eight_processes(stage: Stage, rng: random.Random) -> None:
    """Verbs of all kinds over six workers, the operator committing elsewhere; then reconcile."""
    world, repo = stage.world, stage.repo
    workers = [f"w{number}" for number in range(6)]
    for worker, place in world.lease("r1", *workers).items():
        place.write(f"{worker}.txt", f"work of {worker}\n")
        stage.work[worker] = f"work of {worker}"
    verbs: list[tuple[str, ...]] = []
    for worker in workers:
        verbs += [("freeze", "r1", worker, "--succeeded"), ("promote", "r1", worker), ("promote", "r1", worker)]
    verbs += [("promote", "r1"), ("reap", "r1"), ("status", "r1"), (*LEASE[:2], "-w", "late", "--owner-pid", "none")]
    verbs += [("reconcile", "r1", "--takeover")] * 2
    rng.shuffle(verbs)
    _at_once(world, [(*verb, "--json") for verb in verbs], 8, lambda: _operate(repo, rng))
    _finish(stage, _ANY)


def promotions(stage: Stage, rng: random.Random) -> None:
    """Promote against promote over the same leases, some of them killed, reconcile in between (invariant 25)."""
    world = stage.world
    workers = [f"w{number}" for number in range(4)]
    for worker, place in world.lease("r1", *workers).items():
        place.write(f"{worker}.txt", f"work of {worker}\n")
        stage.work[worker] = f"work of {worker}"
        assert world.freeze("r1", worker).code == 0
    commands = [("promote", "r1", worker, "--json") for worker in workers for _ in range(2)] + [RECONCILE]
    rng.shuffle(commands)
    calls = [world.begin(*command) for command in commands]
    for call in rng.sample(calls, 3):
        if not call.has_ended(rng.uniform(0, 0.4)):
            call.kill(group=rng.random() < 0.5)
    _collect(calls, {-9})
    stage.check(about="promotions")
    _finish(stage, {"promoted"})


def writing_worker(stage: Stage, rng: random.Random) -> None:
    """Freeze against a worker that goes on writing: what was captured is what was there, the rest is late work."""
    world = stage.world
    place = world.lease("r1", "w1")["w1"]
    place.write("first.txt", "work of w1\n")
    stage.work["w1"] = "work of w1"
    stop = threading.Event()

    def write() -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            try:
                (place.path / f"more-{number % 50}.txt").write_text(f"{number}\n" * 50)
            except OSError:
                return

    writing = threading.Thread(target=write)
    writing.start()
    try:
        answer = world.freeze("r1", "w1")
        assert (answer.code, answer.error) in ((0, None), (6, "worktree_changing")), answer
    finally:
        stop.set()
        writing.join(30)
    if answer.code:
        assert world.freeze("r1", "w1").code == 0
    stage.check(about="writing worker")
    assert world.promote("r1").code == 0
    _finish(stage, {"promoted"})


def reconciles(stage: Stage, rng: random.Random) -> None:
    """Several reconciles of one crash at once: together they do what one would."""
    world = stage.world
    for worker, place in world.lease("r1", "w1", "w2", "w3").items():
        place.write(f"{worker}.txt", f"work of {worker}\n")
        stage.work[worker] = f"work of {worker}"
    for worker in ("w1", "w2"):
        assert world.freeze("r1", worker).code == 0
    point = rng.choice(["promote.intended", "promote.moved", "promote.updated", "teardown.trashed"])
    assert world.lionwt("promote", "r1", "w1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    calls = [world.begin(*RECONCILE) for _ in range(4)]
    _collect(calls, set())
    _finish(stage, {"promoted", "discarded"})


def saving_operator(stage: Stage, rng: random.Random) -> None:
    """An operator who saves files of a landing while it happens, is killed and is repaired: the last version stands."""
    world, repo = stage.world, stage.repo
    names = [f"s{number}.txt" for number in range(300)]
    repo.commit("more", **dict.fromkeys(names, "old\n" * 20))
    place = world.lease("r1", "w1")["w1"]
    for number, name in enumerate(names):
        if number % 7:
            place.write(name, "new\n" * 40)
        else:
            (place.path / name).unlink()
    place.write("s/new.txt", "work of w1\n")
    stage.work["w1"] = "work of w1"
    assert world.freeze("r1", "w1").code == 0
    saved: dict[str, str | None] = {}
    stop = threading.Event()
    calm = rng.uniform(0.0005, 0.005)

    def save() -> None:
        while not stop.wait(calm):
            name = rng.choice(names)
            content = f"saved as the {len(saved)}th, {rng.random()}\n" if rng.random() < 0.9 else None
            if content is None:
                (repo.path / name).unlink(missing_ok=True)
            else:
                (repo.path / ".saving").write_text(content)
                os.replace(repo.path / ".saving", repo.path / name)
            saved[name] = content

    # The look comes first, and what it finds would stop the landing: nothing is saved before it is over.
    call = world.begin("promote", "r1", "--json", env={"LIONWT_FAULT": "promote.moved:stop"})
    saving = threading.Thread(target=save)
    try:
        wait_until(lambda: is_stopped(call.pid), 60)
        saving.start()
        call.kill(signal.SIGCONT)
        if rng.random() < 0.5 and not call.has_ended(rng.uniform(0, 0.2)):
            call.kill()
        _collect([call], {-9})
        answer = world.reconcile()
    finally:
        stop.set()
        if saving.ident is not None:
            saving.join(30)
    assert answer.code in (0, 4), answer
    for name, content in saved.items():
        path = repo.path / name
        # A file that was removed before its turn came may have been written anew: it was the old version that went.
        if content is not None:
            assert path.exists() and path.read_text() == content, f"14: {name} is not what was saved there last"
    stage.checker.note_operator()
    again = world.reconcile()
    assert (again.code, again.json["steps"]) == (answer.code, []), again


RACES: dict[str, Callable[[Stage, random.Random], None]] = {
    "eight processes": eight_processes,
    "promotions": promotions,
    "a writing worker": writing_worker,
    "reconciles": reconciles,
    "a saving operator": saving_operator,
}


def run_race(forker: Forker, room: Path, name: str, seed: int) -> None:
    """Run one race once; raises what does not hold."""
    world = CrashWorld(room, forker)
    try:
        repo, checker = world.operated()
        RACES[name](Stage(world, repo, checker), random.Random(seed))
    finally:
        world.end()
        shutil.rmtree(room)


def _at_once(world: CrashWorld, commands: list[tuple[str, ...]], width: int, between: Callable[[], None]) -> None:
    """Keep ``width`` commands running until all have; ``between`` is done whenever one is started."""
    running: list[Call] = []
    for command in commands:
        while len(running) >= width:
            running = [call for call in running if not _ended(call)]
        running.append(world.begin(*command))
        between()
    _collect(running, set())


def _ended(call: Call) -> bool:
    if not call.has_ended(0.01):
        return False
    _collect([call], set())
    return True


def _collect(calls: list[Call], more: set[int]) -> None:
    for call in calls:
        answer = call.answer()
        assert answer.code in DOCUMENTED | more, answer
        assert "Traceback" not in answer.err, answer


def _operate(repo: Repo, rng: random.Random) -> None:
    """The operator stages and unstages; git may find the index locked, and says so."""
    if rng.random() < 0.5:
        repo.run_git("add", "-f", "mine.txt", check=False)
        repo.run_git("restore", "--staged", "mine.txt", check=False)


def _finish(stage: Stage, ends: frozenset[str] | set[str]) -> None:
    stage.repo.run_git("restore", "--staged", "mine.txt", check=False)
    answer = stage.world.reconcile()
    require_ended(stage, answer, ends, "after the race")
    second = stage.world.reconcile()
    assert second.json["steps"] == [], f"19: {answer} then {second}"
    stage.check(settled=True, about="after the race")
