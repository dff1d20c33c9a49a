"""lionagi's conversations, one turn at a time: ADR-0018 in lionagi 0.36.0, which is not edited.

`install()` routes the nine operations of a Branch that call a model through `lionwt.turn`; what it
returns takes it all back. In between, of branches made before as well as after:

* turns on one branch run one after the other, branches beside each other; a call from inside a turn
  is part of it; every turn has one `RunStart` and one `RunEnd` or `RunFailed` with its `turn_id`;
* `Branch.control` and `poll_control` speak of the active turn, and take a `turn_id`;
* a turn's message signals come before its terminal signal, and those of no other turn;
* a model given for one call is that call's model, and never the branch's;
* `last_context_report` is that of the last turn that ended, None when that had no providers.

Signatures, docstrings, results, exceptions, copies and stored forms stay lionagi's. A stream is a
`lionwt.turn.TurnStream`, which behaves as an async generator. Where no asyncio loop runs (trio),
the operations and `control` are lionagi's own, without turns.

Everything is checked before the first change, and one installation exists at a time. Each wrapper
asks whether it is still installed: what others hold of it after the end is lionagi's again. A turn
that is live when it is taken back keeps what it needs, and ends as a turn; the last one that ends
restores the rest.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from threading import RLock
from typing import Any, Final, Literal

from lionwt.errors import LionwtError
from lionwt.lionagi import hooks, hosts, seams
from lionwt.lionagi.routes import Routes, swap_callback

__all__ = ["install"]

_lock: Final = RLock()
_installed: _Installation | None = None
_leaving: _Installation | None = None  # taken back, while turns of it are live


def install(
    target: Any = None,
    *,
    unattributed_control: Literal["reject", "legacy"] = "reject",
    start: Literal["entry", "adopt"] = "entry",
) -> Callable[[], None]:
    """Make the turns of `target` safe, lionagi's Branch or a subclass; returns what undoes it.

    `unattributed_control` is for `control()` while no turn is active: "reject" answers False and
    stores nothing (ADR-0018 D3), "legacy" keeps it for the next poll, as lionagi does.
    `start` is where `run` sends `RunStart`: on "entry", as all operations do (D2), or, with
    "adopt", where lionagi sends it, after its prompt guard: a prompt that is refused then has a
    `RunFailed` alone.

    Called again with the same arguments it is installed once, and stays until each of the returned
    functions has been called; calling one twice does nothing. A call that is under way when it is
    installed or taken back ends as it began, in a turn or not: turns do not wait for one that is not.

    LionwtError, with nothing changed: `lionagi_unsupported` when lionagi is missing, too old or not
    as the adapter knows it; `usage` when an argument is none of the above; `already_done` when it is
    installed with other arguments.
    """
    global _installed
    if unattributed_control not in ("reject", "legacy") or start not in ("entry", "adopt"):
        raise LionwtError("usage", f"unknown option: {unattributed_control=}, {start=}; nothing was changed")
    with _lock:
        if _leaving is not None:  # its live turns are as well off with what comes now
            _leaving.restore()
        if _installed is None or target not in (None, _installed.wanted[0]):
            branch = seams.require()
            target = branch if target is None else target
            if not inspect.isclass(target) or not issubclass(target, branch):
                raise LionwtError("usage", f"{target!r} is no class of lionagi branches; nothing was changed")
        else:
            target = _installed.wanted[0]
        wanted = (target, unattributed_control == "legacy", start == "adopt")
        if _installed is None:
            installation = _Installation(*wanted)
            installation.put()
            _installed = installation
        elif _installed.wanted != wanted:
            raise LionwtError(
                "already_done",
                "the turn adapter is installed with other arguments; nothing was changed",
                hint="call what that install returned, then install again",
            )
        _installed.users += 1
        return _Uninstall(_installed)


class _Uninstall:
    """Takes one installation back, once."""

    def __init__(self, installation: _Installation) -> None:
        self._installation: _Installation | None = installation

    def __call__(self) -> None:
        global _installed
        with _lock:
            installation, self._installation = self._installation, None
            if installation is None:
                return
            installation.users -= 1
            if not installation.users:
                _installed = None
                installation.take_back()


class _Installation:
    """What is replaced, by what, and what was there before."""

    def __init__(self, target: Any, legacy: bool, adopt: bool) -> None:
        self.wanted = (target, legacy, adopt)
        self.users = 0
        self._routes = Routes(target, legacy, adopt)
        self._replaced: list[tuple[Any, str, bool, Any, Any]] = []

    def put(self) -> None:
        """Replace all, or nothing."""
        try:
            for owner, name, make in self._plan():
                before = inspect.getattr_static(owner, name)
                wrapper = make(before)
                self._replaced.append((owner, name, name in vars(owner), before, wrapper))
                setattr(owner, name, wrapper)
        except BaseException:
            self.restore()
            raise
        self._routes.on = True

    def _plan(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        routes = self._routes
        import_module("lionwt.lionagi.lifecycle")
        for name, override in seams.OPERATIONS.items():
            make = routes.stream if name in seams.STREAMS else routes.operation
            yield routes.target, name, partial(make, name, override)
        for name in hooks.METHODS:
            yield routes.target, name, partial(getattr(hooks, name.strip("_")), routes)
        run, chat = import_module(seams.RUN), import_module(seams.CHAT)
        yield run, "run", routes.run
        for module in (run, chat):
            yield module, "_apply_context_providers", partial(hooks.providers, routes)

    def take_back(self) -> None:
        """Route nothing any more; restore the rest when no turn needs it."""
        global _leaving
        self._routes.on = False
        live = hosts.live()
        if not live:
            self.restore()
            return
        self._put_back([row for row in self._replaced if row[0] is self._routes.target and row[1] in seams.OPERATIONS])
        _leaving = self
        waiting = {id(context) for context in live}

        def ended(key: int) -> None:
            waiting.discard(key)
            with _lock:
                if not waiting and _leaving is self:
                    self.restore()

        for context in live:  # let go of when its turn has ended
            weakref.finalize(context, ended, id(context)).atexit = False

    def restore(self) -> None:
        """Put back all that was there; what somebody else has replaced meanwhile stays theirs."""
        global _leaving
        _leaving = None
        self._put_back(self._replaced)
        for branch, _ in hosts.everything():
            if isinstance(branch, self._routes.target):
                swap_callback(branch, self._routes.new_schedule, self._routes.schedule)

    def _put_back(self, rows: list[tuple[Any, str, bool, Any, Any]]) -> None:
        for owner, name, own, before, wrapper in reversed(rows):
            if vars(owner).get(name) is not wrapper:
                continue
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
