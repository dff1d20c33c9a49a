"""What a provider's process is given: the worker's own worktree, its artifacts, its identity (ADR-0091 D2).

Twice, and independently. :func:`bind` sets the request up before the worker is
started, and what it says is compared with the lease. :func:`confined` looks at
the very command line, directory and environment with which the process is
about to be started, wherever they came from, and refuses a grant that is not
the lease's. What a prompt mentions is no grant.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lionwt.errors import LionwtError
from lionwt.lionagi.leases import Held

#: The providers whose requests are understood, by lionagi's canonical name.
PROVIDERS: Final = ("claude_code", "codex", "gemini_code", "pi")
#: lionagi's other providers that work by themselves, in its own process: no worktree would confine them.
REFUSED: Final = ("ag2", "scripted")
#: Those that can be given a directory beside the one they work in.
_WITH_ARTIFACTS: Final = ("claude_code", "codex")
#: What a request may hold that points to somewhere else to work in.
_ELSEWHERE: Final = ("ws", "worktree", "add_dir", "include_directories")

#: By engine, as the command line knows it: options whose values are texts for the model, not grants.
_TEXTS: Final[Mapping[str, frozenset[str]]] = {
    "claude": frozenset({"-p", "--system-prompt", "--append-system-prompt", "--agents", "--json-schema", "--name"}),
    "codex": frozenset(),
    "gemini": frozenset({"-p"}),
    "pi": frozenset({"--system-prompt", "--append-system-prompt"}),
}
#: Options whose values are directories that become reachable.
_GRANTS: Final = frozenset({"--add-dir", "--include-directories", "-C", "--cd", "--plugin-dir"})
#: Settings of codex that grant nothing: a text for the model, and which directories and hooks its user trusts,
#: of which lionagi hands over every entry.
_NO_GRANTS: Final = ("developer_instructions=", "projects=", "hooks.state=")
#: Configuration that opens directories, as an option's value may hold it.
_OPENING: Final = re.compile(r"writable_roots|additionalDirectories|allowWrite|allowRead", re.IGNORECASE)
#: A path in such a configuration that can lead out of the directory it is seen from.
_PLACE: Final = re.compile(r"[\"']([/~.][^\"']*|[^\"']*/\.\.[^\"']*)")
#: What only says who commits, of everything that can point git elsewhere.
_HARMLESS_GIT: Final = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_TERMINAL_PROMPT")


def bind(model: Any, held: Held, provider: str) -> None:
    """Point a CLI provider's requests at the lease, and take every other directory from them."""
    if provider not in PROVIDERS:
        raise _refused(held, f"the provider {provider!r} works where it likes")
    given = model.endpoint.config.kwargs
    for name in _ELSEWHERE:
        given.pop(name, None)
    given["repo"] = held.worktree
    # A light codex, which writes in its directory only, is refused by lionagi with a second one.
    if provider in _WITH_ARTIFACTS and (provider, given.get("workload")) != ("codex", "light"):
        given["add_dir"] = [str(held.artifacts)]


def granted(models: Sequence[Any], held: Held) -> dict[str, Any]:
    """The path binding that the requests hold now, to be compared with the lease's."""
    given = [model.endpoint.config.kwargs for model in models]
    places = sorted({str(kwargs.get("repo")) for kwargs in given}) or [str(held.worktree)]
    beside = sorted({str(path) for kwargs in given for path in kwargs.get("add_dir") or ()}) or [str(held.artifacts)]
    return {
        "cwd": places[0],
        "provider_repo": places[0],
        "source_roots": places,
        "writable_artifact_root": beside[0] if len(beside) == 1 else json.dumps(beside),
        "env": dict(held.pins),
    }


def environment(given: Mapping[str, str] | None, held: Held) -> dict[str, str]:
    """What the process sees: the given environment, who it is, where it is, and nothing that points git elsewhere."""
    kept = {
        name: value
        for name, value in (os.environ if given is None else given).items()
        if not name.startswith("GIT_") or name.startswith(_HARMLESS_GIT)
    }
    kept.pop("OLDPWD", None)
    return {**kept, **held.pins, "PWD": str(held.worktree)}


def confined(command: Sequence[str], cwd: Any, engine: str | None, held: Held) -> None:
    """Refuse a process that would work elsewhere, or reach what the lease does not grant.

    Raises ``grants_mismatch``, naming what it is.
    """
    if engine is None or engine not in _TEXTS:
        raise _refused(held, f"the provider {engine!r} is not known")
    for place in (held.worktree, held.artifacts):
        if place.is_symlink():  # a sibling may have put it there, and a grant would lead where it points
            raise _refused(held, f"{place} is a symbolic link now")
    if cwd is not None and Path(cwd).resolve() != held.worktree.resolve():
        raise _refused(held, f"{engine} would be started in {cwd}")
    for option, value in _values(list(command[1:]), engine):
        if option in _GRANTS and not _inside(value, held):
            raise _refused(held, f"{engine} would be given {option} {value}")
        if _OPENING.search(value) and not all(_inside(path, held) for path in _PLACE.findall(value)):
            raise _refused(held, f"the configuration of {engine} opens other directories: {value}")
        if _mentions(value, held):
            raise _refused(held, f"{engine} would be given {option or 'the argument'} {value}")


def _values(words: Sequence[str], engine: str) -> Iterator[tuple[str, str]]:
    """Every value of a command line with the option it belongs to; not the texts for the model."""
    texts, option = _TEXTS[engine], ""
    # pi has its prompt as the last word, after everything else.
    for word in words[:-1] if engine == "pi" else words:
        if word.startswith("-") and option not in texts:
            option, joined, value = word.partition("=")
            if joined and option not in texts:
                yield option, value
            if joined:
                option = ""
            continue
        if option in texts:
            option = ""  # one value only
        elif not (engine == "codex" and option in ("-c", "--config") and word.startswith(_NO_GRANTS)):
            yield option, word


def _inside(path: str, held: Held) -> bool:
    found = (held.worktree / os.path.expanduser(path)).resolve()
    return any(found.is_relative_to(root.resolve()) for root in (held.worktree, held.artifacts))


def _mentions(value: str, held: Held) -> bool:
    """Whether ``value`` names the operator's checkout, or a sibling's worktree, which lies in it."""
    rest = value.replace(str(held.worktree), "").replace(str(held.artifacts), "")
    roots = {str(path) for path in (*held.checkouts, held.worktree.parent, held.artifacts.parent)}
    return any(re.search(re.escape(root) + r"(?![A-Za-z0-9._-])", rest) for root in roots)


def _refused(held: Held, what: str) -> LionwtError:
    return LionwtError(
        "grants_mismatch",
        f"{what}, which is not of the lease of {held.worker_id!r}; it was not started",
        hint="remove it from the agent's profile or settings",
    )
