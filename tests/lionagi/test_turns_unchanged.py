"""What a user of lionagi sees is what it was, the order of turns aside."""

from __future__ import annotations

import asyncio
import collections.abc
import copy
import inspect
import pickle
import sys
import types
from typing import Any

import pytest

from tests.lionagi.branches import OPERATIONS, STREAMS, Fake, Heard, begin, branch_of, call, installed, offline, run

__all__ = ["offline"]

REPLACED = (*OPERATIONS, "_observed_run", "_safe_emit", "_schedule_emit", "drain_signals")


def shown(name: str) -> tuple[Any, ...]:
    """What a reader, an editor or a framework sees of a method."""
    from lionagi import Branch

    method = getattr(Branch, name)
    return (
        inspect.signature(method),
        inspect.getdoc(method),
        method.__name__,
        method.__qualname__,
        method.__module__,
        method.__annotations__,
        inspect.iscoroutinefunction(method),
        inspect.isfunction(method),
    )


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_shown_of_a_method_is_unchanged(name: str) -> None:
    """Signature, docstring, names, annotations, whether it is a coroutine function."""
    before = shown(name)
    with installed():
        assert shown(name) == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads are kept from Python 3.11 on")
def test_the_overloads_of_chat_are_unchanged() -> None:
    """They are found under the method's name."""
    import typing

    from lionagi import Branch

    before = typing.get_overloads(Branch.chat)
    with installed():
        assert typing.get_overloads(Branch.chat) == before


@pytest.mark.parametrize("name", ["control", "poll_control"])
def test_control_takes_a_turn_id_besides_what_it_took(name: str) -> None:
    """ADR-0018 D3: the one visible addition; docstring and names stay."""
    from lionagi import Branch

    before = shown(name)
    with installed():
        now = shown(name)
        parameters = dict(inspect.signature(getattr(Branch, name)).parameters)
    added = parameters.pop("turn_id")
    assert (added.kind, added.default) == (added.KEYWORD_ONLY, None)
    assert [(p.name, p.kind, p.default) for p in parameters.values()] == [
        (p.name, p.kind, p.default) for p in before[0].parameters.values()
    ]
    assert now[1:5] == before[1:5]


def test_the_function_behind_run_shows_what_it_showed() -> None:
    """For who calls it directly."""
    import importlib

    module = importlib.import_module("lionagi.operations.run.run")
    before = inspect.signature(module.run), inspect.getdoc(module.run), module.run.__qualname__
    with installed():
        assert (inspect.signature(module.run), inspect.getdoc(module.run), module.run.__qualname__) == before


def test_the_classes_are_the_same_pydantic_models() -> None:
    """No field, no private attribute, no configuration is added."""
    from lionagi import Branch, Session

    def model(cls: Any) -> tuple[Any, ...]:
        schema = cls.__pydantic_core_schema__
        return dict(cls.model_fields), dict(cls.__private_attributes__), dict(cls.model_config), id(schema)

    before = model(Branch), model(Session)
    with installed():
        assert (model(Branch), model(Session)) == before


def stored(branch: Any) -> dict[str, Any]:
    kept = branch.to_dict(mode="json")
    kept.pop("logs", None)
    return dict(kept)


@pytest.mark.parametrize("name", ["communicate", "run", "ReAct"])
def test_a_branch_with_turns_behind_it_is_stored_as_any_other(name: str) -> None:
    """`to_dict`, `from_dict`, `model_dump`, equality, and the private state hold nothing new."""

    async def main() -> None:
        from lionagi import Branch

        branch = branch_of(Fake(cli=name == "run"), system="be kind")
        before, private, own = set(stored(branch)), set(branch.__pydantic_private__), set(vars(branch))
        dumped = set(branch.model_dump())
        await call(branch, name)
        assert set(stored(branch)) == before
        assert (set(branch.__pydantic_private__), set(vars(branch))) == (private, own)
        assert set(branch.model_dump()) == dumped
        assert "lionwt" not in str(branch.to_dict(mode="json", include_logs=False))
        data = branch.to_dict(include_logs=False)
        again = Branch.from_dict(data, chat_model=Fake(cli=False).model)
        assert again == branch and type(again) is Branch
        assert [(type(m), m.id) for m in again.messages] == [(type(m), m.id) for m in branch.messages]
        assert await again.chat("z") == "rz"

    with installed():
        run(main)


