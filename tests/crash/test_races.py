"""Races whose order the machine chooses, bounded; the campaign runs them until its time is up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import races
from tests.crash.forking import Forker


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("race", races.RACES)
def test_whatever_order_the_machine_chooses_the_invariants_hold(
    forker: Forker, tmp_path: Path, race: str, seed: int
) -> None:
    """Invariants 5, 9, 11, 14, 19, 20 and 25, among eight processes, an operator and a worker that writes on."""
    races.run_race(forker, tmp_path / "world", race, seed)
