"""The operations of a Branch, as turns: what each of the nine is replaced by.

A wrapper is of the same kind and shows the same signature and docstring; what it does not route, it
hands to what it replaced. Only `lionwt.turn` decides about order, nesting and the end of a turn.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import Any

from lionwt import turn
from lionwt.lionagi import hosts


class Routes:
    """What one installation routes, and how."""

    def __init__(self, target: Any, legacy: bool, adopt: bool) -> None:
        self.target = target
        self.legacy = legacy
        self.adopt = adopt
        self.on = False
        self.emit = target._safe_emit
        self.schedule = target._schedule_emit
        self.new_schedule: Any = None

    def host(self, branch: Any, **options: Any) -> hosts.Host:
        """`branch` for the turn driver; the options are those of `Host`."""
        return hosts.Host(branch, self.emit, **options)

    def routes(self, branch: Any) -> bool:
        """Whether a call on `branch` is a turn. One made before the install gets the new callback."""
        if not isinstance(branch, self.target) or hosts.outside_asyncio():
            return False
        if not self.on:  # a live turn that was left behind still has nested calls
            return self.inside(branch) is not None
        swap_callback(branch, self.schedule, self.new_schedule)
        return True

    def inside(self, branch: Any) -> turn.TurnScope | None:
        """The scope of the turn of `branch` that the caller is inside of."""
        return turn.current_scope(self.host(branch)) if hosts.known(branch) is not None else None

    def operation(self, name: str, override: str | None, original: Any) -> Any:
        """`original` as a turn; `override` is its parameter for the model of one call."""
        model_of = argument(original, override)
        default = "parse_model" if name == "parse" else "chat_model"

        @wraps(original)
        async def operation(branch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.routes(branch):
                return await original(branch, *args, **kwargs)

            async def invoke(scope: turn.TurnScope) -> Any:
                if name != "ReAct":
                    return await original(branch, *args, **kwargs)
                # It sets lionagi's suppression flag for all that it calls.
                flag = hosts.outside_react.set(hosts.silenced())
                try:
                    return await original(branch, *args, **kwargs)
                finally:
                    hosts.outside_react.reset(flag)

            return await turn.run_in_turn(self.host(branch, model=default), model=model_of(args, kwargs), invoke=invoke)

        return operation

    def stream(self, name: str, override: str | None, original: Any) -> Any:
        """The same for an async generator."""
        model_of = argument(original, override)

        @wraps(original)
        def stream(branch: Any, *args: Any, **kwargs: Any) -> Any:
            source = original(branch, *args, **kwargs)  # refuses wrong arguments here; runs nothing yet
            if not self.routes(branch):
                return source
            run = name == "run"
            host = self.host(branch, run=run, adopt=run and self.adopt)

            def invoke(scope: turn.TurnScope) -> Any:
                if run and scope.owns_lifecycle:
                    host.kept.streaming = weakref.ref(scope.context)
                return source

            return turn.stream_in_turn(host, model=model_of(args, kwargs), invoke=invoke)

        return stream

    def run(self, original: Any) -> Any:
        """The function behind `Branch.run`, which `operate` and others call directly."""

        @wraps(original)
        def run(branch: Any, instruction: Any, param: Any) -> Any:
            if not self.routes(branch):
                return original(branch, instruction, param)
            override = None if param._is_sentinel(param.imodel) else param.imodel
            host = self.host(branch, run=True, adopt=self.adopt)

            def invoke(scope: turn.TurnScope) -> Any:
                model = override
                streaming = None if host.kept.streaming is None else host.kept.streaming()
                if model is None and (scope.owns_lifecycle or streaming is scope.context):
                    model = scope.context.model
                view = hosts.View(branch, branch.chat_model if model is None else model)
                return original(view, instruction, param)

            return turn.stream_in_turn(host, model=override, invoke=invoke)

        return run


def argument(function: Any, name: str | None) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """How to find the argument `name` of a call of `function`, a method; None when it is not given."""
    parameters = list(inspect.signature(function).parameters.values())
    place = next((i - 1 for i, p in enumerate(parameters) if p.name == name and p.kind is p.POSITIONAL_OR_KEYWORD), -1)
    sentinel = import_module("lionagi.ln.types").is_sentinel if name else None

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get(name) if name is not None else None
        if 0 <= place < len(args):
            given = args[place]
        return None if given is None or sentinel(given) else given  # type: ignore[misc]

    return find


def swap_callback(branch: Any, old: Any, new: Any) -> None:
    """A branch holds the method that its messages are told to, bound when it was made."""
    callbacks = branch.on_message_added
    for place, callback in enumerate(callbacks):
        if getattr(callback, "__func__", None) is old and callback.__self__ is branch:
            callbacks[place] = MethodType(new, branch)
