"""``reconcile`` of a run with many leases: what has ended costs a look, what has not costs its own work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.bench.support import LIONWT, Bench, Row, seconds

FEW, MANY = 100, 1000


def measure(bench: Bench) -> Iterator[Row]:
    """Rows for 1,000 terminal leases, and for 100 and 1,000 frozen ones."""
    repo = bench.repository("reconciled", 20)
    costs = {}
    for leases in (FEW, MANY):
        run = f"r{leases}"
        _frozen(bench, repo, run, leases)
        taken = seconds(lambda run=run: bench.run(LIONWT, "reconcile", run, "--takeover", cwd=repo))  # type: ignore[misc]
        costs[leases] = taken / leases
        growth = costs[leases] / costs[FEW]
        yield Row(
            f"lionwt reconcile of {leases} frozen leases, each / each of {FEW}", costs[leases] * 1000, "ms",
            growth if leases != FEW else None, 1.3 if leases != FEW else None,
        )  # fmt: skip
    ended = min(seconds(lambda: bench.run(LIONWT, "reconcile", f"r{MANY}", cwd=repo)) for _ in range(3))
    yield Row(f"lionwt reconcile of {MANY} terminal leases", ended, "s", budget=1.0)


def _frozen(bench: Bench, repo: Path, run: str, leases: int) -> None:
    """Lease, start and freeze many workers; in one process, since only reconcile is measured."""
    workers = [f"w{number}" for number in range(leases)]
    script = """
import json, os, sys
from lionwt import names, session
from lionwt.freeze import Verdict, freeze
from lionwt.start import start
opened = session.load(names.run_paths(sys.argv[1], os.environ))
for worker in json.load(sys.stdin):
    file = start(opened, worker)
    (file.lease.worktree_path / "new.txt").write_text(worker)
    freeze(opened, worker, Verdict(succeeded=True))
"""
    named = [word for worker in workers for word in ("-w", worker)]
    bench.run(
        LIONWT, "lease", run, *named, "--target", "work", "--policy", "patch_only", "--owner-pid", "none", cwd=repo
    )
    bench.run_python(script, run, stdin=json.dumps(workers))
    os.sync()
