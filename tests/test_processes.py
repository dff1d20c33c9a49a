"""Whose a process is: both ids, and the run that its own home holds."""

from __future__ import annotations

import subprocess

from tests.conftest import Repo, World


def test_a_process_of_a_run_with_the_same_ids_under_another_home_is_left_alone(world: World, repo: Repo) -> None:
    """Design section 10, invariant 26: no process outside the lease is killed."""
    world.lease("r1", "w1")
    elsewhere = world.root / "elsewhere"
    world.repo("other")
    answer = world.lionwt(
        *("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", "none"),
        cwd=world.root / "other",
        env={"LIONAGI_HOME": str(elsewhere)},
    )
    assert answer.code == 0, answer
    ids = {"LIONAGI_RUN_ID": "r1", "LIONAGI_WORKER_ID": "w1", "LIONAGI_HOME": str(elsewhere)}
    with subprocess.Popen(["sleep", "300"], env=world.environment({**ids})) as stranger:
        try:
            answer = world.freeze("r1", "w1", "--stop-after", "0")
            assert answer.code == 0, answer
            assert stranger.poll() is None
        finally:
            stranger.kill()
