"""Every verb on its way through the fault points: what stands before it, and the call.

A scene makes a repository with an operator at work in it, workers with work that
must not get lost, and says which command is then interrupted. Together the
scenes pass every point of ``lionwt.faults.POINTS`` (a test holds them to it).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import Repo
from tests.crash.invariants import Checker
from tests.crash.leases import expire
from tests.crash.world import CrashWorld

LEASE = ("lease", "r1", "--json", "--owner-pid", "none")
OPEN = (*LEASE, "-w", "w1", "-w", "w2", "--target", "work", "--policy", "merge_validated")
RECONCILE = ("reconcile", "r1", "--takeover", "--json")


@dataclass
class Stage:
    """A scene that has been set up."""

    world: CrashWorld
    repo: Repo
    checker: Checker
    #: What each worker has written, to be found again whatever happens.
    work: dict[str, str] = field(default_factory=dict)

    def lost(self, run: str = "r1") -> list[str]:
        """The workers whose work is in no target, patch, saved file or worktree any more."""
        return [worker for worker, mark in self.work.items() if not self._is_somewhere(run, worker, mark)]

    def _is_somewhere(self, run: str, worker: str, mark: str) -> bool:
        in_target = self.repo.run_git("grep", "-q", "-F", mark, "work", "--", check=False)
        if in_target.returncode == 0:
            return True
        places = (self.world.evidence(run, worker), self.repo.path / ".worktrees/lionagi" / run / worker)
        return any(mark.encode() in path.read_bytes() for place in places for path in _files(place))

    def check(self, *, settled: bool = False, about: str = "") -> None:
        """All invariants, and no work lost."""
        self.checker.require(settled=settled, about=about)
        assert self.lost() == [], f"[{about}] work lost"


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]


@dataclass(frozen=True)
class Scene:
    """A set-up and the command that is interrupted in it, with the exit code it has when it is not."""

    command: tuple[str, ...]
    setup: Callable[[Stage], None]
    code: int = 0
    #: Statuses that a worker may end with, after whatever crash and the reconcile that follows.
    ends: frozenset[str] = frozenset({"promoted"})

    def stage(self, world: CrashWorld) -> Stage:
        repo, checker = world.operated()
        stage = Stage(world, repo, checker)
        self.setup(stage)
        stage.check(about="set up")
        return stage


def _leased(stage: Stage, *workers: str, **options: Any) -> dict[str, Repo]:
    stage.world.env.pop("LIONWT_FAULT", None)
    return stage.world.lease("r1", *workers, **options)


def _write(stage: Stage, worker: str, repo: Repo, name: str = "f1.txt") -> None:
    """Work of every kind: committed, uncommitted, ignored, with the worker's mark in it."""
    stage.work[worker] = f"work of {worker}"
    repo.commit("worker", **{f"committed-{worker}.txt": "committed\n"})
    repo.write(name, f"work of {worker}\n")
    repo.write("ignored/made.txt", "ignored\n")


def _worked(stage: Stage, *workers: str, **options: Any) -> None:
    for number, (worker, repo) in enumerate(_leased(stage, *workers, **options).items(), 1):
        _write(stage, worker, repo, f"f{number}.txt")


def _frozen(stage: Stage, *workers: str, verdict: tuple[str, ...] = (), **options: Any) -> None:
    _worked(stage, *workers, **options)
    for worker in workers:
        answer = stage.world.freeze("r1", worker, *verdict)
        assert answer.code == 0, answer


def _conflicting(stage: Stage, **options: Any) -> None:
    """Two frozen workers of one run that changed the same line; the first has landed."""
    for worker, repo in _leased(stage, "w1", "w2", **options).items():
        _write(stage, worker, repo)
        assert stage.world.freeze("r1", worker).code == 0
    assert stage.world.promote("r1", "w1").code == 0


def _late(stage: Stage) -> None:
    _frozen(stage, "w1")
    worktree = stage.repo.path / ".worktrees/lionagi/r1/w1"
    (worktree / "late.txt").write_text("written after the freeze\n")
    (worktree / "ignored/late.bin").write_text("ignored, after the freeze\n")


def _undone(stage: Stage) -> None:
    """A filter that fails when the second worker's tree is filled: the allocation is undone."""
    stage.world.config("filter.broken.smudge", "false")
    stage.world.config("filter.broken.clean", "cat")
    stage.world.config("filter.broken.required", "true")
    stage.repo.write(".gitattributes", "f3.txt filter=broken\n")
    stage.repo.git("add", ".gitattributes")
    stage.repo.git("commit", "-q", "-m", "a filter", "--", ".gitattributes")
    stage.checker.note_operator()


