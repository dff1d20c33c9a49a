"""What lionagi does around a call, as the turn's: lifecycle, message signals, control, reports.

Inside a turn the lifecycle signals are the driver's, and each of these speaks of that turn alone;
outside of any they are lionagi's.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

from lionwt import turn
from lionwt.lionagi import hosts, seams
from lionwt.lionagi.routes import Routes

#: What these replace on the class.
METHODS = (
    "_observed_run",
    "_safe_emit",
    "_schedule_emit",
    "drain_signals",
    "control",
    "poll_control",
    "last_context_report",
)


def observed_run(routes: Routes, original: Any) -> Any:
    """The lifecycle around `operate` and `communicate`."""

    @wraps(original)
    async def _observed_run(branch: Any, coro: Any) -> Any:
        if routes.inside(branch) is not None:
            return await coro
        return await original(branch, coro)

    return _observed_run


def safe_emit(routes: Routes, original: Any) -> Any:
    """The lifecycle signals of `ReAct`."""
    from lionwt.lionagi import lifecycle

    @wraps(original)
    async def _safe_emit(branch: Any, event: Any) -> None:
        if type(event) not in lifecycle.PLAIN or routes.inside(branch) is None:
            await original(branch, event)

    return _safe_emit


def schedule_emit(routes: Routes, original: Any) -> Any:
    """The signal of a message, in a task that its turn owns."""
    observe = import_module(seams.OBSERVE)

    @wraps(original)
    def _schedule_emit(branch: Any, msg: Any) -> None:
        scope = routes.inside(branch)
        if not isinstance(branch, routes.target) or not (routes.on or scope):
            original(branch, msg)
            return
        task = turn.schedule_signal(routes.host(branch), lambda: observe.emit_message(branch, msg))
        if task is None or task.done() or (scope is not None and task in scope.context.signal_tasks):
            return
        # Nobody's: kept where lionagi keeps it, for a drain outside of any turn.
        branch._signal_tasks.append(task)
        task.add_done_callback(lambda done: _drop(branch._signal_tasks, done))

    routes.new_schedule = _schedule_emit
    return _schedule_emit


def drain_signals(routes: Routes, original: Any) -> Any:
    """Waiting for message signals: the turn's own, or outside of any turn nobody's."""

    @wraps(original)
    async def drain_signals(branch: Any) -> None:
        if routes.inside(branch) is not None:
            await turn.drain_signals(routes.host(branch))
        else:
            await original(branch)

    return drain_signals


def control(routes: Routes, original: Any) -> Any:
    """A directive for the active turn (ADR-0018 D3)."""

    # Plain wrapping would hide the parameter that is new: what is shown is what it takes.
    def control(self_: Any, directive: Any, *, reason: str | None = None, turn_id: Any = None) -> Any:
        host = routes.host(self_)
        if _lionagis(routes, host):
            return original(self_, directive, reason=reason)
        if turn.control(host, getattr(directive, "value", directive), reason=reason, turn_id=turn_id):
            return True
        if not routes.legacy or turn_id is not None or host.turn_state.active is not None:
            return False
        original(self_, directive, reason=reason)
        return True

    return _named(control, original)


def poll_control(routes: Routes, original: Any) -> Any:
    """Taking it."""
    module = import_module(seams.CONTROL)

    def poll_control(self_: Any, *, turn_id: Any = None) -> Any:
        host = routes.host(self_)
        if _lionagis(routes, host):
            return original(self_)
        taken = turn.poll_control(host, turn_id=turn_id)
        if taken is not None:
            return module.LoopControl(module.LoopDirective(taken.directive.value), taken.reason)
        return original(self_) if routes.legacy and turn_id is None else None

    return _named(poll_control, original)


def _lionagis(routes: Routes, host: hosts.Host) -> bool:
    """Whether what runs on a branch is lionagi's own: taken back, or under another library than asyncio."""
    return host.turn_state.active is None and (not routes.on or hosts.outside_asyncio())


def last_context_report(routes: Routes, original: property) -> property:
    """The provider report of the last turn that ended (D5)."""

    def last_context_report(branch: Any) -> Any:
        kept = hosts.known(branch)
        if not routes.on or kept is None or not kept.begun:
            return original.__get__(branch)
        return turn.last_context_report(routes.host(branch))

    return property(last_context_report, original.fset, original.fdel, original.__doc__)


def providers(routes: Routes, original: Any) -> Any:
    """Where the context providers of a request are gathered (D3)."""

    @wraps(original)
    async def _apply_context_providers(branch: Any, *args: Any, **kwargs: Any) -> Any:
        branch = hosts.real(branch)
        answer = await original(branch, *args, **kwargs)
        report = answer[1]
        if report is None or not isinstance(branch, routes.target):
            return answer
        scope = routes.inside(branch)
        if scope is not None:
            scope.context.provider_report = report
            scope.context.provider_blocks = tuple(report.blocks)
        elif (kept := hosts.known(branch)) is not None:
            kept.state.last_report = report  # a pass outside of any turn is its own
        return answer

    return _apply_context_providers


def _named(wrapper: Any, original: Any) -> Any:
    """A wrapper with a signature of its own under the name of what it replaces."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, name, getattr(original, name))
    parameters = list(inspect.signature(wrapper).parameters.values())
    parameters[0] = parameters[0].replace(name="self")
    wrapper.__signature__ = inspect.signature(wrapper).replace(parameters=parameters)
    return wrapper


def _drop(tasks: list[Any], task: Any) -> None:
    with suppress(ValueError):
        tasks.remove(task)
