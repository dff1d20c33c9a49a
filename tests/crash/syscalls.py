"""System calls that fail under lionwt's feet: no space, input/output errors, too many files, a read-only disk.

``strace --inject`` makes the n-th call of a kind fail, for every n that the
command makes, in lionwt alone or in its git children as well. Afterwards the
same must hold as after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import LIONWT, Answer
from tests.crash.forking import Forker
from tests.crash.recovery import DOCUMENTED, recover
from tests.crash.scenes import SCENES
from tests.crash.world import CrashWorld

#: Families of system calls and the errors that real machines give for them.
FAULTS = (
    ("fsync", "EIO"),
    ("fsync", "ENOSPC"),
    ("rename,renameat,renameat2", "EIO"),
    ("unlink,unlinkat", "EIO"),
    ("write", "ENOSPC"),
    ("mkdir,mkdirat", "ENOSPC"),
    ("link,linkat", "EIO"),
)


def why_not() -> str | None:
    """Why strace cannot be used here; None where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-o", os.devnull, "-e", "inject=getppid:error=EIO", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.decode(errors='replace')}"


@dataclass(frozen=True)
class Fault:
    """The n-th call of a family fails while a scene's command runs."""

    scene: str
    calls: str
    error: str
    nth: int
    children: bool = False

    def __str__(self) -> str:
        who = "lionwt and git" if self.children else "lionwt"
        return f"{self.scene}: {self.calls.partition(',')[0]} {self.nth} of {who} gives {self.error}"

    def wrapper(self) -> list[str]:
        follow = ["-f"] if self.children else []
        inject = f"inject={self.calls}:error={self.error}:when={self.nth}"
        return ["strace", *follow, "-qq", "-o", os.devnull, "-e", f"trace={self.calls}", "-e", inject]


def run_traced(world: CrashWorld, wrapper: list[str], command: tuple[str, ...]) -> Answer:
    """Run the installed command in a process of its own under strace."""
    done = subprocess.run(
        [*wrapper, sys.executable, LIONWT, *command],
        cwd=world.root / "repo",
        env=world.environment(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def count(forker: Forker, room: Path, name: str, *, children: bool = False) -> dict[str, int]:
    """How many calls of each family a scene's undisturbed command makes."""
    scene = SCENES[name]
    world = CrashWorld(room, forker)
    try:
        scene.stage(world)
        log = room / "calls.log"
        follow = ["-f"] if children else []
        families = {calls for calls, _ in FAULTS}
        traced = f"trace={','.join(sorted(families))}"
        answer = run_traced(world, ["strace", *follow, "-qq", "-o", str(log), "-e", traced], scene.command)
        assert answer.code == scene.code, answer
        made = re.findall(r"^\d*\s*(\w+)\(", log.read_text(errors="replace"), re.MULTILINE)
        return {calls: sum(made.count(call) for call in calls.split(",")) for calls in families}
    finally:
        world.end()
        shutil.rmtree(room)


def run_fault(forker: Forker, room: Path, fault: Fault) -> None:
    """Set up, let the call fail, recover; raises what does not hold."""
    scene = SCENES[fault.scene]
    world = CrashWorld(room, forker)
    try:
        stage = scene.stage(world)
        answer = run_traced(world, fault.wrapper(), scene.command)
        require_clear(answer, str(fault))
        if fault.children and fault.calls.startswith("unlink"):
            _remove_locks_of_git(world.root / "repo" / ".git")
        ends = set(scene.ends)
        if fault.children and fault.calls.startswith("rename"):
            # git logs a ref's move before it renames the ref: whether it was moved and taken back nobody can tell then.
            ends.add("needs_resolution")
        recover(stage, ends, str(fault), again=scene.command)
    finally:
        world.end()
        shutil.rmtree(room)


def _remove_locks_of_git(git_dir: Path) -> None:
    """What git could not unlink of its own, a person removes: git names it, and lionwt touches no lock but its own."""
    for lock in git_dir.rglob("*.lock"):
        own = lock.relative_to(git_dir).parts
        if own != ("index.lock",) and own[0] != "lionwt" and own[:2] != ("refs", "lionwt"):
            lock.unlink()


def require_clear(answer: Answer, about: str) -> None:
    """A documented exit code, and an error that says something; never a traceback."""
    if not answer.out and answer.code:
        # Where the answer itself could not be written there is nothing to read.
        assert answer.code in DOCUMENTED, f"[{about}] {answer}"
        return
    told = answer.json
    assert answer.code in DOCUMENTED, f"[{about}] {answer}"
    assert "Traceback" not in answer.err, f"[{about}] {answer}"
    if told["error"] is not None:
        assert told["error"]["code"] != "bug" and len(told["error"]["message"]) > 20, f"[{about}] {answer}"


def run_faults(forker: Forker, room: Path, faults: list[Fault]) -> Iterator[tuple[Fault, AssertionError | None]]:
    """Run faults one after the other; yields what became of each."""
    for number, fault in enumerate(faults):
        try:
            run_fault(forker, room / f"s{number}", fault)
            yield fault, None
        except AssertionError as error:
            yield fault, error
