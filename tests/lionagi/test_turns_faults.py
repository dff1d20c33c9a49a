"""What lionagi 0.36 does to overlapping turns, shown on its real Branch, and gone with the adapter.

Each test runs twice: without the adapter, where the fault must show, and with it, where it must not.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest

from tests.lionagi.branches import Fake, Heard, branch_of, call, installed, offline, run, settled, words

__all__ = ["offline"]


@pytest.fixture(params=[False, True], ids=["lionagi", "adapter"])
def adapter(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the adapter is installed."""
    if not request.param:
        yield False
        return
    with installed():
        yield True


def test_overlapping_calls_see_each_other_and_append_in_order(adapter: bool) -> None:
    """ADR-0018 D2: B waits for A, and is built from a history that holds A."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        gate = fake.gate("A")
        first = asyncio.create_task(branch.communicate("A"))
        await fake.entered["A"].wait()
        second = asyncio.create_task(branch.communicate("B"))
        await settled()
        early = len(fake.requests) == 2  # B was sent while A had no answer
        gate.set()
        assert await asyncio.gather(first, second) == ["rA", "rB"]
        assert early is not adapter
        assert words(branch) == (["A", "rA", "B", "rB"] if adapter else ["B", "rB", "A", "rA"])
        assert fake.requests[1] == (["A", "rA", "B"] if adapter else ["B"])

    run(main)


def test_a_directive_is_obeyed_by_the_stream_it_was_meant_for(adapter: bool) -> None:
    """ADR-0018 D3: a CANCEL for one stream is never taken by another."""

    async def main() -> None:
        from lionagi.session.control import LoopDirective

        fake = Fake()
        branch = branch_of(fake)
        fake.gate("A")
        fake.gate("B")
        aimed = asyncio.create_task(_words_of(branch.run("A")))
        await fake.entered["A"].wait()
        innocent = asyncio.create_task(_words_of(branch.run("B")))
        await settled()
        branch.control(LoopDirective.CANCEL)
        fake.gates["B"].set()  # the other gets to its poll first, where they overlap
        await settled()
        fake.gates["A"].set()
        assert await aimed == (["A"] if adapter else ["A", "rA"])
        assert await innocent == (["B", "rB"] if adapter else ["B"])

    run(main)


async def _words_of(stream: Any) -> list[str]:
    return [str(message.rendered).split()[-1] async for message in stream]


def test_a_directive_while_nothing_runs_ends_no_later_turn(adapter: bool) -> None:
    """ADR-0018 D3: a directive is never queued for a future turn; False tells who sent it."""

    async def main() -> None:
        from lionagi.session.control import LoopDirective

        branch = branch_of(Fake())
        answer = branch.control(LoopDirective.CANCEL)
        assert answer is (False if adapter else None)
        assert await _words_of(branch.run("A")) == (["A", "rA"] if adapter else ["A"])

    run(main)


def test_a_streams_messages_are_told_before_its_end(adapter: bool) -> None:
    """ADR-0018 D3: no turn drains the message signals of another, and its own come before its terminal."""

    async def main() -> None:
        from lionagi.session.signal import MessageAdded

        fake = Fake()
        branch = branch_of(fake)
        heard = Heard(branch)
        told = asyncio.Event()
        order: list[str] = []

        async def slow(signal: Any, _session: Any) -> None:
            if str(signal.data.rendered).split()[-1] == "rS":
                await told.wait()
                order.append("message")

        def end(signal: Any, _session: Any) -> None:
            order.append("end")

        heard.session.observe(MessageAdded, handler=slow)
        from lionagi.session.signal import RunEnd

        stream = branch.run("S")
        async with aclosing(stream):
            await stream.__anext__()
            await stream.__anext__()  # its answer is recorded, and an observer is at it
            thief = asyncio.create_task(branch.communicate("T"))
            await settled()
            heard.session.observe(RunEnd, handler=end)
            closing = asyncio.create_task(_words_of(stream))
            await settled()
            told.set()
            assert await closing == []
            await thief
        await settled()
        # Without the adapter communicate took the stream's tasks, and its end came first.
        assert order[:2] == (["message", "end"] if adapter else ["end", "message"])

    run(main)


@pytest.mark.parametrize("rejected", [False, True], ids=["used", "rejected"])
def test_a_model_for_one_call_does_not_stay_on_the_branch(adapter: bool, rejected: bool) -> None:
    """ADR-0018 D3: an override is the turn's, whatever becomes of the turn."""

    async def main() -> None:
        own, other = Fake("own"), Fake("other", cli=not rejected)
        branch = branch_of(own)
        with suppress(ValueError):
            assert await _words_of(branch.run("A", chat_model=other.model)) == ["A", "rA"]
            assert (own.requests, len(other.requests)) == ([], 1)
        assert (branch.chat_model is other.model) is not adapter
        assert (branch.chat_model is own.model) is adapter

    run(main)


