"""Every verb dies, fails and runs out of space at its fault points, and what follows is as the design says.

Here each scene interrupts its command once at every distinct point, in turn by
a kill, an error, a kill and a full disk, beginning elsewhere in every scene;
the campaign does it at every pass with every action.
"""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import pytest

from lionwt import faults
from tests.crash import points, steps
from tests.crash.forking import Forker
from tests.crash.scenes import SCENES


@pytest.mark.parametrize("scene", SCENES)
def test_a_command_is_finished_or_undone_wherever_it_ends(forker: Forker, tmp_path: Path, scene: str) -> None:
    """Invariants 19 and 20 with all the others: kill anywhere, reconcile, and everything is true and ended."""
    passed = points.trace(forker, tmp_path / "whole", scene)
    assert steps.unguarded(passed) == [], "durable steps with no fault point between them"
    cases = points.some_cases(scene, passed)
    broken = [str(error) for _, error in points.run_cases(forker, tmp_path, cases) if error is not None]
    assert broken == []


def test_every_point_is_passed_by_a_verb(forker: Forker, tmp_path: Path) -> None:
    """A point that no scene reaches protects nothing, and one that is not in the registry is never tried."""
    scenes = ["lease opens", "lease undoes", "freeze ends", "freeze", "promote lands", "promote saves late work"]
    scenes += ["reconcile repairs", "reconcile saves commits"]
    passed = {
        point for scene in scenes for kind, point in points.trace(forker, tmp_path / "w", scene) if kind == "point"
    }
    assert passed == set(faults.POINTS)


def test_every_point_in_the_source_is_in_the_registry() -> None:
    """What is passed by its name must be known by its name."""
    source = Path(inspect.getfile(faults)).parent
    passing = re.compile(r'(?:\bpoint\(|\b_write\(.*)"([a-z]+\.[a-z_]+)"')
    named = {name for path in source.glob("*.py") for name in passing.findall(path.read_text())}
    assert named == set(faults.POINTS)


def test_two_durable_steps_without_a_point_between_them_are_seen() -> None:
    """The watch over the steps can fail: one more of them, anywhere, is named."""
    rename, ref = ("step", "os.rename /a/.w.json.0.tmp /a/w.json"), ("step", "git update-ref")
    point = ("point", "store.replaced")
    assert steps.unguarded([rename, point, ref, point]) == []
    assert steps.unguarded([rename, ref, point]) == [(rename[1], ref[1])]
    assert steps.unguarded([rename, point, ref]) == [(ref[1], "the end")]
    assert steps.unguarded([("step", "open /a/new"), rename, point]) == [("open /a/new", rename[1])]
    assert steps.unguarded([("step", "os.remove /a/b"), ("step", "os.rmdir /a")]) == []


def test_worktrees_that_are_filled_at_once_are_one_step_in_whatever_order() -> None:
    """Which of several worktrees is filled first is chance; the suite must not depend on it."""
    fill = {name: f"git read-tree /r/.git/worktrees/{name}/index" for name in ("w1", "w2")}
    keep = {name: f"open /runs/r1/git/lionwt/{name}.index" for name in ("w1", "w2")}
    point = ("point", "lease.populated")
    for order in itertools.permutations([*fill.values(), *keep.values()]):
        assert steps.unguarded([*(("step", step) for step in order), point]) == []
