"""``make bench``: measure everything in one run, print the ratios, write them as JSON.

With arguments, only the named parts: ``python -m tests.bench starting worktrees``.
Every row is printed as soon as it is known.
Ends with 1 when a budget is exceeded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from tests.bench.support import Bench, Row

PARTS = ("turn", "starting", "worktrees", "reconcile")
WHERE = Path(".cache/bench.json")


def _measured(part: str, root: Path) -> Iterator[Row]:
    module = import_module(f"tests.bench.bench_{part}")
    rows: Iterable[Row] = module.measure() if part == "turn" else module.measure(Bench(root))  # a turn needs no world
    yield from rows


def _where() -> str | None:
    """In memory where there is room: a disk's moods say nothing about either side."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30:
        return str(memory)
    return None


def main(parts: list[str]) -> int:
    rows: list[Row] = []
    for part in parts or PARTS:
        print(f"\n{part}", flush=True)
        with tempfile.TemporaryDirectory(prefix="lionwt-bench-", dir=_where()) as root:
            for row in _measured(part, Path(root)):
                ratio = f"{row.ratio:8.2f}" if row.ratio is not None else " " * 8
                budget = f"≤ {row.budget:g}" if row.budget is not None else ""
                verdict = {True: "ok", False: "OVER", None: ""}[row.within]
                print(f"  {row.name:<75} {row.value:10.1f} {row.unit:<6} {ratio} {budget:>7} {verdict}", flush=True)
                rows.append(row)
    WHERE.parent.mkdir(exist_ok=True)
    WHERE.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    over = [row.name for row in rows if row.within is False]
    print(f"\n{len(rows)} rows in {WHERE}; " + (f"over budget: {', '.join(over)}" if over else "all within budget"))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
