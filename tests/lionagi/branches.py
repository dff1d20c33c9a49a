"""lionagi's real Branch over a model that answers from memory, and a session that remembers its signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.turn import turn_harness


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a test's coroutine in a loop of its own that cannot hang."""
    return turn_harness.run(main, strict=False)


class Answer(BaseModel):
    answer: str


#: What the steps of a reasoning loop are answered.
REASONED = ('{"analysis": "a", "extension_needed": false}', '{"answer": "a"}')

REASONING = 'characters."'  # what their prompts end in


class Fake:
    """A model without a network: it answers ``r<last word of the prompt>``, and waits at a gate where one is set.

    ``requests`` holds, of each call, the last words of all messages that were sent.
    """

    def __init__(self, name: str = "fake", *, cli: bool = True) -> None:
        from lionagi.testing import scripted_imodel

        self.model = scripted_imodel([], model=name)
        self.requests: list[list[str]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.entered: dict[str, asyncio.Event] = {}
        self.failing: dict[str, BaseException] = {}
        self.script: list[str] = []
        self.chunks = 1
        endpoint = self.model.endpoint
        endpoint.fake = self
        endpoint._call = self._call
        endpoint.stream = self._stream
        if not cli:
            endpoint.is_cli = False

    def gate(self, word: str) -> asyncio.Event:
        """Calls whose prompt ends in ``word`` wait for this."""
        self.entered[word] = asyncio.Event()
        return self.gates.setdefault(word, asyncio.Event())

    async def _answer(self, payload: dict[str, Any]) -> str:
        words = [str(message["content"]).split()[-1] for message in payload["messages"]]
        self.requests.append(words)
        word = words[-1]
        if word in self.entered:
            self.entered[word].set()
        if word in self.gates:
            await self.gates[word].wait()
        if word in self.failing:
            raise self.failing[word]
        return self.script.pop(0) if self.script and word == REASONING else f"r{word}"

    async def _call(self, payload: dict[str, Any], headers: Any, **kwargs: Any) -> dict[str, Any]:
        text = await self._answer(payload)
        message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "fake", "choices": [message]} | {
            "usage": usage
        }

    async def _stream(self, request: Any, extra_headers: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        from lionagi.service.types.stream_chunk import StreamChunk

        payload, _ = self.model.endpoint.create_payload(request, extra_headers=extra_headers, **kwargs)
        text = await self._answer(payload)
        for number in range(self.chunks - 1):
            yield StreamChunk(type="tool_use", tool_id=str(number), tool_name="tool", tool_input={})
        yield StreamChunk(type="text", content=text)
        yield StreamChunk(type="result", metadata={"num_turns": 1})


def branch_of(fake: Fake, **options: Any) -> Any:
    """A branch on ``fake``."""
    from lionagi import Branch

    return Branch(chat_model=fake.model, **options)


class Heard:
    """A session whose signals are remembered, by kind and as they are."""

    def __init__(self, *branches: Any) -> None:
        from lionagi import Session
        from lionagi.session.signal import Signal

        self.session = Session(default_branch=branches[0])
        self.session.include_branches(list(branches[1:]))
        self.signals: list[Any] = []
        self.session.observe(Signal, handler=self._hear)

    def _hear(self, signal: Any, _session: Any) -> None:
        self.signals.append(signal)

    @property
    def lifecycle(self) -> list[Any]:
        return [signal for signal in self.signals if type(signal).__name__.startswith("Run")]

    @property
    def kinds(self) -> list[str]:
        return [type(signal).__name__ for signal in self.lifecycle]

    @property
    def all_kinds(self) -> list[str]:
        return [type(signal).__name__ for signal in self.signals]

    def one_pair(self, *, failed: bool = False) -> None:
        """Exactly one start and one terminal, with the same turn id."""
        assert self.kinds == ["RunStart", "RunFailed" if failed else "RunEnd"]
        start, end = self.lifecycle
        assert start.turn_id is not None
        assert start.turn_id == end.turn_id


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token counting that downloads no vocabulary, and no log written when the tests end."""
    import tiktoken
    from lionagi.config import settings

    log = {**settings.LOG_CONFIG, "auto_save_on_exit": False}
    monkeypatch.setattr(type(settings), "LOG_CONFIG", log)

    class Encoding:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

        def decode(self, tokens: list[int]) -> str:
            return " ".join("x" * token for token in tokens)

    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: Encoding())


def words(branch: Any) -> list[str]:
    """The last word of every message of a branch, the system message aside."""
    found = []
    for message in branch.messages:
        kind = type(message).__name__
        if kind != "System":
            found.append(str(message.rendered).split()[-1])
    return found


async def settled() -> None:
    """Let everything run that can run without an outside event."""
    for _ in range(50):
        await asyncio.sleep(0)


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[Callable[[], None]]:
    """The adapter, for a while."""
    from lionwt.lionagi.turns import install

    uninstall = install(**options)
    try:
        yield uninstall
    finally:
        uninstall()


#: One call of each of the nine operations, with the exact words that its prompt ends in.
OPERATIONS = ("chat", "chat_and_record", "parse", "interpret", "operate", "communicate", "ReAct", "ReActStream", "run")
STREAMS = ("ReActStream", "run")


async def call(branch: Any, name: str, **options: Any) -> Any:
    """Call an operation of a branch; the items of a stream as a list."""
    if name in STREAMS:
        return [item async for item in begin(branch, name, **options)]
    return await begin(branch, name, **options)


def begin(branch: Any, name: str, **options: Any) -> Any:
    """The coroutine or the stream of an operation of a branch."""
    if name == "parse":
        return branch.parse('{"answer": "x"}', request_type=Answer, **options)
    if name in ("ReAct", "ReActStream"):
        branch.chat_model.endpoint.fake.script = list(REASONED)
        return getattr(branch, name)(instruct={"instruction": "x"}, extension_allowed=False, **options)
    if name == "operate":
        return branch.operate(instruction="x", **options)
    return getattr(branch, name)("x", **options)
