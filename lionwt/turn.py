"""One turn at a time on a conversation: ADR-0018, on the standard library alone.

A *turn* is one top-level model call on a *host*: anything that holds an ordered conversation and
satisfies `TurnHost`. `run_in_turn` and `stream_in_turn` guarantee, on every path out of a turn:

* turns on one host never overlap and start in the order they were asked for (D2);
* one `RunStart`, one terminal signal (`RunEnd` or `RunFailed`), with the same `turn_id` (D4);
* what the turn owns ends with it, in this order: the underlying stream is closed, nested tasks are
  cancelled and awaited, message signals are drained, the terminal signal is attempted, the provider
  report is published, the turn is unbound, the next caller starts. The order is the guarantee: no
  signal comes after its turn's terminal, and no work of a turn runs into the next one;
* no cancellation cuts that short, and none is lost: it is raised when the cleanup is done.

What the ADR leaves open is decided here:

* Bindings form a chain, so A -> B -> back in A is nested in A; a single slot would wait for itself.
  A binding is removed by identity, never by token: a stream may be closed in another context.
* Between two yields of a stream its consumer is inside the turn: a call on the host is nested. This
  holds while the stream object lives. After `break` drops it, the consumer is outside at once, and
  its next call waits until the event loop has closed the stream. The consumer is whoever asks for
  steps; it is never cancelled as a nested task. A child task of either is.
* A call from a message signal's observer is nested while the turn is active. Finalization awaits
  it, as it awaits every signal, instead of cancelling it.
* A nested stream that is still open when its turn ends is closed with it, before the terminal
  signal. Its next step raises `TurnFinalizingError`: it is not exhausted, and does not run on
  beside a later turn.
* A nested task may close the stream of its own turn: neither it nor a task that waits for it is
  cancelled or awaited by that close. The same holds for a task that waits for the turn itself.
* `StopStream` ends a stream silently; out of a coroutine turn it means `RunEnd` as well, and goes
  on to the caller. A nested entry is transparent: it passes through and ends the whole turn.
* A host serves one event loop at a time, and any other once it is idle or that loop is closed; a
  turn that is still live elsewhere is a `RuntimeError`. Nothing here is safe across threads.
* A model that `turn_model` rejects fails the turn: it has its `RunStart` and its `RunFailed`.
* `coroutine.close()`, and a loop that dies, leave no way to await: cleanup is then synchronous,
  nested tasks are cancelled but not awaited, and there is no terminal signal.
* The close of a stream and the terminal signal run in a task of their own, which no cancellation of
  the caller reaches. From Python 3.12 on it shares the caller's context, so that a `ContextVar`
  token of the body can be reset there; before, it has a copy.
* `duration_ms` counts from `RunStart`; it is 0 when nobody listened then.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sys
import weakref
from asyncio import CancelledError, Future, Task, current_task, get_running_loop
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from inspect import isasyncgen, isawaitable
from time import monotonic
from types import TracebackType, coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast
from uuid import UUID, uuid4

__all__ = [
    "ContextProviders",
    "Conversation",
    "LoopBreak",
    "LoopControl",
    "LoopDirective",
    "ProviderReport",
    "RunEnd",
    "RunFailed",
    "RunStart",
    "StopStream",
    "TurnExecutionContext",
    "TurnFinalizingError",
    "TurnHost",
    "TurnScope",
    "TurnSignal",
    "TurnState",
    "TurnStream",
    "build_run_end",
    "check_control",
    "control",
    "current_scope",
    "drain_signals",
    "gather_providers",
    "last_context_report",
    "poll_control",
    "run_in_turn",
    "schedule_signal",
    "stream_in_turn",
]

T = TypeVar("T")
logger = logging.getLogger(__name__)


# What a turn says, and what it is told


@dataclass(frozen=True, slots=True)
class RunStart:
    """A turn has begun (ADR-0018 D5)."""

    turn_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """A turn has ended well (D5). `duration_ms` is in milliseconds; `data` is the turn's result."""

    turn_id: UUID | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    total_cost_usd: float = 0.0
    num_turns: int = 0
    duration_ms: float = 0.0
    data: Any = None


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A turn has failed or was cancelled (D5). `data` is the exception the caller gets."""

    turn_id: UUID | None = None
    data: BaseException | None = None


TurnSignal = RunStart | RunEnd | RunFailed


class LoopDirective(enum.Enum):
    """What `control` may ask of the active turn (D3)."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    BREAK = "break"


@dataclass(frozen=True, slots=True)
class LoopControl:
    """One directive, and why (D3)."""

    directive: LoopDirective
    reason: str | None = None


class LoopBreak(Exception):
    """BREAK was asked for: a hard stop. The turn ends as `RunFailed`, the caller gets this (D3)."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "the turn was stopped by a BREAK directive")
        self.reason = reason


class StopStream(Exception):
    """CANCEL was asked for: a clean stop. The turn ends as `RunEnd`, a stream silently (D3, D4)."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "the turn was stopped by a CANCEL directive")
        self.reason = reason


