"""What can happen to a turn, scenario by scenario. The number is in each test's docstring."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import threading
import uuid
import weakref
from typing import Any

import anyio
import pytest
from turn_harness import (
    Held,
    Host,
    assert_idle,
    at_once,
    forever,
    holding,
    items,
    new_loop,
    outcome,
    quick,
    run,
    settled,
    soon,
    spin,
    until,
)

# 1-3: order, and cancellation before and while active


@pytest.mark.parametrize("contenders", [3, 100])
async def test_turns_run_one_by_one_in_the_order_they_were_asked_for(turn: Any, contenders: int) -> None:
    """Scenario 1."""
    host = Host(turn)
    order: list[str] = []

    async def call(number: int) -> None:
        async def invoke(scope: Any) -> None:
            order.append(f"in {number}")
            await spin(2)
            order.append(f"out {number}")

        await turn.run_in_turn(host, invoke=invoke)

    await asyncio.gather(*(asyncio.create_task(call(n)) for n in range(contenders)))
    assert order == [f"{what} {n}" for n in range(contenders) for what in ("in", "out")]
    assert host.names == ["RunStart", "RunEnd"] * contenders
    ids = [signal.turn_id for signal in host.signals]
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == contenders
    await assert_idle(turn, host)


@pytest.mark.parametrize("kind", ["coroutine", "stream"])
@pytest.mark.parametrize("woken", [False, True])
async def test_a_caller_cancelled_before_its_turn_leaves_it_to_the_next(turn: Any, kind: str, woken: bool) -> None:
    """Scenario 2: cancelled while waiting, and just after being woken."""
    host = Host(turn)
    ran: list[str] = []

    async def body(scope: Any) -> None:
        ran.append("cancelled one")

    async def stream(scope: Any) -> Any:
        ran.append("cancelled one")
        yield 1

    async def first_step() -> None:
        await turn.stream_in_turn(host, invoke=stream).__anext__()

    async def last() -> None:
        ran.append("next one")

    async with holding(turn, host) as held:
        call = first_step() if kind == "stream" else turn.run_in_turn(host, invoke=body)
        waiting = asyncio.create_task(call)
        await spin()
        following = asyncio.create_task(turn.run_in_turn(host, invoke=lambda scope: last()))
        await spin()
        if woken:
            held.go.set()
            await at_once(lambda: host.turn_state.active is None, waiting.cancel)
        waiting.cancel()
        assert isinstance(await settled(waiting), asyncio.CancelledError)
        held.go.set()
        await soon(following)
    assert ran == ["next one"]
    assert host.names == ["RunStart", "RunEnd"] * 2
    await assert_idle(turn, host)


@pytest.mark.parametrize("way", ["close", "drop", "close a step"])
@pytest.mark.parametrize("woken", [False, True])
async def test_a_waiting_coroutine_that_is_closed_or_dropped_leaks_nothing(turn: Any, way: str, woken: bool) -> None:
    """Scenario 2: the hand-over is not lost with it."""
    host = Host(turn)
    async with holding(turn, host) as held:
        waiting: Any = None
        if way == "close a step":
            waiting = turn.stream_in_turn(host, invoke=items(1)).__anext__()
        else:
            waiting = turn.run_in_turn(host, invoke=forever)
        waiting.send(None)
        following = asyncio.create_task(turn.run_in_turn(host, invoke=quick))
        await spin()

        def end() -> None:
            nonlocal waiting
            if way != "drop":
                waiting.close()
            waiting = None
            gc.collect()

        if woken:
            held.go.set()
            await at_once(lambda: host.turn_state.active is None, end)
        else:
            end()
        held.go.set()
        assert await soon(following) == "ok"
    assert host.names == ["RunStart", "RunEnd"] * 2
    await assert_idle(turn, host)


@pytest.mark.parametrize("where", ["body", "start observer"])
async def test_a_turn_cancelled_while_active_fails_and_frees_the_conversation(turn: Any, where: str) -> None:
    """Scenario 3."""
    host = Host(turn)
    reached = asyncio.Event()

    async def stuck(_: Any) -> None:
        reached.set()
        await forever()

    if where == "start observer":
        host.on["RunStart"] = stuck
    task = asyncio.create_task(turn.run_in_turn(host, invoke=stuck))
    await soon(reached.wait())
    task.cancel()
    assert isinstance(await settled(task), asyncio.CancelledError)
    assert host.names == ["RunStart", "RunFailed"]
    assert isinstance(host.signals[1].data, asyncio.CancelledError)
    await assert_idle(turn, host)


# 4-5: cancellation of the end


class Slow:
    """A terminal observer that says when it runs and ends when told to."""

    def __init__(self, host: Host) -> None:
        self.began = asyncio.Event()
        self.go = asyncio.Event()
        self.done = False
        host.on["RunEnd"] = host.on["RunFailed"] = self

    async def __call__(self, signal: Any) -> None:
        self.began.set()
        await self.go.wait()
        self.done = True


@pytest.mark.parametrize("kind", ["coroutine", "stream"])
async def test_cancelling_the_end_of_a_good_turn_twice_changes_only_what_the_caller_gets(turn: Any, kind: str) -> None:
    """Scenario 4: RunEnd, once; the cancellation after the cleanup."""
    host = Host(turn)
    slow = Slow(host)

    async def consume() -> list[Any]:
        return [item async for item in turn.stream_in_turn(host, invoke=items(1))]

    call = consume() if kind == "stream" else turn.run_in_turn(host, invoke=quick)
    task = asyncio.create_task(call)
    await soon(slow.began.wait())
    for _ in range(2):
        task.cancel()
        await spin()
        assert not task.done()
    slow.go.set()
    assert isinstance(await settled(task), asyncio.CancelledError)
    assert slow.done
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_the_error_of_the_body_wins_over_a_cancellation_of_its_end(turn: Any) -> None:
    """Scenario 4: and the task stays cancelled, as far as it knows."""
    host = Host(turn)
    slow = Slow(host)
    seen: list[Any] = []

    async def body(scope: Any) -> None:
        raise ValueError("body")

    async def call() -> None:
        try:
            await turn.run_in_turn(host, invoke=body)
        except BaseException as exc:
            seen.append(exc)
            if sys.version_info >= (3, 11):
                seen.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]

    task = asyncio.create_task(call())
    await soon(slow.began.wait())
    task.cancel()
    await spin()
    slow.go.set()
    await settled(task)
    assert isinstance(seen[0], ValueError)
    assert seen[1:] == ([1] if sys.version_info >= (3, 11) else [])
    assert slow.done
    assert host.names == ["RunStart", "RunFailed"]
    await assert_idle(turn, host)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is new in 3.11")
async def test_a_timeout_during_the_end_is_a_timeout_after_the_end(turn: Any) -> None:
    """Scenario 4: asyncio.timeout takes its own cancellation back; the driver does not."""
    host = Host(turn)
    slow = Slow(host)
    left: list[Any] = []

    async def call() -> None:
        try:
            async with asyncio.timeout(None) as timeout:
                host.timeout = timeout  # type: ignore[attr-defined]
                await turn.run_in_turn(host, invoke=quick)
        finally:
            left.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]

    task = asyncio.create_task(call())
    await soon(slow.began.wait())
    timeout = host.timeout  # type: ignore[attr-defined]
    timeout.reschedule(asyncio.get_running_loop().time())
    await until(timeout.expired)
    await spin()
    assert not task.done()
    slow.go.set()
    assert isinstance(await settled(task), TimeoutError)
    assert left == [0]
    assert slow.done
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_a_nested_task_that_is_slow_to_end_is_awaited_through_every_cancellation(
    turn: Any,
) -> None:
    """Scenario 4: the same for the other steps of the end."""
    host = Host(turn)
    cleaning, go, order = asyncio.Event(), asyncio.Event(), []

    async def nested(scope: Any) -> None:
        try:
            await forever()
        finally:
            cleaning.set()
            await go.wait()
            order.append("nested")

    async def terminal(_: Any) -> None:
        order.append("terminal")

    async def body(scope: Any) -> None:
        host.kept = asyncio.create_task(turn.run_in_turn(host, invoke=nested))  # type: ignore[attr-defined]
        await spin()

    host.on["RunEnd"] = terminal
    task = asyncio.create_task(turn.run_in_turn(host, invoke=body))
    await soon(cleaning.wait())
    for _ in range(3):
        task.cancel()
        await spin()
    assert order == []
    go.set()
    assert isinstance(await settled(task), asyncio.CancelledError)
    assert order == ["nested", "terminal"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("kind", ["coroutine", "stream"])
async def test_under_an_anyio_cancel_scope_the_end_completes_without_spinning(turn: Any, kind: str) -> None:
    """Scenario 5: anyio cancels again on every pass of the loop until it gets through."""
    host = Host(turn)
    slow = Slow(host)
    loop = asyncio.get_running_loop()
    passes = 0
    call_soon = loop.call_soon

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return call_soon(*args, **kwargs)

    async def source(scope: Any) -> Any:
        yield 1
        await forever()

    async def call(scope: anyio.CancelScope) -> None:
        if kind == "coroutine":
            await turn.run_in_turn(host, invoke=forever)
        async for _ in turn.stream_in_turn(host, invoke=source):
            scope.cancel()

    async def scoped() -> str:
        with anyio.CancelScope() as scope:
            loop.call_soon(scope.cancel)
            await call(scope)
        return "after" if scope.cancelled_caught else "not caught"

    task = asyncio.create_task(scoped())
    await soon(slow.began.wait())
    loop.call_soon = counting  # type: ignore[method-assign]
    ended = asyncio.Event()
    loop.call_later(0.1, ended.set)
    await soon(ended.wait())
    loop.call_soon = call_soon  # type: ignore[method-assign]
    assert passes < 20
    assert not task.done()
    slow.go.set()
    assert await settled(task) == "after"
    assert slow.done
    assert host.names == ["RunStart", "RunFailed"]
    await assert_idle(turn, host)


# 6-8: what is nested


@pytest.mark.parametrize("way", ["same task", "gather", "child task", "stream"])
async def test_a_call_from_inside_a_turn_shares_it(turn: Any, way: str) -> None:
    """Scenario 6."""
    host = Host(turn)
    scopes: list[Any] = []
    current: list[Any] = []

    async def nested(scope: Any) -> str:
        scopes.append(scope)
        current.append(turn.current_scope(host))
        return "nested"

    async def nested_stream(scope: Any) -> Any:
        yield await nested(scope)

    async def body(scope: Any) -> Any:
        assert turn.current_scope(host) is scope
        scopes.append(scope)
        if way == "stream":
            got = [item async for item in turn.stream_in_turn(host, invoke=nested_stream)]
        elif way == "same task":
            got = [await turn.run_in_turn(host, invoke=nested)]
        elif way == "gather":
            got = await asyncio.gather(turn.run_in_turn(host, invoke=nested), turn.run_in_turn(host, invoke=nested))
        else:
            got = [await asyncio.create_task(turn.run_in_turn(host, invoke=nested))]
        assert turn.current_scope(host) is scope
        return got

    got = await soon(turn.run_in_turn(host, invoke=body))
    assert set(got) == {"nested"}
    owner, *inner = scopes
    assert owner.owns_lifecycle
    assert inner
    assert all(scope.context is owner.context for scope in inner)
    assert not any(scope.owns_lifecycle for scope in (*inner, *current))
    assert host.names == ["RunStart", "RunEnd"]
    assert host.overrides == [None]
    await assert_idle(turn, host)


@pytest.mark.parametrize("body_fails", [False, True])
async def test_a_nested_task_that_is_not_done_is_cancelled_and_awaited_before_the_drain(
    turn: Any, body_fails: bool
) -> None:
    """Scenario 7: it is cleanup, and not a second failure."""
    host = Host(turn)
    order: list[str] = []

    async def nested(scope: Any) -> None:
        try:
            await forever()
        finally:
            await spin(3)
            order.append("nested ended")

    async def signal() -> None:
        await until(lambda: order)
        order.append("signal")

    async def terminal(_: Any) -> None:
        order.append("terminal")

    async def body(scope: Any) -> str:
        host.kept = asyncio.create_task(turn.run_in_turn(host, invoke=nested))  # type: ignore[attr-defined]
        turn.schedule_signal(host, signal)
        await spin()
        if body_fails:
            raise ValueError("body")
        return "result"

    host.on["RunEnd"] = host.on["RunFailed"] = terminal
    got = await soon(outcome(turn.run_in_turn(host, invoke=body)))
    assert isinstance(got, ValueError) if body_fails else got == "result"
    assert order == ["nested ended", "signal", "terminal"]
    assert host.kept.cancelled()  # type: ignore[attr-defined]
    assert host.names == ["RunStart", "RunFailed" if body_fails else "RunEnd"]
    await assert_idle(turn, host)


async def test_the_failure_of_a_nested_task_matters_only_to_who_awaits_it(turn: Any, caplog: Any) -> None:
    """Scenario 7."""
    host = Host(turn)

    async def fails(scope: Any) -> None:
        raise ValueError("child")

    async def ignoring(scope: Any) -> str:
        asyncio.create_task(turn.run_in_turn(host, invoke=fails), name="ignored")  # noqa: RUF006
        await spin()
        return "result"

    async def awaiting(scope: Any) -> None:
        await asyncio.create_task(turn.run_in_turn(host, invoke=fails))

    with caplog.at_level(logging.WARNING):
        assert await soon(turn.run_in_turn(host, invoke=ignoring)) == "result"
        assert isinstance(await outcome(turn.run_in_turn(host, invoke=awaiting)), ValueError)
    assert "ignored failed inside a turn" in caplog.text
    assert host.names == ["RunStart", "RunEnd", "RunStart", "RunFailed"]
    await assert_idle(turn, host)


async def test_a_child_that_outlives_its_turn_starts_one_of_its_own(turn: Any) -> None:
    """Scenario 8: its binding is stale, also while another turn is active."""
    host = Host(turn)
    go = asyncio.Event()
    scopes: list[Any] = []

    async def late() -> None:
        await go.wait()
        await turn.run_in_turn(host, invoke=lambda scope: note(scope))

    async def note(scope: Any) -> None:
        scopes.append(scope)

    async def body(scope: Any) -> asyncio.Task[None]:
        scopes.append(scope)
        return asyncio.create_task(late())

    child = await turn.run_in_turn(host, invoke=body)
    async with holding(turn, host) as held:
        go.set()
        await spin()
        assert len(scopes) == 1
        held.go.set()
        await soon(child)
    assert scopes[1].owns_lifecycle
    assert scopes[1].context.turn_id not in (scopes[0].context.turn_id, held.scope.context.turn_id)
    assert host.names == ["RunStart", "RunEnd"] * 3
    await assert_idle(turn, host)


async def test_a_child_that_calls_while_its_turn_is_ending_is_refused_at_once(turn: Any) -> None:
    """Scenario 8."""
    host = Host(turn)
    slow = Slow(host)

    async def late() -> Any:
        await slow.began.wait()
        return await outcome(turn.run_in_turn(host, invoke=quick))

    async def body(scope: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(late())

    task = asyncio.create_task(turn.run_in_turn(host, invoke=body))
    await soon(slow.began.wait())
    await spin()
    slow.go.set()
    child = await settled(task)
    assert isinstance(await settled(child), turn.TurnFinalizingError)
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("kind", ["coroutine", "stream"])
async def test_a_terminal_observer_that_calls_is_refused_and_may_call_later(turn: Any, kind: str) -> None:
    """Scenario 8: refused in place and before the close; a turn of its own after it."""
    host = Host(turn)
    got: list[Any] = []
    tasks: list[Any] = []
    go = asyncio.Event()

    async def after() -> Any:
        await go.wait()
        return await outcome(turn.run_in_turn(host, invoke=quick))

    async def terminal(_: Any) -> None:
        host.on.clear()
        got.append(await outcome(turn.run_in_turn(host, invoke=quick)))
        step = turn.stream_in_turn(host, invoke=items(1)).__anext__()
        got.append(await outcome(step))
        before = asyncio.create_task(outcome(turn.run_in_turn(host, invoke=quick)))
        tasks.append(asyncio.create_task(after()))
        got.append(await before)

    host.on["RunEnd"] = terminal
    if kind == "coroutine":
        assert await soon(turn.run_in_turn(host, invoke=quick)) == "ok"
    else:
        stream = turn.stream_in_turn(host, invoke=items(1))
        assert [item async for item in stream] == [1]
    assert [type(error) for error in got] == [turn.TurnFinalizingError] * 3
    assert host.names == ["RunStart", "RunEnd"]
    go.set()
    assert await settled(tasks[0]) == "ok"
    assert host.names == ["RunStart", "RunEnd"] * 2
    await assert_idle(turn, host)


async def test_a_start_observer_that_calls_is_nested(turn: Any) -> None:
    """Scenario 8."""
    host = Host(turn)
    scopes: list[Any] = []

    async def note(scope: Any) -> None:
        scopes.append(scope)

    async def start(_: Any) -> None:
        await turn.run_in_turn(host, invoke=note)

    host.on["RunStart"] = start
    await soon(turn.run_in_turn(host, invoke=note))
    nested, owner = scopes
    assert nested.context is owner.context
    assert (nested.owns_lifecycle, owner.owns_lifecycle) == (False, True)
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


# 9-10: several conversations


async def test_a_turn_on_another_conversation_gives_the_outer_one_back(turn: Any) -> None:
    """Scenario 9: A, then B in A, then A again, and A inside B."""
    a, b = Host(turn), Host(turn)

    async def in_a_again(scope: Any) -> Any:
        return scope

    async def in_b(scope: Any) -> Any:
        return await turn.run_in_turn(a, invoke=in_a_again)

    async def in_a(scope: Any) -> None:
        assert turn.current_scope(a) is scope
        inner = await turn.run_in_turn(b, invoke=in_b)
        assert inner.context is scope.context
        assert not inner.owns_lifecycle
        assert turn.current_scope(b) is None
        assert turn.current_scope(a) is scope
        again = await turn.run_in_turn(a, invoke=in_a_again)
        assert again.context is scope.context

    await soon(turn.run_in_turn(a, invoke=in_a))
    assert a.names == b.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, a)
    await assert_idle(turn, b)


async def test_two_tasks_that_wait_for_each_other_can_be_cancelled_and_leave_nothing(turn: Any, caplog: Any) -> None:
    """Scenario 10: the text has no timeout; a debug line names who waits for whom."""
    a, b = Host(turn), Host(turn)
    ids: dict[str, Any] = {}

    async def cross(mine: Host, other: Host, name: str, ready: Any, go: Any) -> None:
        async def body(scope: Any) -> None:
            ids[name] = scope.context.turn_id
            ready.set()
            await go.wait()
            await turn.run_in_turn(other, invoke=quick)

        await asyncio.sleep(0)  # an eager task has its name only after its first step
        await turn.run_in_turn(mine, invoke=body)

    ready = [asyncio.Event(), asyncio.Event()]
    with caplog.at_level(logging.DEBUG):
        one = asyncio.create_task(cross(a, b, "one", *ready), name="one")
        two = asyncio.create_task(cross(b, a, "two", *ready[::-1]), name="two")
        await spin(50)
    assert not one.done()
    assert not two.done()
    assert f"one waits for turn {ids['two']} of two" in caplog.text
    assert f"two waits for turn {ids['one']} of one" in caplog.text
    one.cancel()
    assert isinstance(await settled(one), asyncio.CancelledError)
    assert await settled(two) is None
    assert a.names == ["RunStart", "RunFailed", "RunStart", "RunEnd"]
    assert b.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, a)
    await assert_idle(turn, b)


# 11-14: streams


async def test_a_stream_may_be_closed_by_another_task(turn: Any) -> None:
    """Scenario 11: no error about a token of another context."""
    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=items(1, 2))
    assert await stream.__anext__() == 1
    await soon(asyncio.create_task(stream.aclose()))
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_a_stream_may_be_closed_by_the_garbage_collector(turn: Any) -> None:
    """Scenario 11."""
    host = Host(turn)

    async def consume() -> None:
        stream = turn.stream_in_turn(host, invoke=items(1, 2))
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        assert await stream.__anext__() == 1

    await asyncio.create_task(consume())
    gc.collect()
    await until(lambda: host.turn_state.active is None)
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_streams_closed_out_of_order_the_other_stays_live(turn: Any, first: int) -> None:
    """Scenario 11."""
    hosts = [Host(turn), Host(turn)]
    streams = [turn.stream_in_turn(host, invoke=items(1, 2)) for host in hosts]
    for stream in streams:
        await stream.__anext__()
    await streams[first].aclose()
    other = 1 - first
    assert turn.current_scope(hosts[first]) is None
    scope = turn.current_scope(hosts[other])
    assert scope is not None
    assert scope.context is hosts[other].turn_state.active
    assert await streams[other].__anext__() == 2
    assert await soon(turn.run_in_turn(hosts[other], invoke=quick)) == "ok"
    await streams[other].aclose()
    for host in hosts:
        assert host.names == ["RunStart", "RunEnd"]
        await assert_idle(turn, host)


@pytest.mark.parametrize("owner", ["coroutine", "stream"])
async def test_a_nested_stream_ends_with_its_turn(turn: Any, owner: str) -> None:
    """D2: what is nested cannot continue into the next turn, and is not taken for exhausted."""
    host = Host(turn)
    log: list[str] = []
    nested: list[Any] = []

    async def source(scope: Any) -> Any:
        try:
            for n in range(3):
                log.append(f"step {n}")
                yield n
        finally:
            await asyncio.sleep(0)
            log.append("closed")

    async def open_nested() -> None:
        nested.append(turn.stream_in_turn(host, invoke=source))
        assert await nested[0].__anext__() == 0

    async def body(scope: Any) -> None:
        await open_nested()

    async def terminal(_: Any) -> None:
        log.append("terminal")

    host.on["RunEnd"] = terminal
    if owner == "coroutine":
        await soon(turn.run_in_turn(host, invoke=body))
    else:
        outer = turn.stream_in_turn(host, invoke=items(1, 2))
        await outer.__anext__()
        await open_nested()  # the consumer is inside the turn
        await soon(outer.aclose())
    assert log == ["step 0", "closed", "terminal"]
    with pytest.raises(turn.TurnFinalizingError, match="has ended"):
        await soon(nested[0].__anext__())
    with pytest.raises(StopAsyncIteration):
        await soon(nested[0].__anext__())
    assert log == ["step 0", "closed", "terminal"]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("owner", ["coroutine", "stream", "source"])
async def test_a_nested_stream_that_was_dropped_is_closed_before_the_terminal(turn: Any, owner: str) -> None:
    """D4: what its turn has started has ended, though nobody holds the stream any more."""
    host = Host(turn)
    log: list[str] = []

    async def inner(scope: Any) -> Any:
        try:
            yield 0
        finally:
            await spin()
            log.append("closed")

    async def body(scope: Any) -> None:
        for _ in range(3):  # they are closed beside each other
            async for _ in turn.stream_in_turn(host, invoke=inner):
                break

    async def source(scope: Any) -> Any:
        await body(scope)
        yield 0

    async def passing(scope: Any) -> Any:
        async for item in turn.stream_in_turn(host, invoke=inner):
            yield item  # closing it drops what it iterates over

    async def terminal(_: Any) -> None:
        log.append("terminal")

    host.on["RunEnd"] = terminal
    if owner == "coroutine":
        await soon(turn.run_in_turn(host, invoke=body))
    else:
        outer = turn.stream_in_turn(host, invoke=source if owner == "stream" else passing)
        await outer.__anext__()
        await soon(outer.aclose())
    assert log == ["closed"] * (1 if owner == "source" else 3) + ["terminal"]
    await assert_idle(turn, host)


async def test_a_nested_stream_whose_turn_was_dropped_goes_no_further(turn: Any) -> None:
    """D2: where nothing could be awaited, its next step closes it."""
    host = Host(turn)
    log: list[str] = []
    nested: list[Any] = []

    async def source(scope: Any) -> Any:
        try:
            for n in range(3):
                log.append(f"step {n}")
                yield n
        finally:
            log.append("closed")

    async def body(scope: Any) -> None:
        nested.append(turn.stream_in_turn(host, invoke=source))
        await nested[0].__anext__()
        await asyncio.Event().wait()

    dropped = turn.run_in_turn(host, invoke=body)
    dropped.send(None)
    dropped.close()
    with pytest.raises(turn.TurnFinalizingError):
        await soon(nested[0].__anext__())
    assert log == ["step 0", "closed"]
    await nested[0].aclose()
    await assert_idle(turn, host)


async def test_steps_from_different_tasks_are_inside_the_same_turn(turn: Any) -> None:
    """Scenario 11."""
    host = Host(turn)
    scopes: list[Any] = []

    async def note(scope: Any) -> None:
        scopes.append(scope)

    async def source(scope: Any) -> Any:
        for n in range(3):
            await turn.run_in_turn(host, invoke=note)
            yield n

    stream = turn.stream_in_turn(host, invoke=source)

    async def step() -> Any:
        got = await stream.__anext__()
        await turn.run_in_turn(host, invoke=note)
        return got

    for expected in (0, 1, 2):  # no task inherits the binding of another
        assert await settled(asyncio.create_task(step())) == expected
    await soon(stream.aclose())
    assert len(scopes) == 6
    assert len({id(scope.context) for scope in scopes}) == 1
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_what_a_stream_holds_open_stays_open_to_it_whoever_steps_it(turn: Any) -> None:
    """Scenarios 9 and 11: a stream of B inside a stream of A, stepped by two tasks."""
    a, b = Host(turn), Host(turn)

    async def source(scope: Any) -> Any:
        inner = turn.stream_in_turn(b, invoke=items(1, 2))
        yield await inner.__anext__()
        yield await turn.run_in_turn(b, invoke=quick)
        await inner.aclose()

    outer = turn.stream_in_turn(a, invoke=source)
    for expected in (1, "ok"):
        assert await settled(asyncio.create_task(outer.__anext__())) == expected
    await outer.aclose()
    await until(lambda: b.turn_state.active is None)
    assert a.names == b.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, a)
    await assert_idle(turn, b)


@pytest.mark.parametrize("way", ["wait_for", "await", "wait"])
async def test_a_consumer_whose_steps_are_tasks_is_inside_between_them_and_never_cancelled(turn: Any, way: str) -> None:
    """Scenarios 11 and 12: asyncio.wait_for makes a task of each step, before Python 3.12."""
    host = Host(turn)

    stream = turn.stream_in_turn(host, invoke=items(1, 2))

    async def step() -> Any:
        if way == "wait_for":
            return await asyncio.wait_for(stream.__anext__(), 5)
        task = asyncio.ensure_future(stream.__anext__())
        if way == "wait":
            await asyncio.wait([task])
        return await task

    async def consume() -> list[Any]:
        got = []
        while True:
            try:
                got.append(await step())
            except StopAsyncIteration:
                return got
            got.append(await turn.run_in_turn(host, invoke=quick))

    assert await settled(asyncio.create_task(consume())) == [1, "ok", 2, "ok"]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_after_break_the_next_call_waits_for_the_close_and_is_its_own_turn(
    turn: Any,
) -> None:
    """Scenario 12."""
    host = Host(turn)
    order: list[str] = []

    async def source(scope: Any) -> Any:
        try:
            yield 1
            yield 2
        finally:
            await spin(3)
            order.append("closed")

    async def body(scope: Any) -> Any:
        order.append("next")
        return scope

    async def consume() -> Any:
        async for _ in turn.stream_in_turn(host, invoke=source):
            break
        return await turn.run_in_turn(host, invoke=body)

    scope = await settled(asyncio.create_task(consume()))
    assert scope.owns_lifecycle
    assert order == ["closed", "next"]
    assert host.names == ["RunStart", "RunEnd"] * 2
    await assert_idle(turn, host)


async def test_a_consumer_may_call_between_two_items(turn: Any) -> None:
    """Scenario 12: nested while the stream lives; also from a task made between two items."""
    host = Host(turn)

    async def same(scope: Any) -> Any:
        return scope

    async def consume() -> None:
        stream = turn.stream_in_turn(host, invoke=items(1, 2))
        async for _ in stream:
            scope = await turn.run_in_turn(host, invoke=same)
            assert not scope.owns_lifecycle
            child = asyncio.create_task(turn.run_in_turn(host, invoke=same))
            assert (await child).context is scope.context

    assert await settled(asyncio.create_task(consume())) is None
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_a_task_beside_the_stream_queues_behind_it(turn: Any) -> None:
    """Scenario 12: whoever made the stream, only its consumer is inside."""
    host = Host(turn)
    go = asyncio.Event()
    stream = turn.stream_in_turn(host, invoke=items(1, 2))

    async def consume() -> None:
        async for _ in stream:
            await go.wait()

    consumer = asyncio.create_task(consume())
    await until(lambda: host.turn_state.active is not None)
    beside = asyncio.create_task(turn.run_in_turn(host, invoke=quick))
    mine = asyncio.create_task(turn.run_in_turn(host, invoke=quick))
    await spin()
    assert not beside.done()
    assert not mine.done()
    go.set()
    await settled(consumer)
    assert await settled(beside) == await settled(mine) == "ok"
    assert host.names == ["RunStart", "RunEnd"] * 3
    await assert_idle(turn, host)


class Source:
    """A stream whose close can be told to fail."""

    def __init__(self, fails: BaseException | None = None, raises: Exception | None = None) -> None:
        self.fails, self.raises, self.left, self.closed = fails, raises, [1], 0

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> int:
        if self.left:
            return self.left.pop()
        raise self.raises or StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1
        if self.fails is not None:
            raise self.fails


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    ("close", "body", "caller", "terminal"),
    [
        (ValueError("close"), None, None, "RunEnd"),
        (ValueError("close"), KeyError("body"), KeyError, "RunFailed"),
        (Odd("close"), None, Odd, "RunFailed"),
        (Odd("close"), KeyError("body"), KeyError, "RunFailed"),
    ],
    ids=["exception", "exception-second", "base-alone", "base-second"],
)
async def test_what_the_close_of_a_stream_raises_never_hides_the_outcome(
    turn: Any, caplog: Any, close: Any, body: Any, caller: Any, terminal: str
) -> None:
    """Scenario 13."""
    host = Host(turn)
    source = Source(close, body)
    got: list[Any] = []
    failed: Any = None
    try:
        async for item in turn.stream_in_turn(host, invoke=lambda scope: source):
            got.append(item)
    except BaseException as exc:
        failed = exc
    assert failed is None if caller is None else type(failed) is caller
    assert got == [1]
    assert source.closed == 1
    assert ("closing the stream" in caplog.text) is (caller is not Odd)
    assert host.names == ["RunStart", terminal]
    await assert_idle(turn, host)


async def test_the_close_of_a_stream_is_finished_whoever_cancels_it(turn: Any) -> None:
    """Scenarios 4 and 13: what the body saves in its own end is saved."""
    host = Host(turn)
    closing, go, saved = asyncio.Event(), asyncio.Event(), []

    async def source(scope: Any) -> Any:
        try:
            yield 1
        finally:
            closing.set()
            await go.wait()
            saved.append("history")

    async def consume() -> None:
        stream = turn.stream_in_turn(host, invoke=source)
        await stream.__anext__()
        await stream.aclose()

    task = asyncio.create_task(consume())
    await soon(closing.wait())
    for _ in range(2):
        task.cancel()
        await spin()
    go.set()
    assert isinstance(await settled(task), asyncio.CancelledError)
    assert saved == ["history"]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="a task's context can be had since 3.12")
async def test_a_token_of_the_body_can_be_reset_while_its_stream_is_closed(turn: Any, caplog: Any) -> None:
    """Scenario 13: the close runs in the context of who closes."""
    host = Host(turn)
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outer")
    seen: list[str] = []

    async def source(scope: Any) -> Any:
        token = variable.set("body")
        try:
            yield 1
        finally:
            variable.reset(token)
            seen.append(variable.get())

    stream = turn.stream_in_turn(host, invoke=source)
    await stream.__anext__()
    with caplog.at_level(logging.WARNING):
        await stream.aclose()
    assert seen == ["outer"]
    assert caplog.text == ""
    await assert_idle(turn, host)


@pytest.mark.parametrize("shape", ["direct", "awaited", "gathered", "task group"])
async def test_a_nested_task_that_closes_its_own_stream_does_not_cancel_itself(turn: Any, shape: str) -> None:
    """Scenario 14: nor does it wait for the tasks that wait for it."""
    if shape == "task group" and sys.version_info < (3, 11):
        pytest.skip("asyncio.TaskGroup is new in 3.11")
    host = Host(turn)
    closed: list[str] = []
    stream = turn.stream_in_turn(host, invoke=items(1, 2))
    await stream.__anext__()

    async def close(scope: Any) -> None:
        await stream.aclose()
        await asyncio.sleep(0)
        closed.append("closed")

    async def closer() -> None:
        await turn.run_in_turn(host, invoke=close)

    async def around(scope: Any) -> None:
        if shape == "awaited":
            await asyncio.create_task(closer())
        elif shape == "gathered":
            await asyncio.gather(closer(), asyncio.sleep(0))
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(closer())

    work = closer() if shape == "direct" else turn.run_in_turn(host, invoke=around)
    got = await settled(asyncio.create_task(work))
    if shape != "task group":  # a group's own cancellation cannot be told from any other
        assert got is None
        assert closed == ["closed"]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_a_task_that_has_closed_its_own_turn_is_no_longer_part_of_it(turn: Any, caplog: Any) -> None:
    """Scenario 14: what happens to it later is not the turn's."""
    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=items(1, 2))
    await stream.__anext__()

    async def close(scope: Any) -> None:
        await stream.aclose()

    async def closer() -> None:
        await turn.run_in_turn(host, invoke=close)
        raise ValueError("later")

    with caplog.at_level(logging.WARNING):
        assert isinstance(await settled(asyncio.create_task(closer())), ValueError)
        await spin()
    assert "inside a turn" not in caplog.text
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_a_nested_task_that_waits_for_the_turn_itself_does_not_hold_it_up(turn: Any) -> None:
    """Scenario 14: the same for a coroutine turn."""
    host = Host(turn)
    got: list[Any] = []

    async def watch(owner: Any) -> None:
        await turn.run_in_turn(host, invoke=quick)

        async def wait(scope: Any) -> None:
            got.append(await owner)

        await turn.run_in_turn(host, invoke=wait)

    async def body(scope: Any) -> str:
        host.kept = asyncio.create_task(watch(asyncio.current_task()))  # type: ignore[attr-defined]
        await spin()
        return "result"

    assert await settled(asyncio.create_task(turn.run_in_turn(host, invoke=body))) == "result"
    await settled(host.kept)  # type: ignore[attr-defined]
    assert got == ["result"]
    await assert_idle(turn, host)


