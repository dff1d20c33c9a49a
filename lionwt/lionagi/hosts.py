"""A lionagi Branch as the turn driver sees it: what is kept of it, its signals, a view with a model.

What belongs to a branch is kept beside it, by identity: lionagi compares branches by id, copies
their private state, and writes the rest out. Nothing is added to a branch, so nothing of a turn is
copied, pickled or stored with one, and it is forgotten with it.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from lionwt import turn
from lionwt.lionagi import seams

#: lionagi's suppression flag as it was outside of the ReAct calls that this code is inside of: what
#: they set is meant for their own branch, and must not silence another.
outside_react: ContextVar[bool | None] = ContextVar("lionwt_outside_react", default=None)


class Kept:
    """What is kept of one branch, for as long as it lives."""

    __slots__ = ("__weakref__", "_key", "begun", "branch", "start", "state", "streaming")

    def __init__(self, branch: Any) -> None:
        self._key = id(branch)
        self.branch = weakref.ref(branch, self._forget)
        self.state = turn.TurnState()
        self.begun = False  # whether there has been a turn
        self.start: Any = None  # a RunStart that waits until lionagi sends its own
        self.streaming: weakref.ref[Any] | None = None  # the context of the turn that Branch.run opened
        _kept[self._key] = self

    def _forget(self, _: object) -> None:
        if _kept.get(self._key) is self:
            del _kept[self._key]


_kept: dict[int, Kept] = {}


def kept_of(branch: Any) -> Kept:
    """What is kept of `branch`, made when it is first asked for."""
    kept = known(branch)
    return Kept(branch) if kept is None else kept


def known(branch: Any) -> Kept | None:
    """What is kept of `branch`, or None."""
    return _kept.get(id(branch))  # an id is used again only after `_forget`


def everything() -> Iterator[tuple[Any, Kept]]:
    """Every branch of which something is kept, and what is."""
    for kept in tuple(_kept.values()):
        branch = kept.branch()
        if branch is not None:
            yield branch, kept


def live() -> list[turn.TurnExecutionContext]:
    """The turns that are active now; one whose event loop is closed has ended."""
    active = [kept.state.active for _, kept in everything()]
    return [context for context in active if context and not context.owner_task.get_loop().is_closed()]


class Host:
    """One entry into a branch's turns: a `TurnHost`.

    Whether anyone listens is settled when the turn begins, so that there is a pair or nothing.
    `emit` is lionagi's own way to send a lifecycle signal: it logs what an observer raises.
    """

    __slots__ = ("_adopt", "_branch", "_emit", "_model", "_observed", "_run", "kept", "turn_state")

    def __init__(self, branch: Any, emit: Any, *, model: str = "chat_model", run: bool = False, adopt: bool = False):
        self.kept = kept_of(branch)
        self.turn_state = self.kept.state
        self._branch = branch
        self._emit = emit
        self._model = model
        self._run = run
        self._adopt = adopt
        self._observed: bool | None = None

    def turn_model(self, override: Any) -> Any:
        kept = self.kept
        if not kept.begun:  # until now the report was lionagi's
            kept.state.last_report = self._branch.last_context_report
            kept.begun = True
        kept.start = None
        return getattr(self._branch, self._model) if override is None else override

    def turn_observed(self) -> bool:
        if self._observed is None:
            self._observed = self._branch._observer is not None and not (self._run and silenced())
        return self._observed

    async def turn_emit(self, signal: turn.TurnSignal) -> None:
        from lionwt.lionagi import lifecycle

        kept, stamp = self.kept, signal.turn_id
        if isinstance(signal, turn.RunStart):
            event = lifecycle.RunStart(turn_id=stamp)
            if self._adopt and not _flag().get():
                kept.start = event
                return
        elif isinstance(signal, turn.RunEnd):
            event = lifecycle.run_end(self._branch, stamp, signal.duration_ms, signal.data)
        elif isinstance(signal.data, import_module(seams.OBSERVE).StopStream):
            event = lifecycle.run_end(self._branch, stamp, 0.0, None)  # a clean stop: ADR-0018 D4
        else:
            event = lifecycle.RunFailed(turn_id=stamp, data=signal.data)
        kept.start = None
        await self._emit(self._branch, event)


def _flag() -> ContextVar[bool]:
    flag: ContextVar[bool] = import_module(seams.LIFECYCLE).suppress_lifecycle_var
    return flag


def silenced() -> bool:
    """Whether who runs this asked lionagi for silence, other than a ReAct turn of lionagi itself."""
    outside = outside_react.get()
    return _flag().get() if outside is None else outside


class View:
    """A branch with a model of its own, for one run: all else is the branch (ADR-0018 D3).

    lionagi's run sends its lifecycle signals through it; they are the turn's, and sent once. It sets
    the model of one call on its branch; here it reaches this view alone.
    """

    __slots__ = ("_lionwt_branch", "_lionwt_model")

    def __init__(self, branch: Any, model: Any) -> None:
        object.__setattr__(self, "_lionwt_branch", branch)
        object.__setattr__(self, "_lionwt_model", model)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return type(self._lionwt_branch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lionwt_branch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "chat_model":
            setattr(self._lionwt_branch, name, value)
            return
        if not isinstance(value, import_module("lionagi.service.imodel").iModel):
            raise TypeError("Input model is not an instance of iModel")
        object.__setattr__(self, "_lionwt_model", value)

    def __repr__(self) -> str:
        return repr(self._lionwt_branch)

    def __eq__(self, other: object) -> bool:
        return bool(self._lionwt_branch == other)

    def __hash__(self) -> int:
        return hash(self._lionwt_branch)

    @property
    def chat_model(self) -> Any:
        return self._lionwt_model

    async def emit(self, event: Any) -> list[Any]:
        from lionwt.lionagi import lifecycle

        branch = self._lionwt_branch
        if type(event) not in lifecycle.PLAIN:
            answers: list[Any] = await branch.emit(event)
            return answers
        kept = kept_of(branch)
        start, kept.start = kept.start, None
        return [] if start is None or type(event) is not lifecycle.PLAIN[0] else await branch.emit(start)


def real(branch: Any) -> Any:
    """The branch itself, of a view as well."""
    return branch._lionwt_branch if type(branch) is View else branch


def outside_asyncio() -> bool:
    """Whether another library than asyncio runs this: turns are asyncio's, lionagi's calls are not."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        trio = sys.modules.get("trio")
        return trio is not None and bool(trio.lowlevel.in_trio_run())
    return False
