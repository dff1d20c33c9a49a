"""`lionwt.turn` costs the standard library, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import lionwt

ROOT = Path(lionwt.__file__).parents[1]


def _python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees this lionwt, and whatever is installed."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_importing_the_driver_loads_the_standard_library_and_nothing_else() -> None:
    before = _imported("pass")
    added = _imported("import lionwt.turn") - before
    assert {"lionwt", "lionwt.turn"} <= added
    foreign = {name for name in added if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"lionwt", "lionwt.turn"}


def _imported(code: str) -> set[str]:
    """What was loaded, by its own account; `importtime` lists what was looked for in vain, too."""
    done = _python(code + "; import sys; print(*sys.modules)", "-X", "importtime")
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines} & set(done.stdout.split())


def test_the_driver_works_where_nothing_else_is_installed() -> None:
    _python(
        """
        import sys

        for name in ("typer", "rich", "pydantic", "filelock", "sh", "anyio", "psutil"):
            sys.modules[name] = None

        import asyncio
        from lionwt.turn import Conversation, run_in_turn, stream_in_turn

        async def main():
            host = Conversation()
            host.observers.append(lambda signal: asyncio.sleep(0))

            async def body(scope):
                return 1

            async def items(scope):
                yield 2

            assert await run_in_turn(host, invoke=body) == 1
            assert [item async for item in stream_in_turn(host, invoke=items)] == [2]

        asyncio.run(main())
        """,
        "-W",
        "error",
    )
