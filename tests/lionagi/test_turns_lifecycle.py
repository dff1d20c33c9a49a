"""One turn at a time on a real Branch: order, nesting, one stamped pair, control, models, reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.lionagi.branches import (
    OPERATIONS,
    REASONING,
    STREAMS,
    Fake,
    Heard,
    begin,
    branch_of,
    call,
    installed,
    offline,
    run,
    settled,
    words,
)

__all__ = ["offline"]

CALLS = tuple(name for name in OPERATIONS if name not in STREAMS)


@pytest.fixture(autouse=True)
def uninstall() -> Iterator[Callable[[], None]]:
    """The adapter as it is by default."""
    with installed() as uninstall:
        yield uninstall


@pytest.mark.parametrize("cli", [False, True], ids=["api", "cli"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_one_stamped_pair(name: str, cli: bool) -> None:
    """ADR-0018 D4, D5: one RunStart, one RunEnd, the same id, whatever it is composed of."""

    async def main() -> None:
        from lionagi.session.signal import RunEnd, RunStart

        branch = branch_of(Fake(cli=cli or name == "run"))
        heard = Heard(branch)
        result = await call(branch, name)
        heard.one_pair()
        start, end = heard.lifecycle
        assert isinstance(start, RunStart) and isinstance(end, RunEnd)
        assert heard.signals[0] is start and heard.signals[-1] is end
        assert end.data == (None if name in STREAMS else result)
        assert end.duration_ms > 0

    run(main)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "parse"])
def test_a_failure_is_the_callers_and_the_signals(name: str) -> None:
    """ADR-0018 D4: the original exception, and one RunFailed with it."""

    async def main() -> None:
        fake = Fake(cli=name == "run")
        branch = branch_of(fake)
        heard = Heard(branch)
        prompt = {"ReAct": REASONING, "ReActStream": REASONING, "interpret": "x'"}.get(name, "x")
        failure = RuntimeError("no answer")
        fake.failing[prompt] = failure
        with pytest.raises(Exception, match="no answer") as raised:
            await call(branch, name)
        heard.one_pair(failed=True)
        assert heard.lifecycle[1].data is raised.value
        fake.failing.clear()
        await branch.chat("y")  # and the branch is free

    run(main)


@pytest.mark.parametrize("name", ["chat", "communicate", "operate", "run"])
def test_a_cancelled_call_has_one_failed_pair_and_frees_the_branch(name: str) -> None:
    """ADR-0018 D4: RunFailed, the cancellation goes on, the next caller starts."""

    async def main() -> None:
        fake = Fake(cli=name == "run")
        branch = branch_of(fake)
        heard = Heard(branch)
        fake.gate("x")
        task = asyncio.create_task(call(branch, name))
        await fake.entered["x"].wait()
        waiting = asyncio.create_task(branch.chat("y"))
        await settled()
        assert not waiting.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        heard_so_far = heard.kinds[:2]
        assert heard_so_far == ["RunStart", "RunFailed"]
        assert await waiting == "ry"

    run(main)


@pytest.mark.parametrize("second", OPERATIONS)
@pytest.mark.parametrize("first", ["chat", "communicate", "run"])
def test_any_two_operations_on_one_branch_take_turns(first: str, second: str) -> None:
    """ADR-0018 D2: first come, first served; nothing of the second before the first has ended."""

    async def main() -> None:
        fake = Fake()
        branch = branch_of(fake)
        heard = Heard(branch)
        fake.gate("x")
        one = asyncio.create_task(call(branch, first))
        await fake.entered["x"].wait()
        two = asyncio.create_task(call(branch, second))
        await settled()
        assert heard.kinds == ["RunStart"] and len(fake.requests) == 1
        fake.gates["x"].set()
        await asyncio.gather(one, two)
        assert heard.kinds == ["RunStart", "RunEnd"] * 2
        ids = [signal.turn_id for signal in heard.lifecycle]
        assert ids[0] == ids[1] != ids[2] == ids[3]

    run(main)


def test_many_contenders_take_turns_in_the_order_they_came() -> None:
    """ADR-0018 D2, with a history that every one of them sees whole."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        names = [f"m{number}" for number in range(30)]
        await asyncio.gather(*(branch.communicate(name) for name in names))
        assert words(branch) == [word for name in names for word in (name, f"r{name}")]
        assert [len(request) for request in fake.requests] == list(range(1, 60, 2))

    run(main)


