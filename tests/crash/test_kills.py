"""``kill -9`` at random moments, bounded; the campaign does a thousand on 5,000 files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash import kills
from tests.crash.forking import Forker


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
