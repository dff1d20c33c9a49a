"""The checker itself: a sound life violates nothing, and each kind of damage is seen and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Repo, wait_until
from tests.crash.invariants import Broken, Checker
from tests.crash.world import SECRET, CrashWorld

Damage = Callable[[CrashWorld, Repo], Any]


def lived(world: CrashWorld) -> tuple[Repo, Checker]:
    """One worker landed, one discarded, one frozen, one running; the checker has seen all of it."""
    repo, checker = world.operated()
    world.frozen("r1", {"landed": {"f1.txt": "new\n"}, "frozen": {"f2.txt": "new\n"}})
    workers = world.lease("r1", "running", "failed")
    workers["running"].write("f3.txt", "new\n")
    world.freeze_now("r1", "failed", "--failed")
    assert world.promote("r1", "landed", "failed").code == 3
    return repo, checker


def edit(world: CrashWorld, worker: str, change: Callable[[dict[str, Any]], None], run: str = "r1") -> None:
    """Change a lease file the way no lionwt would."""
    path = world.state(run) / "workspaces" / f"{worker}.json"
    data = json.loads(path.read_bytes())
    data["serial"] += 1
    change(data)
    path.write_text(json.dumps(data))


def test_a_whole_life_violates_nothing(crash: CrashWorld) -> None:
    """The checker is silent where everything is as the design wants it, at every step."""
    _, checker = lived(crash)
    checker.require()
    assert crash.reconcile().code == 0
    checker.require(settled=True)
    assert {lease.record["status"] for lease in checker.leases() if lease.record} == {"promoted", "discarded"}


def landed(world: CrashWorld) -> str:
    return str(world.record("r1", "landed")["promoted_commit"])


DAMAGES: dict[str, tuple[str, Damage]] = {
    "a torn file": ("1:", lambda w, r: (w.state("r1") / "workspaces" / "running.json").write_text('{"sch')),
    "a state without its arrow": ("1:", lambda w, r: edit(w, "running", lambda d: d["lease"].update(state="frozen"))),
    "a step back": ("1:", lambda w, r: edit(w, "frozen", lambda d: d["lease"].update(state="running"))),
    "the same serial": ("1:", lambda w, r: edit(w, "running", lambda d: d.update(serial=d["serial"] - 1, owner={}))),
    "a branch of nobody": ("2:", lambda w, r: r.git("branch", "lionagi/r1/ghost")),
    "an anchor of nobody": ("2:", lambda w, r: r.git("update-ref", "refs/lionwt/r1/ghost/head", "work")),
    "a worktree of nobody": ("2:", lambda w, r: (r.path / ".worktrees/lionagi/r1/ghost").mkdir()),
    "a registration of nobody": (
        "2:",
        lambda w, r: (
            shutil.copytree(r.path / ".git/worktrees/running", r.path / ".git/worktrees/ghost")
            and (r.path / ".git/worktrees/ghost/locked").write_text("lionwt 00\n")
            and (r.path / ".git/worktrees/ghost/gitdir").write_text("/nowhere/.git\n")
        ),
    ),
    "a forgotten lease": ("3:", lambda w, r: (w.state("r1") / "workspaces" / "landed.json").unlink()),
    "another base": ("4:", lambda w, r: edit(w, "running", lambda d: d["lease"].update(base_sha="0" * 40))),
    "a changed patch": ("6:", lambda w, r: (w.evidence("r1", "frozen") / "candidate.patch").write_text("")),
    "another tree": ("6:", lambda w, r: edit(w, "frozen", lambda d: d["evidence"].update(tree=r.head("work^{tree}")))),
    "a missing patch": ("7:", lambda w, r: (w.evidence("r1", "frozen") / "candidate.patch").unlink()),
    "a move nobody journalled": (
        "9:",
        lambda w, r: r.git(
            "update-ref", "refs/heads/work", r.git("commit-tree", "-p", "work", "work^{tree}", "-m", "")
        ),
    ),
    "a target moved back": ("11:", lambda w, r: r.git("update-ref", "refs/heads/work", "work^")),
    "a move beside the line": ("9:", lambda w, r: r.git("update-ref", "refs/heads/work", "main")),
    "a failure that landed": (
        "9:",
        lambda w, r: edit(w, "landed", lambda d: d["candidate"].update(worker_succeeded=False)),
    ),
    "another tree landed": (
        "10:",
        lambda w, r: edit(w, "landed", lambda d: d["outcome"]["landing"].update(tree=r.head("main^{tree}"))),
    ),
    "a landing without an outcome": ("11:", lambda w, r: edit(w, "landed", lambda d: d["outcome"].update(status="x"))),
    "an outcome without a landing": (
        "11:",
        lambda w, r: (
            edit(
                w,
                "frozen",
                lambda d: d.update(outcome={"status": "promoted", "landing": {"merge": r.head("lionagi/r1/running")}}),
            )
            if r.git("commit", "-q", "--allow-empty", "-m", "x", cwd=r.path / ".worktrees/lionagi/r1/running") == ""
            else None
        ),
    ),
    "a protected branch moved": ("12:", lambda w, r: r.git("update-ref", "refs/heads/main", "work")),
    "an edit lost": ("14:", lambda w, r: r.git("checkout", "--", "mine.txt")),
    "an ignored file lost": ("14:", lambda w, r: (r.path / "ignored/cache.bin").unlink()),
    "an untracked file changed": ("14:", lambda w, r: r.write("untracked.txt", "else\n")),
    "a removal that was none": (
        "15:",
        lambda w, r: edit(w, "landed", lambda d: d["lease"].update(worktree_path=str(r.path))),
    ),
    "a branch that is there": ("15:", lambda w, r: r.git("branch", "lionagi/r1/landed")),
    "a retention without a worktree": (
        "17:",
        lambda w, r: edit(w, "failed", lambda d: d["record"].update(status="retained", retention_until=9e9)),
    ),
    "a readable file": ("23:", lambda w, r: (w.state("r1") / "workspaces" / "landed.json").chmod(0o644)),
    "an environment stored": ("23:", lambda w, r: (w.state("r1") / "note").write_text(SECRET)),
}

#: What only a settled repository must not have.
LITTER: dict[str, tuple[str, Damage]] = {
    "an index lock": ("left:", lambda w, r: (r.path / ".git/index.lock").write_text("")),
    "a ref lock": ("left:", lambda w, r: (r.path / ".git/refs/heads/work.lock").write_text("")),
    "a copy of the index": ("left:", lambda w, r: (r.path / ".git/lionwt-00.index").write_text("")),
    "a temporary lease file": ("left:", lambda w, r: (w.state("r1") / "workspaces" / ".w.json.0.tmp").write_text("")),
    "a scratch directory": ("left:", lambda w, r: (w.state("r1") / "git/lionwt/w~12345678").mkdir()),
    "a retired registration": ("left:", lambda w, r: (r.path / ".git/lionwt/retired.00").mkdir()),
    "a tree in the trash": ("left:", lambda w, r: (r.path / ".worktrees/.trash").mkdir()),
    "an anchor that stayed": ("left:", lambda w, r: r.git("update-ref", "refs/lionwt/r1/landed/head", "work")),
    "a checkout left behind": ("14:", lambda w, r: r.write("f1.txt", "line 0 of 1\n")),
    "an index left behind": ("14:", lambda w, r: r.git("read-tree", "main")),
    "a lost object": ("fsck:", lambda w, r: _lose(r, r.head("work:f1.txt"))),
}


def _lose(repo: Repo, oid: str) -> None:
    (repo.path / ".git/objects" / oid[:2] / oid[2:]).unlink()


def test_every_kind_of_damage_is_seen_and_named(crash: CrashWorld) -> None:
    """A checker that cannot fail proves nothing."""
    repo, checker = lived(crash)
    checker.require()
    known = dict(checker._known)
    aside = crash.root.with_name("aside")
    shutil.copytree(crash.root, aside, symlinks=True)
    unseen = {}
    for what, (number, damage) in {**DAMAGES, **LITTER}.items():
        damage(crash, repo)
        checker._known = dict(known)
        found = checker.look(settled=what in LITTER)
        if not any(entry.startswith(number) for entry in found):
            unseen[what] = found
        shutil.rmtree(crash.root)
        shutil.copytree(aside, crash.root, symlinks=True)
    assert unseen == {}
    checker.require()


def test_a_violation_is_raised_with_the_whole_list(crash: CrashWorld) -> None:
    """What is wrong is said at once, with the invariant's number, not one thing after the other."""
    repo, checker = lived(crash)
    repo.write("untracked.txt", "else\n")
    repo.git("branch", "lionagi/r1/ghost")
    with pytest.raises(Broken, match=r"2: refs/heads/lionagi/r1/ghost (.|\n)*14: b'untracked.txt'"):
        checker.require()


def test_a_git_that_lives_on_is_seen(crash: CrashWorld) -> None:
    """Nothing left behind: no process either."""
    repo, checker = lived(crash)
    env = {**os.environ, "GIT_DIR": str(repo.path / ".git")}
    child = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: b"GIT_DIR" in Path("/proc", str(child.pid), "environ").read_bytes())
        assert any(f"process {child.pid}" in entry for entry in checker.look(settled=True))
    finally:
        child.kill()
        child.communicate(timeout=30)