class TurnFinalizingError(RuntimeError):
    """A call, or a step of a nested stream, from inside a turn that is ending or has ended (D2)."""


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """What the context providers of one turn did (D3): rendered blocks, and names by outcome."""

    blocks: list[str] = field(default_factory=list)
    fired: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    degraded: list[dict[str, str]] = field(default_factory=list)


# The state of one turn, and of one host


class _Lazy:
    __slots__ = ("__weakref__",)

    if not TYPE_CHECKING:
        # An id costs more than the rest of a turn, and most turns start no task: what the driver
        # leaves out is made when it is first read.
        def __getattr__(self, name: str) -> object:
            value: object
            if name == "turn_id":
                value = uuid4()
            elif name in ("signal_tasks", "nested_tasks", "_streams"):
                value = set()
                self._has_tasks = True
            elif name == "provider_blocks":
                value = ()
            elif name == "control":
                value = None
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            setattr(self, name, value)
            return value


@dataclass(slots=True, eq=False)
class TurnExecutionContext(_Lazy):
    """The runtime state of one top-level turn, shared by all that is nested in it (ADR-0018 D1).

    It is never serialized, and released when the turn has ended. `phase` only moves forward.
    """

    turn_id: UUID
    model: Any
    owner_task: Task[Any]
    phase: Literal["active", "finalizing", "closed"] = "active"
    provider_blocks: tuple[str, ...] = ()
    provider_report: Any = None
    control: LoopControl | None = None
    signal_tasks: set[Task[Any]] = field(default_factory=set)
    nested_tasks: set[Task[Any]] = field(default_factory=set)
    _streams: set[_Place] = field(default_factory=set, init=False, repr=False)  # nested, and open
    _has_tasks: bool = field(default=True, init=False, repr=False)

    def _child_done(self, task: Task[Any]) -> None:
        self.nested_tasks.discard(task)
        self.signal_tasks.discard(task)
        _log_failure(task)


@dataclass(frozen=True, slots=True)
class TurnScope:
    """A turn as one entry into it sees it (D1).

    `owns_lifecycle` is True for the top-level entry alone. A nested entry shares the `context`, and
    emits no lifecycle signal.
    """

    context: TurnExecutionContext
    owns_lifecycle: bool


class TurnState:
    """The lock, the active turn and the last report of a host (D1, D5): one each, by identity.

    `active` is the turn that holds the lock, or None; `last_report` the provider report of the last
    turn that ended. A copied or unpickled host gets a fresh state: turns are not copied.
    """

    __slots__ = ("__weakref__", "_handed", "_waiters", "active", "last_report")

    active: TurnExecutionContext | None
    last_report: Any

    def __init__(self) -> None:
        self.active = None
        self.last_report = None
        # The lock goes from turn to turn by hand-over, so nobody can overtake: `_handed` is the
        # waiter that was given it and has not run yet. An asyncio.Lock forgets the next waiter when
        # the woken one is closed, and stays with the first loop in which it was contended.
        self._handed: Future[None] | None = None
        self._waiters: deque[Future[None]] = deque()

    def __reduce__(self) -> tuple[type[TurnState], tuple[()]]:
        return TurnState, ()

    def _current(self) -> TurnExecutionContext | None:
        """The active turn; one whose event loop is gone has ended."""
        context = self.active
        if context is not None and context.owner_task.get_loop().is_closed():
            context.phase = "closed"
            self.active = context = None
            self._hand_over()
        return context

    async def _wait(self, task: Task[Any]) -> None:
        """Return when the lock belongs to `task`, first come first served."""
        context = self._current()
        if self._handed is not None and self._handed.get_loop().is_closed():
            self._hand_over()
        holder = context.owner_task if context is not None else self._handed
        if holder is None:
            return
        loop = task.get_loop()
        if holder.get_loop() is not loop:
            raise RuntimeError(
                "a turn of this conversation is still live in another event loop; "
                "end it, or close that loop, before using the conversation in this one"
            )
        if context is not None and logger.isEnabledFor(logging.DEBUG):
            owner, ahead = context.owner_task.get_name(), len(self._waiters)
            waits = "%s waits for turn %s of %s, behind %d others"
            logger.debug(waits, task.get_name(), context.turn_id, owner, ahead)
        waiter: Future[None] = loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if self._handed is waiter:
                self._hand_over()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        self._handed = None

    def _hand_over(self) -> None:
        """Give the lock to the first waiter that can still take it, or to nobody."""
        self._handed = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done() and not waiter.get_loop().is_closed():
                self._handed = waiter
                waiter.set_result(None)
                return


class TurnHost(Protocol):
    """What the driver needs of a conversation: a lionagi Branch, or any object like this (D2)."""

    @property
    def turn_state(self) -> TurnState:
        """Always the same object, made once with `TurnState()`."""

    def turn_model(self, override: Any) -> Any:
        """The model of the turn that starts now; `override` is what the caller gave, or None.

        Called once per turn, with the lock held. It must not store `override` on the host. What it
        raises fails the turn.
        """

    def turn_observed(self) -> bool:
        """Whether anyone listens. While nobody does, no signal is made."""

    async def turn_emit(self, signal: TurnSignal) -> None:
        """Tell the observers. What it raises is logged, and changes nothing for the turn."""


