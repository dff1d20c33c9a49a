"""The tools of a worker that is a model behind an API (ADR-0091 D2).

Every code-capable tool gets the lease's path binding, or the worker is not
started. lionagi's own tools that read, edit and search files take one path:
it is resolved under the lease before the tool sees it, and an escape is
refused. Whatever starts processes, takes paths in other ways, or is not
lionagi's own, no binding confines.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

from lionwt import records
from lionwt.errors import LionwtError
from lionwt.lionagi.leases import Held

#: Tools that reach neither files nor processes, by module and name.
HARMLESS: Final = frozenset({("lionagi.tools.communication.messenger", "messenger")})
#: Tools with one path, by module and name: the argument, and whether it may be left out.
BOUND: Final[Mapping[tuple[str, str], tuple[str, bool]]] = {
    ("lionagi.tools.coding", "reader"): ("path", False),
    ("lionagi.tools.coding", "editor"): ("file_path", False),
    ("lionagi.tools.coding", "search"): ("path", True),
    ("lionagi.tools.file.reader", "reader_tool"): ("path", False),
    ("lionagi.tools.file.editor", "editor_tool"): ("file_path", False),
    ("lionagi.tools.code.search", "search_tool"): ("path", True),
}


def bind(branch: Any, held: Held) -> None:
    """Bind every tool of a branch to the lease; raises ``grants_mismatch`` for one that cannot be.

    The tools are copies: a clone shares its parent's, and does not inherit its binding.
    """
    registry = branch.acts.registry
    bound = {name: _bound(tool, held) for name, tool in registry.items()}
    if free := sorted(name for name, tool in bound.items() if tool is None):
        raise LionwtError(
            "grants_mismatch",
            f"{held.worker_id!r} has tools that no lease confines ({', '.join(free)}); it was not started",
            hint="remove them from the agent's profile",
        )
    registry.update(bound)


def _bound(tool: Any, held: Held) -> Any:
    kind = (str(getattr(tool.func_callable, "__module__", "")), str(tool.function))
    if kind in HARMLESS:
        return tool
    if kind not in BOUND:
        return None
    before, confines = tool.preprocessor, binding(held)
    if isinstance(before, _Guard):
        before = before.before
    return tool.model_copy(update={"preprocessor": _Guard(_guard, confines, *BOUND[kind], before)})


def binding(held: Held) -> records.Binding:
    """The lease's path binding."""
    return records.Binding(
        cwd=held.worktree,
        provider_repo=held.worktree,
        source_roots=(held.worktree,),
        writable_artifact_root=held.artifacts,
        env=dict(held.pins),
    )


class _Guard(functools.partial[Any]):
    """What a tool's arguments pass through; lionagi sees the coroutine function in it."""

    @property
    def before(self) -> Any:
        """What they passed through anyway."""
        return self.args[-1]


async def _guard(
    confines: records.Binding, argument: str, optional: bool, before: Any, arguments: Any, **named: Any
) -> dict[str, Any]:
    """The arguments with their path inside the lease; raises ``path_escape``."""
    if before is not None:
        arguments = before(arguments, **named)
        if inspect.isawaitable(arguments):
            arguments = await arguments
    given = dict(arguments)
    if optional and given.get(argument) is None:
        given[argument] = "."
    given[argument] = str(confines.resolve(str(given.get(argument) or "")))
    return given
