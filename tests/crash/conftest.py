"""One forking process for all tests of a worker process, and a crash world for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.forking import Forker
from tests.crash.world import CrashWorld


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def crash(tmp_path: Path, forker: Forker) -> Iterator[CrashWorld]:
    world = CrashWorld(tmp_path / "world", forker)
    yield world
    world.end()