def _expired(stage: Stage) -> None:
    """A retained worker whose time has come."""
    _conflicting(stage, args=("--retain-for", "1h"))
    assert stage.world.promote("r1").code == 4
    expire(stage.world.state("r1") / "workspaces" / "w2.json")


def _killed(point: str, *command: str) -> Callable[[Stage], None]:
    def kill(stage: Stage) -> None:
        answer = stage.world.lionwt(*command, env={"LIONWT_FAULT": f"{point}:kill"})
        assert answer.code == -9, answer

    return kill


def _then(*steps: Callable[[Stage], None]) -> Callable[[Stage], None]:
    def all_of(stage: Stage) -> None:
        for step in steps:
            step(stage)

    return all_of


def _deleted_by_hand(stage: Stage) -> None:
    _worked(stage, "w1")
    stage.work.clear()  # only what was committed can be saved
    stage.work["w1"] = ""
    shutil.rmtree(stage.repo.path / ".worktrees/lionagi/r1/w1")


def _teardown_failed(stage: Stage) -> None:
    """The branch moved after the freeze: it is kept, until it is where it was again."""
    _frozen(stage, "w1")
    tip = stage.repo.head("lionagi/r1/w1")
    stage.repo.git("update-ref", "refs/heads/lionagi/r1/w1", "main")
    assert stage.world.promote("r1").code == 5
    stage.repo.git("update-ref", "refs/heads/lionagi/r1/w1", tip)


def _just(function: Callable[..., Any], *workers: str, **options: Any) -> Callable[[Stage], None]:
    return lambda stage: function(stage, *workers, **options)


def _opened(stage: Stage) -> None:
    _leased(stage, "w0", start=False)


def _nothing(_stage: Stage) -> None:
    pass


_ANY_END = frozenset({"promoted", "discarded"})
_DISCARDED = frozenset({"discarded"})
_CONFLICT = frozenset({"promoted", "needs_resolution"})

SCENES: dict[str, Scene] = {
    "lease opens": Scene(OPEN, _nothing, ends=_DISCARDED),
    "lease adds": Scene((*LEASE, "-w", "w1", "-w", "w2"), _opened, ends=_DISCARDED),
    "lease undoes": Scene(OPEN, _undone, code=8, ends=_DISCARDED),
    "start": Scene(("start", "r1", "w1", "--json"), _just(_leased, "w1", start=False), ends=_DISCARDED),
    "freeze": Scene(("freeze", "r1", "w1", "--succeeded", "--json"), _just(_worked, "w1"), ends=_ANY_END),
    "freeze ends": Scene(
        ("freeze", "r1", "w1", "--failed", "--json"), _just(_leased, "w1", start=False), ends=_DISCARDED
    ),
    "promote lands": Scene(("promote", "r1", "--json"), _just(_frozen, "w1", "w2")),
    "promote keeps": Scene(("promote", "r1", "--policy", "patch_only", "--json"), _just(_frozen, "w1"), ends=_ANY_END),
    "promote discards": Scene(
        ("promote", "r1", "--json"), _just(_frozen, "w1", verdict=("--failed",)), code=3, ends=_DISCARDED
    ),
    "promote conflicts": Scene(("promote", "r1", "--json"), _conflicting, code=4, ends=_CONFLICT),
    "promote retains": Scene(
        ("promote", "r1", "--json"),
        _just(_conflicting, args=("--retain-for", "1h")),
        code=4,
        ends=frozenset({"promoted", "retained"}),
    ),
    "promote saves late work": Scene(("promote", "r1", "--json"), _late),
    "reap": Scene(("reap", "r1", "--json"), _expired, ends=_CONFLICT),
    "reconcile undoes": Scene(RECONCILE, _killed("lease.populated", *OPEN), ends=_DISCARDED),
    "reconcile freezes": Scene(RECONCILE, _just(_worked, "w1"), ends=_DISCARDED),
    "reconcile lands": Scene(RECONCILE, _just(_frozen, "w1", "w2")),
    "reconcile repairs": Scene(
        RECONCILE, _then(_just(_frozen, "w1", "w2"), _killed("promote.moved", "promote", "r1", "w1"))
    ),
    "reconcile lands again": Scene(
        RECONCILE, _then(_just(_frozen, "w1"), _killed("promote.intended", "promote", "r1", "w1"))
    ),
    "reconcile tears down": Scene(
        RECONCILE, _then(_just(_frozen, "w1"), _killed("teardown.trashed", "promote", "r1", "w1"))
    ),
    "reconcile retries": Scene(RECONCILE, _teardown_failed),
    "reconcile expires": Scene(RECONCILE, _expired, code=4, ends=_CONFLICT),
    "reconcile saves commits": Scene(RECONCILE, _deleted_by_hand, ends=_DISCARDED),
}