def test_branches_do_not_wait_for_each_other() -> None:
    """ADR-0018 D2: distinct branches have distinct locks, clones and splits as well."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        others = [branch.clone(), heard.session.split(branch), heard.session.new_branch(chat_model=fake.model)]
        fake.gate("x")
        held = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        for other in others:
            assert await other.communicate("y") == "ry"
        assert not held.done()
        fake.gates["x"].set()
        await held

    run(main)


def test_a_call_from_a_tool_is_part_of_the_turn() -> None:
    """ADR-0018 D2: nested work shares the turn: no wait, no signals, the same context."""

    async def main() -> None:
        from lionwt.lionagi import hosts
        from lionwt.turn import current_scope

        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        seen: list[Any] = []

        async def answer(payload: Any) -> str:
            scope = current_scope(hosts.Host(branch, None))
            seen.append((scope.context, scope.owns_lifecycle) if scope else None)
            if len(seen) == 1:
                assert await branch.chat("inner") == "rinner"
                await asyncio.create_task(branch.communicate("child"))
            return f"r{str(payload['messages'][-1]['content']).split()[-1]}"

        fake._answer = answer  # type: ignore[method-assign]
        assert await branch.communicate("outer") == "router"
        heard.one_pair()
        assert len({id(context) for context, _ in seen}) == 1

    run(main)


def test_an_observer_may_call_its_branch() -> None:
    """ADR-0018 D2: a start observer's call is nested; a terminal observer's is refused, not a deadlock."""

    async def main() -> None:
        from lionagi.session.signal import RunEnd, RunStart

        from lionwt.turn import TurnFinalizingError

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)
        answers: list[Any] = []

        async def at_start(signal: Any, _session: Any) -> None:
            answers.append(await branch.chat("start"))

        async def at_end(signal: Any, _session: Any) -> None:
            try:
                await branch.chat("end")
            except TurnFinalizingError as error:
                answers.append(error)

        heard.session.observe(RunStart, handler=at_start)
        heard.session.observe(RunEnd, handler=at_end)
        assert await branch.communicate("x") == "rx"
        heard.one_pair()
        assert answers[0] == "rstart" and isinstance(answers[1], TurnFinalizingError)

    run(main)


def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """ADR-0018 D4: logged, the result kept, no second terminal."""

    async def main() -> None:
        from lionagi.session.signal import Signal

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)

        def broken(signal: Any, _session: Any) -> None:
            raise ValueError("observer")

        heard.session.observe(Signal, handler=broken)
        assert await branch.communicate("x") == "rx"
        heard.one_pair()

    with caplog.at_level(logging.ERROR, logger="lionagi"):
        run(main)
    assert "observer raised during lifecycle emission of RunEnd" in caplog.text


def test_who_is_observed_from_the_middle_of_a_turn_hears_no_half_pair() -> None:
    """ADR-0018 D4: a terminal only where there was a start."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        fake.gate("x")
        task = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        heard = Heard(branch)
        fake.gates["x"].set()
        await task
        assert heard.kinds == []

    run(main)


# Streams


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("end", ["break", "aclose", "throw", "cancel"])
def test_a_stream_that_is_left_ends_its_turn(name: str, end: str) -> None:
    """ADR-0018 D4: RunEnd for a consumer that leaves, RunFailed for an error or a cancellation."""

    async def main() -> None:
        fake = Fake()
        branch = branch_of(fake)
        heard = Heard(branch)

        async def consume() -> None:
            stream = begin(branch, name)
            async for _ in stream:
                if end == "break":
                    break
                if end == "aclose":
                    await stream.aclose()
                elif end == "throw":
                    with pytest.raises(KeyError):
                        await stream.athrow(KeyError("thrown"))
                else:
                    async with aclosing(stream):  # what ends with an error may keep its frame, and the stream in it
                        await asyncio.sleep(60)
            if end == "aclose":
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()

        task = asyncio.create_task(consume())
        await settled()
        if end == "cancel":
            for _ in range(20):
                await settled()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        assert await branch.chat("y") == "ry"  # waits for what `break` leaves to the loop
        assert heard.kinds[:2] == ["RunStart", "RunFailed" if end == "throw" else "RunEnd"]
        assert heard.kinds[2:] == ["RunStart", "RunEnd"]

    run(main)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_was_never_asked_holds_nothing(name: str) -> None:
    """ADR-0018 D2: entry occurs at the first step."""

    async def main() -> None:
        branch = branch_of(Fake())
        heard = Heard(branch)
        stream = begin(branch, name)
        await branch.chat("y")
        assert heard.kinds == ["RunStart", "RunEnd"]
        del stream
        await settled()
        assert heard.kinds == ["RunStart", "RunEnd"]

    run(main)


