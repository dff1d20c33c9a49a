"""Failing system calls, a full disk, too few descriptors and a read-only disk, bounded; the campaign tries all."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import syscalls
from tests.crash.forking import Forker
from tests.crash.recovery import recover
from tests.crash.scenes import SCENES
from tests.crash.world import CrashWorld


@pytest.mark.parametrize("calls", [calls for calls, error in syscalls.FAULTS if error != "ENOSPC" or calls != "fsync"])
@pytest.mark.parametrize("scene", ["freeze", "promote lands"])
def test_a_failing_call_is_an_error_and_loses_nothing(forker: Forker, tmp_path: Path, scene: str, calls: str) -> None:
    """A documented exit, a clear error, and everything as after a crash; of lionwt's calls one early and one late."""
    if reason := syscalls.why_not():
        pytest.skip(reason)
    total = syscalls.count(forker, tmp_path / "counted", scene)[calls]
    error = dict(syscalls.FAULTS)[calls]
    chosen = sorted({max(1, total // 3), max(1, total * 4 // 5)}) if total else []
    faults = [syscalls.Fault(scene, calls, error, nth) for nth in chosen]
    broken = [str(failure) for _, failure in syscalls.run_faults(forker, tmp_path, faults) if failure is not None]
    assert broken == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes of its own."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "lionwt-test", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode(errors='replace').strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def make(place: Path) -> Path:
    """A directory on the disk that has room."""
    place.mkdir()
    return place


def fill(place: Path, leave: int) -> Path:
    """Fill the file system that ``place`` is on, up to ``leave`` bytes."""
    filler = place / "filler"
    free = os.statvfs(place)
    with open(filler, "wb") as file:
        file.write(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return filler


@pytest.mark.parametrize("leave", [0, 40_000, 400_000])
@pytest.mark.parametrize("scene", ["lease opens", "freeze", "promote lands"])
def test_a_full_disk_is_said_and_once_there_is_space_all_is_finished(
    forker: Forker, tmp_path: Path, small_disk: Path, scene: str, leave: int
) -> None:
    """Exit 8 no_space (or done, where the space was enough); then reconcile, and all invariants."""
    world = CrashWorld(small_disk / "world", forker)
    try:
        stage = SCENES[scene].stage(world)
        world.calls = make(tmp_path / "calls")
        filler = fill(small_disk, leave)
        answer = world.lionwt(*SCENES[scene].command)
        filler.unlink()
        if answer.code:
            assert (answer.code, answer.error) in ((8, "no_space"), (5, "teardown_failed")), answer
            assert "space" in answer.out
        recover(stage, SCENES[scene].ends, f"{scene} with {leave} bytes", again=SCENES[scene].command)
    finally:
        world.end()


@pytest.mark.parametrize("scene", ["lease opens", "freeze", "promote lands"])
def test_a_read_only_disk_is_said_and_nothing_is_changed(
    forker: Forker, tmp_path: Path, small_disk: Path, scene: str
) -> None:
    """Nothing can be written, so nothing is half done: the same command works when it can."""
    world = CrashWorld(small_disk / "world", forker)
    try:
        stage = SCENES[scene].stage(world)
        world.calls = make(tmp_path / "calls")
        world.env["TMPDIR"] = str(make(tmp_path / "tmp"))
        before, refs = world.state_of(), stage.repo.refs()
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        answer = world.lionwt(*SCENES[scene].command)
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert answer.code == 8 and answer.error in ("permission", "git_failed", "system"), answer
        assert (world.state_of(), stage.repo.refs()) == (before, refs)
        stage.check(about=scene)
        again = world.lionwt(*SCENES[scene].command)
        assert again.code == SCENES[scene].code, again
    finally:
        world.end()


@pytest.mark.parametrize("most", [12, 16, 22])
@pytest.mark.parametrize("scene", ["lease opens", "freeze", "promote lands"])
def test_too_few_descriptors_are_an_error_and_lose_nothing(
    forker: Forker, tmp_path: Path, scene: str, most: int
) -> None:
    """EMFILE wherever it comes: a documented exit, and everything as after a crash."""
    world = CrashWorld(tmp_path / "world", forker)
    try:
        stage = SCENES[scene].stage(world)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        answer = syscalls.run_traced(world, ["prlimit", f"--nofile={most}:{hard}"], SCENES[scene].command)
        syscalls.require_clear(answer, f"{scene} with {most} descriptors")
        recover(stage, SCENES[scene].ends, f"{scene} with {most} descriptors", again=SCENES[scene].command)
    finally:
        world.end()