class Conversation:
    """A ready `TurnHost` for people who have no class of their own; or inherit from it.

    `messages` is yours, the driver never reads it. `observers` are called with every signal, in
    order, and may be coroutine functions; one that raises is logged, and the next is called.
    """

    def __init__(self, model: Any = None, messages: Iterable[Any] = ()) -> None:
        self.turn_state = TurnState()
        self.model = model
        self.messages = list(messages)
        self.observers: list[Callable[[TurnSignal], object]] = []

    def turn_model(self, override: Any) -> Any:
        return self.model if override is None else override

    def turn_observed(self) -> bool:
        return bool(self.observers)

    async def turn_emit(self, signal: TurnSignal) -> None:
        for observer in tuple(self.observers):
            try:
                answer = observer(signal)
                if isawaitable(answer):
                    await answer
            except Exception:
                logger.warning("an observer failed on %s", type(signal).__name__, exc_info=True)


# Bindings: the turns that the running code is inside of


class _Turn:
    """The binding of a turn: its body has it in its context, and so has every task made there.

    The end of the turn empties it, so that a task which outlives the turn retains nothing.
    """

    __slots__ = ("askers", "depth", "nested", "scope", "state")

    root: ClassVar[None] = None
    signal: ClassVar[None] = None
    stream: ClassVar[None] = None

    state: TurnState | None  # None once it has ended
    scope: TurnScope | None  # None until it begins
    nested: TurnScope | None  # what every nested entry gets, once there is one
    depth: int  # how many nested calls deep the owner's task is
    askers: weakref.WeakSet[Task[Any]]  # who asks for its steps; only of a stream


class _Inside:
    """A binding inside a turn: of a nested stream, a signal's observer, or a stream's consumer."""

    __slots__ = ("root", "signal", "state", "stream")

    def __init__(
        self,
        root: _Turn,
        signal: Task[Any] | None = None,
        stream: weakref.ref[TurnStream[Any]] | None = None,
    ) -> None:
        self.root = root
        self.state: TurnState | None = root.state
        self.signal = signal
        self.stream = stream


_Binding = _Turn | _Inside
_Chain = tuple[_Binding, ...]
_bindings: ContextVar[_Chain] = ContextVar("lionwt_turns", default=())


class _Context(TurnExecutionContext):
    """A context that the driver fills in by hand: the generated constructor takes three times as long."""

    __slots__ = ()
    __init__ = object.__init__


class _Scope(TurnScope):
    """The same for the scope of a top-level entry."""

    __slots__ = ()
    __init__ = object.__init__
    owns_lifecycle = True


for _made in (_Context, _Scope):
    _made.__name__ = _made.__mro__[1].__name__
    _made.__qualname__ = _made.__mro__[1].__qualname__
_set_context = TurnScope.__dict__["context"].__set__


def _begin(turn: _Turn, state: TurnState, owner: Task[Any]) -> TurnExecutionContext:
    """Fill in a turn that begins. By hand: generated constructors take three times as long."""
    context: TurnExecutionContext = _Context()
    context.model = None
    context.owner_task = owner
    context.phase = "active"
    context.provider_report = None
    context._has_tasks = False
    scope: TurnScope = _Scope()
    _set_context(scope, context)
    turn.state = state
    turn.scope = scope
    turn.nested = None
    turn.depth = 0
    return context


def _live(chain: _Chain) -> _Chain:
    """The chain without what has ended: otherwise it would grow from turn to turn."""
    return tuple(
        binding
        for binding in chain
        if binding.state is not None
        and (binding.root is None or binding.root.state is not None)
        and (binding.stream is None or binding.stream() is not None)
    )


def _find(state: TurnState) -> _Binding | None:
    """The innermost binding to the host's active turn (D2: pointer identity, not inheritance)."""
    for binding in reversed(_bindings.get()):
        if binding.state is state:
            scope = (binding.root or binding).scope  # type: ignore[union-attr]
            if scope is not None and scope.context is state.active:
                stream = binding.stream
                if stream is None or stream() is not None:
                    return binding
    return None


def _turn_of(binding: _Binding) -> tuple[_Turn, TurnExecutionContext]:
    turn: _Turn = binding.root or binding  # type: ignore[assignment]
    return turn, turn.scope.context  # type: ignore[union-attr]


