"""The words around a turn: providers, signals, the ready host, the stream object."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import uuid
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from turn_harness import (
    Host,
    assert_idle,
    forever,
    holding,
    items,
    outcome,
    quick,
    soon,
    spin,
    until,
)


class Registry:
    """A registry that contains what a provider raises, as ADR-0016 has it."""

    def __init__(self, turn: Any, **providers: Any) -> None:
        self.turn, self.providers, self.asked = turn, providers, 0

    @property
    def names(self) -> list[str]:
        return list(self.providers)

    async def gather(self, branch: Any, instruction: Any) -> Any:
        self.asked += 1
        report = self.turn.ProviderReport()
        for name, answer in self.providers.items():
            if isinstance(answer, Exception):
                report.failed.append(name)
            else:
                report.blocks.append(f"{answer} for {instruction}")
        return report


async def _gathered(turn: Any, registry: Any, has_system: bool) -> Any:
    host = Host(turn)

    async def body(scope: Any) -> Any:
        report = await turn.gather_providers(host, "hello", scope=scope, registry=registry, has_system=has_system)
        assert scope.context.provider_report is report
        return scope.context.provider_blocks, report

    got = await soon(turn.run_in_turn(host, invoke=body))
    assert turn.last_context_report(host) is got[1]
    return got


@pytest.mark.parametrize("registered", [False, True])
async def test_without_providers_there_are_no_blocks_and_no_report(turn: Any, registered: bool) -> None:
    registry = Registry(turn) if registered else None
    assert await _gathered(turn, registry, True) == ((), None)


async def test_without_a_system_message_providers_are_skipped_and_not_asked(turn: Any) -> None:
    registry = Registry(turn, notes="note", memory="fact")
    blocks, report = await _gathered(turn, registry, False)
    assert blocks == ()
    assert report == turn.ProviderReport(skipped=["notes", "memory"])
    assert registry.asked == 0


async def test_with_a_system_message_their_blocks_are_the_turns(turn: Any) -> None:
    blocks, report = await _gathered(turn, Registry(turn, notes="note", memory="fact"), True)
    assert blocks == ("note for hello", "fact for hello")
    assert report.failed == []


async def test_a_provider_that_fails_is_named_and_the_others_remain(turn: Any) -> None:
    registry = Registry(turn, notes=ValueError("no notes"), memory="fact")
    blocks, report = await _gathered(turn, registry, True)
    assert blocks == ("fact for hello",)
    assert report.failed == ["notes"]


async def test_a_registry_that_fails_does_not_fail_the_turn(turn: Any) -> None:
    class Broken(Registry):
        async def gather(self, branch: Any, instruction: Any) -> Any:
            raise ValueError("registry")

    blocks, report = await _gathered(turn, Broken(turn, notes="note"), True)
    assert blocks == ()
    assert report.failed == ["notes"]


async def test_the_ready_host_tells_every_observer_and_survives_one_that_fails(turn: Any, caplog: Any) -> None:
    host = turn.Conversation("model", ["hello"])
    heard: list[str] = []

    def fails(signal: Any) -> None:
        raise ValueError("first observer")

    async def waits(signal: Any) -> None:
        await asyncio.sleep(0)
        heard.append(type(signal).__name__)

    host.observers += [fails, waits, lambda signal: heard.append("plain")]

    async def body(scope: Any) -> Any:
        return scope.context.model

    assert await soon(turn.run_in_turn(host, invoke=body)) == "model"
    assert await soon(turn.run_in_turn(host, model="other", invoke=body)) == "other"
    assert host.model == "model"
    assert host.messages == ["hello"]
    assert heard == ["RunStart", "plain", "RunEnd", "plain"] * 2
    assert "first observer" in caplog.text


async def test_a_run_end_carries_the_id_the_result_and_the_time(turn: Any) -> None:
    host = Host(turn)
    number = uuid.uuid4()
    end = turn.build_run_end(host, turn_id=number, duration_ms=1.5, result="r")
    assert dataclasses.asdict(end) == {
        "turn_id": number,
        "input_tokens": 0,
        "output_tokens": 0,
        "total_cost_usd": 0.0,
        "num_turns": 0,
        "duration_ms": 1.5,
        "data": "r",
    }
    assert turn.build_run_end(host).turn_id is None
    await soon(turn.run_in_turn(host, invoke=quick))
    assert host.signals[1].data == "ok"
    assert host.signals[1].duration_ms > 0


async def test_a_context_made_by_hand_has_the_fields_of_the_record(turn: Any) -> None:
    task = asyncio.current_task()
    number = uuid.uuid4()
    context = turn.TurnExecutionContext(number, "model", task)
    assert (context.turn_id, context.model, context.owner_task) == (number, "model", task)
    assert (context.phase, context.provider_blocks) == ("active", ())
    assert context.provider_report is context.control is None
    assert context.signal_tasks == context.nested_tasks == set()
    with pytest.raises(AttributeError, match="nonsense"):
        _ = context.nonsense
    scope = turn.TurnScope(context, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scope.owns_lifecycle = False


async def test_a_turn_has_one_id_and_it_is_its_own(turn: Any) -> None:
    host = Host(turn, observed=False)
    seen: list[Any] = []

    async def body(scope: Any) -> None:
        seen.append(scope)
        assert scope.context.turn_id == scope.context.turn_id
        assert scope.context.owner_task is asyncio.current_task()

    for _ in range(2):
        await turn.run_in_turn(host, invoke=body)
    assert seen[0].context.turn_id != seen[1].context.turn_id
    assert seen[0].context.phase == "closed"
    assert seen[0].context.turn_id.version == 4


async def test_without_listeners_no_signal_is_made(turn: Any) -> None:
    host = Host(turn, observed=False)

    async def body(scope: Any) -> Any:
        return turn.schedule_signal(host, forever)

    assert await soon(turn.run_in_turn(host, invoke=body)) is None
    assert host.signals == []


def test_without_a_loop_no_signal_is_scheduled(turn: Any) -> None:
    host = Host(turn)
    assert turn.schedule_signal(host, forever) is None
    assert turn.current_scope(host) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
async def test_a_copied_state_is_a_fresh_one(turn: Any, copied: Any) -> None:
    host = turn.Conversation()

    async def body(scope: Any) -> Any:
        other = turn.Conversation()
        other.turn_state = copied(host.turn_state)
        assert other.turn_state.active is None
        return await soon(turn.run_in_turn(other, invoke=quick))

    assert await turn.run_in_turn(host, invoke=body) == "ok"


async def test_an_unknown_directive_is_an_error(turn: Any) -> None:
    with pytest.raises(ValueError, match="'halt'"):
        turn.control(Host(turn), "halt")


async def test_the_stream_is_an_async_generator_that_can_be_weakly_referred_to(turn: Any) -> None:
    stream = turn.stream_in_turn(Host(turn), invoke=items(1))
    assert isinstance(stream, AsyncGenerator)
    assert weakref.ref(stream)() is stream
    assert stream.__aiter__() is stream
    assert [item async for item in stream] == [1]
    assert [item async for item in stream] == []


async def test_what_is_sent_and_thrown_reaches_the_body(turn: Any) -> None:
    host = Host(turn)

    async def echo(scope: Any) -> Any:
        sent = yield "ready"
        while True:
            try:
                sent = yield sent
            except KeyError as exc:
                sent = f"caught {exc.args[0]}"

    stream = turn.stream_in_turn(host, invoke=echo)
    assert await stream.asend(None) == "ready"
    assert await stream.asend("a") == "a"
    assert await stream.athrow(KeyError("b")) == "caught b"
    assert await stream.athrow(KeyError, "c") == "caught c"
    error = ValueError("d")
    assert await outcome(stream.athrow(error)) is error
    assert host.names == ["RunStart", "RunFailed"]
    assert host.signals[1].data is error
    await assert_idle(turn, host)


async def test_an_iterator_without_athrow_gets_what_is_thrown_raised(turn: Any) -> None:
    class Plain:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            return 1

    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=lambda scope: Plain())
    assert await stream.__anext__() == 1
    assert isinstance(await outcome(stream.athrow(ValueError())), ValueError)
    assert host.names == ["RunStart", "RunFailed"]
    await assert_idle(turn, host)


async def test_a_stream_cannot_be_stepped_twice_at_once(turn: Any) -> None:
    host = Host(turn)

    async def source(scope: Any) -> Any:
        await forever()
        yield 1

    stream = turn.stream_in_turn(host, invoke=source)
    first = asyncio.create_task(stream.__anext__())
    await spin()
    assert isinstance(await outcome(stream.__anext__()), RuntimeError)
    first.cancel()
    assert isinstance(await outcome(first), asyncio.CancelledError)
    await assert_idle(turn, host)


async def test_a_stream_that_waits_for_its_turn_cannot_be_used_by_another_task(turn: Any) -> None:
    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=items(1))
    async with holding(turn, host):
        first = asyncio.create_task(stream.__anext__())
        await spin()
        for other in (stream.__anext__(), stream.athrow(ValueError()), stream.aclose()):
            assert type(await outcome(other)) is RuntimeError
    assert await soon(first) == 1
    await stream.aclose()
    await assert_idle(turn, host)


async def test_a_value_sent_too_early_starts_nothing(turn: Any) -> None:
    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=items(1))
    assert isinstance(await outcome(stream.asend("early")), TypeError)
    await assert_idle(turn, host)
    assert await stream.asend(None) == 1
    await stream.aclose()


async def test_what_is_thrown_into_a_stream_not_started_ends_it(turn: Any) -> None:
    host = Host(turn)
    stream = turn.stream_in_turn(host, invoke=items(1))
    error = ValueError()
    assert await outcome(stream.athrow(error)) is error
    assert [item async for item in stream] == []
    assert host.signals == []
    await assert_idle(turn, host)


async def test_what_a_context_knows_does_not_grow_from_turn_to_turn(turn: Any) -> None:
    host = Host(turn, observed=False)
    lengths: list[int] = []

    async def after(owner: Any, left: int) -> None:
        await asyncio.wait([owner])
        await begin(left - 1)

    async def begin(left: int) -> None:
        async def body(scope: Any) -> None:
            async for _ in turn.stream_in_turn(other, invoke=items(1, 2)):
                break
            lengths.append(len(turn._bindings.get()))
            if left:
                children.append(asyncio.create_task(after(asyncio.current_task(), left)))

        await turn.run_in_turn(host, invoke=body)

    other = Host(turn, observed=False)
    children: list[Any] = []
    await asyncio.create_task(begin(10))
    while not all(child.done() for child in children):
        await asyncio.wait(children)
    assert len(lengths) == 11
    assert max(lengths) <= 3
    await until(lambda: other.turn_state.active is None)
    await assert_idle(turn, host)
    await assert_idle(turn, other)
