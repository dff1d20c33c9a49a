"""One answer, two forms: a JSON object for programs, a few plain lines for people.

The only module that prints, and the only importer of rich (on a colour
terminal). Whatever came from a name, a path or git's words is escaped before a
terminal sees it; JSON is ASCII.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from lionwt.errors import LionwtError

# C0, DEL, C1, the bidirectional controls, line separators, lone surrogates.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escaped(text: str) -> str:
    """``text`` with everything that could steer a terminal spelled out."""
    return _UNSAFE.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text
    )


@dataclass(frozen=True)
class Line:
    """One line of a human answer; ``mood`` picks its colour on a terminal."""

    text: str
    mood: str = ""


@dataclass
class Answer:
    """What a command found or did."""

    command: str
    exit_code: int = 0
    error: LionwtError | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    next: Sequence[str] = ()
    told: bool = False  # the lines say what the error says

    def as_object(self) -> dict[str, Any]:
        """The JSON answer (design section 5)."""
        return {
            "schema": f"lionwt/{self.command}@1",
            "ok": self.exit_code == 0,
            "exit_code": self.exit_code,
            "error": self.error.as_object() if self.error is not None else None,
            "next": list(self.next),
            **self.payload,
        }


def of_error(command: str, error: LionwtError) -> Answer:
    """The answer of a command that was refused as a whole."""
    return Answer(command, error.exit_code, error, next=error.next)


def show(answer: Answer, as_json: bool) -> None:
    """Print an answer: JSON on stdout, or lines on stdout and the error on stderr."""
    if as_json:
        text = json.dumps(answer.as_object(), ensure_ascii=True).replace("\x7f", "\\u007f")
        _write(sys.stdout, [Line(text)], raw=True)
        return
    _write(sys.stdout, answer.lines)
    if answer.error is not None and not answer.told:
        _write(sys.stderr, _error_lines(answer.error))
    if answer.next and answer.exit_code == 0:
        _write(sys.stdout, [Line(f"next: {command}", "dim") for command in answer.next[:3]])


def _error_lines(error: LionwtError) -> list[Line]:
    lines = [Line(f"lionwt: {error.message} [{error.code}]", "bad")]
    if error.hint:
        lines.append(Line(f"  → {error.hint}"))
    return lines


_STYLES: Final = {"good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim", "": ""}


def _write(stream: TextIO, lines: Sequence[Line], raw: bool = False) -> None:
    if not lines:
        return
    try:
        if not raw and stream.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console
            from rich.text import Text

            console = Console(file=stream, highlight=False, soft_wrap=True)
            for line in lines:
                console.print(Text(escaped(line.text), style=_STYLES[line.mood]))
        else:
            encoding = stream.encoding or "ascii"
            for line in lines:
                text = line.text if raw else escaped(line.text)
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:
        # The reader has gone; what was done is done, and the exit code says it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
