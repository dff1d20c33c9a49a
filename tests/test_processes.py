"""Whose a process is: both ids, and the run that its own home holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

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


def test_an_owner_is_known_again_after_the_clock_was_set(world: World, repo: Repo) -> None:
    """Design section 8: a living owner is never taken for dead; the kernel's boot time moves with the clock."""
    stepped = world.root / "stat"
    stepped.write_text(
        re.sub(r"(?m)^btime (\d+)$", lambda m: f"btime {int(m[1]) + 3600}", Path("/proc/stat").read_text())
    )
    wrapper = ("unshare", "--mount", "sh", "-c", f'mount --bind {stepped} /proc/stat && exec "$@"', "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not permitted")
    with subprocess.Popen(["sleep", "300"]) as owner:
        try:
            answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--owner-pid", str(owner.pid))
            assert answer.code == 0, answer
            refused = world.lionwt("reconcile", "r1", "--json", wrapper=wrapper)
            assert refused.error == "owner_alive", refused
        finally:
            owner.kill()
    assert world.lionwt("reconcile", "r1").code == 0