def _nest(binding: _Binding) -> tuple[_Turn, TurnScope, int]:
    """Enter a turn again: it, the nested scope, and 1 in its owner's task, 0 in any other.

    Any other task becomes part of the turn (D2). TurnFinalizingError when the turn is ending.
    """
    turn, context = _turn_of(binding)
    if context.phase != "active":
        raise TurnFinalizingError(
            f"turn {context.turn_id} is ending and cannot be entered again from inside it; "
            "start a task that runs after it, or catch this error and try again later"
        )
    scope = turn.nested
    if scope is None:
        scope = turn.nested = TurnScope(context, False)
    task = _own_task()
    if task is context.owner_task:
        return turn, scope, 1
    if task.get_loop() is not context.owner_task.get_loop():
        raise RuntimeError(f"turn {context.turn_id} is live in another event loop")
    known = task in getattr(turn, "askers", ())
    if not known and task not in context.nested_tasks and task not in context.signal_tasks:
        group = context.nested_tasks if binding.signal is None else context.signal_tasks
        group.add(task)
        task.add_done_callback(context._child_done)
    return turn, scope, 0


# Before CPython 3.12 current_task() is itself Python, and costs a fifth of a turn.
_tasks: dict[Any, Task[Any]] | None = (
    getattr(asyncio.tasks, "_current_tasks", None) if sys.version_info < (3, 12) else None
)


def _own_task() -> Task[Any]:
    task = _tasks.get(get_running_loop()) if _tasks is not None else current_task()
    if task is None:
        raise RuntimeError("a turn must be run inside an asyncio task")
    return task


def _task_if_any() -> Task[Any] | None:
    try:
        return current_task()
    except RuntimeError:
        return None


# The two drivers


async def run_in_turn(branch: TurnHost, *, model: Any = None, invoke: Callable[[TurnScope], Awaitable[T]]) -> T:
    """Await `invoke(scope)` as one turn of `branch`, and return its result (ADR-0018 D2, D4).

    Waits, without limit, until every earlier turn has ended. Called from inside a turn of the same
    host it is nested instead: no wait, no signals, the same context. `model` is an override for
    this turn alone, handed to `branch.turn_model`.

    Raises whatever `invoke` raises, unchanged; `CancelledError`, once the turn is cleaned up;
    `TurnFinalizingError` when called from inside a turn that is ending; `RuntimeError` when a turn
    is live in another event loop, or outside a task.
    """
    state = branch.turn_state
    outer = _bindings.get()
    if outer:
        binding = _find(state)
        if binding is not None:
            turn, scope, deeper = _nest(binding)
            turn.depth += deeper
            try:
                return await invoke(scope)
            finally:
                turn.depth -= deeper
        outer = _live(outer)
    task = (_tasks.get(get_running_loop()) if _tasks is not None else current_task()) or _own_task()
    if state.active is not None or state._handed is not None:
        await state._wait(task)
    turn = _Turn()
    context = _begin(turn, state, task)
    chain = (*outer, turn) if outer else (turn,)
    started = 0.0
    token = None
    try:
        state.active = context
        token = _bindings.set(chain)
        try:
            context.model = branch.turn_model(model)
        finally:  # a rejected model is a turn that failed: it has a start as well
            if branch.turn_observed():
                started = monotonic()
                await _emit(branch, RunStart(context.turn_id))
        result = await invoke(turn.scope)  # type: ignore[arg-type]
    except GeneratorExit:
        raise
    except BaseException as exc:
        await _finalize(branch, context, started, failure=exc)
        raise
    else:
        if context._has_tasks or branch.turn_observed():
            _raise(await _finalize(branch, context, started, result=result))
        return result
    finally:
        _close(state, turn, context, chain, outer, token)


def stream_in_turn(
    branch: TurnHost, *, model: Any = None, invoke: Callable[[TurnScope], AsyncIterator[T]]
) -> TurnStream[T]:
    """Iterate over `invoke(scope)` as one turn of `branch` (ADR-0018 D2, D4).

    The turn begins at the first step, not here, and lasts until the stream is exhausted, fails, is
    cancelled or is closed. Hold it in `contextlib.aclosing` to have it closed for certain: a stream
    that is kept without being closed keeps the conversation. Steps raise as `run_in_turn` does.
    """
    return TurnStream(branch, model, invoke)


