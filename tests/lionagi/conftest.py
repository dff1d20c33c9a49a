"""The real lionagi, without a network: fake provider programs first on PATH, a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Answer, Repo, World

LI = str(Path(sys.executable).parent / "li")
PROGRAMS = ("claude", "codex", "agy", "pi")


class Lionagi:
    """Runs ``li`` and ``lionwt li`` with fake providers in a world of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.root = world.root / "fake"
        (self.root / "calls").mkdir(parents=True)
        (self.root / "bin").mkdir()
        for name in PROGRAMS:
            program = self.root / "bin" / name
            source = Path(__file__).with_name("fake_provider.py").read_text()
            program.write_text(f"#!{sys.executable} -S\n{source}")
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        world.env["PATH"] = f"{self.root / 'bin'}:{Path(sys.executable).parent}:{world.env['PATH']}"
        world.env["FAKE_DIR"] = str(self.root)
        self.jobs({})

    def jobs(self, jobs: dict[str, list[list[Any]]]) -> None:
        (self.root / "jobs.json").write_text(json.dumps(jobs))

    def plan(self, *tasks: str | dict[str, Any], roles: tuple[str, ...] = ("implementer",)) -> None:
        """What the orchestrator plans: a task each, given to the roles in turn."""
        assignments = []
        for number, task in enumerate(tasks):
            given = {"task": task} if isinstance(task, str) else task
            assignments.append({"assignee": roles[number % len(roles)], "depends_on": [], **given})
        (self.root / "plan.json").write_text(json.dumps({"assignments": assignments}))

    def profile(self, name: str, **settings: str) -> None:
        """A role of the user's own."""
        place = self.world.home / ".lionagi" / "agents" / f"{name}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(["---", *(f"{key}: {said}" for key, said in settings.items()), "---", f"{name}\n"]))

    def li(self, *arguments: str, program: str = LI, env: dict[str, str | None] | None = None) -> Answer:
        done = self.popen(*arguments, program=program, env=env)
        out, err = done.communicate(timeout=120)
        return Answer(done.returncode, out, err)

    def popen(
        self, *arguments: str, program: str = LI, env: dict[str, str | None] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [program, *arguments],
            cwd=self.world.root / "repo",
            env=self.world.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.world.children.append(child)
        return child

    def edited(self, *changes: tuple[str, str, str]) -> dict[str, str | None]:
        """An environment whose lionagi differs: in each of these files one text is another."""
        installed, copy = Path(sysconfig.get_path("purelib")) / "lionagi", self.world.root / "site" / "lionagi"
        shutil.copytree(installed, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in changes:
            text = (copy / file).read_text()
            assert old in text, (file, old)
            (copy / file).unlink()
            (copy / file).write_text(text.replace(old, new, 1))
        return {"PYTHONPATH": str(copy.parent)}

    def calls(self, job: str | None = None) -> list[dict[str, Any]]:
        """How the providers were called, in the order of their starts."""
        found = [json.loads(path.read_text()) for path in sorted((self.root / "calls").glob("*.json"))]
        return [call for call in found if job is None or call["job"] == job]

    def runs(self) -> list[str]:
        places = (self.world.lionagi_home / "runs").glob("*/workspaces.json")
        return sorted(path.parent.name for path in places)

    def run(self) -> str:
        """The one run that was opened."""
        [run] = self.runs()
        return run


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie: in a container nobody may reap it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def lionagi(world: World, repo: Repo) -> Lionagi:
    """lionagi's ``li`` beside a repository on branch ``work``."""
    for name in list(os.environ):
        assert not name.startswith("LIONAGI_AGENT_DEPTH")
    return Lionagi(world)
