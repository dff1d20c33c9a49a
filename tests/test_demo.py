"""The demo tells the truth, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LIONWT, World, wait_until

DEMO = Path(__file__).parent / "demo.sh"


def demo(world: World, first_on_path: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", DEMO],
        cwd=world.root,
        env=world.environment({"PATH": f"{first_on_path}:{world.env['PATH']}", "TMPDIR": str(world.root)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def leftovers(world: World) -> list[Path]:
    return list(world.root.glob("lionwt-demo.*"))


def test_the_demo_shows_what_it_says_and_cleans_up(world: World) -> None:
    """make demo: one worker lands, one becomes a patch, one conflicts, one crashes and is reconciled."""
    out, err = demo(world, str(Path(LIONWT).parent)).communicate(timeout=120)
    assert err == ""
    for told in (
        "$ lionwt lease tea -w milk -w lemon -w sugar --target work --policy merge_validated --owner-pid none\n",
        "milk: promoted, landed on work as ",
        "lemon: discarded, kept as a patch\n",
        "sugar: needs_resolution, needs a person\n",
        "honey: promoted, landed on work as ",
        "Merge worker milk of run tea\n",
        "Merge worker honey of run tea\n",
        "$ git status --short --branch\n## work\n",
        "sugar:\ncandidate.patch\nconflict.json\nmanifest.json\n",
    ):
        assert told in out, told
    assert "\x1b" not in out
    assert not leftovers(world)


@pytest.mark.parametrize("lying", ["promote tea milk", "promote tea sugar"])
def test_the_demo_fails_where_something_is_not_as_told(world: World, tmp_path: Path, lying: str) -> None:
    """It checks what it shows: a lionwt that only claims to have done it is found out."""
    fake = tmp_path / "bin" / "lionwt"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\ncase "$*" in "{lying}"*) echo done ;; *) exec {LIONWT} "$@" ;; esac\n')
    fake.chmod(0o755)
    child = demo(world, str(fake.parent))
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert err.startswith("demo: not as told: ")
    assert not leftovers(world)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_cleans_up_too(world: World, number: signal.Signals) -> None:
    """Ctrl-C goes to the whole foreground group."""
    child = demo(world, str(Path(LIONWT).parent))
    try:
        wait_until(lambda: list(world.root.glob("lionwt-demo.*/repo/.worktrees")))
        os.killpg(child.pid, number)
        child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert child.returncode == 128 + number
    assert not leftovers(world)