def test_the_consumer_of_a_stream_is_inside_its_turn() -> None:
    """ADR-0018 D2: a call between two items is nested; another task waits."""

    async def main() -> None:
        fake = Fake()
        branch = branch_of(fake)
        heard = Heard(branch)
        go = asyncio.Event()

        async def outsider() -> Any:
            await go.wait()
            return await branch.chat("out")

        waiting = asyncio.create_task(outsider())
        async with aclosing(branch.run("x")) as stream:
            await stream.__anext__()
            go.set()
            assert await branch.chat("in") == "rin"
            await settled()
            assert not waiting.done()
        assert heard.kinds[:2] == ["RunStart", "RunEnd"]
        assert await waiting == "rout"

    run(main)


# Control


def test_a_directive_can_name_its_turn() -> None:
    """ADR-0018 D3: by id, once, the last one written; False for any other turn or none."""

    async def main() -> None:
        from uuid import uuid4

        from lionagi.session.control import LoopControl, LoopDirective

        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        assert branch.control(LoopDirective.CANCEL) is False
        assert branch.poll_control() is None
        fake.gate("x")
        task = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        turn_id = heard.lifecycle[0].turn_id
        assert branch.control(LoopDirective.BREAK, turn_id=uuid4()) is False
        assert branch.control(LoopDirective.BREAK, turn_id=turn_id) is True
        assert branch.control(LoopDirective.CANCEL, reason="enough") is True
        assert branch.poll_control(turn_id=uuid4()) is None
        assert branch.poll_control(turn_id=turn_id) == LoopControl(LoopDirective.CANCEL, "enough")
        assert branch.poll_control() is None
        fake.gates["x"].set()
        await task
        assert branch.control(LoopDirective.CANCEL, turn_id=turn_id) is False

    run(main)


@pytest.mark.parametrize(("directive", "failed"), [("CANCEL", False), ("BREAK", True)])
def test_a_stream_obeys_its_directive(directive: str, failed: bool) -> None:
    """ADR-0018 D3, D4: CANCEL ends it silently with RunEnd, BREAK is lionagi's LoopBreak and RunFailed."""

    async def main() -> None:
        from lionagi.session.control import LoopBreak, LoopDirective

        branch = branch_of(Fake())
        heard = Heard(branch)
        found: list[str] = []

        async def consume() -> None:
            async for message in branch.run("x"):
                found.append(type(message).__name__)
                assert branch.control(LoopDirective[directive], reason="why")

        if failed:
            with pytest.raises(LoopBreak, match="why"):
                await consume()
        else:
            await consume()
        assert found == ["Instruction"]
        heard.one_pair(failed=failed)

    run(main)


def test_a_clean_stop_out_of_a_call_is_no_failure() -> None:
    """ADR-0018 D4: StopStream means RunEnd; out of a coroutine it goes on to the caller."""

    async def main() -> None:
        from lionagi.operations._observe import StopStream, check_control
        from lionagi.session.control import LoopDirective

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)

        async def middle(branch: Any, *_: Any, **__: Any) -> Any:
            branch.control(LoopDirective.CANCEL)
            check_control(branch)

        with pytest.raises(StopStream):
            await branch.operate(instruction="x", middle=middle)
        heard.one_pair()

    run(main)


