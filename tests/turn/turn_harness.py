"""What the turn tests share: a loop that cannot hang, a host that remembers, waits for states."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

MODES = ["plain", "eager"] if sys.version_info >= (3, 12) else ["plain"]
BOUND = 20.0


class Hung(AssertionError):
    """A test did not end in time, or its loop could not be emptied."""


def new_loop(mode: str = "plain") -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    if mode == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def run(
    main: Callable[[], Coroutine[Any, Any, Any]],
    *,
    mode: str = "plain",
    bound: float = BOUND,
    strict: bool = True,
) -> Any:
    """Like asyncio.run, but a task that never ends, whatever is done to it, is an error.

    What the loop itself complains about (an exception nobody retrieved) is an error as well.
    """
    complaints: list[Any] = []
    loop = new_loop(mode)
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    async def bounded() -> Any:
        task = asyncio.ensure_future(main())
        done, _ = await asyncio.wait([task], timeout=bound)
        if not done:
            frames = [str(frame) for t in asyncio.all_tasks() for frame in t.get_stack(limit=1)]
            raise Hung("\n".join(["did not end; waiting in:", *frames]))
        return task.result()

    try:
        result = loop.run_until_complete(bounded())
        gc.collect(1)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        _empty(loop)
        asyncio.set_event_loop(None)
    if strict:
        assert not complaints, complaints
    return result


def _empty(loop: asyncio.AbstractEventLoop) -> None:
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1))
        if not asyncio.all_tasks(loop):
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


class Host:
    """A conversation that remembers every signal, and does in each what a test asks for."""

    def __init__(self, driver: Any, model: Any = "host model", *, observed: bool = True) -> None:
        self.turn_state = driver.TurnState()
        self.model = model
        self.observed = observed
        self.signals: list[Any] = []
        self.on: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.overrides: list[Any] = []

    def turn_model(self, override: Any) -> Any:
        self.overrides.append(override)
        if isinstance(override, Exception):
            raise override
        return self.model if override is None else override

    def turn_observed(self) -> bool:
        return self.observed

    async def turn_emit(self, signal: Any) -> None:
        self.signals.append(signal)
        action = self.on.get(type(signal).__name__)
        if action is not None:
            await action(signal)

    @property
    def names(self) -> list[str]:
        return [type(signal).__name__ for signal in self.signals]


async def soon(awaitable: Awaitable[Any]) -> Any:
    """What must happen without help from outside."""
    return await asyncio.wait_for(awaitable, 5)


async def spin(times: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(times):
        await asyncio.sleep(0)


async def until(state: Callable[[], object]) -> None:
    """Wait for a state that no event announces."""

    async def poll() -> None:
        while not state():
            await asyncio.sleep(0)

    await soon(poll())


async def at_once(state: Callable[[], object], action: Callable[[], object]) -> None:
    """Act in the very pass of the loop in which the state comes about, before what it woke runs."""
    loop = asyncio.get_running_loop()
    acted = loop.create_future()

    def look() -> None:
        if state():
            action()
            acted.set_result(None)
        else:
            loop.call_soon(look)

    look()
    await soon(acted)


async def quick(scope: Any) -> str:
    return "ok"


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """A result, or the exception in place of it, KeyboardInterrupt and SystemExit apart."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError) as exc:
        return exc


async def settled(task: asyncio.Task[Any]) -> Any:
    await soon(asyncio.wait([task]))
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()


async def assert_idle(driver: Any, host: Host) -> None:
    """Nothing of any turn is left: no active turn, no binding here, and the next one can start."""
    assert host.turn_state.active is None
    assert driver.current_scope(host) is None
    assert driver.control(host, driver.LoopDirective.CANCEL) is False
    before = len(host.signals)
    host.on.clear()
    assert await soon(driver.run_in_turn(host, invoke=quick)) == "ok"
    if host.observed:
        assert host.names[before:] == ["RunStart", "RunEnd"]


def items(*values: Any) -> Callable[[Any], AsyncIterator[Any]]:
    async def stream(scope: Any) -> AsyncIterator[Any]:
        for value in values:
            yield value

    return stream


class Held:
    """A turn body that says when it has begun and ends when told to."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go = asyncio.Event()
        self.scope: Any = None

    async def __call__(self, scope: Any) -> str:
        self.scope = scope
        self.began.set()
        await self.go.wait()
        return "held"


@contextlib.asynccontextmanager
async def holding(driver: Any, host: Host) -> AsyncIterator[Held]:
    """A turn of another task that is active meanwhile."""
    held = Held()
    task = asyncio.create_task(driver.run_in_turn(host, invoke=held))
    await soon(held.began.wait())
    try:
        yield held
    finally:
        held.go.set()
        await settled(task)


def scenarios_of(module: Any) -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for name, function in vars(module).items()
        if name.startswith("test_") and inspect.isfunction(function)
    }
