"""Write down the fault points and the durable steps of a call, in their order.

A durable step is what another process still sees after a ``kill -9``: a name
that appears, goes or moves, and a git child that writes refs, registrations,
an index or files. The interpreter's own audit events tell them all, whichever
module makes them, so none can be made unnoticed.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

#: Events of the interpreter that change names, with the arguments that are paths.
_EVENTS = {
    "open": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "lionwt.trees.remove": (0,),
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


def is_durable(step: str) -> bool:
    """Whether a step leaves something that a later command must know of.

    Not: what lies in a scratch directory or in one that is still being built;
    a temporary file before it gets its name; a lock file; a directory by itself.
    """
    words = step.split()
    where = words[-1]
    passing = "~" in where or ".tmp/" in where or where == os.devnull
    unfinished = words[0] == "open" and where.endswith((".lock", ".tmp"))
    return not (passing or unfinished or words[0] == "os.mkdir")


def unguarded(trace: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Durable steps that follow each other with no fault point between them, so that none can die there."""
    found = []
    before: str | None = None
    for kind, what in trace:
        if kind == "point":
            before = None
        elif is_durable(what):
            if before is not None and not _is_one(before, what):
                found.append((before, what))
            before = what
    if before is not None and not _is_one(before, _SWEEPING):
        found.append((before, "the end"))
    return found


_SWEEPING = "os.remove "
#: Several worktrees are filled at once, each with a copy of its index: what of it comes first is chance.
_POPULATING = r"git read-tree \S+/worktrees/|open \S+/git/lionwt/\S+\.index$"
#: Steps that are one: dying between them is no other state for those who come later.
_ONE: tuple[tuple[str, str], ...] = (
    # Sweeping: what is left of it is swept again.
    (r"(os\.remove|os\.rmdir|lionwt\.trees\.remove) ", r"(os\.remove|os\.rmdir|lionwt\.trees\.remove) "),
    # What belongs to an allocation is undone as a whole, by its nonce.
    (r"git worktree", r"os\.remove \S+/info/sparse-checkout"),
    (r"os\.remove \S+/info/sparse-checkout", r"git config"),
    (_POPULATING, _POPULATING),
    (r"os\.remove \S+/git/lionwt/\S+\.index$", r"os\.rename \S+ \S+/\.trash/"),
    # The index's copy is nobody's before the landing is journalled, and made anew when it is repaired.
    (r"open \S+\.index\.new$", r"os\.link \S+ \S+/index\.lock"),
    (r"os\.remove \S+\.index(\.new|\.lock)?$", r"open \S+/lionwt-\w+\.index$"),
    (r"open \S+/lionwt-\w+\.index$", r"(open|git update-index) \S+/lionwt-\w+\.index$"),
    (r"git update-index \S+/lionwt-\w+\.index$", r"git update-index \S+/lionwt-\w+\.index$"),
)


def _is_one(before: str, after: str) -> bool:
    return any(re.match(one, before) and re.match(other, after) for one, other in _ONE)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and not _makes_a_name(*arguments):
        return
    if event in _EVENTS:
        # What goes by a directory's descriptor is the inside of a tree that is named before.
        if event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] not in (-1, None):
            return
        if os.environ.get("TMPDIR") in (_shown(arguments[0]), os.path.dirname(_shown(arguments[0]))):
            return  # a nameless file, or tempfile's look whether it can write there
        note("step", f"{event} " + " ".join(_shown(arguments[position]) for position in _EVENTS[event]))
    elif event == "subprocess.Popen":
        words = [_shown(word) for word in arguments[1]]
        verb = _verb(words)
        if verb is not None and verb[0] in _WRITING and not _only_looks(verb):
            note("step", f"git {verb[0]} {_index_of(arguments[3])}".rstrip())


def _makes_a_name(path: Any, _mode: Any, flags: int) -> bool:
    """Whether an ``open`` may make a file that somebody else sees; not one that is only ever a descriptor."""
    nameless = flags & os.O_TMPFILE == os.O_TMPFILE
    return bool(flags & os.O_CREAT) and not nameless and not isinstance(path, int)


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
