"""The whole crash programme: ``python -m tests.crash [--minutes 60] [--seed N] [--kills N | --only UNIT]``.

Every fault point of every verb at every pass with every action, failing system
calls, random kills of promotions of 5,000 files, races, and histories that
Hypothesis makes up. A unit that violates an invariant is printed with what runs
it again (``--only``), and the exit status is 1. What the time does not suffice
for is left out from an order that the seed shuffles, and the table says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lionwt.faults import POINTS
from tests.crash import kills, points, races, syscalls
from tests.crash.forking import Forker
from tests.crash.scenes import SCENES

#: The share of the remaining time that each part may take; what one leaves over the later ones get.
#: The first two have an end, which an hour on two processors suffices for; the others go on until theirs.
PARTS = {"points": 0.4, "syscalls": 0.75, "races": 0.15, "histories": 0.2, "kills": 1.0}
FILES = 5000
_KILLS_A_UNIT = 25
#: Scenes whose system calls are made to fail.
_TRACED = ("lease opens", "freeze", "promote lands", "promote keeps", "reconcile repairs", "reconcile freezes")

_forker: Forker | None = None
_room: Path | None = None


@dataclass
class Tally:
    """What a part did."""

    done: int = 0
    planned: int | None = None
    broken: list[str] = field(default_factory=list)


def _begin(room: str) -> None:
    """Each process of the pool has a forker and a place of its own."""
    global _forker, _room
    _forker = Forker()
    _room = Path(tempfile.mkdtemp(dir=room))


def run_unit(unit: str) -> tuple[str, int, str | None]:
    """Run one unit by its name; returns how much was done and what does not hold."""
    assert _forker is not None and _room is not None
    part, *words = unit.split("|")
    for left in _room.iterdir():  # by a unit in which something does not hold
        shutil.rmtree(left, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix="unit.", dir=_room))
    try:
        return unit, _RUN[part](_forker, room / "world", words), None
    except Exception as error:
        return unit, 1, f"{type(error).__name__}: {error}"


def _run_point(forker: Forker, room: Path, words: list[str]) -> int:
    scene, point, nth, action, owner = words
    points.run_case(forker, room, points.Case(scene, point, int(nth), action, owner == "owned"))
    return 1


def _run_syscall(forker: Forker, room: Path, words: list[str]) -> int:
    scene, calls, error, nth, who = words
    syscalls.run_fault(forker, room, syscalls.Fault(scene, calls, error, int(nth), who == "children"))
    return 1


def _run_kills(forker: Forker, room: Path, words: list[str]) -> int:
    seed, files, most = map(int, words)
    tally = kills.Kills(seed)
    for tally in kills.series(forker, room, files=files, seed=seed, deadline=float("inf"), most=most):  # noqa: B007
        pass
    if tally.violations:
        raise AssertionError(tally.violations[0])
    return tally.done


def _run_race(forker: Forker, room: Path, words: list[str]) -> int:
    races.run_race(forker, room, words[0], int(words[1]))
    return 1


def _run_history(forker: Forker, room: Path, words: list[str]) -> int:
    from tests.test_stateful import run_histories

    return run_histories(forker, room, seed=int(words[0]), examples=int(words[1]))


_RUN: dict[str, Callable[[Forker, Path, list[str]], int]] = {
    "points": _run_point,
    "syscalls": _run_syscall,
    "kills": _run_kills,
    "races": _run_race,
    "histories": _run_history,
}


def _trace(scene: str) -> list[str]:
    assert _forker is not None and _room is not None
    passed = points.trace(_forker, _room / "trace", scene)
    return [
        f"points|{case.scene}|{case.point}|{case.nth}|{case.action}|{'owned' if case.is_owned else 'none'}"
        for case in points.all_cases(scene, passed)
    ]


def _count(scene: str, children: bool) -> tuple[str, bool, dict[str, int]]:
    assert _forker is not None and _room is not None
    return scene, children, syscalls.count(_forker, _room / "counted", scene, children=children)


class Campaign:
    """The parts in their order, over a pool of processes."""

    def __init__(self, pool: concurrent.futures.Executor, jobs: int, seed: int, seconds: float) -> None:
        self.pool, self.jobs, self.seed = pool, jobs, seed
        self.ends = time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.tallies = {part: Tally() for part in PARTS}
        self.lost = 0

    def run_kills(self, most: int) -> None:
        """Nothing but random kills, ``most`` of them if the time suffices."""
        self.tallies = {"kills": Tally(planned=most)}
        self._run_part("kills", self.ends)

    def run(self) -> None:
        for part, share in PARTS.items():
            remaining = self.ends - time.monotonic()
            self._run_part(part, time.monotonic() + remaining * share)

    def _run_part(self, part: str, deadline: float) -> None:
        tally = self.tallies[part]
        units: Iterable[str]
        if part == "points":
            units = [unit for found in self.pool.map(_trace, SCENES) for unit in found]
        elif part == "syscalls":
            units = [] if syscalls.why_not() else self._syscalls()
        else:
            units = self._endless(part)
            if tally.planned is not None:
                units = list(itertools.islice(units, -(-tally.planned // _KILLS_A_UNIT)))
        if isinstance(units, list):
            tally.planned = tally.planned or len(units)
            self.rng.shuffle(units)
        waiting: set[concurrent.futures.Future[tuple[str, int, str | None]]] = set()
        source = iter(units)
        while True:
            while len(waiting) < self.jobs and time.monotonic() < deadline and (unit := next(source, None)):
                waiting.add(self.pool.submit(run_unit, unit))
            if not waiting:
                break
            ended, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                self._note(part, *future.result())
        print(f"{part}: {tally.done} done, {len(tally.broken)} broken", flush=True)

    def _note(self, part: str, unit: str, done: int, error: str | None) -> None:
        self.tallies[part].done += done
        if error is not None:
            self.tallies[part].broken.append(unit)
            self.lost += any(word in error for word in ("work lost", " 14: "))
            print(f"VIOLATED by --only {unit!r}\n{error}\n", flush=True)

    def _syscalls(self) -> list[str]:
        asked = [(scene, who) for scene in _TRACED for who in (False, True)]
        found = self.pool.map(_count, *zip(*asked, strict=True))
        counted = {(scene, children): totals for scene, children, totals in found}
        return [
            f"syscalls|{scene}|{calls}|{error}|{nth}|{'children' if children else 'lionwt'}"
            for scene in _TRACED
            for calls, error in syscalls.FAULTS
            for children in (False, True)
            for nth in range(1, counted[scene, children][calls] + 1)
        ]

    def _endless(self, part: str) -> Iterator[str]:
        number = self.seed
        while True:
            number += 1
            if part == "kills":
                yield f"kills|{number}|{FILES}|{_KILLS_A_UNIT}"
            elif part == "races":
                yield from (f"races|{name}|{number}" for name in races.RACES)
            else:
                yield f"histories|{number}|10"

    def table(self) -> str:
        """What was done, in one look."""
        names = {
            "points": f"crash points ({len(POINTS)} × {len(SCENES)} verbs)",
            "syscalls": "failing system calls",
            "kills": f"random kills ({FILES} files)",
            "races": "races",
            "histories": "made-up histories",
        }
        rows = []
        for part, tally in self.tallies.items():
            of = "" if tally.planned is None else f" of {tally.planned}"
            survived = tally.done - len(tally.broken)
            rows.append(f"{names[part]:<36}{str(tally.done) + of:>14} run{survived:>8} survived")
        rows.append(f"{'units that violate an invariant':<36}{len(self.broken()):>14}")
        rows.append(f"{'of which lost work':<36}{self.lost:>14}")
        return "\n".join(rows)

    def broken(self) -> list[str]:
        return [unit for tally in self.tallies.values() for unit in tally.broken]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it may take (default: 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="repeats the choices of another campaign")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--kills", type=int, metavar="N", help="only random kills, so many of them")
    parser.add_argument("--only", metavar="UNIT", help="run one unit, as a violation names it")
    given = parser.parse_args()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lionwt-crash.", dir=place, ignore_cleanup_errors=True) as room:
        if given.only:
            _begin(room)
            _, _, error = run_unit(given.only)
            print(error or "holds")
            return int(error is not None)
        print(f"seed {given.seed}", flush=True)
        with concurrent.futures.ProcessPoolExecutor(given.jobs, initializer=_begin, initargs=(room,)) as pool:
            campaign = Campaign(pool, given.jobs, given.seed, given.minutes * 60)
            try:
                campaign.run_kills(given.kills) if given.kills else campaign.run()
            except KeyboardInterrupt:
                print("stopped", flush=True)
    print(campaign.table())
    return int(bool(campaign.broken()))


if __name__ == "__main__":
    sys.exit(main())
