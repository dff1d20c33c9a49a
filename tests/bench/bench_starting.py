"""What a start costs, as a part of ``import typer``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench.support import LIONWT, Bench, Row, best


def measure(bench: Bench) -> Iterator[Row]:
    """Rows for --version, --help and verbs that write."""
    python = sys.executable
    empty, typer, version, helped = best(
        15,
        lambda: bench.run(python, "-c", "pass"),
        lambda: bench.run(python, "-c", "import typer"),
        lambda: bench.run(LIONWT, "--version"),
        lambda: bench.run(LIONWT, "--help"),
    )
    yield Row("python -c pass", empty * 1000, "ms")
    yield Row("python -c 'import typer'", typer * 1000, "ms")
    yield Row("lionwt --version / import typer", version * 1000, "ms", version / typer, 0.5)
    yield Row("lionwt --help / import typer", helped * 1000, "ms", helped / typer, 1.5)
    yield from _verbs(bench, typer)


def _verbs(bench: Bench, typer: float) -> Iterator[Row]:
    """Verbs that write, on a small repository, less the time of their git processes."""
    repo = bench.repository("starting", 20)
    logged = bench.root / "git.log"
    wrapper = bench.root / "bin" / "git"
    wrapper.parent.mkdir()
    real = shutil.which("git")
    wrapper.write_text(
        f"#!{sys.executable} -IS\n"
        "import os, sys, time\n"
        "t = time.perf_counter()\n"
        f"code = os.spawnv(os.P_WAIT, {real!r}, ['git', *sys.argv[1:]])\n"
        f"open({str(logged)!r}, 'a').write('%f\\n' % (time.perf_counter() - t))\n"
        "os._exit(code)\n"
    )
    wrapper.chmod(0o755)
    least: dict[str, float] = {}
    gits: dict[str, tuple[int, float]] = {}
    for number in range(9):
        run, measured = f"start{number}", number % 3 != 2
        env = {} if measured else {"PATH": f"{wrapper.parent}:{bench.env['PATH']}"}

        def verb(name: str, *arguments: str, env: dict[str, str] = env, measured: bool = measured) -> None:
            logged.write_text("")
            (taken,) = best(1, lambda: bench.run(LIONWT, name, *arguments, "--json", cwd=repo, env=env))
            if measured:
                least[name] = min(least.get(name, taken), taken)
            else:
                spent = [float(line) for line in logged.read_text().split()]
                gits[name] = min(gits.get(name, (len(spent), sum(spent))), (len(spent), sum(spent)))

        verb("lease", run, "-w", "w", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none")
        verb("start", run, "w")
        worktree = Path(
            json.loads((bench.root / "lionagi/runs" / run / "workspaces/w.json").read_text())["lease"]["worktree_path"]
        )
        (worktree / f"new{number}.txt").write_text("new\n")
        verb("freeze", run, "w", "--succeeded")
        verb("promote", run)
        verb("status", run)
    for name, taken in least.items():
        count, spent = gits[name]
        own = taken - spent
        budget = 3.0 if name != "status" else 1.5
        yield Row(f"lionwt {name} less its {count} git processes / import typer", own * 1000, "ms", own / typer, budget)
