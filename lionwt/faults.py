"""Named points at which a test makes lionwt die, fail, run out of space or stop.

A durable step is worth nothing until it has been interrupted. Each has a name
in :data:`POINTS`; ``LIONWT_FAULT=<name>:<action>[:<nth>]`` makes the n-th pass
through it ``kill`` (SIGKILL to itself), ``raise``, ``nospace`` (ENOSPC) or
``stop`` (SIGSTOP, until somebody continues it); several are joined by commas.
Without that variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Final

POINTS: Final = (
    "locks.asked",
    "store.written",
    "store.replaced",
    "store.moved",
    "store.forgotten",
    "readmodel.marked",
    "readmodel.written",
    "readmodel.dropped",
    "lease.unopened",
    "lease.planned",
    "lease.prepared",
    "lease.intended",
    "lease.branched",
    "lease.registered",
    "lease.populated",
    "lease.recorded",
    "lease.closed",
    "freeze.stopped",
    "freeze.captured",
    "freeze.evidence",
    "freeze.anchored",
    "freeze.recorded",
    "promote.index_linked",
    "promote.index_locked",
    "promote.intended",
    "promote.moved",
    "promote.index_updated",
    "promote.set_aside",
    "promote.files_written",
    "promote.updated",
    "promote.index_installed",
    "promote.index_renamed",
    "promote.landed",
    "gone.saved",
    "teardown.intended",
    "teardown.trashed",
    "teardown.set_aside",
    "teardown.retired",
    "teardown.branch_deleted",
    "teardown.recorded",
    "trash.emptied",
    "trash.tidied",
)

_passed: dict[str, int] = {}


class InjectedFault(RuntimeError):
    """Raised by the action ``raise``."""


def point(name: str) -> None:
    """Pass the durable step ``name``."""
    wanted = os.environ.get("LIONWT_FAULT")
    if not wanted:
        return
    parts = next((parts for entry in wanted.split(",") if (parts := entry.split(":"))[0] == name), None)
    if parts is None:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if len(parts) > 2 and _passed[name] != int(parts[2]):
        return
    action = parts[1]
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "nospace":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise InjectedFault(name)