class TurnStream(AsyncGenerator[T, Any]):
    """The iterator that `stream_in_turn` returns; it behaves as an async generator (D4)."""

    __slots__ = ("__weakref__", "_asked_for", "_between", "_nested", "_starting", "_steps", "_turn")

    def __init__(self, branch: TurnHost, model: Any, invoke: Callable[[TurnScope], AsyncIterator[T]]) -> None:
        self._asked_for = (branch, model, invoke)
        self._starting = False
        self._steps: AsyncGenerator[T, Any] | None = None
        self._nested: _Place | None = None
        self._turn = turn = _Turn()
        turn.state = branch.turn_state
        turn.scope = None
        turn.askers = weakref.WeakSet()
        # Nothing that the turn holds may hold the stream: only so does a `break` show.
        self._between = _Inside(turn, None, weakref.ref(self))

    # Plain functions: they run in the context of whoever asks, also when the step itself is then
    # wrapped in a task, as asyncio.wait_for does before Python 3.12.

    def __anext__(self) -> Coroutine[Any, Any, T]:
        return self._ask("__anext__")

    def asend(self, value: Any) -> Coroutine[Any, Any, T]:
        return self._ask("asend", value)

    def athrow(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Coroutine[Any, Any, T]:
        error = typ if val is None else val if isinstance(val, BaseException) else typ(val)
        if tb is not None:
            error = (error if isinstance(error, BaseException) else error()).with_traceback(tb)
        return self._ask("athrow", error)

    async def aclose(self) -> None:
        if self._steps is None:
            self._end_unstarted()
        else:
            if self._nested is not None:
                self._nested.cut = False
            await _through(self._steps.aclose())

    def _ask(self, step: str, *value: Any) -> Coroutine[Any, Any, T]:
        turn, task = self._turn, _task_if_any()
        if turn.state is not None:
            if task is not None:
                turn.askers.add(task)
            chain = _bindings.get()
            if self._between not in chain:
                _bindings.set((*_live(chain), self._between))
        return self._step(step, *value)

    async def _step(self, step: str, *value: Any) -> T:
        if self._steps is None and step == "athrow":
            self._end_unstarted()
        elif self._steps is None and value not in ((), (None,)):
            raise TypeError("a stream that has not started can be sent nothing but None")
        steps: Any = self._steps or await self._start()
        place = self._nested
        if place is not None and place.inside.root is not None and place.inside.root.state is None:
            if steps.ag_frame is not None and not steps.ag_running:  # its turn could not close it
                place.cut = True
                await _through(steps.aclose())
            if place.cut:
                place.cut = False
                raise TurnFinalizingError("the turn that this stream was part of has ended, and the stream with it")
        return cast(T, await _through(getattr(steps, step)(*value)))

    async def _start(self) -> AsyncGenerator[T, Any]:
        self._refuse_if_starting()
        self._starting = True
        (branch, model, invoke), turn = self._asked_for, self._turn
        state = branch.turn_state
        try:
            binding = _find(state)
            if binding is not None:
                root, scope, _ = _nest(binding)
                place = _Place(_Inside(root, binding.signal), self._between, ())
                turn.state = None
                self._steps = _steps(None, model, invoke, scope, place)
                self._nested = place
                place.steps = weakref.ref(self._steps)
            else:
                task = _own_task()
                if state.active is not None or state._handed is not None:
                    await state._wait(task)
                state.active = _begin(turn, state, task)
                place = _Place(turn, self._between, (self._between,))
                self._steps = _steps(branch, model, invoke, cast(TurnScope, turn.scope), place)
        finally:
            self._starting = False
            if self._steps is None:
                self._end_unstarted()
        return self._steps

    def _refuse_if_starting(self) -> None:
        if self._starting:
            raise RuntimeError("another step of this stream is already waiting for its turn")

    def _end_unstarted(self) -> None:
        self._refuse_if_starting()
        self._turn.state = None
        self._steps = _nothing()


async def _nothing() -> AsyncGenerator[Any, Any]:
    return
    yield


@coroutine
def _through(step: Any) -> Generator[Any, Any, Any]:
    """Await a step of an async generator so that closing the coroutine closes the generator.

    Before Python 3.13, `close()` ends the step alone and leaves the generator suspended for ever.
    """
    if sys.version_info >= (3, 13):
        return (yield from step)
    try:
        waiting = step.send(None)
        while True:
            try:
                sent = yield waiting
            except BaseException as exc:
                waiting = step.throw(exc)
            else:
                waiting = step.send(sent)
    except StopIteration as done:
        return done.value


class _Place:
    """Where the steps of a stream are bound: `inside` during one, `outside` between two."""

    __slots__ = ("_between", "_during", "_inner", "_outside", "_shown", "cut", "ended", "inside", "steps")

    def __init__(self, inside: _Binding, between: _Inside, outside: _Chain) -> None:
        self.inside = inside
        # Of a nested stream: its steps, who waits for their end, and whether its turn has closed it
        # and nobody was told yet.
        self.steps: weakref.ref[Any] | None = None
        self.ended: Future[None] | None = None
        self.cut = False
        self._between = between
        self._outside = outside
        self._inner: _Chain = ()  # what the body itself holds open
        self._shown: _Chain | None = None
        self._during: _Chain | None = None

    def enter(self) -> None:
        """Put the step inside the turn, whatever context it runs in."""
        chain = _bindings.get()
        if chain is not self._shown or self._during is None:
            mine = (self.inside, self._between, *self._inner)
            others = (b for b in _live(chain) if b not in mine)
            self._during = (*others, self.inside, *self._inner)
        _bindings.set(self._during)

    def leave(self) -> None:
        """Give the consumer its own view back."""
        chain = _bindings.get()
        if chain is not self._during or self._shown is None:
            at = chain.index(self.inside) if self.inside in chain else len(chain)
            self._inner = chain[at + 1 :]
            self._shown = (*chain[:at], *self._outside, *self._inner)
            self._during = chain
        _bindings.set(self._shown)


async def _steps(
    branch: TurnHost | None,  # None in a nested stream
    model: Any,
    invoke: Callable[[TurnScope], AsyncIterator[T]],
    scope: TurnScope,
    place: _Place,
) -> AsyncGenerator[T, Any]:
    context = scope.context
    source: Any = None
    started = 0.0
    at_yield = False
    if branch is None:
        context._streams.add(place)
    try:
        place.enter()
        try:
            if branch is not None:
                try:
                    context.model = branch.turn_model(model)
                finally:
                    if branch.turn_observed():
                        started = monotonic()
                        await _emit(branch, RunStart(context.turn_id))
            source = invoke(scope).__aiter__()
            step = source.__anext__()
            while True:
                try:
                    item = await (_through(step) if isasyncgen(source) else step)
                except StopAsyncIteration:
                    break
                place.leave()
                try:
                    sent = yield item
                except GeneratorExit:
                    at_yield = True
                    raise
                except BaseException as thrown:
                    if not hasattr(source, "athrow"):
                        raise
                    step = source.athrow(thrown)
                else:
                    step = source.__anext__() if sent is None else source.asend(sent)
                finally:
                    place.enter()
        except BaseException as exc:
            if isinstance(exc, GeneratorExit) and (not at_yield or _task_if_any() is None):
                raise
            _, cancelled = await _end_stream(branch, context, source, started, exc)
            if isinstance(exc, (GeneratorExit, StopStream)):
                _raise(cancelled)
            if branch is None or not isinstance(exc, StopStream):
                raise
        else:
            failed, cancelled = await _end_stream(branch, context, source, started, None)
            _raise(failed or cancelled)
    finally:
        if branch is not None:
            _close(branch.turn_state, cast(_Turn, place.inside), context, (), ())
        else:
            place.inside.state = None
            _bindings.set(_live(_bindings.get()))
            context._streams.discard(place)
            if place.ended is not None and not place.ended.done():
                place.ended.set_result(None)


async def _end_stream(
    branch: TurnHost | None,
    context: TurnExecutionContext,
    source: Any,
    started: float,
    failure: BaseException | None,
) -> tuple[BaseException | None, CancelledError | None]:
    """Close the source, then end the turn if it is one (D4). What to raise, if nothing else is."""
    cancelled: CancelledError | None = None
    failed: BaseException | None = None
    if hasattr(source, "aclose") and getattr(source, "ag_frame", source) is not None:
        closing = _spawn(source.aclose)
        cancelled = await _settle([closing])
        failed = CancelledError() if closing.cancelled() else closing.exception()
        if failed is not None and (failure is not None or isinstance(failed, Exception)):
            logger.warning("closing the stream of a turn failed", exc_info=failed)
            failed = None
    if branch is not None:
        if context._has_tasks:  # closing the source may have left streams behind that it had opened
            later = await _end_streams(context)
            cancelled = cancelled or later
        later = await _finalize(branch, context, started, failure=failure or failed)
        cancelled = cancelled or later
    return failed, cancelled


# The end of a turn, and what must not be cancelled


async def _finalize(
    branch: TurnHost,
    context: TurnExecutionContext,
    started: float,
    *,
    failure: BaseException | None = None,
    result: object = None,
) -> CancelledError | None:
    """End the turn's tasks, attempt its one terminal signal (D4). A cancel that came meanwhile."""
    context.phase = "finalizing"
    cancelled = await _end_tasks(context) if context._has_tasks else None
    try:
        if branch.turn_observed():
            signal: TurnSignal = RunFailed(context.turn_id, failure)
            if failure is None or isinstance(failure, (StopStream, GeneratorExit)):
                spent = (monotonic() - started) * 1000.0 if started else 0.0
                signal = build_run_end(branch, turn_id=context.turn_id, duration_ms=spent, result=result)
            later = await _settle([_spawn(_emit, branch, signal)])
            cancelled = cancelled or later
    except Exception:
        logger.warning("the terminal signal of a turn could not be sent", exc_info=True)
    return cancelled


async def _emit(branch: TurnHost, signal: TurnSignal) -> None:
    try:
        await branch.turn_emit(signal)
    except Exception:
        logger.warning("observing %s failed", type(signal).__name__, exc_info=True)


async def _end_tasks(context: TurnExecutionContext) -> CancelledError | None:
    """Cancel and await what is nested, then drain the signals (D2, D3)."""
    task = _own_task()
    # Who waits for this task, or whose observer this is, cannot end before it.
    spared = {binding.signal for binding in _bindings.get()}

    def unfinished(group: set[Task[Any]]) -> list[Task[Any]]:
        return [t for t in group if not (t.done() or t in spared or _waits_for(t, task))]

    cancelled: CancelledError | None = None
    nested = unfinished(context.nested_tasks)
    for child in nested:
        child.cancel()
    if nested and task in context.nested_tasks:
        # A child may wait for this one in a task group: then the cancellation comes back here.
        try:
            await asyncio.wait(nested)
        except CancelledError as exc:
            cancelled = exc.with_traceback(None)
    else:
        cancelled = await _settle(nested)
    later = await _end_streams(context)
    cancelled = cancelled or later
    while signals := unfinished(context.signal_tasks):
        later = await _settle(signals)
        cancelled = cancelled or later
    return cancelled


async def _end_streams(context: TurnExecutionContext) -> CancelledError | None:
    """Close the nested streams that are open (D2). One that was dropped is being closed by the loop."""
    cancelled: CancelledError | None = None
    for place in tuple(context._streams):
        steps = None if place.steps is None else place.steps()
        closing: Future[None]
        if place not in context._streams or (steps is not None and steps.ag_running):
            continue  # it has ended meanwhile, or whoever is at it cannot be waited for: its next step ends it
        if steps is None:
            closing = place.ended = get_running_loop().create_future()
        else:
            place.cut = True
            closing = _spawn(steps.aclose)
        del steps
        later = await _settle([closing])
        cancelled = cancelled or later
        if not closing.cancelled() and closing.exception() is not None:
            logger.warning("closing a nested stream failed", exc_info=closing.exception())
    return cancelled


def _waits_for(waiting: Task[Any], task: Task[Any]) -> bool:
    """Whether `waiting` awaits `task`, itself or through tasks and gathers."""
    seen: list[Any] = [waiting]
    for future in seen:
        if future is task:
            return True
        awaited = [getattr(future, "_fut_waiter", None), *getattr(future, "_children", ())]
        seen.extend(f for f in awaited if f is not None and f not in seen)
    return False


def _close(
    state: TurnState,
    turn: _Turn,
    context: TurnExecutionContext,
    chain: _Chain,
    outer: _Chain,
    token: Token[_Chain] | None = None,
) -> None:
    """The part of every end that cannot wait: unbind, publish, release (D4).

    Unbinding undoes `chain` over `outer`; when something else is bound by now, it is taken out.
    """
    if context._has_tasks:
        task = _task_if_any()
        for child in tuple(context.nested_tasks):
            child.remove_done_callback(context._child_done)
            if context.phase == "active" and child is not task and not child.get_loop().is_closed():
                child.cancel()
    context.phase = "closed"
    turn.state = turn.scope = turn.nested = None
    now = _bindings.get()
    try:
        if now is chain and token is not None:
            _bindings.reset(token)  # cheaper than a set, and possible only in the context of the start
        else:
            _bindings.set(outer if now is chain else _live(now))
    except ValueError:
        _bindings.set(outer)
    if state.active is context:
        state.last_report = context.provider_report
        state.active = None
        if state._waiters:
            state._hand_over()


def _raise(error: BaseException | None) -> None:
    if error is not None:
        try:
            raise error
        finally:
            error = None  # an exception whose traceback holds it is a cycle


def _spawn(function: Callable[..., Awaitable[object]], *args: Any) -> Task[None]:
    """A task that no cancellation of this one reaches, in the same context where that can be."""

    async def call() -> None:
        await function(*args)

    # Not through the task factory: an eager start cannot enter a context that is in use.
    task = _own_task()
    if sys.version_info >= (3, 12):
        shared = task.get_context()
        if shared.get(_bindings, ()) is _bindings.get():
            return Task(call(), loop=task.get_loop(), context=shared)
    return Task(call(), loop=task.get_loop())


async def _settle(tasks: Sequence[Future[Any]]) -> CancelledError | None:
    """Wait until all are done, whoever cancels; the first cancellation, for the caller to raise.

    Never `uncancel()`: the cancellation is put off, not withdrawn.
    """
    first: CancelledError | None = None
    pending = [task for task in tasks if not task.done()]
    if pending:
        with _Shield():
            while pending:
                try:
                    await asyncio.wait(pending)
                except CancelledError as exc:
                    first = first or exc.with_traceback(None)
                pending = [task for task in pending if not task.done()]
    return first


class _Shield:
    """anyio's shield when anyio is loaded: its scopes cancel again until it gets through."""

    def __enter__(self) -> None:
        scope = getattr(sys.modules.get("anyio"), "CancelScope", None)
        self._scope = None if scope is None else scope(shield=True)
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._scope is not None:
            try:
                self._scope.__exit__(*error)
            except RuntimeError:  # the loop has died: this is not the task that entered
                logger.debug("an anyio shield could not be left", exc_info=True)


def _log_failure(task: Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("%s failed inside a turn", task.get_name(), exc_info=task.exception())


# Around a turn


def current_scope(branch: TurnHost) -> TurnScope | None:
    """The scope of the turn of `branch` that the caller is inside of, or None (ADR-0018 D2).

    It owns the lifecycle only in the task that entered the turn, outside any nested call.
    """
    binding = _find(branch.turn_state)
    if binding is None:
        return None
    turn, context = _turn_of(binding)
    if binding is turn and not turn.depth and _task_if_any() is context.owner_task:
        return turn.scope
    return TurnScope(context, False)


def control(
    branch: TurnHost,
    directive: LoopDirective,
    *,
    reason: str | None = None,
    turn_id: UUID | None = None,
) -> bool:
    """Leave a directive for the active turn, or for the turn `turn_id` alone (ADR-0018 D3).

    False, and nothing stored, when no turn is active, it is already ending, or it is another one.
    The last directive before a poll wins; none is kept for a later turn. `ValueError` when
    `directive` is none of `LoopDirective`.
    """
    wanted = LoopControl(LoopDirective(directive), reason)
    context = _addressed(branch, turn_id)
    if context is None:
        return False
    context.control = wanted
    return True


def poll_control(branch: TurnHost, *, turn_id: UUID | None = None) -> LoopControl | None:
    """Take the directive of the active turn, once; None under the conditions of `control` (D3)."""
    context = _addressed(branch, turn_id)
    if context is None:
        return None
    directive, context.control = context.control, None
    return directive


def check_control(branch: TurnHost, *, turn_id: UUID | None = None) -> None:
    """Obey the directive of the active turn: BREAK raises `LoopBreak`, CANCEL `StopStream` (D3)."""
    taken = poll_control(branch, turn_id=turn_id)
    if taken is not None and taken.directive is LoopDirective.BREAK:
        raise LoopBreak(taken.reason)
    if taken is not None and taken.directive is LoopDirective.CANCEL:
        raise StopStream(taken.reason)


def _addressed(branch: TurnHost, turn_id: UUID | None) -> TurnExecutionContext | None:
    context = branch.turn_state._current()
    if context is None or context.phase != "active":
        return None
    return context if turn_id is None or turn_id == context.turn_id else None


_running_signals: set[Task[Any]] = set()  # the event loop alone would let them be collected


def schedule_signal(branch: TurnHost, factory: Callable[[], Awaitable[object]]) -> Task[None] | None:
    """Await `factory()` in a task, before the terminal signal of the caller's turn (ADR-0018 D3).

    Outside an active turn of `branch`, or in one that is ending, the task is detached: no turn
    waits for it. None, and `factory` not called, when nobody listens or no event loop runs. What it
    raises is logged.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    if not branch.turn_observed():
        return None
    turn: _Turn | None = None
    binding = _find(branch.turn_state)
    if binding is not None:
        turn, context = _turn_of(binding)
        if context.phase != "active" or context.owner_task.get_loop() is not loop:
            turn = None
    task = loop.create_task(_signal(turn, factory))
    if not task.done():
        _running_signals.add(task)
        task.add_done_callback(_running_signals.discard)
        if turn is not None:
            context.signal_tasks.add(task)
    task.add_done_callback(_log_failure if turn is None else context._child_done)
    return task


async def _signal(turn: _Turn | None, factory: Callable[[], Awaitable[object]]) -> None:
    if turn is not None:
        _bindings.set((*_live(_bindings.get()), _Inside(turn, _own_task())))
    await factory()


async def drain_signals(branch: TurnHost) -> None:
    """Wait until the signals of the caller's own turn are done; never those of another (D3).

    Outside a turn, and in a signal's own observer, there is nothing to wait for.
    """
    binding = _find(branch.turn_state)
    if binding is None or binding.signal is not None:
        return
    _, context = _turn_of(binding)
    while signals := [task for task in context.signal_tasks if not task.done()]:
        await asyncio.wait(signals)


def last_context_report(branch: TurnHost) -> Any:
    """The provider report of the last turn that ended, in whatever way; or None (ADR-0018 D5)."""
    return branch.turn_state.last_report


def build_run_end(
    branch: TurnHost,
    *,
    turn_id: UUID | None = None,
    duration_ms: float = 0.0,
    result: Any = None,
) -> RunEnd:
    """The `RunEnd` of a turn (ADR-0018 D5); `duration_ms` in milliseconds, `result` as its `data`.

    The usage counts are 0: only the host knows them, and may add them in its `turn_emit`.
    """
    return RunEnd(turn_id=turn_id, duration_ms=duration_ms, data=result)


class ContextProviders(Protocol):
    """A registry of context providers (ADR-0016). `gather` contains what a provider raises."""

    @property
    def names(self) -> Sequence[str]:
        """The registered providers."""

    async def gather(self, branch: Any, instruction: Any) -> Any:
        """A `ProviderReport`, or anything with its fields."""


async def gather_providers(
    branch: Any,
    instruction: Any,
    *,
    scope: TurnScope,
    registry: ContextProviders | None,
    has_system: bool,
) -> Any:
    """Gather the context providers for the turn of `scope`, and return its report (ADR-0018 D3).

    Without providers the context stays as it is, and the report is None. Without a system message
    they are not invoked, and all are `skipped`. Otherwise the context gets the registry's report
    and its blocks. A registry that raises counts as all its providers having failed: the turn goes
    on.
    """
    context = scope.context
    names = [] if registry is None else list(registry.names)
    if registry is None or not names:
        return None
    if not has_system:
        context.provider_report = ProviderReport(skipped=names)
        return context.provider_report
    try:
        report = await registry.gather(branch, instruction)
    except Exception:
        logger.warning("the context providers failed", exc_info=True)
        report = ProviderReport(failed=names)
    context.provider_report = report
    context.provider_blocks = tuple(report.blocks)
    return report
