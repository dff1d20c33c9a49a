"""Write down the fault points and the durable steps of a call, in their order.

A durable step is what another process still sees after a ``kill -9``: a name
that appears, goes or moves, and a git child that writes refs, registrations,
an index or files. The interpreter's own audit events tell them all, whichever
module makes them, so none can be made unnoticed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

#: Events of the interpreter that change names, with the arguments that are paths.
_EVENTS = {
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "shutil.rmtree": (0,),
    "shutil.copyfile": (1,),
}
#: git commands that write something else than objects.
_WRITING = {
    "update-ref",
    "worktree",
    "read-tree",
    "checkout-index",
    "update-index",
    "config",
    "symbolic-ref",
    "pack-refs",
    "branch",
    "apply",
    "add",
}

_where: int | None = None


def begin(trace: str) -> None:
    """Write down from here on, in this process."""
    global _where
    _where = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.addaudithook(_hook)


def note(kind: str, what: str) -> None:
    """Write one line, if anything is written down at all."""
    if _where is not None:
        os.write(_where, f"{kind}\t{what}\n".encode("utf-8", "backslashreplace"))


def read(trace: Path) -> list[tuple[str, str]]:
    """The lines of a trace: ("point" or "step", what)."""
    if not trace.exists():
        return []
    lines = trace.read_text("utf-8").splitlines()
    return [(kind, what) for kind, _, what in (line.partition("\t") for line in lines)]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        # What goes by a directory's descriptor is the inside of a tree that is named before.
        if event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] not in (-1, None):
            return
        note("step", f"{event} " + " ".join(_shown(arguments[position]) for position in _EVENTS[event]))
    elif event == "subprocess.Popen":
        words = [_shown(word) for word in arguments[1]]
        verb = _verb(words)
        if verb is not None and verb[0] in _WRITING and not _only_looks(verb):
            note("step", f"git {verb[0]} {_index_of(arguments[3])}".rstrip())


def _verb(words: list[str]) -> list[str] | None:
    if not words or os.path.basename(words[0]) != "git":
        return None
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] in ("-c", "-C") else rest[1:]
    return rest or None


def _only_looks(words: list[str]) -> bool:
    if words[0] == "worktree":
        return words[1:2] == ["list"]
    if words[0] == "config":
        return "--unset-all" not in words
    if words[0] == "read-tree":
        return "-n" in words
    return words[0] == "symbolic-ref"


def _index_of(env: Any) -> str:
    """Which index a git child writes, so that a private one can be told."""
    value = env.get("GIT_INDEX_FILE") if env else None
    return _shown(value) if value else ""


def _shown(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else str(value)
