"""What typer would ask pydantic for, done without it.

Typer turns every parameter into a value through a pydantic adapter, whose
import costs a command more than everything else before git. The parameters here
are flags, text, lists of text and choices among words, so nothing is to be
converted. Where a typer has no such adapter, nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _Words:
    """Stands where typer keeps the adapter of a parameter."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The words as typed; raises a usage error for one that is not among the choices."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        choices = param.type_descriptor.choices
        if choices and value not in choices:
            offered = ", ".join(repr(choice) for choice in choices)
            raise typer.BadParameter(f"{value!r} is not one of {offered}", ctx=ctx, param=param)
        return list(value) if several else value


def _taking_words(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", False) is None:
            vars(parameter)["_runtime_param"] = _Words()
    return parameters


class Command(TyperCommand):
    """A command whose parameters are words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Every parameter, ``--help`` included."""
        return _taking_words(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the options before the command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Every parameter, ``--help`` included."""
        return _taking_words(super().get_params(ctx))
