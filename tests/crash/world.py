"""A world whose commands are forked, with an operator in it and a checker of the invariants."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import Answer, Repo, World
from tests.crash.forking import Call, Forker
from tests.crash.invariants import Checker

#: A value of the environment that no file of lionwt's may hold (invariant 23).
SECRET = "only-in-the-environment-3b1f"

#: What the operator has in the checkout: one of each kind, in nobody's way.
OPERATORS_FILES = {
    "untracked.txt": "untracked\n",
    "ignored/cache.bin": "ignored\n",
    "build.log": "ignored too\n",
    "new/staged.txt": "staged\n",
    "mine.txt": "edited and not staged\n",
    "both.txt": "staged, then edited\n",
}


class CrashWorld(World):
    """The test's machine; its commands cost no start of an interpreter."""

    def __init__(self, root: Path, forker: Forker) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root, None)
        self.forker = forker
        self.calls = root / "calls"
        self.calls.mkdir()
        self.env["LIONWT_TEST_SECRET"] = SECRET
        self.started: list[Call] = []
        #: With an owner, leases are its own, and it dies before each reconcile, which takes nothing over then.
        self.is_owned = False
        self.owner: subprocess.Popen[bytes] | None = None

    def _as_owned(self, arguments: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
        if arguments[0] == "reconcile":
            self._end_owner()
            return [word for word in arguments if word != "--takeover"]
        if "--owner-pid" not in arguments:
            return list(arguments)
        if self.owner is None:
            self.owner = subprocess.Popen(["sleep", "3600"])
        words = list(arguments)
        words[words.index("--owner-pid") + 1] = str(self.owner.pid)
        return words

    def _end_owner(self) -> None:
        if self.owner is not None:
            self.owner.kill()
            self.owner.wait()
            self.owner = None

    def begin(
        self,
        *arguments: str | os.PathLike[str],
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Call:
        """Start the command, as the leader of a process group of its own."""
        where = cwd or self.root / "repo"
        if self.is_owned:
            arguments = tuple(self._as_owned(arguments))
        call = self.forker.start(arguments, where, self.environment(dict(env or {})), self.calls)
        self.started = [other for other in self.started if other.code is None]
        self.started.append(call)
        return call

    def lionwt(
        self,
        *arguments: str | os.PathLike[str],
        cwd: Path | None = None,
        env: dict[str, str | None] | None = None,
        stdin: str | None = None,
        wrapper: Sequence[str] = (),
    ) -> Answer:
        assert stdin is None and not wrapper
        return self.begin(*arguments, cwd=cwd, env=env).answer()

    def end(self) -> None:
        for call in self.started:
            if call.code is None and not call.has_ended():
                call.kill(group=True)
            if call.code is None:
                call.answer(30)
        self._end_owner()
        super().end()

    def operated(self, more: Mapping[str, str] | None = None) -> tuple[Repo, Checker]:
        """A repository in which the operator is at work, and its checker."""
        repo = self.repo()
        for name in ("mine.txt", "both.txt", *(more or {})):
            repo.write(name, (more or {}).get(name, "as committed\n"))
        repo.commit("what the operator edits")
        repo.write("both.txt", "staged\n")
        repo.write("new/staged.txt", OPERATORS_FILES["new/staged.txt"])
        repo.git("add", "-f", "both.txt", "new/staged.txt")
        for name, content in OPERATORS_FILES.items():
            repo.write(name, content)
        return repo, Checker(repo, self.lionagi_home, SECRET)

    def reconcile(self, run: str = "r1", *arguments: str, **options: Any) -> Answer:
        return self.lionwt("reconcile", run, "--takeover", "--json", *arguments, **options)

    def state_of(self, run: str = "r1") -> dict[str, bytes]:
        """Every byte of a run's state that a second reconcile must not change."""
        return {
            str(path.relative_to(self.state(run))): path.read_bytes()
            for path in sorted(self.state(run).rglob("*"))
            if path.is_file() and not path.name.endswith(".lock")
        }
