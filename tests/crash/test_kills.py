"""``kill -9`` at random moments, bounded; ``python -m tests.crash --kills 1000`` does a thousand on 5,000 files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.crash import kills
from tests.crash.forking import Forker
from tests.crash.world import CrashWorld


@pytest.mark.parametrize("seed", [1, 2])
def test_a_promotion_killed_at_any_moment_is_the_old_head_or_the_whole_landing(
    forker: Forker, tmp_path: Path, seed: int
) -> None:
    """Invariants 9, 11, 14 and 20: nothing half, nothing twice, nothing of the operator's lost, nothing left."""
    tally = kills.Kills(seed)
    deadline = time.monotonic() + 60
    for tally in kills.series(forker, tmp_path / "field", files=600, seed=seed, deadline=deadline, most=12):  # noqa: B007
        pass
    assert tally.violations == []
    assert tally.hit > 0, "not one promotion was hit"


@pytest.mark.parametrize("verb", ["lease", "freeze"])
def test_a_git_that_outlives_its_killed_lionwt_does_no_harm(crash: CrashWorld, verb: str) -> None:
    """Kill anywhere: what the git child of a dead lease or freeze still writes is nobody's, and does not stay."""
    repo, checker = crash.operated()
    on, asleep, go = (crash.root / name for name in ("on", "asleep", "go"))
    waits = f"sh -c 'if [ -e {on} ]; then touch {asleep}; while [ ! -e {go} ]; do sleep 0.05; done; fi; cat'"
    crash.config("filter.slow.smudge", waits)
    crash.config("filter.slow.clean", waits)
    repo.write(".gitattributes", "f3.txt filter=slow\n")
    repo.git("add", ".gitattributes")
    repo.git("commit", "-q", "-m", "a slow filter", "--", ".gitattributes")
    checker.note_operator()
    command = kills.COMMANDS[verb]("r1")
    if verb == "freeze":
        worker = crash.lease("r1", "w1")["w1"]
        worker.write("f3.txt", "changed\n")
    on.touch()
    call = crash.begin(*command)
    try:
        wait_until(asleep.exists)
        call.kill()
        assert call.answer().code == -9
        on.unlink()
        answer = crash.reconcile()
        checker.require()
        # A freeze's git stands in the worktree; a lease's has lost the directory it writes to.
        assert (answer.code, answer.error) == ((6, "worker_alive") if verb == "freeze" else (0, None)), answer
    finally:
        go.touch()
    assert kills.when_its_git_has_ended(crash, "r1").code == 0
    wait_until(lambda: checker.look(settled=True) == [])