def test_legacy_control_is_kept_for_the_next_poll(uninstall: Callable[[], None]) -> None:
    """`unattributed_control="legacy"`: as lionagi has it while no turn is active, and only then."""
    uninstall()

    async def main() -> None:
        from uuid import uuid4

        from lionagi.session.control import LoopBreak, LoopDirective

        branch = branch_of(Fake())
        assert branch.control(LoopDirective.CANCEL, reason="r") is True
        assert branch.poll_control().reason == "r"
        assert branch.poll_control() is None
        assert branch.control(LoopDirective.BREAK, turn_id=uuid4()) is False
        branch.control(LoopDirective.BREAK)
        with pytest.raises(LoopBreak):
            await call(branch, "run")

    with installed(unattributed_control="legacy"):
        run(main)


# Models


def test_a_waiting_call_uses_the_model_of_the_time_it_starts() -> None:
    """ADR-0018 D1: the model is resolved after the lock."""

    async def main() -> None:
        old, new = Fake("old", cli=False), Fake("new", cli=False)
        branch = branch_of(old)
        old.gate("x")
        one = asyncio.create_task(branch.communicate("x"))
        await old.entered["x"].wait()
        two = asyncio.create_task(branch.communicate("y"))
        await settled()
        branch.chat_model = new.model
        old.gates["x"].set()
        await asyncio.gather(one, two)
        assert (len(old.requests), len(new.requests)) == (1, 1)

    run(main)


def test_a_run_keeps_the_model_it_started_with() -> None:
    """ADR-0018 D3: a change during an active turn does not replace that turn's snapshot."""

    async def main() -> None:
        old, new = Fake("old"), Fake("new")
        branch = branch_of(old)
        async with aclosing(branch.run("x")) as stream:
            await stream.__anext__()
            branch.chat_model = new.model
            async for _ in stream:
                pass
        assert (len(old.requests), len(new.requests)) == (1, 0)
        assert branch.chat_model is new.model

    run(main)


def test_a_start_observer_changes_the_model_for_later_runs_alone() -> None:
    """ADR-0018 D1: what a run starts with is settled before it says so."""

    async def main() -> None:
        from lionagi.session.signal import RunStart

        old, new = Fake("old"), Fake("new")
        branch = branch_of(old)

        def change(signal: Any, _session: Any) -> None:
            branch.chat_model = new.model

        Heard(branch).session.observe(RunStart, handler=change)
        await call(branch, "run")
        assert (len(old.requests), len(new.requests)) == (1, 0)
        await call(branch, "run")
        assert (len(old.requests), len(new.requests)) == (1, 1)

    run(main)


def test_what_is_no_model_is_refused_as_lionagi_refuses_it() -> None:
    """ADR-0018 D3: the turn fails, the configuration is untouched."""

    async def main() -> None:
        branch = branch_of(Fake())
        before = branch.chat_model
        with pytest.raises(TypeError, match="Input model is not an instance of iModel"):
            await call(branch, "run", chat_model="gpt")
        assert branch.chat_model is before

    run(main)


def test_the_turn_knows_its_model() -> None:
    """ADR-0018 D1: the override of the call, or what the branch has."""

    async def main() -> None:
        from lionwt.lionagi import hosts
        from lionwt.turn import current_scope

        own, other, parse = Fake("own", cli=False), Fake("other"), Fake("parse", cli=False)
        branch = branch_of(own, parse_model=parse.model)
        heard = Heard(branch)
        models: list[Any] = []
        from lionagi.session.signal import RunStart

        def look(signal: Any, _session: Any) -> None:
            scope = current_scope(hosts.Host(branch, None))
            assert scope is not None
            models.append(scope.context.model)

        heard.session.observe(RunStart, handler=look)
        await branch.chat("x")
        await branch.chat("x", imodel=other.model)
        await branch.chat("x", None, None, None, None, None, None, None, other.model)
        await branch.communicate("x", chat_model=other.model)
        await call(branch, "parse")
        await call(branch, "run", chat_model=other.model)
        other_ = other.model
        assert [m is e for m, e in zip(models, [own.model, other_, other_, other_, parse.model, other_], strict=True)]
        assert models == [own.model, other_, other_, other_, parse.model, other_]

    run(main)


# Providers


class _Note:
    name = "note"

    def __init__(self) -> None:
        self.branches: list[Any] = []

    async def provide(self, branch: Any, instruction: Any) -> str:
        self.branches.append(branch)
        return "noted"


