"""``lionwt li ARGS…`` becomes ``li ARGS…`` with the workers' adapter installed.

The process is replaced, not watched over: signals reach lionagi itself, its
exit code is the command's, and the owner of every lease is the process that
the operator sees. Imports nothing of lionagi.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

#: Neither the repository that the command is called in nor a worker's files are ever imported from.
_PROGRAM = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; "
    "from lionwt.lionagi.workers import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Wishes:
    """What the operator said before ARGS; times as they were typed."""

    target: str | None = None
    policy: str | None = None
    retain_for: str | None = None
    check: tuple[str, ...] = ()
    check_merged: tuple[str, ...] = ()
    check_timeout: str | None = None
    stop_after: str | None = None
    as_json: bool = False

    @classmethod
    def of(cls, text: str) -> Wishes:
        """What :func:`launch` wrote."""
        said: dict[str, Any] = json.loads(text)
        for name, value in said.items():
            said[name] = tuple(value) if isinstance(value, list) else value
        return cls(**said)


def launch(wishes: Wishes, arguments: Sequence[str]) -> NoReturn:
    """Become ``li ARGS…`` in this interpreter; never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, json.dumps(asdict(wishes)), *arguments])
