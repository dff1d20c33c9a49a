"""The example in the README does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lionwt

ROOT = Path(lionwt.__file__).parents[1]


def _example() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "run_in_turn" in code and "asyncio.run(" in code:
            return str(code)
    raise AssertionError("the README does not show a turn")


def test_the_example_of_the_readme_runs_and_prints_what_its_comment_says() -> None:
    code = _example()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = re.search(r"# (\[.*\])", code)
    assert expected is not None
    assert done.stdout.strip() == expected[1]


def test_the_function_that_makes_a_conversation_turn_safe_has_ten_lines() -> None:
    code = _example()
    lines = [line for line in code[: code.index("async def main")].splitlines() if line.strip()]
    assert len(lines) <= 10