def test_copies_of_a_branch_take_turns_of_their_own() -> None:
    """`clone`, `aclone`, `split`, `asplit`, `model_copy`: during a turn of the original as well."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        await branch.communicate("w")
        fake.gate("x")
        held = asyncio.create_task(branch.chat("x"))
        await fake.entered["x"].wait()
        session = heard.session
        copies = [branch.clone(), await branch.aclone(), session.split(branch), await session.asplit(branch)]
        copies += [branch.model_copy(), copy.copy(branch)]
        for made in copies:
            assert type(made) is type(branch)
            assert len(made.messages) == 2
            assert await made.chat("y") == "ry"
        assert not held.done()
        fake.gates["x"].set()
        assert await held == "rx"

    with installed():
        run(main)


def test_what_cannot_be_copied_or_pickled_says_so_as_before() -> None:
    """A branch holds what neither can copy; the adapter adds no other reason."""

    def reasons() -> list[str]:
        branch = branch_of(Fake(cli=False))
        asyncio.run(branch.communicate("x"))
        found = []
        for attempt in (copy.deepcopy, pickle.dumps):
            try:
                attempt(branch)
                found.append("done")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}".split(" at 0x")[0])
        return found

    before = reasons()
    with installed():
        assert reasons() == before


RESULTS = ("chat", "chat_and_record", "parse", "interpret", "operate", "communicate", "ReAct", "ReActStream", "run")


@pytest.mark.parametrize("name", RESULTS)
def test_an_operation_returns_what_it_returned(name: str) -> None:
    """The same types, values and messages."""

    def results() -> Any:
        async def main() -> Any:
            branch = branch_of(Fake(cli=name == "run"))
            result = await call(branch, name)
            items = result if isinstance(result, list) else [result]
            return [(type(item).__qualname__, str(getattr(item, "rendered", item))) for item in items], [
                (type(message).__name__, str(message.rendered)) for message in branch.messages
            ]

        return run(main)

    before = results()
    with installed():
        assert results() == before


@pytest.mark.parametrize("name", ["communicate", "chat", "operate", "run"])
def test_wrong_arguments_are_the_same_error(name: str) -> None:
    """A TypeError that names the method."""

    def error() -> str:
        async def main() -> None:
            branch = branch_of(Fake())
            if name == "run":
                branch.run("a", "b", "c")
            else:
                await getattr(branch, name)(*range(30))

        with pytest.raises(TypeError) as raised:
            run(main)
        return str(raised.value)

    before = error()
    with installed():
        assert error() == before
    assert f"Branch.{name}()" in before


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_behaves_as_an_async_generator(name: str) -> None:
    """Steps, `asend`, `athrow`, `aclose`, and what follows each."""

    async def main() -> None:
        branch = branch_of(Fake())
        stream = begin(branch, name)
        assert isinstance(stream, collections.abc.AsyncGenerator)
        assert stream.__aiter__() is stream
        with pytest.raises(TypeError):
            await stream.asend("early")
        first = await stream.asend(None)
        assert first is not None
        with pytest.raises(KeyError, match="thrown"):
            await stream.athrow(KeyError("thrown"))
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        await stream.aclose()
        unstarted = begin(branch, name)
        await unstarted.aclose()
        assert [item async for item in unstarted] == []

    run(main)
    with installed():
        run(main)


def test_a_run_says_the_same_when_the_model_is_no_cli() -> None:
    """lionagi's own refusal, and the branch untouched."""

    def refusal() -> str:
        async def main() -> None:
            await call(branch_of(Fake(cli=False)), "run")

        with pytest.raises(ValueError, match="only supports CLI endpoints") as raised:
            run(main)
        return str(raised.value)

    before = refusal()
    with installed():
        assert refusal() == before


def test_a_snapshot_of_a_run_holds_the_branchs_own_model(tmp_path: Any) -> None:
    """ADR-0018 D3: a model for one call is in no stored configuration either."""

    async def main() -> None:
        import json

        own, other = Fake("own"), Fake("other")
        branch = branch_of(own)
        async for _ in branch.run("x", chat_model=other.model, stream_persist=True, persist_dir=str(tmp_path)):
            pass
        [snapshot] = tmp_path.glob("*.json")
        kept = json.loads(snapshot.read_text())
        assert kept["id"] == str(branch.id)
        assert kept["metadata"]["lion_class"] == "lionagi.session.branch.Branch"
        assert kept["chat_model"]["endpoint"]["config"]["kwargs"]["model"] == "own"
        assert other.model.streaming_process_func is None

    with installed():
        run(main)