@pytest.mark.parametrize("name", ["communicate", "run"])
def test_a_provider_gets_the_branch_itself_and_the_turn_gets_its_report(name: str) -> None:
    """ADR-0018 D3: blocks and report belong to the turn's context."""

    async def main() -> None:
        from lionwt.lionagi import hosts
        from lionwt.turn import current_scope

        fake = Fake()
        branch = branch_of(fake, system="be kind")
        note = _Note()
        branch.providers.register(note, name="note")
        contexts: list[Any] = []
        original = fake._answer

        async def answer(payload: Any) -> str:
            scope = current_scope(hosts.Host(branch, None))
            assert scope is not None
            contexts.append((scope.context.provider_blocks, scope.context.provider_report))
            assert branch.last_context_report is None
            return await original(payload)

        fake._answer = answer  # type: ignore[method-assign]
        await call(branch, name)
        assert [found is branch for found in note.branches] == [True]
        [(blocks, report)] = contexts
        assert blocks == ("noted",)
        assert branch.last_context_report is report

    run(main)


def test_a_request_outside_of_any_turn_has_a_report_of_its_own() -> None:
    """lionagi's functions can be called without a turn, before and after turns: the last report is shown."""

    async def main() -> None:
        from lionagi.operations.chat.chat import chat
        from lionagi.operations.types import ChatParam

        branch = branch_of(Fake(cli=False), system="be kind")
        branch.providers.register(_Note(), name="note")
        reports = []
        for word in ("x", "y"):
            await chat(branch, word, ChatParam.from_branch(branch))
            reports.append(branch.last_context_report)
            await branch.chat(word)
            reports.append(branch.last_context_report)
        assert [report.blocks for report in reports] == [["noted"]] * 4
        assert len({id(report) for report in reports}) == 4

    run(main)


def test_a_report_from_before_is_shown_until_a_turn_has_ended(uninstall: Callable[[], None]) -> None:
    """ADR-0018 D5: none is partial, and none is lost."""
    uninstall()

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake, system="be kind")
        branch.providers.register(_Note(), name="note")
        await branch.chat("x")
        report = branch.last_context_report
        with installed():
            assert branch.last_context_report is report
            fake.gate("y")
            task = asyncio.create_task(branch.chat("y"))
            await fake.entered["y"].wait()
            assert branch.last_context_report is report
            fake.gates["y"].set()
            await task
            assert branch.last_context_report is not report

    run(main)


# Where a run starts


@pytest.mark.parametrize(("start", "kinds"), [("entry", ["RunStart", "RunFailed"]), ("adopt", ["RunFailed"])])
def test_a_refused_prompt_starts_where_it_was_asked_to(
    uninstall: Callable[[], None], start: str, kinds: list[str]
) -> None:
    """`start`: on entry (ADR-0018 D2), or where lionagi starts a run, after its prompt guard."""
    uninstall()

    async def main() -> None:
        from lionagi.hooks.bus import HookPoint

        branch = branch_of(Fake())
        heard = Heard(branch)

        async def guard(**_: Any) -> None:
            raise PermissionError("refused")

        heard.session.hooks.on(HookPoint.USER_PROMPT_SUBMIT, guard)
        with pytest.raises(PermissionError, match="refused"):
            await call(branch, "run")
        assert heard.kinds == kinds
        assert words(branch) == []

    with installed(start=start):
        run(main)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_adopted_start_is_part_of_the_pair(uninstall: Callable[[], None], name: str) -> None:
    """`start="adopt"`: lionagi's own start is the turn's."""
    uninstall()

    async def main() -> None:
        branch = branch_of(Fake())
        heard = Heard(branch)
        await call(branch, name)
        heard.one_pair()

    with installed(start="adopt"):
        run(main)


# Silence, and what is told in between


def test_who_asks_for_silence_gets_it() -> None:
    """lionagi's suppression flag, set by a caller, still silences a run: its start and its end."""

    async def main() -> None:
        from lionagi.session._lifecycle_ctx import suppress_lifecycle_var

        branch = branch_of(Fake())
        heard = Heard(branch)
        token = suppress_lifecycle_var.set(True)
        try:
            await call(branch, "run")
        finally:
            suppress_lifecycle_var.reset(token)
        assert heard.kinds == []
        await call(branch, "run")
        heard.one_pair()

    run(main)


