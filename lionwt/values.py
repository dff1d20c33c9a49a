"""Small values with named fields.

Most of a command's start is the making of classes: one of these takes a
twentieth of a dataclass's time to make.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec


class Value(msgspec.Struct, frozen=True):
    """An immutable group of fields."""

    def having(self: V, **changes: Any) -> V:
        """The same with other values in some fields."""
        return msgspec.structs.replace(self, **changes)

    def in_order(self) -> tuple[Any, ...]:
        """The values of the fields, as declared."""
        return msgspec.structs.astuple(self)


class State(msgspec.Struct, eq=False):
    """A group of fields that change."""


V = TypeVar("V", bound=Value)


def checked(kind: type[V], fields: dict[str, Any]) -> V:
    """A value of fields from elsewhere; raises ``ValueError`` naming the one that is of another type."""
    return msgspec.convert(fields, kind)