# 15-16: signals and observers


async def test_message_signals_are_drained_before_the_terminal(turn: Any) -> None:
    """Scenario 15: but not one that a signal schedules while the turn is ending."""
    host = Host(turn)
    order: list[str] = []

    async def second() -> None:
        await until(lambda: "terminal" in order)
        order.append("second")

    async def first() -> None:
        await spin(3)
        order.append("first")
        turn.schedule_signal(host, second)

    async def terminal(_: Any) -> None:
        order.append("terminal")

    async def body(scope: Any) -> None:
        assert turn.schedule_signal(host, first) is not None

    host.on["RunEnd"] = terminal
    await soon(turn.run_in_turn(host, invoke=body))
    await until(lambda: len(order) == 3)
    assert order == ["first", "terminal", "second"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("when", ["while finalizing", "from a stale child", "outside"])
async def test_a_signal_outside_an_active_turn_is_adopted_by_nobody(turn: Any, when: str) -> None:
    """Scenario 15."""
    host = Host(turn)
    stuck = asyncio.Event()
    tasks: list[Any] = []

    def schedule() -> None:
        tasks.append(turn.schedule_signal(host, stuck.wait))

    async def terminal(_: Any) -> None:
        schedule()

    go = asyncio.Event()

    async def stale() -> None:
        await go.wait()
        schedule()

    async def body(scope: Any) -> Any:
        return asyncio.create_task(stale())

    if when == "while finalizing":
        host.on["RunEnd"] = terminal
    child = await soon(turn.run_in_turn(host, invoke=body))
    host.on.clear()
    if when == "outside":
        schedule()
    async with holding(turn, host) as held:
        if when == "from a stale child":
            go.set()
            await soon(child)
        assert held.scope.context.signal_tasks == set()
        held.go.set()
    assert await soon(turn.run_in_turn(host, invoke=quick)) == "ok"
    assert not tasks[0].done()
    stuck.set()
    await settled(tasks[0])
    go.set()
    await soon(child)
    await assert_idle(turn, host)


@pytest.mark.parametrize("shape", ["in place", "in a task"])
async def test_a_call_from_a_signals_observer_is_nested_and_awaited(turn: Any, shape: str) -> None:
    """Scenario 15: the end of the turn waits for it, instead of cancelling it."""
    host = Host(turn)
    entered, go, order = asyncio.Event(), asyncio.Event(), []

    async def work(scope: Any) -> None:
        entered.set()
        await go.wait()
        order.append(scope)

    async def observer() -> None:
        call = turn.run_in_turn(host, invoke=work)
        await (call if shape == "in place" else asyncio.create_task(call))

    async def terminal(_: Any) -> None:
        order.append("terminal")

    async def body(scope: Any) -> Any:
        turn.schedule_signal(host, observer)
        await entered.wait()
        return scope

    host.on["RunEnd"] = terminal
    task = asyncio.create_task(turn.run_in_turn(host, invoke=body))
    await soon(entered.wait())
    await spin()
    assert not task.done()
    go.set()
    owner = await settled(task)
    nested, last = order
    assert last == "terminal"
    assert nested.context is owner.context
    assert not nested.owns_lifecycle
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("shape", ["in place", "in a task"])
async def test_an_observer_may_close_the_stream_that_waits_for_it(turn: Any, shape: str) -> None:
    """Scenarios 14 and 15."""
    host = Host(turn)
    got: list[Any] = []
    stream: Any = None

    async def observer() -> None:
        await asyncio.sleep(0)
        if shape == "in place":
            got.append(await outcome(stream.aclose()))
        else:  # asyncio.wait does not show for whom it waits
            closing = asyncio.create_task(stream.aclose())
            await asyncio.wait([closing])
            got.append(closing.exception())

    async def source(scope: Any) -> Any:
        turn.schedule_signal(host, observer)
        yield 1
        yield 2

    stream = turn.stream_in_turn(host, invoke=source)
    await stream.__anext__()
    await until(lambda: got)
    assert got == [None]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_drain_waits_for_the_callers_own_signals_alone(turn: Any) -> None:
    """Scenario 15."""
    a, b = Host(turn), Host(turn)
    stuck, done = asyncio.Event(), []

    async def mine() -> None:
        await spin(3)
        done.append("mine")

    async with holding(turn, a):
        other = asyncio.create_task(turn.run_in_turn(a, invoke=quick))
        await soon(turn.drain_signals(a))

        async def body(scope: Any) -> None:
            detached = turn.schedule_signal(a, stuck.wait)
            turn.schedule_signal(b, mine)
            await turn.drain_signals(b)
            assert done == ["mine"]
            assert not detached.done()

        await soon(turn.run_in_turn(b, invoke=body))
    stuck.set()
    await settled(other)
    await assert_idle(turn, a)


async def test_an_observer_that_drains_does_not_wait_for_itself(turn: Any) -> None:
    """Scenario 15."""
    host = Host(turn)
    drained: list[str] = []

    async def observer() -> None:
        await asyncio.sleep(0)
        await turn.drain_signals(host)
        drained.append("drained")

    async def body(scope: Any) -> None:
        turn.schedule_signal(host, observer)

    await soon(turn.run_in_turn(host, invoke=body))
    assert drained == ["drained"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("where", ["RunStart", "message", "RunEnd"])
async def test_an_observer_that_raises_is_logged_and_changes_nothing(turn: Any, caplog: Any, where: str) -> None:
    """Scenario 16: the result is kept, and there is no second terminal."""
    host = Host(turn)

    async def fails(_: Any = None) -> None:
        raise ValueError("observer of " + where)

    async def body(scope: Any) -> str:
        if where == "message":
            turn.schedule_signal(host, fails)
        return "result"

    host.on[where] = fails
    with caplog.at_level(logging.WARNING):
        assert await soon(turn.run_in_turn(host, invoke=body)) == "result"
    assert "observer of " + where in caplog.text
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


# 17-18: control and model


async def test_a_directive_reaches_the_active_turn_alone_and_is_taken_once(turn: Any) -> None:
    """Scenario 17."""
    host = Host(turn)
    cancel, keep_on = turn.LoopDirective.CANCEL, turn.LoopDirective.CONTINUE
    assert turn.control(host, cancel) is False
    assert turn.poll_control(host) is None
    ending: list[Any] = []

    async def terminal(_: Any) -> None:
        ending.append(turn.control(host, cancel))
        ending.append(turn.poll_control(host))

    host.on["RunEnd"] = terminal
    async with holding(turn, host) as held:
        mine = held.scope.context.turn_id
        assert turn.control(Host(turn), cancel) is False
        assert turn.control(host, cancel, turn_id=uuid.uuid4()) is False
        assert turn.poll_control(host) is None
        assert turn.control(host, keep_on, reason="first") is True
        assert turn.control(host, cancel, reason="last", turn_id=mine) is True
        assert turn.poll_control(host, turn_id=uuid.uuid4()) is None
        taken = turn.poll_control(host, turn_id=mine)
        assert (taken.directive, taken.reason) == (cancel, "last")
        assert turn.poll_control(host) is None
        assert turn.control(host, cancel, reason="not taken") is True
    assert ending == [False, None]
    async with holding(turn, host):
        assert turn.poll_control(host) is None
    await assert_idle(turn, host)


@pytest.mark.parametrize(
    ("directive", "error", "terminal"),
    [("CONTINUE", None, "RunEnd"), ("BREAK", "LoopBreak", "RunFailed"), ("CANCEL", None, "RunEnd")],
)
async def test_a_stream_that_checks_obeys(turn: Any, directive: str, error: str | None, terminal: str) -> None:
    """Scenario 17."""
    host = Host(turn)

    async def source(scope: Any) -> Any:
        for n in range(3):
            turn.check_control(host)
            yield n

    got: list[Any] = []
    failed: Any = None
    try:
        async for item in turn.stream_in_turn(host, invoke=source):
            got.append(item)
            if item == 0:
                turn.control(host, turn.LoopDirective[directive], reason="why")
    except turn.LoopBreak as exc:
        failed = exc
    assert got == ([0, 1, 2] if directive == "CONTINUE" else [0])
    assert (type(failed).__name__ if failed else None) == error
    assert failed is None or failed.reason == "why"
    assert host.names == ["RunStart", terminal]
    await assert_idle(turn, host)


async def test_the_model_is_the_one_configured_when_the_turn_starts(turn: Any) -> None:
    """Scenario 18: not when the caller began to wait, and not later."""
    host = Host(turn, model="old")
    models: list[Any] = []

    async def body(scope: Any) -> None:
        host.model = "newer"
        models.append(scope.context.model)

    async with holding(turn, host) as held:
        waiting = asyncio.create_task(turn.run_in_turn(host, invoke=body))
        await spin()
        assert host.overrides == [None]
        host.model = "new"
        assert held.scope.context.model == "old"
    await settled(waiting)
    assert models == ["new"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("way", ["success", "failure", "rejected", "stream"])
async def test_an_override_never_lands_on_the_conversation(turn: Any, way: str) -> None:
    """Scenario 18."""
    host = Host(turn, model="own")
    models: list[Any] = []
    override: Any = ValueError("no such endpoint") if way == "rejected" else "other"

    async def body(scope: Any) -> None:
        models.append(scope.context.model)
        if way == "failure":
            raise KeyError("provider")

    async def source(scope: Any) -> Any:
        await body(scope)
        yield 1

    if way == "stream":
        stream = turn.stream_in_turn(host, model=override, invoke=source)
        assert [item async for item in stream] == [1]
    else:
        got = await soon(outcome(turn.run_in_turn(host, model=override, invoke=body)))
        assert (got is override) is (way == "rejected")
    assert host.model == "own"
    assert models == ([] if way == "rejected" else ["other"])
    assert host.overrides == [override]
    good = way in ("success", "stream")
    assert host.names == ["RunStart", "RunEnd" if good else "RunFailed"]
    await soon(turn.run_in_turn(host, invoke=body) if way != "failure" else quick(None))
    assert models[-1:] != ["other"] or way == "failure"
    await assert_idle(turn, host)


# 19-20: ends that cannot wait, and loops


@pytest.mark.parametrize("kind", ["coroutine", "stream step"])
async def test_a_coroutine_closed_while_active_is_cleaned_up_at_once(turn: Any, kind: str) -> None:
    """Scenario 19: no terminal is possible."""
    host = Host(turn)
    held = Held()
    children: list[Any] = []

    async def body(scope: Any) -> None:
        children.append(asyncio.create_task(turn.run_in_turn(host, invoke=forever)))
        await held(scope)

    closed: list[str] = []

    async def source(scope: Any) -> Any:
        try:
            await body(scope)
            yield 1
        finally:
            closed.append("source")

    def begin() -> Any:
        if kind == "coroutine":
            return turn.run_in_turn(host, invoke=body)
        return turn.stream_in_turn(host, invoke=source).__anext__()

    driving = contextvars.copy_context()
    call = driving.run(begin)

    def drive() -> None:
        call.send(None)

    driving.run(drive)
    while not held.began.is_set():
        driving.run(drive)
    await spin()
    following = asyncio.create_task(turn.run_in_turn(host, invoke=quick))
    await spin()
    call.close()
    assert closed == ([] if kind == "coroutine" else ["source"])
    assert host.turn_state.active is None
    assert await soon(following) == "ok"
    assert isinstance(await settled(children[0]), asyncio.CancelledError)
    assert host.names == ["RunStart", "RunStart", "RunEnd"]
    await assert_idle(turn, host)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_fails_the_turn_and_goes_on(turn: Any, mode: str, error: Any) -> None:
    """Scenario 19."""
    host = Host(turn)

    async def body(scope: Any) -> None:
        raise error

    loop = new_loop(mode)
    task: Any = None

    async def start() -> None:
        nonlocal task
        task = asyncio.ensure_future(call())
        await asyncio.wait([task])

    async def call() -> None:
        await asyncio.sleep(0)
        await turn.run_in_turn(host, invoke=body)

    with pytest.raises(error):
        loop.run_until_complete(start())
    loop.run_until_complete(spin())
    assert type(task.exception()) is error
    assert host.names == ["RunStart", "RunFailed"]
    assert isinstance(host.signals[1].data, error)
    loop.run_until_complete(assert_idle(turn, host))
    loop.close()


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("where", ["finalizer", "body", "stream", "close of a stream"])
def test_a_loop_that_ends_in_the_middle_of_a_turn_leaves_the_conversation_idle(
    turn: Any, mode: str, where: str, dropped: bool
) -> None:
    """Scenario 19: whether or not anybody still holds the task."""
    host = Host(turn)
    loop = new_loop(mode)
    loop.set_exception_handler(lambda *_: None)
    kept: list[Any] = []

    async def start() -> None:
        slow = Slow(host)
        held = Held()

        async def source(scope: Any) -> Any:
            yield 1
            yield 2

        async def consume() -> None:
            stream = turn.stream_in_turn(host, invoke=source)
            await stream.__anext__()
            if where == "close of a stream":
                await stream.aclose()
            await held(None)

        if "stream" in where:
            call = consume()
        else:
            call = turn.run_in_turn(host, invoke=held if where == "body" else quick)
        task = asyncio.ensure_future(call)
        kept.append(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        ending = where in ("finalizer", "close of a stream")
        await soon((slow.began if ending else held.began).wait())
        for other in asyncio.all_tasks():
            other._log_destroy_pending = False  # type: ignore[attr-defined]

    loop.run_until_complete(start())
    loop.close()
    if dropped:
        kept.clear()
        host.on.clear()
        gc.collect()
    assert turn.control(host, turn.LoopDirective.CANCEL) is False
    assert turn.poll_control(host) is None
    host.signals.clear()
    run(lambda: assert_idle(turn, host), mode=mode)
    kept.clear()
    host.on.clear()
    gc.collect()
    run(lambda: assert_idle(turn, host), mode=mode)


def test_asyncio_run_that_ends_early_still_gets_the_terminal(turn: Any) -> None:
    """Scenario 19: its cancellation of everything reaches the end of the turn as well."""
    host = Host(turn)

    async def stuck(_: Any) -> None:
        await forever()

    async def main() -> None:
        host.on["RunEnd"] = stuck
        host.kept = asyncio.create_task(turn.run_in_turn(host, invoke=quick))  # type: ignore[attr-defined]
        await until(lambda: len(host.signals) == 2)

    done = threading.Event()

    def call() -> None:
        asyncio.run(main())
        done.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert done.wait(10)
    assert host.names == ["RunStart", "RunEnd"]
    assert host.turn_state.active is None


def test_one_conversation_serves_two_loops_one_after_the_other(turn: Any, mode: str) -> None:
    """Scenario 20: contended in each."""
    host = Host(turn)

    async def contend() -> None:
        async def body(scope: Any) -> None:
            await spin(2)

        await asyncio.gather(*(turn.run_in_turn(host, invoke=body) for _ in range(5)))

    for loops in (1, 2, 3):
        run(contend, mode=mode)
        assert host.names == ["RunStart", "RunEnd"] * 5 * loops


def test_a_turn_still_live_in_another_loop_is_a_clear_error(turn: Any, mode: str) -> None:
    """Scenario 20: from outside the turn, and from a thread inside it."""
    host = Host(turn)
    first, second = new_loop(mode), new_loop(mode)
    held: Any = None

    async def start() -> Any:
        nonlocal held
        held = Held()
        task = asyncio.ensure_future(turn.run_in_turn(host, invoke=held))
        await soon(held.began.wait())
        return task

    task = first.run_until_complete(start())

    async def call() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await soon(turn.run_in_turn(host, invoke=quick))
        with pytest.raises(RuntimeError, match="another event loop"):
            await soon(turn.stream_in_turn(host, invoke=items(1)).__anext__())

    async def body(scope: Any) -> None:
        await asyncio.to_thread(asyncio.run, call())

    second.run_until_complete(call())

    async def finish() -> None:
        held.go.set()
        await soon(task)
        await soon(turn.run_in_turn(host, invoke=body))

    first.run_until_complete(finish())
    second.run_until_complete(assert_idle(turn, host))
    for loop in (first, second):
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


# 22-23: reports, memory, StopStream


@pytest.mark.parametrize("way", ["success", "failure", "cancelled", "closed"])
async def test_the_report_of_the_last_turn_is_published_after_its_terminal(turn: Any, way: str) -> None:
    """Scenario 22: never a partial one, and none for a turn without providers."""
    host = Host(turn)
    seen: list[Any] = []
    reached = asyncio.Event()

    async def body(scope: Any) -> None:
        scope.context.provider_report = way
        seen.append(turn.last_context_report(host))
        reached.set()
        if way == "failure":
            raise ValueError(way)
        if way == "cancelled":
            await forever()

    async def source(scope: Any) -> Any:
        await body(scope)
        yield 1

    async def terminal(_: Any) -> None:
        seen.append(turn.last_context_report(host))

    host.on["RunEnd"] = host.on["RunFailed"] = terminal
    if way == "closed":
        stream = turn.stream_in_turn(host, invoke=source)
        await stream.__anext__()
        await stream.aclose()
    else:
        task = asyncio.create_task(turn.run_in_turn(host, invoke=body))
        await soon(reached.wait())
        if way == "cancelled":
            task.cancel()
        await settled(task)
    assert seen == [None, None]
    assert turn.last_context_report(host) == way
    await soon(turn.run_in_turn(host, invoke=quick))
    assert turn.last_context_report(host) is None
    await assert_idle(turn, host)


async def test_nothing_is_retained_of_a_finished_turn(turn: Any) -> None:
    """Scenario 22: not in the host, not in the caller's context, not by a child that lives on."""

    class Model:
        pass

    host = Host(turn)
    go = asyncio.Event()
    models: list[Any] = []
    children: list[Any] = []

    async def live_on() -> None:
        await go.wait()

    async def body(scope: Any) -> None:
        models.append(weakref.ref(scope.context.model))
        children.append(asyncio.create_task(live_on()))
        await turn.run_in_turn(host, invoke=quick)

    async def source(scope: Any) -> Any:
        await body(scope)
        yield 1
        yield 2

    async def fails(scope: Any) -> None:
        await body(scope)
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            host.model = Model()
            await turn.run_in_turn(host, invoke=body)
            host.model = Model()
            async for _ in turn.stream_in_turn(host, invoke=source):
                break
            host.model = None
            await until(lambda: host.turn_state.active is None)
            host.model = Model()
            assert type(await outcome(turn.run_in_turn(host, invoke=fails))) is ValueError
            host.model = None
            host.signals.clear()
            host.overrides.clear()
        await spin()
        assert [ref() for ref in models] == [None] * 6
    finally:
        gc.enable()
        go.set()
        await asyncio.gather(*children)
    await assert_idle(turn, host)


async def test_stop_stream_out_of_a_coroutine_turn_is_a_good_end_and_goes_on(turn: Any) -> None:
    """Scenario 23."""
    host = Host(turn)

    async def body(scope: Any) -> None:
        turn.control(host, turn.LoopDirective.CANCEL, reason="enough")
        turn.check_control(host)

    got = await soon(outcome(turn.run_in_turn(host, invoke=body)))
    assert type(got) is turn.StopStream
    assert got.reason == "enough"
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)


async def test_stop_stream_in_a_nested_stream_ends_the_whole_turn(turn: Any) -> None:
    """Scenario 23: a nested entry is transparent."""
    host = Host(turn)

    async def inner(scope: Any) -> Any:
        yield 1
        raise turn.StopStream("enough")

    async def outer(scope: Any) -> Any:
        async for item in turn.stream_in_turn(host, invoke=inner):
            yield item
        yield "never"

    assert [item async for item in turn.stream_in_turn(host, invoke=outer)] == [1]
    assert host.names == ["RunStart", "RunEnd"]
    await assert_idle(turn, host)