def test_signals_are_lionagis_with_an_id() -> None:
    """ADR-0018 D5: kind, class, stored form and usage as before, `turn_id` a string in it."""

    async def main() -> None:
        from lionagi.protocols.types import Element
        from lionagi.session import signal
        from lionagi.session.observer import _sanitize_signal_payload

        branch = branch_of(Fake(cli=False))
        heard = Heard(branch)
        await branch.communicate("x")
        start, end = heard.lifecycle
        assert (type(start).__name__, type(end).__name__) == ("RunStart", "RunEnd")
        assert heard.session.observer.by_type(signal.RunEnd) == [end]
        assert signal.lane_for([start, end]) == "succeeded"
        payload = _sanitize_signal_payload(end)
        assert payload["turn_id"] == str(end.turn_id)
        assert end.model_dump(mode="json")["turn_id"] == str(end.turn_id)
        assert (end.input_tokens, end.output_tokens) == (3, 2)
        assert signal.RunEnd(**{k: v for k, v in end.model_dump().items() if k != "turn_id"}).output_tokens == 2
        again = Element.from_dict(end.to_dict(mode="json"))
        assert isinstance(again, signal.RunEnd) and again.turn_id == end.turn_id

    with installed():
        run(main)


def test_two_event_loops_one_after_the_other() -> None:
    """A branch serves one loop at a time, and any other once it is idle."""
    branch = branch_of(Fake(cli=False))
    with installed():
        for word in ("x", "y"):

            async def main(word: str = word) -> Any:
                return await branch.communicate(word)

            assert run(main) == f"r{word}"


def test_a_view_is_the_branch_in_all_but_its_model() -> None:
    """What lionagi's run is given is a branch to whoever looks."""
    from lionagi import Branch

    from lionwt.lionagi.hosts import View, real

    own, other = Fake("own"), Fake("other")
    branch = branch_of(own)
    view = View(branch, other.model)
    assert isinstance(view, Branch)
    assert real(view) is branch is real(branch)
    assert (view == branch, branch == view, hash(view) == hash(branch)) == (True, True, True)
    assert repr(view) == repr(branch)
    assert (view.chat_model, branch.chat_model) == (other.model, own.model)
    view.name = "named"
    assert branch.name == "named"
    assert view.msgs is branch.msgs
    assert isinstance(view.clone, types.MethodType) and view.clone.__self__ is branch


def test_under_another_async_library_the_operations_are_lionagis() -> None:
    """No asyncio loop, no turns: they pass through."""
    import trio
    from lionagi.testing import LionAGIMockFactory

    async def main() -> None:
        branch = LionAGIMockFactory.create_mocked_branch(response="ok")
        heard = Heard(branch)
        assert await branch.chat("x") == "ok"
        assert await branch.communicate("x") == "ok"
        assert heard.kinds == ["RunStart", "RunEnd"]
        assert not any(hasattr(signal, "turn_id") for signal in heard.lifecycle)
        assert inspect.isasyncgen(branch.run("x"))

    with installed():
        trio.run(main)


def test_under_another_async_library_a_stream_obeys_its_directive() -> None:
    """There is no turn to speak of, so `control` is lionagi's as well."""
    import trio

    async def main() -> tuple[int, Any]:
        from lionagi.service.types.stream_chunk import StreamChunk
        from lionagi.session.control import LoopDirective

        fake = Fake()

        async def create_event(**kwargs: Any) -> object:
            return object()

        async def stream(api_call: Any = None, **kwargs: Any) -> Any:
            for number in range(5):
                yield StreamChunk(type="tool_use", tool_id=str(number), tool_name="tool", tool_input={})

        # The executor of a model is asyncio's; what is left works in any loop.
        fake.model.executor = types.SimpleNamespace(append=None, config={})
        fake.model.create_event, fake.model.stream = create_event, stream
        branch = branch_of(fake)
        count, answer = 0, None
        async for _ in branch.run("x"):
            count += 1
            if count == 2:
                answer = branch.control(LoopDirective.CANCEL)
        return count, answer

    before = trio.run(main)
    assert before == (2, None)
    with installed():
        assert trio.run(main) == before
