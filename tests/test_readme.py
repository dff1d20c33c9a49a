"""What the README shows can be pasted and works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Repo, World

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def block(language: str, holding: str) -> str:
    """The one code block of the README in ``language`` that holds a word."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.S) if holding in text]
    assert len(found) == 1, f"{len(found)} {language} blocks hold {holding!r}"
    return str(found[0])


def test_the_python_example_lands_a_worker_as_pasted(world: World, repo: Repo, tmp_path: Path) -> None:
    """README, "From Python": nothing has to be filled in on a checkout of branch work."""
    script = tmp_path / "example.py"
    script.write_text(block("python", "WorktreeCoordinator"))
    done = subprocess.run(
        [sys.executable, script], cwd=repo.path, env=world.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.split() == ["promoted", repo.head("work")]
    assert repo.git("show", "work:hello.txt") == "hello"
    assert repo.status() == ""


@pytest.mark.parametrize("holding", ["lionwt.turn import Conversation"])
def test_the_turn_example_prints_what_it_says(world: World, tmp_path: Path, holding: str) -> None:
    """README, "One turn at a time"."""
    text = block("python", holding)
    script = tmp_path / "turns.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], env=world.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "['echo: one', 'other: two']"), done


def test_the_lionagi_example_prints_what_it_says(world: World, tmp_path: Path) -> None:
    """README, "For lionagi users": no key and no network."""
    script = tmp_path / "branch.py"
    script.write_text(block("python", "lionwt.lionagi.turns import install"))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=world.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    turn = ["RunStart", "MessageAdded", "MessageAdded", "RunEnd"]
    assert done.stdout.splitlines() == [*turn, *turn, "['one', 'two']"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completions_lie_where_the_readme_says(shell: str) -> None:
    """README, "Commands": a wheel puts them into ``share`` of its environment."""
    named = re.findall(r"\$share/([\w./-]+)", block("sh", "bash-completion"))
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
    (place,) = [name for name in named if shell in name]
    assert f'"share/{place}"' in project