def test_a_lifecycle_signal_of_ones_own_goes_through() -> None:
    """ADR-0018 D5: signals that are made by hand stay what they are."""

    async def main() -> None:
        from lionagi.session.signal import RunStart

        branch = branch_of(Fake())
        heard = Heard(branch)
        async for _ in branch.run("x"):
            await branch.emit(RunStart())
        assert heard.kinds == ["RunStart", "RunStart", "RunStart", "RunEnd"]

    run(main)


def test_messages_outside_of_turns_are_told_and_can_be_waited_for() -> None:
    """ADR-0018 D3: nobody's signals are detached; `drain_signals` outside of a turn waits for them."""

    async def main() -> None:
        branch = branch_of(Fake())
        heard = Heard(branch)
        await branch.msgs.a_add_message(instruction="by hand")
        assert "MessageAdded" not in heard.all_kinds
        await branch.drain_signals()
        assert heard.all_kinds == ["MessageAdded"]
        await branch.msgs.a_add_message(instruction="once more")
        assert len(branch._signal_tasks) == 1
        await settled()
        assert branch._signal_tasks == []  # nobody has to wait for what is done

    run(main)


def test_inside_a_turn_a_drain_waits_for_its_messages() -> None:
    """ADR-0018 D3: `drain_signals` speaks of the caller's own turn."""

    async def main() -> None:
        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)

        async def middle(branch: Any, *_: Any, **__: Any) -> Any:
            await branch.msgs.a_add_message(instruction="by hand")
            await branch.drain_signals()
            assert heard.all_kinds == ["RunStart", "MessageAdded"]

        await branch.operate(instruction="x", middle=middle)
        assert heard.all_kinds == ["RunStart", "MessageAdded", "RunEnd"]

    run(main)


@pytest.mark.parametrize("name", ["communicate", "operate", "chat_and_record", "run", "ReAct"])
def test_every_message_of_a_turn_is_told_inside_its_pair(name: str) -> None:
    """ADR-0018 D4: pending message signals are drained before terminal emission."""

    async def main() -> None:
        branch = branch_of(Fake(cli=name == "run"))
        heard = Heard(branch)
        await call(branch, name)
        kinds = [kind for kind in heard.all_kinds if kind in ("RunStart", "MessageAdded", "RunEnd")]
        assert kinds[0] == "RunStart" and kinds[-1] == "RunEnd"
        assert kinds.count("MessageAdded") == len(branch.messages)

    run(main)


def test_calls_through_session_and_flow_are_turns() -> None:
    """ADR-0018 D2: whoever calls an operation by name calls the turn."""

    async def main() -> None:
        from lionagi.operations import Builder

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)
        assert await heard.session.run_operation("communicate", instruction="x") == "rx"
        builder = Builder()
        builder.add_operation("communicate", instruction="y")
        await heard.session.flow(builder.get_graph(), default_branch=branch)
        ids = [signal.turn_id for signal in heard.lifecycle if hasattr(signal, "turn_id")]
        assert len(ids) == 4 and len(set(ids)) == 2

    run(main)


@pytest.mark.parametrize("end", ["aclose", "throw", "break"])
def test_what_a_run_cleans_up_is_done_before_its_terminal(end: str) -> None:
    """ADR-0018 D4: the hooks, snapshot and chunk handler of a stream that was left are no part of the next turn."""

    async def main() -> None:
        from lionagi.hooks.bus import HookBus, HookPoint
        from lionagi.session.signal import RunEnd, RunFailed

        fake = Fake()
        fake.chunks = 3
        branch = branch_of(fake)
        heard = Heard(branch)
        branch.attach_hook_bus(HookBus())
        order: list[str] = []

        async def after_the_call(**_: Any) -> None:
            await settled()
            order.append("cleaned up")

        branch._hooks.on(HookPoint.API_POST_CALL, after_the_call)
        for kind in (RunEnd, RunFailed):
            heard.session.observe(kind, handler=lambda *_: order.append("terminal"))
        stream = branch.run("x")
        await stream.__anext__()
        await stream.__anext__()
        if end == "aclose":
            await stream.aclose()
        elif end == "throw":
            with pytest.raises(KeyError):
                await stream.athrow(KeyError("thrown"))
        del stream
        await call(branch, "run")
        assert order == ["cleaned up", "terminal"] * 2

    run(main)