def test_overlapping_runs_each_use_the_model_they_were_given(adapter: bool) -> None:
    """ADR-0018 D3: a model is resolved per turn."""

    async def main() -> None:
        own, one, two = Fake("own"), Fake("one"), Fake("two")
        branch = branch_of(own)
        started = asyncio.Event()

        async def second() -> list[str]:
            await started.wait()
            return await _words_of(branch.run("B", chat_model=two.model))

        later = asyncio.create_task(second())
        first = branch.run("A", chat_model=one.model)
        await first.__anext__()  # its prompt is recorded, its model not yet asked
        started.set()
        await settled()
        assert await _words_of(first) == ["rA"]
        assert await later == ["B", "rB"]
        assert (len(one.requests), len(two.requests)) == ((1, 1) if adapter else (0, 2))

    run(main)


class _Note:
    name = "note"

    async def provide(self, branch: Any, instruction: Any) -> str:
        return "noted"


def test_a_provider_report_is_the_last_ended_turns(adapter: bool) -> None:
    """ADR-0018 D5: none is visible before its turn ends, and a turn without providers has none."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake, system="be kind")
        branch.providers.register(_Note(), name="note")
        gate = fake.gate("A")
        turn = asyncio.create_task(branch.communicate("A"))
        await fake.entered["A"].wait()
        assert (branch.last_context_report is None) is adapter
        gate.set()
        await turn
        assert [entry["provider_name"] for entry in branch.last_context_report.fired] == ["note"]
        branch._context_providers = None
        await branch.communicate("B")
        assert (branch.last_context_report is None) is adapter

    run(main)


def test_a_closed_stream_has_ended_when_aclose_returns(adapter: bool) -> None:
    """ADR-0018 section D4: RunEnd does not wait for the garbage collector."""

    async def main() -> None:
        branch = branch_of(Fake())
        heard = Heard(branch)
        stream = branch.run("A")
        await stream.__anext__()
        gc.disable()
        try:
            await stream.aclose()
            assert heard.kinds == (["RunStart", "RunEnd"] if adapter else ["RunStart"])
        finally:
            gc.enable()
        await settled()

    run(main)


def test_a_call_cancelled_while_its_signals_are_drained_has_a_terminal(adapter: bool) -> None:
    """ADR-0018 D4: cleanup is shielded; a good body stays RunEnd, the cancellation comes after it."""

    async def main() -> None:
        from lionagi.session.signal import MessageAdded

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)
        reached, release = asyncio.Event(), asyncio.Event()

        async def slow(signal: Any, _session: Any) -> None:
            reached.set()
            await release.wait()

        heard.session.observe(MessageAdded, handler=slow)
        call = asyncio.create_task(branch.communicate("A"))
        await reached.wait()
        await settled()
        call.cancel()
        await settled()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        await settled()
        assert heard.kinds == (["RunStart", "RunEnd"] if adapter else ["RunStart"])

    run(main)


@pytest.mark.parametrize("name", ["chat", "chat_and_record", "parse", "interpret"])
def test_every_operation_that_calls_a_model_has_a_lifecycle(adapter: bool, name: str) -> None:
    """ADR-0018 D2: they participate as well."""

    async def main() -> None:
        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)
        await call(branch, name)
        if adapter:
            heard.one_pair()
        else:
            assert heard.kinds == []

    run(main)


@pytest.mark.parametrize("outer", ["communicate", "ReAct"])
def test_a_run_on_another_branch_is_heard_from_inside_a_turn(adapter: bool, outer: str) -> None:
    """ADR-0018 D4: no flag of one branch's turn silences another branch."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch, other = branch_of(fake), branch_of(Fake())
        Heard(branch)
        heard = Heard(other)
        original = fake._answer

        async def answer(payload: Any) -> str:
            if not heard.signals:
                await _words_of(other.run("B"))
            return await original(payload)

        fake._answer = answer  # type: ignore[method-assign]
        await call(branch, outer)
        assert heard.kinds == (["RunStart", "RunEnd"] if adapter else [])

    run(main)
