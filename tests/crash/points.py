"""Every fault point of every verb, killed, raising and out of space; then reconcile and all invariants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.crash import steps
from tests.crash.forking import Forker
from tests.crash.recovery import DOCUMENTED, recover
from tests.crash.scenes import SCENES
from tests.crash.world import CrashWorld

ACTIONS = ("kill", "raise", "nospace")


@dataclass(frozen=True)
class Case:
    """The n-th pass of a scene's command through a point, and what happens there.

    With ``is_owned`` an owner answered for the leases and is dead before they are reconciled,
    else none was declared and they are taken over.
    """

    scene: str
    point: str
    nth: int
    action: str
    is_owned: bool = False

    def __str__(self) -> str:
        return f"{self.scene}: {self.point}:{self.action}:{self.nth}{' (owned)' if self.is_owned else ''}"


def trace(forker: Forker, room: Path, name: str) -> list[tuple[str, str]]:
    """Run a scene's command undisturbed and return what it passed; all invariants hold afterwards."""
    scene = SCENES[name]
    world = CrashWorld(room, forker)
    try:
        stage = scene.stage(world)
        passed = room.with_name(f"{room.name}.trace")
        answer = world.lionwt(*scene.command, env={"LIONWT_TRACE": str(passed)})
        assert answer.code == scene.code, f"[{name}] {answer}"
        stage.check(about=name, settled=name.startswith("reconcile"))
        found = steps.read(passed)
        passed.unlink()
        return found
    finally:
        world.end()
        shutil.rmtree(room)


def all_cases(name: str, passed: list[tuple[str, str]]) -> list[Case]:
    """Every pass through every point, with every action."""
    counts: dict[str, int] = {}
    found = []
    for kind, point in passed:
        if kind == "point":
            counts[point] = counts.get(point, 0) + 1
            found += [Case(name, point, counts[point], action) for action in ACTIONS]
            found.append(Case(name, point, counts[point], "kill", is_owned=True))
    return found


def some_cases(name: str, passed: list[tuple[str, str]]) -> list[Case]:
    """Each point of the scene once, at one of its passes: kill at every other, in turn with the rest.

    The turn begins elsewhere in every scene, so a point that several verbs pass
    meets every action. Every other kill leaves the leases of an owner that is dead.
    """
    counts: dict[str, int] = {}
    for kind, point in passed:
        if kind == "point":
            counts[point] = counts.get(point, 0) + 1
    turn = list(SCENES).index(name)
    actions = ("kill", "raise", "kill", "nospace")
    return [
        Case(name, point, 1 + at % counts[point], actions[at % 4], is_owned=at % 4 == 2)
        for at, point in enumerate(counts, turn)
    ]


def run_case(forker: Forker, room: Path, case: Case) -> None:
    """Set up, interrupt, recover; raises what does not hold."""
    scene = SCENES[case.scene]
    world = CrashWorld(room, forker)
    world.is_owned = case.is_owned
    try:
        stage = scene.stage(world)
        fault = f"{case.point}:{case.action}:{case.nth}"
        answer = world.lionwt(*scene.command, env={"LIONWT_FAULT": fault})
        if case.action == "kill":
            assert answer.code == -9, f"[{case}] the point was not reached: {answer}"
        elif case.action == "nospace":
            assert answer.json["exit_code"] in DOCUMENTED, f"[{case}] {answer}"
        else:
            assert answer.json["exit_code"] in {1, *DOCUMENTED}, f"[{case}] {answer}"
        recover(stage, scene.ends, str(case), again=scene.command)
    finally:
        world.end()
        shutil.rmtree(room)


def run_cases(forker: Forker, room: Path, cases: list[Case]) -> Iterator[tuple[Case, AssertionError | None]]:
    """Run cases one after the other, each in a world of its own; yields what became of each."""
    for number, case in enumerate(cases):
        try:
            run_case(forker, room / f"c{number}", case)
            yield case, None
        except AssertionError as error:
            yield case, error
