"""The terminal matrix of ADR-0018 D4, row by row."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from turn_harness import Held, Host, assert_idle, forever, items, quick, settled, soon, spin

# Each path ends one turn on `host`, and returns what its caller got: a value or an exception.


async def coroutine_returns(turn: Any, host: Host, body: Any) -> Any:
    async def invoke(scope: Any) -> str:
        await body(scope)
        return "result"

    return await turn.run_in_turn(host, invoke=invoke)


async def stream_is_exhausted(turn: Any, host: Host, body: Any) -> Any:
    return [item async for item in turn.stream_in_turn(host, invoke=_stream(body))]


async def stream_raises(turn: Any, host: Host, body: Any, error: BaseException) -> Any:
    got = []
    try:
        async for item in turn.stream_in_turn(host, invoke=_stream(body, error)):
            got.append(item)
    except BaseException as exc:
        return exc
    return got


async def coroutine_raises(turn: Any, host: Host, body: Any, error: BaseException) -> Any:
    async def invoke(scope: Any) -> None:
        await body(scope)
        raise error

    try:
        return await turn.run_in_turn(host, invoke=invoke)
    except BaseException as exc:
        return exc


async def stream_is_closed(turn: Any, host: Host, body: Any) -> Any:
    stream = turn.stream_in_turn(host, invoke=_stream(body))
    first = await stream.__anext__()
    await stream.aclose()
    return [first]


async def stream_is_thrown_generator_exit(turn: Any, host: Host, body: Any) -> Any:
    stream = turn.stream_in_turn(host, invoke=_stream(body))
    await stream.__anext__()
    try:
        await stream.athrow(GeneratorExit())
    except GeneratorExit as exc:
        return exc


async def coroutine_is_cancelled(turn: Any, host: Host, body: Any) -> Any:
    held = Held()

    async def invoke(scope: Any) -> None:
        await body(scope)
        await held(scope)

    task = asyncio.create_task(turn.run_in_turn(host, invoke=invoke))
    await soon(held.began.wait())
    task.cancel()
    return await settled(task)


async def stream_step_is_cancelled(turn: Any, host: Host, body: Any) -> Any:
    held = Held()

    async def source(scope: Any) -> Any:
        await body(scope)
        yield 1
        await held(scope)

    async def consume() -> None:
        async for _ in turn.stream_in_turn(host, invoke=source):
            pass

    task = asyncio.create_task(consume())
    await soon(held.began.wait())
    task.cancel()
    return await settled(task)


async def cancelled_waiting_for_the_lock(turn: Any, host: Host, body: Any) -> Any:
    async with _elsewhere(turn, host):
        task = asyncio.create_task(turn.run_in_turn(host, invoke=body))
        await spin()
        task.cancel()
        return await settled(task)


async def stream_never_iterated(turn: Any, host: Host, body: Any) -> Any:
    stream = turn.stream_in_turn(host, invoke=items(1))
    await stream.aclose()
    del stream
    turn.stream_in_turn(host, invoke=items(1))
    return None


ERROR = ValueError("provider")
BREAK = "LoopBreak"
STOP = "StopStream"
CANCELLED = asyncio.CancelledError

MATRIX = [
    # path after the lock was acquired        raised   terminal     what the caller gets
    (coroutine_returns, None, "RunEnd", "result"),
    (stream_is_exhausted, None, "RunEnd", [1, 2]),
    (stream_raises, STOP, "RunEnd", [1, 2]),
    (coroutine_raises, STOP, "RunEnd", STOP),
    (stream_is_closed, None, "RunEnd", [1]),
    (stream_is_thrown_generator_exit, None, "RunEnd", GeneratorExit),
    (coroutine_raises, ERROR, "RunFailed", ERROR),
    (stream_raises, ERROR, "RunFailed", ERROR),
    (coroutine_raises, BREAK, "RunFailed", BREAK),
    (stream_raises, BREAK, "RunFailed", BREAK),
    (coroutine_is_cancelled, None, "RunFailed", CANCELLED),
    (stream_step_is_cancelled, None, "RunFailed", CANCELLED),
    (cancelled_waiting_for_the_lock, None, None, CANCELLED),
    (stream_never_iterated, None, None, None),
]


@pytest.mark.parametrize(
    ("path", "raised", "terminal", "caller_gets"),
    MATRIX,
    ids=[f"{row[0].__name__}-{row[1]}" for row in MATRIX],
)
async def test_every_path_has_its_terminal_its_answer_and_the_same_cleanup(
    turn: Any, mode: str, path: Any, raised: Any, terminal: str | None, caller_gets: Any
) -> None:
    host = Host(turn)
    ended: list[str] = []
    scopes: list[Any] = []

    async def child() -> None:
        async def nested(scope: Any) -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(0)
                ended.append("nested task")

        await turn.run_in_turn(host, invoke=nested)

    async def signal() -> None:
        await asyncio.sleep(0)
        ended.append("signal")

    async def body(scope: Any) -> None:
        scopes.append(scope)
        host.keep = asyncio.create_task(child())  # type: ignore[attr-defined]
        await spin(3)
        turn.schedule_signal(host, signal)

    async def at_end(_: Any) -> None:
        ended.append("terminal")

    host.on["RunEnd"] = host.on["RunFailed"] = at_end
    error = {BREAK: turn.LoopBreak("b"), STOP: turn.StopStream("s")}.get(raised, raised)
    got = await (path(turn, host, body) if error is None else path(turn, host, body, error))

    if caller_gets in (BREAK, STOP, ERROR):
        assert got is error
    elif isinstance(caller_gets, type):
        assert type(got) is caller_gets
    else:
        assert got == caller_gets
    if terminal is None:
        assert host.names == []
        assert scopes == []
    else:
        assert host.names == ["RunStart", terminal]
        start, end = host.signals
        assert start.turn_id == end.turn_id == scopes[0].context.turn_id
        if terminal == "RunFailed":
            assert type(end.data) is type(got)
            assert caller_gets is CANCELLED or end.data is got
        assert sorted(ended[:-1]) == ["nested task", "signal"]
        assert ended[-1] == "terminal"
        assert scopes[0].context.phase == "closed"
    await assert_idle(turn, host)


def _stream(body: Any, error: BaseException | None = None) -> Any:
    async def source(scope: Any) -> Any:
        await body(scope)
        yield 1
        yield 2
        if error is not None:
            raise error

    return source


@contextlib.asynccontextmanager
async def _elsewhere(turn: Any, host: Host) -> Any:
    """Another turn holds the lock, unseen and unheard."""
    held = Held()
    host.observed = False
    task = asyncio.create_task(turn.run_in_turn(host, invoke=held))
    await soon(held.began.wait())
    host.observed = True
    yield
    host.observed = False
    held.go.set()
    await soon(task)
    await soon(turn.run_in_turn(host, invoke=quick))
    host.observed = True
