"""Two drivers that are wrong on purpose, so that every scenario can be seen to fail.

`NAIVE` is what one writes first: a lock, one slot in a ContextVar, its token, a plain `finally`.
`CARELESS` is worse in other ways: no lock, an override that stays, observers that can break the
turn, a host that remembers every turn. Neither is imported by anything but the tests.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
import uuid
from collections.abc import AsyncIterator
from typing import Any

from lionwt import turn as words

_slot: contextvars.ContextVar[Any] = contextvars.ContextVar("slot", default=None)


class TurnState:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.active: Any = None
        self.last_report: Any = None
        self.control: Any = None
        self.signals: list[asyncio.Task[Any]] = []


def _nested_in(branch: Any) -> Any:
    bound = _slot.get()
    return bound[1] if bound is not None and bound[0] is branch else None


def _context(branch: Any, model: Any) -> Any:
    return words.TurnExecutionContext(
        uuid.uuid4(),
        branch.turn_model(model),
        asyncio.current_task(),  # type: ignore[arg-type]
    )


async def run_in_turn(branch: Any, *, model: Any = None, invoke: Any) -> Any:
    context = _nested_in(branch)
    if context is not None:
        return await invoke(words.TurnScope(context, False))
    state = branch.turn_state
    async with state.lock:
        context = _context(branch, model)
        state.active = context
        token = _slot.set((branch, context))
        await branch.turn_emit(words.RunStart(context.turn_id))
        terminal: Any = None
        try:
            result = await invoke(words.TurnScope(context, True))
            terminal = words.RunEnd(context.turn_id)
            return result
        except BaseException as exc:
            terminal = words.RunFailed(context.turn_id, exc)
            raise
        finally:
            await drain_signals(branch)
            await branch.turn_emit(terminal)
            state.last_report = context.provider_report
            state.active = None
            _slot.reset(token)


async def stream_in_turn(branch: Any, *, model: Any = None, invoke: Any) -> AsyncIterator[Any]:
    context = _nested_in(branch)
    if context is not None:
        async for item in invoke(words.TurnScope(context, False)):
            yield item
        return
    state = branch.turn_state
    async with state.lock:
        context = _context(branch, model)
        state.active = context
        token = _slot.set((branch, context))
        await branch.turn_emit(words.RunStart(context.turn_id))
        terminal: Any = None
        source = invoke(words.TurnScope(context, True))
        try:
            async for item in source:
                yield item
            terminal = words.RunEnd(context.turn_id)
        except words.StopStream:
            terminal = words.RunEnd(context.turn_id)
        except BaseException as exc:
            terminal = words.RunFailed(context.turn_id, exc)
            raise
        finally:
            if hasattr(source, "aclose"):
                await source.aclose()
            await drain_signals(branch)
            await branch.turn_emit(terminal)
            state.last_report = context.provider_report
            state.active = None
            _slot.reset(token)


def current_scope(branch: Any) -> Any:
    context = _nested_in(branch)
    return None if context is None else words.TurnScope(context, True)


def control(branch: Any, directive: Any, *, reason: Any = None, turn_id: Any = None) -> bool:
    branch.turn_state.control = words.LoopControl(directive, reason)
    return branch.turn_state.active is not None


def poll_control(branch: Any, *, turn_id: Any = None) -> Any:
    taken, branch.turn_state.control = branch.turn_state.control, None
    return taken


def check_control(branch: Any, *, turn_id: Any = None) -> None:
    taken = poll_control(branch)
    if taken is not None and taken.directive is words.LoopDirective.BREAK:
        raise words.LoopBreak(taken.reason)
    if taken is not None and taken.directive is words.LoopDirective.CANCEL:
        raise words.StopStream(taken.reason)


def schedule_signal(branch: Any, factory: Any) -> Any:
    task = asyncio.ensure_future(factory())
    branch.turn_state.signals.append(task)
    return task


async def drain_signals(branch: Any) -> None:
    tasks, branch.turn_state.signals = branch.turn_state.signals, []
    await asyncio.gather(*tasks)


def last_context_report(branch: Any) -> Any:
    return branch.turn_state.last_report


NAIVE = types.SimpleNamespace(
    **{name: getattr(words, name) for name in words.__all__},
)
for _function in (
    TurnState,
    run_in_turn,
    stream_in_turn,
    current_scope,
    control,
    poll_control,
    check_control,
    schedule_signal,
    drain_signals,
    last_context_report,
):
    setattr(NAIVE, _function.__name__, _function)


class _Kept(TurnState):
    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Any] = []


async def _careless_run(branch: Any, *, model: Any = None, invoke: Any) -> Any:
    state = branch.turn_state
    context = _context(branch, model)
    state.active = context
    state.turns.append(context)
    branch.model = context.model
    await branch.turn_emit(words.RunStart(context.turn_id))
    try:
        result = await invoke(words.TurnScope(context, True))
    except Exception as exc:
        await branch.turn_emit(words.RunFailed(context.turn_id, exc))
        raise
    finally:
        state.last_report = context.provider_report or state.last_report
        state.active = None
    await branch.turn_emit(words.RunEnd(context.turn_id))
    return result


async def _careless_stream(branch: Any, *, model: Any = None, invoke: Any) -> AsyncIterator[Any]:
    async def collect(scope: Any) -> list[Any]:
        return [item async for item in invoke(scope)]

    for item in await _careless_run(branch, model=model, invoke=collect):
        yield item


CARELESS = types.SimpleNamespace(**vars(NAIVE))
CARELESS.TurnState = _Kept
CARELESS.run_in_turn = _careless_run
CARELESS.stream_in_turn = _careless_stream
