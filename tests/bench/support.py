"""What every measurement shares: a private world, repositories of a size, rows of the table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIONWT = str(Path(sys.executable).parent / "lionwt")


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ratio`` is what the budget speaks of."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    budget: float | None = None

    @property
    def within(self) -> bool | None:
        if self.budget is None:
            return None
        return (self.ratio if self.ratio is not None else self.value) <= self.budget

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within}


class Bench:
    """A home of its own, and the commands that are compared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        home = root / "home"
        home.mkdir()
        (home / ".gitconfig").write_text(
            "[user]\n\tname = Bench\n\temail = bench@example.invalid\n[init]\n\tdefaultBranch = main\n"
            "[gc]\n\tauto = 0\n[maintenance]\n\tauto = false\n[advice]\n\tdetachedHead = false\n"
        )
        self.env = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "LIONAGI_HOME": str(root / "lionagi"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "LANG": "C.UTF-8",
        }

    def run(self, *command: str | os.PathLike[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [os.fspath(word) for word in command],
            cwd=cwd or self.root,
            env={**self.env, **(env or {})},
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command} failed: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode(errors="replace")

    def run_python(self, script: str, *arguments: str, stdin: str = "") -> None:
        """Run a script against the package, in this world."""
        command = [sys.executable, "-c", script, *arguments]
        subprocess.run(command, cwd=self.root, env=self.env, input=stdin.encode(), check=True)

    def repository(self, name: str, files: int) -> Path:
        """A repository with ``files`` small files on branch ``work``."""
        path = self.root / name
        path.mkdir()
        self.run("git", "init", "-q", "-b", "work", cwd=path)
        lines = [
            b"commit refs/heads/work\ncommitter B <b@example.invalid> 1700000000 +0000\ndata 4\nbase\n",
        ]
        for number in range(files):
            content = f"file {number}\n".encode() * (1 + number % 40)
            lines.append(f"M 100644 inline d{number // 100:03d}/f{number % 100:02d}.txt\n".encode())
            lines.append(f"data {len(content)}\n".encode() + content + b"\n")
        subprocess.run(["git", "fast-import", "--quiet"], input=b"".join(lines), cwd=path, env=self.env, check=True)
        self.run("git", "reset", "-q", "--hard", cwd=path)
        time.sleep(1.2)  # an index of the same second as its files makes git look at all of them again
        return path

    def settle(self) -> None:
        """Let the disk catch up, so that one measurement does not pay for another."""
        os.sync()
        time.sleep(1.2)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    taken: list[float] = []
    started = time.perf_counter()
    yield taken
    taken.append(time.perf_counter() - started)


def seconds(action: Callable[[], object]) -> float:
    with stopwatch() as taken:
        action()
    return taken[0]


def best(repeats: int, *actions: Callable[[], object]) -> list[float]:
    """The least time of each action over interleaved repeats: noise only ever adds."""
    found = [float("inf")] * len(actions)
    for _ in range(repeats):
        for position, action in enumerate(actions):
            found[position] = min(found[position], seconds(action))
    return found
