"""Every verb on every supported Python that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Answer, Repo, World

VENVS = Path(__file__).parent.parent / ".venv"
VERSIONS = ("3.10", "3.12", "3.13")


def made() -> list[str]:
    """The environments that .ci/setup has made beside the one that runs the tests."""
    return sorted(path.parent.parent.name for path in VENVS.glob("3.*/bin/lionwt"))


def interpreters(version: str) -> Iterator[str]:
    """Where .ci/setup looks for a Python."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
    yield from (f"/usr/local/bin/python{version}", f"/usr/bin/python{version}")
    yield from filter(None, [shutil.which(f"python{version}")])


def works(interpreter: str, version: str) -> bool:
    script = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    if not os.access(interpreter, os.X_OK):
        return False
    return subprocess.run([interpreter, "-c", script], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="a developer may have set up fewer")
def test_in_ci_every_python_that_is_there_has_its_environment() -> None:
    """A version that is silently missing would be a promise that nobody keeps."""
    there = [version for version in VERSIONS if any(works(found, version) for found in interpreters(version))]
    assert made() == there


@pytest.mark.parametrize("version", made())
def test_a_whole_life_on_this_python(world: World, repo: Repo, version: str) -> None:
    """pyproject: Python 3.10 and newer; every verb, --version, --help and python -m lionwt."""
    bin_ = VENVS / version / "bin"

    def call(*words: str | Path, code: int = 0) -> Answer:
        done = subprocess.run(
            words, cwd=repo.path, env=world.environment(), capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (code, ""), done
        return Answer(done.returncode, done.stdout, done.stderr)

    lionwt, python = bin_ / "lionwt", bin_ / "python"
    assert call(python, "-V").out.startswith(f"Python {version}.")
    assert call(lionwt, "--version").out == call(python, "-m", "lionwt", "--version").out
    assert call(lionwt, "--help").out == call(python, "-m", "lionwt", "--help").out
    assert call(lionwt, "frobnicate", "--json", code=2).error == "usage"
    lease = ("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none")
    tree = Path(call(lionwt, *lease, "--json").json["leases"][0]["worktree_path"])
    assert call(lionwt, "start", "r1", "w1", "--json").json["lease"]["state"] == "running"
    (tree / "new.txt").write_text("new\n")
    frozen = call(lionwt, "freeze", "r1", "w1", "--succeeded", "--validation", "tests=pass,exit=0", "--json")
    assert frozen.json["candidate"]["files_changed"] == ["new.txt"]
    landed = call(python, "-m", "lionwt", "promote", "r1", "--json").json["records"][0]
    assert (landed["status"], repo.head("work")) == ("promoted", landed["promoted_commit"])
    assert call(lionwt, "promote", "r1").out.startswith("w1: promoted, landed on work as ")
