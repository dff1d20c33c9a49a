"""What people type on the command line, turned into values, or a clear refusal."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lionwt.errors import LionwtError
from lionwt.records import Check, Owner, Validation

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: Seconds that a wait may last at most: a day. Whoever wants more repeats the command.
LONGEST_WAIT: Final = 86400.0
#: The end of the year 9999: later times have no date.
LAST_MOMENT: Final = 253402300799.0


def _usage(message: str, hint: str | None = None) -> LionwtError:
    return LionwtError("usage", f"{message}; nothing was changed", hint=hint)


def duration(value: str | None, option: str) -> float | None:
    """``90s``, ``15m``, ``2h``, ``1d`` as seconds; more than nothing."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    length = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if length <= 0:
        raise _usage(f"{option} {value!r} is not a duration", hint="write it as 90s, 15m, 2h or 1d")
    if time.time() + length > LAST_MOMENT:
        raise _usage(f"{option} {value!r} has no end that a date could name")
    return length


def seconds(value: str, option: str) -> float:
    """A number of seconds, 0 or more; ``15m`` and the like are understood."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if not found:
        raise _usage(f"{option} {value!r} is not a number of seconds")
    length = float(found[1]) * _UNITS[found[2]]
    if length > LONGEST_WAIT:
        raise _usage(f"{option} {value!r} is more than a day", hint="every wait has an end: give fewer seconds")
    return length


def moment(value: str | None) -> float | None:
    """Unix seconds, or an ISO 8601 time (local where it names no zone)."""
    if value is None:
        return None
    try:
        if re.fullmatch(r"\d+(?:\.\d+)?", value):
            found = float(value)
        else:
            found = datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        found = math.inf
    if found > LAST_MOMENT:
        raise _usage(f"--retain-until {value!r} is not a time", hint="write Unix seconds or 2030-01-31T12:00:00+00:00")
    return found


def directory(value: str) -> Path:
    """An existing directory."""
    path = Path(os.path.abspath(os.path.expanduser(value)))
    if not path.is_dir():
        raise _usage(f"--repo {value!r} is not a directory")
    return path


def validation_names(values: Sequence[str]) -> tuple[str, ...]:
    """The names of declared validations, each once."""
    for value in values:
        if not _is_name(value):
            raise _usage(f"{value!r} is not the name of a validation", hint="no '=', ',' or control characters")
    return tuple(dict.fromkeys(values))


def _is_name(value: str) -> bool:
    """A printable name of a validation that can stand before ``=`` and among commas."""
    return 0 < len(value) <= 128 and value.isprintable() and value == value.strip() and not set(value) & set("=,")


def validation(value: str) -> Validation:
    """``NAME=pass|fail[,exit=N][,evidence=REF]``."""
    name, separator, rest = value.partition("=")
    verdict, *extras = rest.split(",")
    hint = "write NAME=pass or NAME=fail, then ,exit=N and ,evidence=REF if you like"
    if not separator or not _is_name(name) or verdict not in ("pass", "fail"):
        raise _usage(f"--validation {value!r} cannot be understood", hint)
    found: dict[str, str] = {}
    for extra in extras:
        key, separator, given = extra.partition("=")
        if key not in ("exit", "evidence") or not separator or not given or key in found:
            raise _usage(f"--validation {value!r} cannot be understood at {extra!r}", hint)
        found[key] = given
    exit_code = found.get("exit")
    if exit_code is not None and not re.fullmatch(r"-?\d{1,9}", exit_code):
        raise _usage(f"--validation {value!r}: exit={exit_code!r} is no exit code", hint)
    reference = found.get("evidence")
    if reference is not None and not reference.isprintable():
        raise _usage(f"--validation {value!r}: evidence is no printable path", hint)
    if reference is not None and (os.path.isabs(reference) or ".." in Path(reference).parts):
        raise _usage(f"--validation {value!r}: evidence is a path relative to the artifact root", hint)
    if verdict == "pass" and exit_code not in (None, "0"):
        raise _usage(f"--validation {value!r} passed with exit code {exit_code}", "a check that passes exits with 0")
    return Validation(
        name=name,
        passed=verdict == "pass",
        exit_code=int(exit_code) if exit_code is not None else None,
        evidence_ref=reference,
    )


def checks(values: Sequence[str], timeout: str, option: str) -> tuple[Check, ...]:
    """``NAME=CMD`` for each check, all with one bound in seconds; a name is given once."""
    bound = seconds(timeout, "--check-timeout")
    if bound <= 0:
        raise _usage(f"--check-timeout {timeout!r} leaves no time")
    found: dict[str, Check] = {}
    for value in values:
        name, separator, command = value.partition("=")
        if not separator or not _is_name(name) or not command.strip() or "\0" in command:
            raise _usage(f"{option} {value!r} cannot be understood", hint=f'write {option} NAME="COMMAND"')
        if name in found:
            raise _usage(f"{option} {name!r} was given twice", hint="give every check a name of its own")
        found[name] = Check(name=name, command=command, timeout=bound)
    return tuple(found.values())


def owner(value: str | None) -> Owner | None:
    """The owner of a lease: a pid, ``none``, by default the process that called lionwt."""
    from lionwt import processes

    if value == "none":
        return None
    if value is None:
        return processes.owner(os.getppid())
    if not re.fullmatch(r"[1-9]\d{0,9}", value):
        raise _usage(f"--owner-pid {value!r} is neither a process id nor none")
    return processes.owner(int(value))


def grants(value: str | None) -> dict[str, Any] | None:
    """The path binding in a JSON file, or on stdin for ``-``."""
    if value is None:
        return None
    try:
        loaded = json.loads(_standard_input() if value == "-" else Path(value).read_bytes())
    except OSError as error:
        raise _usage(f"--grants {value!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _usage(f"--grants {value!r} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise _usage(f"--grants {value!r} is not a JSON object")
    return loaded


def _standard_input() -> bytes:
    return b"" if sys.stdin is None else sys.stdin.buffer.read()  # None where the caller closed it
