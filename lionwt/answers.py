"""One answer, two forms: a JSON object for programs, a few plain lines for people.

The only module that prints, and the only importer of rich (on a colour
terminal). Whatever came from a name, a path or git's words is escaped before a
terminal sees it; JSON is ASCII.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final, TextIO

from lionwt.errors import SYSTEM, LionwtError
from lionwt.values import State, Value

# C0, DEL, C1, the bidirectional controls, line separators, lone surrogates.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escaped(text: str) -> str:
    """``text`` with everything that could steer a terminal spelled out."""
    return _UNSAFE.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text
    )


class Line(Value, frozen=True):
    """One line of a human answer; ``mood`` picks its colour on a terminal."""

    text: str
    mood: str = ""


class Answer(State):
    """What a command found or did."""

    command: str
    exit_code: int = 0
    error: LionwtError | None = None
    payload: dict[str, Any] = {}
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


def of_error(command: str, error: LionwtError, shown: Answer | None = None) -> Answer:
    """The answer of a command that was refused as a whole; ``shown`` is help to go with it."""
    lines = shown.lines if shown else ()
    return Answer(command, error.exit_code, error, lines=lines, next=error.next, told=bool(lines))


def of_interruption(command: str, number: int) -> Answer:
    """The answer of a command that a signal ended."""
    error = LionwtError(
        "interrupted",
        f"interrupted by {signal.Signals(number).name}; what was not finished was undone, or can be repeated",
        hint="run the same command again",
    )
    return Answer(command, error.exit_code + number, error)


def of_bug(command: str, bug: Exception) -> Answer:
    """The answer of a command that failed in a way nobody foresaw; the details go to stderr."""
    for line in traceback.format_exception(bug):
        _write(sys.stderr, [Line(part) for part in line.splitlines()])
    where = traceback.extract_tb(bug.__traceback__)[-1]
    error = LionwtError(
        "bug",
        f"{type(bug).__name__}: {bug} (in {os.path.basename(where.filename)}:{where.lineno})",
        hint="please report it with the lines above; the run's files tell how far it came",
    )
    return Answer(command, error.exit_code, error)


def of_text(command: str, text: str) -> Answer:
    """The answer that is a text to read: help."""
    return Answer(command, payload={"text": text}, lines=[Line(line) for line in text.splitlines()])


def warn(text: str) -> None:
    """Say on stderr what the answer does not depend on."""
    with contextlib.suppress(OSError):
        _write(sys.stderr, [Line(f"lionwt: {text}", "warn")])


def show(answer: Answer, as_json: bool) -> int:
    """Print an answer, JSON on stdout, or lines on stdout and the error on stderr; returns the exit code.

    A reader that has gone changes nothing: what was done is done, and the exit
    code says it. An answer that cannot be written is a failure of the system.
    """
    try:
        _show(answer, as_json)
    except BrokenPipeError:
        pass
    except OSError as error:
        _give_up(sys.stdout)  # half an answer, or one that says another exit code, is worse than none
        with contextlib.suppress(OSError):
            lost = f"lionwt: the answer (exit code {answer.exit_code}) could not be written: {error.strerror}"
            _write(sys.stderr, [Line(lost, "bad")])
        return answer.exit_code or SYSTEM
    finally:
        _forget_unwritten()
    return answer.exit_code


def _show(answer: Answer, as_json: bool) -> None:
    if as_json:
        text = json.dumps(answer.as_object(), ensure_ascii=True).replace("\x7f", "\\u007f")
        _write(sys.stdout, [Line(text)], raw=True)
        return
    _write(sys.stdout, answer.lines)
    if answer.error is not None and not answer.told:
        _write(sys.stderr, _error_lines(answer.error))
    if answer.next and answer.exit_code == 0:
        _write(sys.stdout, [Line(f"next: {command}", "dim") for command in answer.next[:_NEXT]])
        if (more := len(answer.next) - _NEXT) > 0:
            _write(sys.stdout, [Line(f"      and {more} more (--json lists all)", "dim")])


def _forget_unwritten() -> None:
    """What a stream could not be rid of must not fail again when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _give_up(stream)


def _give_up(stream: TextIO) -> None:
    """Let what a stream still holds, and whatever comes, go nowhere."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _error_lines(error: LionwtError) -> list[Line]:
    lines = [Line(f"lionwt: {error.message} [{error.code}]", "bad")]
    if error.hint:
        lines.append(Line(f"  → {error.hint}"))
    return lines


#: So many commands are offered below an answer.
_NEXT: Final = 3
_STYLES: Final = {"good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim", "": ""}


def _write(stream: TextIO | None, lines: Sequence[Line], raw: bool = False) -> None:
    if not lines or stream is None:  # the caller closed it
        return
    if not raw and stream.isatty() and not os.environ.get("NO_COLOR"):
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text(escaped(line.text), style=_STYLES[line.mood]))
    else:
        encoding = stream.encoding or "ascii"
        text = "".join(f"{line.text if raw else escaped(line.text)}\n" for line in lines)
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
