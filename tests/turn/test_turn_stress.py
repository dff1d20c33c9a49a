"""Many callers, cancelled, broken off and closed at random; and any sequence of such things."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from turn_harness import Host, assert_idle, new_loop, outcome, run, spin

import lionwt.turn

CONTENDERS = 300
SEEDS = 30


class Watched(Host):
    """A host that counts the bodies inside it, and pairs starts with terminals."""

    inside = 0

    async def turn_emit(self, signal: Any) -> None:
        open_turns = len(self.names) % 2
        assert (type(signal).__name__ == "RunStart") is (open_turns == 0)
        await super().turn_emit(signal)
        assert len(self.signals) % 2 == 0 or self.inside == 0

    def enter(self) -> None:
        self.inside += 1
        assert self.inside == 1, "two bodies at once"

    def leave(self) -> None:
        self.inside -= 1


async def _storm(turn: Any, contenders: int, seed: int) -> None:
    chance = random.Random(seed)
    host = Watched(turn)
    broken: list[str] = []

    async def signal() -> None:
        await spin(chance.randrange(3))

    async def nested(scope: Any) -> None:
        await spin(chance.randrange(4))

    async def body(scope: Any) -> None:
        try:
            host.enter()
        except AssertionError as exc:
            broken.append(str(exc))
        try:
            for _ in range(chance.randrange(4)):
                act = chance.randrange(6)
                if act == 0:
                    await turn.run_in_turn(host, invoke=nested)
                elif act == 1:
                    keep.append(asyncio.create_task(turn.run_in_turn(host, invoke=nested)))
                elif act == 2:
                    turn.schedule_signal(host, signal)
                elif act == 3:
                    raise ValueError(act)
                else:
                    await asyncio.sleep(0)
        finally:
            host.leave()

    async def source(scope: Any) -> Any:
        for n in range(3):
            await body(scope)
            yield n

    async def consume() -> None:
        stream = turn.stream_in_turn(host, invoke=source)
        way = chance.randrange(4)
        if way == 0:
            await stream.aclose()
            return
        async for _ in stream:
            if way == 1:
                break
            if way == 2:
                await turn.run_in_turn(host, invoke=nested)
            if way == 3 and chance.randrange(2):
                await stream.aclose()
        del stream

    async def call() -> Any:
        way = consume() if chance.randrange(2) else turn.run_in_turn(host, invoke=body)
        return type(await outcome(way))  # the exception itself would keep its stream open

    keep: list[asyncio.Task[Any]] = []
    tasks = [asyncio.create_task(call()) for _ in range(contenders)]
    while not all(task.done() for task in tasks):
        for task in chance.sample(tasks, contenders // 50):
            task.cancel()
        await spin(chance.randrange(1, 6))
    results = await asyncio.gather(*tasks, *keep, return_exceptions=True)
    assert broken == []
    allowed = {type(None), ValueError, asyncio.CancelledError, turn.TurnFinalizingError}
    assert {r if isinstance(r, type) else type(r) for r in results} <= allowed
    del results
    for _ in range(1000):
        if host.turn_state.active is None:
            break
        await asyncio.sleep(0)
    starts = [s.turn_id for s in host.signals if type(s).__name__ == "RunStart"]
    ends = [s.turn_id for s in host.signals if type(s).__name__ != "RunStart"]
    assert starts == ends
    assert len(starts) > contenders // 10
    await assert_idle(turn, host)


def test_no_storm_of_cancels_breaks_and_closes_loses_or_overlaps_a_turn(turn: Any, mode: str) -> None:
    """Scenario 21: 300 contenders, 30 seeds."""
    for seed in range(SEEDS):
        try:
            run(lambda seed=seed: _storm(turn, CONTENDERS, seed), mode=mode, bound=30)  # type: ignore[misc]
        except BaseException:
            print(f"seed {seed}")
            raise


class Conversations(RuleBasedStateMachine):
    """Any sequence of starting, going on, ending, cancelling and dropping, on two conversations."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = lionwt.turn
        self.loop = new_loop()
        self.complaints: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.complaints.append(context))
        self.hosts = [Watched(self.turn), Watched(self.turn)]
        self.tasks: list[tuple[asyncio.Task[Any], asyncio.Event]] = []
        self.streams: list[list[Any]] = []

    def _do(self, work: Any = None) -> Any:
        async def main() -> Any:
            result = None if work is None else await work()
            await spin(20)
            return result

        return self.loop.run_until_complete(main())

    @rule(which=st.sampled_from([0, 1]), other=st.booleans(), fails=st.booleans())
    def call(self, which: int, other: bool, fails: bool) -> None:
        host, go = self.hosts[which], asyncio.Event()

        async def nested(scope: Any) -> None:
            assert not scope.owns_lifecycle
            await asyncio.sleep(0)

        async def body(scope: Any) -> None:
            host.enter()
            try:
                await go.wait()
                await self.turn.run_in_turn(host, invoke=nested)
                if fails:
                    raise ValueError
            finally:
                host.leave()

        async def start() -> None:
            task = asyncio.ensure_future(outcome(self.turn.run_in_turn(host, invoke=body)))
            self.tasks.append((task, go))

        self._do(start)

    @rule(which=st.sampled_from([0, 1]))
    def open(self, which: int) -> None:
        async def source(scope: Any) -> Any:
            for n in range(3):
                yield n

        slot = [self.turn.stream_in_turn(self.hosts[which], invoke=source), None]
        self.streams.append(slot)

    @precondition(lambda self: self.streams)
    @rule(pick=st.randoms(use_true_random=False))
    def step(self, pick: Any) -> None:
        slot = pick.choice(self.streams)

        async def start() -> None:
            if slot[0] is not None and (slot[1] is None or slot[1].done()):
                slot[1] = asyncio.ensure_future(outcome(slot[0].__anext__()))

        self._do(start)

    @precondition(lambda self: self.streams)
    @rule(pick=st.randoms(use_true_random=False), way=st.sampled_from(["close", "drop", "cancel"]))
    def end(self, pick: Any, way: str) -> None:
        slot = pick.choice(self.streams)

        async def close() -> None:
            if way == "cancel" and slot[1] is not None:
                slot[1].cancel()
            elif way == "drop":
                slot[0] = None
            elif slot[0] is not None:
                got = await outcome(slot[0].aclose())
                assert got is None or isinstance(got, RuntimeError)

        self._do(close)

    @precondition(lambda self: self.tasks)
    @rule(pick=st.randoms(use_true_random=False), cancel=st.booleans())
    def finish(self, pick: Any, cancel: bool) -> None:
        task, go = pick.choice(self.tasks)
        if cancel:
            task.cancel()
        go.set()
        self._do()

    @invariant()
    def starts_and_terminals_alternate(self) -> None:
        for host in self.hosts:
            ids = [signal.turn_id for signal in host.signals]
            assert ids[1::2] == ids[: len(ids) // 2 * 2 : 2]
            active = host.turn_state.active
            assert (active is not None) is (len(ids) % 2 == 1)
            assert self.turn.control(host, self.turn.LoopDirective.CONTINUE) is (active is not None)

    def teardown(self) -> None:
        async def end() -> None:
            for _, go in self.tasks:
                go.set()
            for slot in self.streams:
                if slot[1] is not None:
                    slot[1].cancel()
                slot[0] = None
            rest = [task for task, _ in self.tasks] + [s[1] for s in self.streams if s[1]]
            if rest:
                _, late = await asyncio.wait(rest, timeout=10)
                assert not late
            await spin()
            for host in self.hosts:
                await assert_idle(self.turn, host)

        try:
            self.loop.run_until_complete(end())
        finally:
            self.loop.close()
        assert self.complaints == []


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("contenders", [1000])
async def test_a_thousand_contenders_are_served_in_order(turn: Any, contenders: int) -> None:
    """Scenario 1, with many more."""
    host = Host(turn)
    order: list[int] = []

    async def call(number: int) -> None:
        async def body(scope: Any) -> None:
            order.append(number)
            await asyncio.sleep(0)

        await turn.run_in_turn(host, invoke=body)

    await asyncio.gather(*(asyncio.create_task(call(n)) for n in range(contenders)))
    assert order == list(range(contenders))
    await assert_idle(turn, host)
