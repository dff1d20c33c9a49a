"""What a turn costs, against a bare `asyncio.Lock` around the same await, in one run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from lionwt.turn import Conversation, TurnScope, run_in_turn, stream_in_turn
from tests.bench.support import Row

CALLS = 200
ROUNDS = 400
BUDGETS = {"turn": 6.0, "turn, against async with": 6.0, "nested": 4.0}


async def _body(scope: TurnScope | None = None) -> int:
    return 1


async def _items(scope: TurnScope) -> Any:
    for n in range(10):
        yield n


async def _lock(calls: int) -> float:
    lock = asyncio.Lock()
    begin = time.perf_counter()
    for _ in range(calls):
        async with lock:
            await _body()
    return time.perf_counter() - begin


async def _acquire(calls: int) -> float:
    lock = asyncio.Lock()
    begin = time.perf_counter()
    for _ in range(calls):
        await lock.acquire()
        try:
            await _body()
        finally:
            lock.release()
    return time.perf_counter() - begin


async def _turn(calls: int) -> float:
    host = Conversation()
    begin = time.perf_counter()
    for _ in range(calls):
        await run_in_turn(host, invoke=_body)
    return time.perf_counter() - begin


async def _observed(calls: int) -> float:
    host = Conversation()
    host.observers.append(lambda signal: None)
    begin = time.perf_counter()
    for _ in range(calls):
        await run_in_turn(host, invoke=_body)
    return time.perf_counter() - begin


async def _nested(calls: int) -> float:
    host = Conversation()

    async def outer(scope: TurnScope) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            await run_in_turn(host, invoke=_body)
        return time.perf_counter() - begin

    return await run_in_turn(host, invoke=outer)


async def _locked_stream(calls: int) -> float:
    lock = asyncio.Lock()
    begin = time.perf_counter()
    for _ in range(calls):
        async with lock:
            async for _ in _items(None):  # type: ignore[arg-type]
                pass
    return time.perf_counter() - begin


async def _stream(calls: int) -> float:
    host = Conversation()
    begin = time.perf_counter()
    for _ in range(calls):
        async for _ in stream_in_turn(host, invoke=_items):
            pass
    return time.perf_counter() - begin


async def _contend(calls: int, enter: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await asyncio.gather(*(enter() for _ in range(calls)))
    return time.perf_counter() - begin


async def _contended_lock(calls: int) -> float:
    lock = asyncio.Lock()

    async def enter() -> None:
        async with lock:
            await asyncio.sleep(0)

    return await _contend(calls, enter)


async def _contended_turn(calls: int) -> float:
    host = Conversation()

    async def body(scope: TurnScope) -> None:
        await asyncio.sleep(0)

    return await _contend(calls, lambda: run_in_turn(host, invoke=body))


async def _memory(turns: int) -> int:
    """Memory blocks that `turns` turns leave behind, of every kind in turn."""
    host = Conversation()
    host.observers.append(lambda signal: None)

    async def nesting(scope: TurnScope) -> None:
        await asyncio.gather(run_in_turn(host, invoke=_body), run_in_turn(host, invoke=_body))

    async def failing(scope: TurnScope) -> None:
        raise ValueError

    async def some(count: int) -> None:
        for n in range(count):
            if n % 4 == 0:
                await run_in_turn(host, invoke=nesting)
            elif n % 4 == 1:
                with contextlib.suppress(ValueError):
                    await run_in_turn(host, invoke=failing)
            elif n % 4 == 2:
                async for _ in stream_in_turn(host, invoke=_items):
                    break
                await run_in_turn(host, invoke=_body)
            else:
                await run_in_turn(host, invoke=_body)

    left = []
    for _ in range(3):  # the first round also fills the caches of the interpreter
        gc.collect()
        before = sys.getallocatedblocks()
        await some(turns)
        await asyncio.sleep(0)
        gc.collect()
        left.append(sys.getallocatedblocks() - before)
    return min(left[1:])


async def _compare(base: Any, mine: Any, calls: int, rounds: int) -> tuple[float, float, float]:
    """The best of each, in seconds a call, and the median of the ratios of neighbours in time.

    Short rounds, interleaved: whatever else the machine does disturbs both of a pair alike.
    """
    bases, mines = [], []
    gc.collect()
    for _ in range(rounds):
        bases.append(await base(calls) / calls)
        mines.append(await mine(calls) / calls)
    ratio = statistics.median(m / b for m, b in zip(mines, bases, strict=True))
    return min(bases), min(mines), ratio


def measure() -> Iterator[Row]:
    """The table: a turn, and what is built on it, against the bare lock."""
    pairs: list[tuple[str, Any, str, Any, int, int]] = [
        ("turn", _turn, "acquire, try, release", _acquire, CALLS, ROUNDS),
        ("turn, against async with", _turn, "async with lock", _lock, CALLS, ROUNDS),
        ("turn with an observer", _observed, "async with lock", _lock, CALLS // 10, 100),
        ("nested", _nested, "acquire, try, release", _acquire, CALLS, ROUNDS),
        ("stream of ten items", _stream, "lock around ten items", _locked_stream, CALLS // 20, 100),
        ("1,000 contenders", _contended_turn, "lock, 1,000 contenders", _contended_lock, 1000, 20),
    ]
    shown: set[str] = set()
    for name, mine, base_name, base, calls, rounds in pairs:
        best_base, best, ratio = asyncio.run(_compare(base, mine, calls, rounds))
        if base_name not in shown:
            shown.add(base_name)
            yield Row(base_name, best_base * 1e6, "us")
        yield Row(name, best * 1e6, "us", ratio, BUDGETS.get(name))
    yield Row("memory after 20,000 turns", float(asyncio.run(_memory(20_000))), "blocks", budget=200.0)
